"""Chunks that hints have pinned or spared.

The law of this module: all of it ends by the clock, and it is bounded by tenant and in all: what is
over a cap is refused. A row that goes takes its pin along.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.core.config import CoreConfig
from kvd.core.timers import Timers


class Kept(NamedTuple):
    """A chunk that is pinned (`hard`) or spared, until then."""

    until: int
    hard: bool
    namespace: str
    nbytes: int  # slots


class Keeping:
    """Chunks that are pinned or spared, by row. A row that goes is taken out; so is one whose time
    is over, by a timer."""

    def __init__(self, config: CoreConfig, timers: Timers) -> None:
        self.by_row: dict[int, Kept] = {}
        self._timers = timers
        self._cap = int(config.size * config.pin_share)
        self._most = int(config.size * config.pin_total_share)
        self._bytes: dict[str, int] = {}
        self.nbytes = 0

    def of(self, namespace: str) -> int:
        """Slot bytes that a tenant has pinned or spared."""
        return self._bytes.get(namespace, 0)

    def pinned(self, row: int, now: int) -> bool:
        kept = self.by_row.get(row)
        return kept is not None and kept.hard and now < kept.until

    def spared(self, row: int, now: int) -> bool:
        kept = self.by_row.get(row)
        return kept is not None and not kept.hard and now < kept.until

    def add(self, row: int, kept: Kept) -> bool:
        """Pin or spare, in place of what was said before; False if that is over a cap."""
        before = self.by_row.get(row)
        more = kept.nbytes - (before.nbytes if before else 0)
        if more > 0 and (
            self.of(kept.namespace) + more > self._cap or self.nbytes + more > self._most
        ):
            return False
        self.drop(row)
        self.by_row[row] = kept
        self._bytes[kept.namespace] = self.of(kept.namespace) + kept.nbytes
        self.nbytes += kept.nbytes
        self._timers.add(kept.until, "pin", row)
        return True

    def drop(self, row: int) -> bool:
        """Neither pinned nor spared any more; whether it was."""
        kept = self.by_row.pop(row, None)
        if kept is None:
            return False
        self._timers.remove(kept.until, "pin", row)
        self._bytes[kept.namespace] -= kept.nbytes
        if not self._bytes[kept.namespace]:
            del self._bytes[kept.namespace]
        self.nbytes -= kept.nbytes
        return True
