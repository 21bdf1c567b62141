"""Counts by name, from any thread.

The law of this module: none is lost. `+=` on a number that threads share reads and writes it one
after the other, and what another thread counts in between is gone.
"""

from __future__ import annotations

import threading


class Tally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, by: int = 1) -> None:
        """A count that is added to, if only 0, is told from then on."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def set(self, name: str, value: int) -> None:
        """For what is found anew each time."""
        with self._lock:
            self._counts[name] = value

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
