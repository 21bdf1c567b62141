"""How long a thread may have a core before others that wait for it: its slice.

The law of this module: it asks for less, never for more, and needs no privilege. A thread that
mostly waits (the loop, what reads a disk, ZMQ's own threads) asks for a short slice: the kernel
then lets it in as soon as it has something to do, although somebody's copy of many megabytes is
under way on that core; its part of the processor stays what it was. Threads that are made meanwhile
have the same. Linux has it for ordinary threads since 6.12; elsewhere nothing happens, and to
threads that somebody has put under another policy (batch, real time) neither.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SHORT_NS", "now_ns", "set_ns", "short"]

SHORT_NS = 300_000  # about a turn of the loop: a shorter one would be put off in its middle

# size, policy, flags, nice, priority, runtime, deadline, period
_Layout = struct.Struct("<IIQiIQQQ")
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_OTHER = 0
_RESET_ON_FORK = 1

_LIBC = ctypes.CDLL(None, use_errno=True)


def _attributes(thread: int) -> tuple[int, ...] | None:
    """Of a thread, 0 for the calling one, if they can be told and it is an ordinary one."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return None
    memory = ctypes.create_string_buffer(_Layout.size)
    if _LIBC.syscall(calls[1], thread, memory, _Layout.size, 0) != 0:
        return None
    found = _Layout.unpack(memory.raw)
    return found if found[1] == _OTHER else None


def now_ns(thread: int = 0) -> int:
    """The slice of a thread (native id; 0: the calling one); 0 if that can't be told."""
    found = _attributes(thread)
    return 0 if found is None else int(found[5])


def set_ns(slice_ns: int) -> bool:
    """Give the calling thread a slice; 0: the usual one. Whether the kernel took it."""
    found = _attributes(0)
    if found is None:
        return False
    _, policy, flags, nice, priority, *_ = found
    memory = _Layout.pack(
        _Layout.size, policy, flags & _RESET_ON_FORK, nice, priority, slice_ns, 0, 0
    )
    return bool(_LIBC.syscall(_CALLS[platform.machine()][0], 0, memory, 0) == 0)


@contextmanager
def short() -> Iterator[None]:
    """Threads that the calling one makes meanwhile have a short slice."""
    before = now_ns()
    if not 0 < SHORT_NS < before or not set_ns(SHORT_NS):
        yield
        return
    try:
        yield
    finally:
        set_ns(before)
