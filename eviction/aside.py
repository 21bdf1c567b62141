"""Chunks that stand beside the order of eviction for a while.

The law of this module: first in, first out, by queue and over all queues; every step costs the
same whatever else stands here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

NOBODY: Final = -1


class Aside:
    """A set of chunks, each of one queue, in the order in which they came."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, int] = OrderedDict()  # chunk -> queue
        self._of: dict[int, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._queue

    def put(self, chunk: int, queue: int) -> None:
        """At the end, also if it is here already."""
        self.take(chunk)
        self._queue[chunk] = queue
        self._of.setdefault(queue, OrderedDict())[chunk] = None

    def take(self, chunk: int) -> bool:
        """Remove; whether it was here."""
        queue = self._queue.pop(chunk, None)
        if queue is None:
            return False
        mine = self._of[queue]
        del mine[chunk]
        if not mine:
            del self._of[queue]
        return True

    def of(self, queue: int) -> Iterable[int]:
        """Those of a queue, the first to come first. Dead after any change."""
        return self._of.get(queue, ())

    def first(self, queue: int | None = None) -> int:
        """The first to come, of a queue or of all, or NOBODY."""
        if not self._queue:  # as a rule
            return NOBODY
        return next(iter(self._queue if queue is None else self.of(queue)), NOBODY)

    def clear(self) -> None:
        self._queue.clear()
        self._of.clear()
