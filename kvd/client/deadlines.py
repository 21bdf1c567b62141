"""When calls end that nobody answered.

The law of this module: the nearest deadline is known at once. A call that is done leaves late, but
those that are done never outnumber the live ones by much.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvd.client.call import Call

__all__ = ["Deadlines"]

_COMPACT = 1024  # calls that are done may stay


class Deadlines:
    """A heap of calls by deadline, ns. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Call]] = []
        self._numbered = 0
        self._live = 0  # how many were live when the heap was compacted last

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def nearest(self) -> int:
        """Pre: there is one."""
        return self._heap[0][0]

    def add(self, call: Call) -> bool:
        """Whether it is the nearest one."""
        heap = self._heap
        if len(heap) > 2 * self._live + _COMPACT:
            heap[:] = [entry for entry in heap if not entry[2].done]
            heapify(heap)
            self._live = len(heap)
        self._numbered += 1
        heappush(heap, (call.deadline_ns, self._numbered, call))
        return heap[0][2] is call

    def pop(self, now: int) -> Call | None:
        """A call whose deadline has passed and that is not done."""
        heap = self._heap
        while heap and (heap[0][0] <= now or heap[0][2].done):
            call = heappop(heap)[2]
            if not call.done:
                return call
        return None
