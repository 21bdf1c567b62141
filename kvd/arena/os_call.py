"""The one system call that the standard library lacks: fallocate with PUNCH_HOLE.

The law of this module: memory is given back by punching holes, never by truncating: whoever still
has the file mapped then reads zeros and gets no SIGBUS.
"""

from __future__ import annotations

import ctypes
import os

_KEEP_SIZE = 1
_PUNCH_HOLE = 2

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free a range of a file; it reads as zeros from now on. OSError."""
    if length <= 0:
        return
    if _LIBC.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
