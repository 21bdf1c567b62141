"""The flock that says: some process may still write into this session's slots.

The law of this module: a descriptor is closed once, by the process that it was handed to; a forked
child closes its copy at once, so that it does not keep the parent's lock alive.
"""

from __future__ import annotations

import os
import weakref
from typing import ClassVar

__all__ = ["SessionLock"]


class SessionLock:
    """The descriptor of a session's flock: while it is open, writes of that session may still be
    going on. Held by the link and by every unfinished reservation."""

    _open: ClassVar[weakref.WeakSet[SessionLock]] = weakref.WeakSet()

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        SessionLock._open.add(self)

    def drop(self) -> None:
        """Close this process's descriptor (a child's copy must not keep the lock alive)."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def drop_all_in_child(cls) -> None:
        for lock in list(cls._open):
            lock.drop()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self.drop()
