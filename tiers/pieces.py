"""Pieces: a write to a medium that loads come from lets a load go first, also in its middle.

The law of this module: without loads a write is one call. For a while after a load began
(tiers/quiet.py) it is made in pieces, and none is begun while a load waits or is under way: so a
load waits for a piece at most, however long the chunk is that somebody else has written down. No
piece waits longer than PATIENCE_NS: loads without a pause don't stop writes for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["PATIENCE_NS", "PIECE", "Pieces"]

PIECE = 512 << 10  # what a disk writes in less than a load's own time, and not much slower than all
PATIENCE_NS = 5_000_000


class Pieces:
    """`beside(now)`: whether loads come. `loads()`: whether one waits or is under way. Both are
    asked with the lock held."""

    def __init__(
        self,
        lock: threading.Lock,
        beside: Callable[[int], bool],
        loads: Callable[[], bool],
        clock: Callable[[], int],
    ) -> None:
        self._lock = lock
        self._beside = beside
        self._loads = loads
        self._clock = clock
        self._none = threading.Condition(lock)
        self._own = threading.local()

    def through(self) -> None:
        """A load is. Pre: the lock is held."""
        if not self._loads():
            self._none.notify_all()

    def next(self, left: int) -> int:
        """From a worker in a write, before each call: how many of the bytes `left` to write now.
        Waits while a load has the medium."""
        with self._lock:
            begun = self._clock()
            if not self._beside(begun):
                return left
            end = begun + PATIENCE_NS
            while self._loads() and (rest := end - self._clock()) > 0:
                self._none.wait(rest / 1e9)
            self._own.waited = getattr(self._own, "waited", 0) + self._clock() - begun
        return min(left, PIECE)

    def take_waited(self) -> int:
        """Nanoseconds that this thread has waited here since it was asked last."""
        waited: int = getattr(self._own, "waited", 0)
        self._own.waited = 0
        return waited
