"""What engines say of the future: a session is over, a prefix will be asked for again, must stay,
or matters more or less than others.

The law of this module: a hint changes an order, it removes nothing and promises nothing; one that
was wrong costs little. What is *pinned* is no victim while the pin lasts; what is *spared* is one
only when nothing else can go. Both end by the clock, and both together are bounded: by tenant, and
over all tenants. A command of an operator goes over all of them.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvd.core.actions import HintResult
from kvd.core.columns import NONE
from kvd.core.config import CoreConfig
from kvd.core.events import Hint, HintKind
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.errors import BadKey

if TYPE_CHECKING:
    from kvd.core.store import Store

_GRACE = 4  # a chunk that is expected is spared a quarter longer
_GRACE_LEAST_NS = 5_000_000_000
LOW, NORMAL, HIGH = 0, 1, 2


class Kept(NamedTuple):
    """A chunk that is pinned (`hard`) or spared, until then."""

    until: int
    hard: bool
    namespace: str
    nbytes: int  # slots


class Keeping:
    """Chunks that are pinned or spared, by row. A row that goes is taken out."""

    def __init__(self, config: CoreConfig) -> None:
        self.by_row: dict[int, Kept] = {}
        self._cap = int(config.size * config.pin_share)
        self._most = int(config.size * config.pin_total_share)
        self._bytes: dict[str, int] = {}
        self.nbytes = 0
        self._ends: list[tuple[int, int]] = []  # heap of (until, row), some maybe over

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
        heappush(self._ends, (kept.until, row))
        return True

    def drop(self, row: int) -> bool:
        """Neither pinned nor spared any more; whether it was."""
        kept = self.by_row.pop(row, None)
        if kept is None:
            return False
        self._bytes[kept.namespace] -= kept.nbytes
        if not self._bytes[kept.namespace]:
            del self._bytes[kept.namespace]
        self.nbytes -= kept.nbytes
        return True

    def expire(self, now: int) -> None:
        """Take out what is over, and what the heap has too much of."""
        ends = self._ends
        while ends and ends[0][0] <= now:
            until, row = heappop(ends)
            kept = self.by_row.get(row)
            if kept is not None and kept.until == until:
                self.drop(row)
        if len(ends) > 2 * len(self.by_row) + 1024:
            ends[:] = sorted((kept.until, row) for row, kept in self.by_row.items())


class Hints:
    """Carries out hints."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def take(self, session: Session, space: Space, event: Hint) -> HintResult:
        """One hint about some keys of one chain, in its order. BadKey for one that is unknown."""
        store = self._store
        try:
            kind = HintKind(event.hint)
        except ValueError:
            raise BadKey(f"hint {event.hint} is unknown: 1 to {max(HintKind)}") from None
        if kind is HintKind.PRIORITY and event.level not in (LOW, NORMAL, HIGH):
            raise BadKey(f"level {event.level} is unknown: 0 low, 1 normal, 2 high")
        store.keeping.expire(store.now)
        asked = space.get_many(event.hashes).tolist()
        rows = [row for row in asked if row != NONE and not store.is_empty(row)]
        within = min(event.within_ns, store.config.pin_max_ns)
        taken = over = 0
        if kind is HintKind.SESSION_END:
            taken = self._cool(self._private(rows))
        elif kind is HintKind.PRIORITY and event.level == LOW:
            taken = self._cool(rows[::-1])
        elif kind is HintKind.PRIORITY and event.level == NORMAL:
            taken = self._release(rows)
        elif kind is HintKind.PIN and not within:
            taken = self._release(rows)
        else:
            if kind is HintKind.EXPECT_REUSE:
                within += max(within // _GRACE, _GRACE_LEAST_NS)
            elif kind is HintKind.PRIORITY:
                within = within or store.config.pin_max_ns
            within = min(within, store.config.pin_max_ns)
            hard = kind is HintKind.PIN
            kept = Kept(store.now + within, hard, space.namespace, space.chunk_slot_bytes)
            for row in rows:
                if store.keeping.add(row, kept):
                    taken += 1
                else:
                    over += 1
        counts = store.counters.tenant(space.namespace)
        counts["chunks_hinted", kind.name.lower()] += taken
        counts["hints_over_cap", ""] += over
        return HintResult(taken, len(asked) - len(rows), over, within)

    def _private(self, rows: list[int]) -> list[int]:
        """What no other session shares, from the leaf on: up to the first chunk that has anything
        else below it."""
        chunks = self._store.chunks
        found: list[int] = []
        below = NONE
        for row in reversed(rows):
            first = chunks.child[row]
            if first != below or (first != NONE and chunks.next[first] != NONE):
                break
            found.append(row)
            below = row
        return found

    def _cool(self, rows: list[int]) -> int:
        """In every tier, these go first, as soon as the uses before are applied. From leaf to
        root."""
        store = self._store
        for row in rows:
            store.keeping.drop(row)
        if rows:
            store.touch(np.array(rows, np.int64), over=True)
        return len(rows)

    def _release(self, rows: list[int]) -> int:
        return sum(map(self._store.keeping.drop, rows))
