"""What falls due when.

The law of this module: whatever the core holds for somebody has an entry here, and ending it early
takes the entry out at once, so that a busy hour of short leases leaves nothing behind.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, NamedTuple

_SHIFT: Final = 24  # a bucket is 16.8 ms


class Due(NamedTuple):
    kind: str  # lease, write or wait
    number: int


class Timers:
    """Buckets of time: adding and removing cost a dictionary operation."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Due, int]] = {}
        self._order: list[int] = []  # heap of bucket numbers, some maybe empty by now

    def add(self, due: int, kind: str, number: int) -> None:
        bucket = due >> _SHIFT
        entries = self._buckets.get(bucket)
        if entries is None:
            entries = self._buckets[bucket] = {}
            heappush(self._order, bucket)
        entries[Due(kind, number)] = due

    def remove(self, due: int, kind: str, number: int) -> None:
        """Pre: it was added with this `due`; one that has been popped is passed over, and so is one
        that was added anew since, maybe into the same bucket."""
        entries = self._buckets.get(due >> _SHIFT)
        if entries is not None:
            entry = Due(kind, number)
            if entries.get(entry) == due:
                del entries[entry]

    def pop(self, now: int) -> Due | None:
        """One thing that was due at `now` or before."""
        while self._order and self._order[0] <= now >> _SHIFT:
            entries = self._buckets[self._order[0]]
            for entry, due in entries.items():
                if due <= now:
                    del entries[entry]
                    return entry
            if entries:
                return None
            del self._buckets[heappop(self._order)]
        return None

    def next(self) -> int | None:
        """When the next thing is due."""
        while self._order:
            entries = self._buckets[self._order[0]]
            if entries:
                return min(entries.values())
            del self._buckets[heappop(self._order)]
        return None
