"""Files that an operator names, or that an earlier life left.

The law of this module: only a regular file is read. A pipe that nobody writes into, a terminal or a
device would hold up a start for ever, or never end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

__all__ = ["check_file", "open_file"]


def open_file(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open it for reading. OSError, whose `strerror` says so if it is no regular file; `follow`: a
    link may stand for it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # so that a pipe opens at once
    descriptor = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_file(path: str | os.PathLike[str]) -> None:
    """OSError unless it could be read now."""
    open_file(path).close()
