"""Calls that a busy daemon put off: they are asked again when it said.

The law of this module: those that come due at one moment go in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from kvd.client.call import Call

__all__ = ["Delays"]


class Delays:
    """A heap of calls by when they are asked again, ns. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Call]] = []
        self._numbered = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def nearest(self) -> int:
        """Pre: there is one."""
        return self._heap[0][0]

    def add(self, call: Call, again_ns: int) -> None:
        self._numbered += 1
        heappush(self._heap, (again_ns, self._numbered, call))

    def due(self, now: int) -> Iterator[Call]:
        """Takes out those whose time has come; none that is done."""
        while self._heap and self._heap[0][0] <= now:
            call = heappop(self._heap)[2]
            if not call.done:
                yield call

    def clear(self) -> list[Call]:
        """Takes out all."""
        calls = [call for _, _, call in self._heap]
        self._heap.clear()
        return calls
