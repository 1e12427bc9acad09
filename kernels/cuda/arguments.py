"""What launchers ask of the tensors whose addresses they hand to C, where nothing else would notice."""

from __future__ import annotations

from torch import Tensor, dtype


def is_dense(x: Tensor, kind: dtype, *shape: int) -> bool:
    """Whether x is of this dtype and shape, and contiguous."""
    return x.dtype == kind and x.shape == shape and x.is_contiguous()


def box_strides(x: Tensor, what: str) -> tuple[int, int]:
    """Strides, in elements, of the first two dimensions of a bf16 tensor of three, as the copy engine takes them.

    Raises:
        ValueError: rows are not dense, or do not begin at multiples of 16 bytes.
    """
    strides = tuple(stride if size > 1 else 8 for size, stride in zip(x.shape, x.stride(), strict=True))
    if x.stride(2) != 1 or x.data_ptr() % 16 or strides[0] % 8 or strides[1] % 8:
        raise ValueError(
            f"{what}: base {x.data_ptr():#x}, strides {tuple(x.stride())}: rows have to be dense and at multiples of "
            "16 bytes"
        )
    return strides[0], strides[1]
