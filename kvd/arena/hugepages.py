"""HugePages: the arena's memory in pages of 2 MiB, where the kernel gives them.

The law of this module: no byte changes, and whoever uses the memory meanwhile waits for the copy of
one such page at most. What stays in small pages serves as well, only slower; it is an error only
where huge ones are required, and it is said in any case.

MADV_COLLAPSE does what the settings for shared memory in /sys/kernel/mm/transparent_hugepage would
do, whatever they say: nearly every machine leaves them at `never`. For memory that is new it takes
no longer than small pages do; for memory in use it copies, 2 s of processor time a GiB.
"""

from __future__ import annotations

import errno
import os
import platform
import re
from pathlib import Path
from typing import Literal

from kvd.arena.mapping import HUGE_PAGE, Mapping
from kvd.arena.preflight import file_system_kind
from kvd.errors import ArenaError
from kvd.sizes import format_size

__all__ = ["WISHES", "HugePages", "Wish"]

Wish = Literal["prefer", "require", "never"]
WISHES: tuple[Wish, ...] = ("prefer", "require", "never")

_WHY = {
    errno.ENOMEM: "no memory in one piece is free (as root: echo 1 > /proc/sys/vm/compact_memory)",
    errno.EBUSY: "the memory cgroup has no room for one more page at a time",
    errno.EAGAIN: "somebody keeps the pages where they are, as for a device",
}


def _why(number: int, path: Path) -> str:
    """What an errno of the kernel means, and the way out."""
    if number != errno.EINVAL:
        return _WHY.get(number, os.strerror(number))
    kind = file_system_kind(path.parent)
    if kind in ("tmpfs", "devtmpfs", ""):
        return (
            f"this kernel, {platform.release()}, can't (Linux 6.1 can, if transparent huge pages "
            "are built into it)"
        )
    return f"its file system, {kind}, can't (choose an arena.path on a tmpfs, such as /dev/shm)"


class HugePages:
    """`path`: what to call the arena. `fd` (writable) and `mapping` are its file."""

    def __init__(self, path: Path, fd: int, mapping: Mapping, wish: Wish) -> None:
        self._path = path
        self._fd = fd
        self._mapping = mapping
        self._wish = wish
        self._whole = mapping.size // HUGE_PAGE * HUGE_PAGE
        self._counted: int | None = None
        self.problem = ""  # why some of the memory was not put into huge pages

    def take(self, begin: int, end: int) -> None:
        """Memory for a range that has none, or not all. What it does not get here is still to be
        reserved; what lies there stays. ArenaError if huge pages are required."""
        if self._wish == "never":
            return
        try:
            for at in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end, HUGE_PAGE):
                os.posix_fallocate(self._fd, at, 1)  # the kernel fills up, but does not begin
        except OSError:
            return  # no memory at all: who reserves the rest is told so
        self.insist(begin, end)

    def insist(self, begin: int, end: int) -> None:
        """As `gather`. ArenaError if huge pages are required, and the range is not in them."""
        if self.gather(begin, end) or self._wish != "require":
            return
        problem = self.problem
        try:
            found = f"{self.count()} are"
        except OSError as error:
            found = f"an unknown part ({error}) is"
        raise ArenaError(
            f"arena.huge_pages is require, but of the first {end} bytes of arena {self._path} only "
            f"{found} in huge pages: {problem}; or make it prefer"
        )

    def gather(self, begin: int, end: int) -> bool:
        """Put a range that has memory into huge pages, as far as it is not; whether all of it
        is, or none should be."""
        if self._wish == "never":
            return True
        number = self._mapping.collapse(begin, end - begin)
        if number:
            self.problem = _why(number, self._path)
        return not number

    def count(self) -> int:
        """Bytes of the mapping that are in huge pages, by the kernel's word. It looks at all of
        this process's memory: milliseconds."""
        begin, end = self._mapping.address, self._mapping.address + self._mapping.size
        inside, kib = False, 0
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                    inside = begin <= int(head[1], 16) < end
                elif inside and line.startswith("ShmemPmdMapped:"):
                    kib += int(line.split()[1])
        self._counted = kib << 10
        if self._counted >= self._whole:
            self.problem = ""  # there was one, for a time
        return self._counted

    def why_small(self, reserved: int) -> str:
        """Why not all is in huge pages, as `count` found it last: a problem, or what is as it
        should be. Empty if all is, or if nothing is known. `reserved`: bytes that have memory."""
        if self.problem or self._counted is None:
            return self.problem
        if self._counted < self._whole:
            if self._wish == "never":
                return "arena.huge_pages is never"
            return "" if reserved >= self._mapping.size else "there is no memory for the rest"
        rest = self._mapping.size - self._whole
        return f"the last {format_size(rest)} are less than such a page" if rest else ""
