"""Seats: how many calls of a kind are in a medium at a time, when more workers serve it.

The law of this module: a worker that only takes a digest holds no seat. With as many workers as the
medium takes calls, all of them would come out of it together, take their digests together, and the
medium would stand idle meanwhile, again and again. A seat is a courtesy, not a lock: who gets none
within PATIENCE_S goes in without, so calls that hang keep nobody out.
"""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["PATIENCE_S", "Seats"]

PATIENCE_S: Final = 0.25


class Seats:
    """`depth` calls that write and as many that read; 0: any number. From any thread."""

    def __init__(self, depth: int, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._writes = threading.Semaphore(depth) if depth else None
        self._reads = threading.Semaphore(depth) if depth else None

    def take(self, *, write: bool) -> bool:
        """Wait for a seat; whether one was had, and is to be given back."""
        seats = self._writes if write else self._reads
        return seats is not None and seats.acquire(timeout=self._patience_s)

    def give_back(self, *, write: bool) -> None:
        """Pre: `take` said that one was had."""
        seats = self._writes if write else self._reads
        assert seats is not None
        seats.release()
