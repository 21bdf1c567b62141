"""What engines say of the future: a session is over, a prefix will be asked for again, must stay,
or matters more or less than others.

The law of this module: a hint changes an order, it removes nothing and promises nothing; one that
was wrong costs little. What is *pinned* is no victim while the pin lasts; what is *spared* is one
only when nothing else can go. Both end by the clock, and both together are bounded: by tenant, and
over all tenants. A command of an operator goes over all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.core.actions import HintResult
from kvd.core.columns import NONE
from kvd.core.events import HASH_BYTES, Hint, HintKind
from kvd.core.jobs import Pause, Work, spent
from kvd.core.keeping import Kept
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.errors import BadKey

if TYPE_CHECKING:
    from kvd.core.store import Store

Rows = NDArray[np.int64]

_GRACE: Final = 4  # a chunk that is expected is spared a quarter longer
_GRACE_LEAST_NS: Final = 5_000_000_000
# A session that is said to be over is believed when nobody has come back to it for an eighth of the
# time that chunks stay: a wrong hint is found out by then, mostly, and a right one loses little.
PATIENCE: Final = 8
_MOST_WAITING: Final = 1 << 18  # chunks; those beyond are believed at once
_PART: Final = 128  # keys in one go
_SHARED: Final = -2  # in place of a row: nothing further up is the session's own
LOW, NORMAL, HIGH = 0, 1, 2


class Over(NamedTuple):
    """Chunks of a session that is said to be over, from leaf to root."""

    rows: Rows
    words: NDArray[np.uint64]  # of their keys: a row may be another's by then
    when: int


class Hints:
    """Carries out hints."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[int, Over] = {}
        self._rows = 0  # in these

    def take(self, session: Session, space: Space, event: Hint) -> Work[HintResult]:
        """One hint about keys of one chain, in its order, a part of them at a time."""
        store = self._store
        kind = HintKind(event.hint)
        within = min(event.within_ns, store.config.pin_max_ns)
        if kind is HintKind.EXPECT_REUSE:
            within += max(within // _GRACE, _GRACE_LEAST_NS)
        elif kind is HintKind.PRIORITY and event.level == HIGH:
            within = within or store.config.pin_max_ns
        within = min(within, store.config.pin_max_ns)
        cools = kind is HintKind.SESSION_END or (kind is HintKind.PRIORITY and event.level == LOW)
        ends = (kind is HintKind.PIN and not within) or (
            kind is HintKind.PRIORITY and event.level == NORMAL
        )
        kept = Kept(
            store.now + within, kind is HintKind.PIN, space.namespace, space.chunk_slot_bytes
        )
        counts = store.counters.tenant(space.namespace)
        asked = len(event.hashes) // HASH_BYTES
        taken = absent = over = 0
        below: int | None = NONE if kind is HintKind.SESSION_END else None
        cold: list[tuple[Rows, NDArray[np.uint64]]] = []
        begins = range(0, asked, _PART)
        for begin in reversed(begins) if cools else begins:
            part = event.hashes[HASH_BYTES * begin : HASH_BYTES * min(begin + _PART, asked)]
            found = space.get_many(part).tolist()
            rows = [row for row in found if row != NONE and not store.is_empty(row)]
            absent += len(found) - len(rows)
            done = 0
            if cools:
                rows.reverse()
                if below is not None and rows:
                    private = self._private(rows, below)
                    below = private[-1] if len(private) == len(rows) else _SHARED
                    rows = private
                done = len(rows)
                cold.append(self._cool(rows))
            elif ends:
                done = sum(map(store.keeping.drop, rows))
            else:
                done = sum(store.keeping.add(row, kept) for row in rows)
                over += len(rows) - done
            taken += done
            counts["chunks_hinted", kind.name.lower()] += done
            if spent(store, 2 + len(found) // 8):
                yield Pause.SLICE
        if taken and cools:
            rows_, words = map(np.concatenate, zip(*cold, strict=True))
            self._later(Over(rows_, words, store.now), patient=kind is HintKind.SESSION_END)
        counts["hints_over_cap", ""] += over
        return HintResult(taken, absent, over, 0 if cools or ends else within)

    def _later(self, over: Over, *, patient: bool) -> None:
        """Cool these now, or when nobody has come back to them for a while."""
        store = self._store
        due = store.now + int(store.stay_ns / PATIENCE)
        if not patient or due <= store.now or self._rows + len(over.rows) > _MOST_WAITING:
            store.touches.over(over.rows, over.words)
            return
        number = store.handle()
        self._waiting[number] = over
        self._rows += len(over.rows)
        store.timers.add(due, "hint", number)

    def due(self, number: int) -> None:
        """It has been a while."""
        store, over = self._store, self._waiting.pop(number)
        self._rows -= len(over.rows)
        unused = store.chunks.np_last[over.rows] <= over.when
        if unused.any():
            store.touches.over(over.rows[unused], over.words[unused])

    def _private(self, rows: list[int], below: int) -> list[int]:
        """What no other session shares, from the leaf on: up to the first chunk that has anything
        else below it than `below`, the one before it (NONE: it is the leaf)."""
        chunks = self._store.chunks
        found: list[int] = []
        for row in rows:
            first = chunks.child[row]
            if first != below or (first != NONE and chunks.next[first] != NONE):
                break
            found.append(row)
            below = row
        return found

    def _cool(self, rows: list[int]) -> tuple[Rows, NDArray[np.uint64]]:
        """No longer kept. The rows, and what tells them from others that may have them later."""
        store = self._store
        for row in rows:
            store.keeping.drop(row)
        some = np.array(rows, np.int64)
        return some, store.chunks.np_key[some, 0]


def check(event: Hint) -> None:
    """BadKey for a hint that is unknown."""
    if event.hint not in [int(kind) for kind in HintKind]:
        raise BadKey(f"hint {event.hint} is unknown: 1 to {max(HintKind)}")
    if event.hint == HintKind.PRIORITY and event.level not in (LOW, NORMAL, HIGH):
        raise BadKey(f"level {event.level} is unknown: 0 low, 1 normal, 2 high")
    if event.within_ns < 0:
        raise BadKey("within_ns is below 0")
