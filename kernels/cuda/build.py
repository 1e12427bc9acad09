"""Building and loading the CUDA C++ kernels: nvcc once per source and compiler, then a shared object and ctypes.

The objects hold machine code for sm_90a only and speak a plain C interface of pointers, so they depend on no version of
torch. Knows files and compilers; not operations, not tensors (except their addresses, and the current stream).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-lineinfo")


def cache_dir() -> Path:
    """Where built objects are kept: $HEADRACE_KERNEL_CACHE, else `headrace/kernels` in the user's cache folder."""
    explicit = os.environ.get("HEADRACE_KERNEL_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / "kernels"


def compiler() -> str | None:
    """Path of nvcc: $CUDA_HOME/bin, then PATH, then the usual place; None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(str(Path(home) / "bin" / "nvcc")) or shutil.which("nvcc")


def object_path(source: str) -> Path:
    """Path of the built object: its name holds a digest of the source, the shared headers and the flags."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in (source, *sorted(x.name for x in SOURCES.glob("*.cuh"))):
        digest.update((SOURCES / name).read_bytes())
    return cache_dir() / f"{source.removesuffix('.cu')}-{digest.hexdigest()[:16]}.so"


def build(source: str) -> Path:
    """Builds one `.cu` of this folder unless its object exists. Two processes may build at once: the rename is atomic.

    Raises:
        RuntimeError: there is no nvcc, or it refused the source (its output is the message).
    """
    target = object_path(source)
    if target.exists():
        return target
    nvcc = compiler()
    if nvcc is None:
        raise RuntimeError(f"{source} needs nvcc: set CUDA_HOME or PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run(
        [nvcc, *FLAGS, "-o", str(part), str(SOURCES / source)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"nvcc refused {source}:\n{done.stdout}{done.stderr}")
    for line in (done.stdout + done.stderr).splitlines():
        if "serialized" in line:  # products one after another, for want of registers: right, but half as fast
            logger.warning("kernel.slow source=%s nvcc=%s", source, line.strip())
    part.rename(target)
    return target


@functools.cache
def load(source: str) -> ctypes.CDLL:
    """The loaded object of a `.cu` file, built if need be."""
    return ctypes.CDLL(str(build(source)))


def current_stream() -> int:
    """The raw handle of torch's current CUDA stream, so that a launch joins the graph being captured, if any."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def check(status: int, what: str) -> None:
    """Raises RuntimeError if a launch did not return cudaSuccess."""
    if status != 0:
        raise RuntimeError(f"{what}: CUDA error {status}")


def address(tensor: Any) -> int | None:
    """Device address of a tensor's first element; None for None."""
    return None if tensor is None else int(tensor.data_ptr())
