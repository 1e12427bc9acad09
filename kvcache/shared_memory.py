"""Memory that two processes of one worker map: the engine's, which computes in it, and the one that ships its pages."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt


class SharedMemory:
    """Zeroed memory of a file that has no name, so that it ends with the last process that maps it.

    The system hands its pages out when they are first touched: a large one costs nothing until it is used. It counts as
    shared memory of this process, and no file system bounds it.
    """

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """
        Args:
            descriptor: of such memory, from the process that made it; this object closes it in the end. None: make it.
        """
        size = max(num_bytes, mmap.PAGESIZE)
        self.descriptor = os.memfd_create("headrace-pool") if descriptor is None else descriptor
        weakref.finalize(self, os.close, self.descriptor)
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self._mapping = mmap.mmap(self.descriptor, size)
        # Where the system does this for files at all; numpy asks the same for its own large arrays.
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8, count=num_bytes)
        """uint8 [num_bytes], page-aligned; it keeps the mapping alive."""

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data
