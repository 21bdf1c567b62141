"""Engines of plain system calls: O_DIRECT where the file system takes it, buffered elsewhere.

The law of this module: it moves exactly the bytes it was asked to, or raises OSError. O_DIRECT
wants memory, offset and length in whole pages. A slot of the arena begins at one, so its whole
pages go straight from and to it; only the last, broken page takes a detour through a page of the
thread's own. Memory that is not aligned (inline payloads, tests) goes through a thread's buffer.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvd.tiers.nvme.layout import PAGE

BOUNCE = 1 << 20

_local = threading.local()


class File(ABC):
    """A slab's payload area as an engine sees it. `at` is a multiple of 4 KiB."""

    @abstractmethod
    def write(self, at: int, source: memoryview) -> None: ...

    @abstractmethod
    def read(self, at: int, into: memoryview) -> None:
        """OSError ESTALE when the file ends before."""

    @abstractmethod
    def close(self) -> None: ...


class Engine(ABC):
    name: str

    @abstractmethod
    def open(self, path: Path) -> File:
        """An existing file, for reading and writing. OSError."""


class PosixEngine(Engine):
    def __init__(self, *, direct: bool) -> None:
        self.name = "o_direct" if direct else "buffered"
        self._direct = direct

    def open(self, path: Path) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags | (os.O_DIRECT if self._direct else 0))
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags | (os.O_DIRECT if self._direct else 0))
        return DirectFile(fd) if self._direct else BufferedFile(fd)


class BufferedFile(File):
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, at: int, source: memoryview) -> None:
        while source:
            done = os.pwrite(self.fd, source, at)
            source, at = source[done:], at + done

    def read(self, at: int, into: memoryview) -> None:
        while into:
            done = os.preadv(self.fd, [into], at)
            if done == 0:
                raise _ended()
            into, at = into[done:], at + done

    def close(self) -> None:
        os.close(self.fd)


class DirectFile(File):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, at: int, source: memoryview) -> None:
        if address(source) % PAGE:
            bounce = _buffer(BOUNCE)
            for begin in range(0, len(source), BOUNCE):
                part = source[begin : begin + BOUNCE]
                bounce[: len(part)] = part
                self._write_aligned(at + begin, bounce[: len(part)])
        else:
            self._write_aligned(at, source)

    def _write_aligned(self, at: int, source: memoryview) -> None:
        whole = len(source) & -PAGE
        views = [source[:whole]] if whole else []
        if whole < len(source):
            page = _tail_page()
            page[: len(source) - whole] = source[whole:]
            page[len(source) - whole :] = bytes(PAGE - (len(source) - whole))
            views.append(page)
        self._move(os.pwritev, views, at, OSError(errno.EIO, "a write made no progress"))

    def read(self, at: int, into: memoryview) -> None:
        if address(into) % PAGE:
            bounce = _buffer(BOUNCE)
            for begin in range(0, len(into), BOUNCE):
                part = into[begin : begin + BOUNCE]
                self._read_aligned(at + begin, bounce[: len(part)])
                part[:] = bounce[: len(part)]
        else:
            self._read_aligned(at, into)

    def _read_aligned(self, at: int, into: memoryview) -> None:
        whole = len(into) & -PAGE
        views = [into[:whole]] if whole else []
        if whole < len(into):
            views.append(_tail_page())
        self._move(os.preadv, views, at, _ended())
        if whole < len(into):
            into[whole:] = _tail_page()[: len(into) - whole]

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        views: list[memoryview],
        at: int,
        stalled: OSError,
    ) -> None:
        total = sum(map(len, views))
        while (done := call(self._fd, views, at)) < total:
            # A signal, or a limit of the kernel's. What is left must begin at a page again.
            done &= -PAGE
            if not done:
                raise stalled
            views, at, total = _after(views, done), at + done, total - done

    def close(self) -> None:
        os.close(self._fd)


def take_for_writing(path: Path, fd: int) -> None:
    """A descriptor that was opened to be read can be written from now on, under its number, if the
    file has still that path; calls that are under way go on with the old one. OSError."""
    found = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        there, here = os.fstat(found), os.fstat(fd)
        if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
            os.dup2(found, fd, inheritable=False)
    finally:
        os.close(found)


def address(view: memoryview) -> int:
    """Where a buffer lies."""
    if not view:
        return 0
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left


def _buffer(size: int) -> memoryview:
    if not hasattr(_local, "bounce"):
        _local.bounce = memoryview(mmap.mmap(-1, size))
    bounce: memoryview = _local.bounce
    return bounce


def _tail_page() -> memoryview:
    if not hasattr(_local, "page"):
        _local.page = memoryview(mmap.mmap(-1, PAGE))
    page: memoryview = _local.page
    return page


def _ended() -> OSError:
    return OSError(errno.ESTALE, "the file ends before its slot does")
