"""A child that ends with its parent, whatever ended the parent. Linux only, as is NIXL."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends.

    SIGKILL, because nobody is left who would watch over a drain. The parent may have ended before the kernel was asked:
    then this process has another parent by now, and leaves.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)
