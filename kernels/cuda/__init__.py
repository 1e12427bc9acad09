"""Kernels for Hopper GPUs (compute capability 9.0), one operation a module, its plain PyTorch reference in the
same module or in `kernels/device.py`; `hopper.py` puts them together to what a step needs.

Importing this package, or any module of it but `triton_source`, needs neither a GPU nor triton nor nvcc: CUDA C++
sources (`*.cu`) are built by `build.load` at the first call of an operation, `triton_source` is imported inside the
functions that launch its kernels. The references are the oracle of the GPU tests; they are written for reading, not for
speed.
"""
