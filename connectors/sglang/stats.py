"""What the backend did, counted.

The law of this module: counters only rise, each with the event that it names; the lists for
SGLang's metrics hold what happened since they were last taken, and never grow without bound.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import NamedTuple

__all__ = ["Moved", "Stats"]

_KEPT = 1024  # batches between two looks of SGLang's metrics


class Moved(NamedTuple):
    """One batch that was moved."""

    pages: int
    gib_per_s: float


class Stats:
    """Counters by name, and the batches that were moved. Any thread may call.

    Names: asked, found (lookups, pages); loaded, stored, present (were there already); refused
    (calls while the backend can't work); `load.REASON`, `store.REASON` (pages, by outcome),
    `WHAT.silent` (calls while the daemon is left alone), `WHAT.ERROR` (calls that failed);
    odd_keys, odd_indices, odd_values (pages that were not what they have to be); elsewhere (pages
    that were stored before in another place of a chain).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._loads: deque[Moved] = deque(maxlen=_KEPT)
        self._stores: deque[Moved] = deque(maxlen=_KEPT)

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """All counters that are not 0."""
        with self._lock:
            return dict(self._counts)

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        """A load of `pages` pages of together `nbytes` took so long."""
        self._moved("loaded", self._loads, pages, nbytes, seconds)

    def stored(self, pages: int, nbytes: int, seconds: float) -> None:
        """A store of `pages` new pages of together `nbytes` took so long."""
        self._moved("stored", self._stores, pages, nbytes, seconds)

    def take(self) -> tuple[list[Moved], list[Moved]]:
        """Loads and stores since the last call."""
        with self._lock:
            taken = list(self._loads), list(self._stores)
            self._loads.clear()
            self._stores.clear()
            return taken

    def _moved(
        self, name: str, into: deque[Moved], pages: int, nbytes: int, seconds: float
    ) -> None:
        if pages:
            with self._lock:
                self._counts[name] += pages
                into.append(Moved(pages, nbytes / max(seconds, 1e-9) / (1 << 30)))
