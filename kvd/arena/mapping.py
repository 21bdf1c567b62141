"""A shared mapping of a file that no forked child inherits and no view outlives.

The law of this module: memory stays mapped until the last view of it is gone, so a stale view can
be wrong but never a crash; a forked child has no mapping (MADV_DONTFORK) and unmaps nothing, for
its own memory may by then lie at that address. That is why this is not mmap.mmap, which would
unmap in the child, keeps a descriptor, and holds the GIL while it populates.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.errors import ArenaError, Forked

MADV_POPULATE_READ = 22  # Linux 5.14
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25  # Linux 6.1

HUGE_PAGE = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB

_PAGE = mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # not in the mmap module, like the next
_PROT_NONE = 0

# CDLL releases the GIL for the length of a call.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """The first `size` bytes of `fd`, shared. The descriptor is not kept and may be closed.

    `bytes` is a uint8 array over it; slices and memoryviews of it keep it mapped. ArenaError if
    the file is shorter (touching beyond its end would be SIGBUS) or can't be mapped.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        actual = os.fstat(fd).st_size
        if actual < size:
            raise ArenaError(f"a file of {actual} bytes can't be mapped as {size} bytes")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _map(fd, size, prot)
        if _LIBC.madvise(address, size, mmap.MADV_DONTFORK) != 0:
            error = os.strerror(ctypes.get_errno())
            _LIBC.munmap(address, size)
            raise ArenaError(f"can't keep a mapping of {size} bytes from children: {error}")
        self.size = size
        self.address: int = address
        self._pid = os.getpid()
        memory = (ctypes.c_uint8 * size).from_address(address)
        # Views hold `memory`; when it goes, nobody can touch the pages any more.
        weakref.finalize(memory, _unmap, address, size, self._pid).atexit = False
        array: NDArray[np.uint8] = np.frombuffer(memoryview(memory), dtype=np.uint8)
        array.flags.writeable = writable
        self._bytes: NDArray[np.uint8] | None = array

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of it. ArenaError after close; Forked in a forked child, where it is not mapped."""
        if self._bytes is None:
            raise ArenaError("the mapping was closed")
        if os.getpid() != self._pid:
            raise Forked("shared memory is not mapped in a forked child: attach anew there")
        return self._bytes

    def populate(self, offset: int, length: int, *, write: bool) -> None:
        """Fault pages in without the GIL. Contents are not changed, writable or not. ArenaError
        when out of range or when the kernel has no memory for it."""
        memory = self.bytes
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ArenaError(f"range ({offset}, {length}) is outside of {self.size} mapped bytes")
        begin = offset // _PAGE * _PAGE
        length += offset - begin
        if length == 0:
            return
        advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
        if _LIBC.madvise(self.address + begin, length, advice) == 0:
            return
        error = ctypes.get_errno()
        if error != 22:  # EINVAL: a kernel without MADV_POPULATE
            raise ArenaError(f"can't fault in {length} bytes: {os.strerror(error)}")
        # A read is all that may be done here: somebody may be writing these very bytes.
        memory[begin : begin + length : _PAGE].max()

    def collapse(self, offset: int, length: int) -> int:
        """Have the kernel put the huge pages that lie within this range where they belong, without
        the GIL; 0, or the errno of why it did not for all. No byte changes. Each of them needs one
        small page that is in memory. ArenaError after close, Forked."""
        begin = -(-offset // HUGE_PAGE) * HUGE_PAGE
        end = min(offset + length, self.bytes.size) // HUGE_PAGE * HUGE_PAGE
        if not 0 <= begin < end:
            return 0
        failed = _LIBC.madvise(self.address + begin, end - begin, MADV_COLLAPSE)
        return ctypes.get_errno() if failed else 0

    def close(self) -> None:
        """Let go. The memory is unmapped when no view of it is left. Idempotent."""
        self._bytes = None


def _map(fd: int, size: int, prot: int) -> int:
    """Where `size` bytes of the file are mapped: at a huge page's boundary, since only there can
    one entry of the page table stand for a huge page of the file."""
    slack = HUGE_PAGE if size >= HUGE_PAGE else 0
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = _LIBC.mmap(None, size + slack, _PROT_NONE, private, -1, 0) if slack else None
    if found == _FAILED:
        raise _unmapped(size)
    address = -(-found // HUGE_PAGE) * HUGE_PAGE if found else None
    flags = mmap.MAP_SHARED | (_MAP_FIXED if address else 0)
    mapped = _LIBC.mmap(address, size, prot, flags, fd, 0)
    if mapped == _FAILED:
        error = _unmapped(size)
        if found:
            _LIBC.munmap(found, size + slack)
        raise error
    if found and address:
        last = -(-(address + size) // _PAGE) * _PAGE
        for begin, end in ((found, address), (last, found + size + slack)):
            if end > begin:
                _LIBC.munmap(begin, end - begin)
    at: int = mapped
    return at


def _unmapped(size: int) -> ArenaError:
    return ArenaError(f"can't map {size} bytes: {os.strerror(ctypes.get_errno())}")


def _unmap(address: int, size: int, pid: int) -> Any:
    if os.getpid() == pid:
        _LIBC.munmap(address, size)
