"""Making room below: which chunks leave a tier that is full.

The law of this module: the tier itself says when it is full, and what would help; which chunks go
is decided by the tier's own policy among those that may: not leased, not in anybody's hands, and,
if this is the last copy, a leaf (of what lies here and above: what hangs below it further down
waits for it to be stored again); and among the chunks of the tenant whose turn it is. What was
chosen is invisible at once and deleted then. Who waits for room tries again when the deletions are
done, or learns that there will be none. Where there is a next tier, room is made well ahead of
need, so that last copies have the time to go down there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from kvd.core import columns as col
from kvd.core.columns import NONE
from kvd.core.descents import Descent, Descents
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.lower import READY, Lower, TierJob
from kvd.core.shares import NOBODY
from kvd.core.store import Store

_BATCH: Final = 32  # chunks deleted at a time, at most
_PART: Final = 50  # of a tier's chunks: a fiftieth is deleted at a time
_SKIPS: Final = 64
_SCAN: Final = 1024  # rows looked at where a policy does not know all
_STRIDE: Final = 1 << 16
_KIDS: Final = 64  # looked at
_AHEAD: Final = 8  # payloads, of a tier that is not the last


class Rooms:
    """`retry(move, cell, room=)`: a write that waited may try again, or has to give up."""

    def __init__(self, store: Store, jobs: Jobs, fetches: Fetches, descents: Descents) -> None:
        self._store = store
        self._jobs = jobs
        self._fetches = fetches
        self._descents = descents
        descents.ended = self._descended
        descents.full = self.make
        self.retry: Callable[..., None] = lambda move, cell, *, room: None
        # (tier, how many, where) -> how many records that nobody knows were given up
        self.unnamed: Callable[[Lower, int, tuple[int, ...]], int] = lambda lower, most, places: 0
        self._waiting: dict[tuple[int, int], deque[tuple[object, int]]] = {}  # (tier, size)
        self._deleting: dict[tuple[int, int], int] = {}  # deletions under way
        self._running: set[tuple[int, int]] = set()
        self._down: dict[tuple[int, int], int] = {}  # descents under way

    def ahead(self, lower: Lower) -> int:
        """How many more payloads a tier should have room for, at the least."""
        least = max(2, lower.writing)
        last = lower.number + 1 == len(self._store.ladder.lowers)
        return least if last else least + max(1, min(_AHEAD, lower.chunks // _PART))

    def wait(
        self,
        lower: Lower,
        size: int,
        move: object,
        cell: int,
        empty: tuple[int, ...],
        by: int = NOBODY,
    ) -> None:
        """A write found no room: it tries again when some was made."""
        place = (lower.number, size)
        self._waiting.setdefault(place, deque()).append((move, cell))
        self.make(lower, size, empty, by)

    def make(self, lower: Lower, size: int, empty: tuple[int, ...], by: int = NOBODY) -> None:
        """Delete some chunks of a tier with shards of this class, or those at the places named, for
        a tenant."""
        place = (lower.number, size)
        if self._down.get(place) and not self._waiting.get(place):
            return  # nobody is in a hurry
        if place not in self._running and not self._deleting.get(place):
            self._running.add(place)
            self._jobs.start(self._make(lower, size, empty, by))

    def _make(self, lower: Lower, size: int, empty: tuple[int, ...], by: int) -> Work[None]:
        store = self._store
        place = (lower.number, size)
        count = max(1, min(_BATCH, lower.chunks // _PART))
        hurried = bool(self._waiting.get(place))
        before = lower.chunks
        unnamed = self.unnamed(lower, _BATCH, empty)
        if empty:
            yield from self._empty(lower, size, empty, by)
            empty = () if lower.chunks == before and not unnamed else empty
        passed: dict[int, int] = {}
        turn = lower.policy.turn
        while not empty and count > 0:
            row = self._pick(lower, size, passed, by, hurried=bool(self._waiting.get(place)))
            if lower.policy.turn != turn:  # it names others than it did
                turn = lower.policy.turn
                passed.clear()
            elif row is None:
                break
            if row is None:
                row = NONE
            if row != NONE:
                store.evicts(row, by, lower.use)
                count -= 1
                if not self._waiting.get(place) and self._descents.begin(lower, row, place):
                    self._down[place] = self._down.get(place, 0) + 1
                else:
                    self.drop(lower, row, "capacity", place)
            if spent(store, 5):
                yield Pause.SLICE
        self._running.discard(place)
        if self._waiting.get(place) and not hurried:  # they came meanwhile
            self.make(lower, size, (), by)
        elif not self._deleting.get(place):
            self._answer(place, room=lower.chunks < before or unnamed > 0)

    def _empty(self, lower: Lower, size: int, empty: tuple[int, ...], by: int) -> Work[None]:
        """Delete what lies at the places that the tier named, as far as it may go."""
        store = self._store
        wanted = np.array(empty, np.uint64)
        upto = store.cells.used
        for begin in range(0, upto, _STRIDE):
            end = min(begin + _STRIDE, upto)
            found = np.flatnonzero(
                (lower.np_state[begin:end] == READY) & np.isin(lower.np_at[begin:end], wanted)
            )
            for cell in (found + begin).tolist():
                row = store.cells.chunk[cell]
                if lower.count[row] and self.legal(lower, row) and self._allowed(lower, row, by):
                    store.evicts(row, by, lower.use)
                    self.drop(lower, row, "capacity", (lower.number, size))
            if spent(store, 50):
                yield Pause.SLICE

    def _allowed(self, lower: Lower, row: int, by: int) -> bool:
        """Whether the chunk's tenant may lose it for want of room of another."""
        shares, tenant = self._store.shares, self._store.tenant(row)
        return tenant == by or not shares.isolate or lower.use.above(tenant)

    def fit(self, lower: Lower, tenant: int, size: int, nbytes: int) -> bool:
        """Delete the tenant's own coldest chunks of a class until so much more keeps to its maximum
        in the tier. False if that can't be done at once."""
        store, use = self._store, lower.use
        passed: dict[int, int] = {}
        looks = _BATCH
        while store.shares.isolate and use.full(tenant, use.coming[tenant] + nbytes):
            looks -= 1
            row = None
            if looks:
                row = self._pick(lower, size, passed, tenant, hurried=True, own=True)
            if row is None:
                return False
            if row != NONE:
                self.drop(lower, row, "quota")
        return True

    def legal(self, lower: Lower, row: int) -> bool:
        """Whether the chunk may be deleted from the tier now."""
        if self._held(row):
            return False
        return self._leaf(lower, row) or self._store.ladder.elsewhere(lower, row)

    def _held(self, row: int) -> bool:
        store, chunks = self._store, self._store.chunks
        if chunks.leases[row] or chunks.writing[row] or row in store.pinned:
            return True
        return bool(store.keeping.by_row and store.keeping.pinned(row, store.now))

    def _queues(
        self, lower: Lower, size: int, passed: dict[int, int], by: int, own: bool
    ) -> list[int]:
        """Queues with candidates left of the tenant whose turn it is."""
        store, shares = self._store, self._store.shares
        owners = store.spaces.queue_tenants
        left = [
            queue
            for queue in store.spaces.class_queues.get(size, ())
            if passed.get(queue, 0) < lower.residents.get(queue, 0)
        ]
        if not own and (not shares.isolate or not left):
            return left
        giver = by if own else lower.use.victim({owners[queue] for queue in left}, by, size)
        return [queue for queue in left if owners[queue] == giver]

    def _leaf(self, lower: Lower, row: int) -> bool:
        chunks = self._store.chunks
        child = chunks.child[row]
        above = self._store.ladder.lowers[: lower.number + 1]
        for _ in range(_KIDS):
            if child == NONE:
                return True
            if chunks.tally[child] & col.HERE or any(low.count[child] for low in above):
                return False
            child = chunks.next[child]
        return False

    def _may(self, lower: Lower, row: int, *, hurried: bool) -> bool:
        """Whether the chunk may be chosen: to be deleted, or to go to the next tier first."""
        if self.legal(lower, row):
            return True
        return not hurried and not self._held(row) and self._descents.possible(lower, row)

    def _pick(
        self,
        lower: Lower,
        size: int,
        passed: dict[int, int],
        by: int,
        *,
        hurried: bool,
        own: bool = False,
    ) -> int | None:
        """The chunk that goes next; NONE after some that may not; None if there is none."""
        store = self._store
        best, least = -1, 0.0
        queues = self._queues(lower, size, passed, by, own)
        for queue in queues:
            cold = lower.policy.coldness(queue, store.now)
            if cold is not None and (best < 0 or cold < least):
                best, least = queue, cold
        if best < 0:
            if not lower.policy.partial:
                return None
            return self._scan(lower, size, passed, by, own, hurried=hurried)
        skipped: list[int] = []
        for row in lower.policy.victims(best, store.now):
            if self._may(lower, row, hurried=hurried):
                lower.policy.defer(skipped, store.now)
                return row
            skipped.append(row)
            if len(skipped) >= _SKIPS:
                break
        else:
            passed[best] = lower.residents[best]
        lower.policy.defer(skipped, store.now)
        passed[best] = passed.get(best, 0) + len(skipped)
        return NONE

    def _scan(
        self,
        lower: Lower,
        size: int,
        passed: dict[int, int],
        by: int,
        own: bool,
        *,
        hurried: bool,
    ) -> int | None:
        """As `_pick`, where the policy does not know all: by row numbers."""
        store = self._store
        queues = self._queues(lower, size, {}, by, own)
        begin = passed.get(NONE, 0)
        end = passed[NONE] = min(begin + _SCAN, store.chunks.used)
        for row in (np.flatnonzero(lower.np_count[begin:end]) + begin).tolist():
            space = store.spaces.of(store.chunks.space[row])
            if space.queues[0] in queues and self._may(lower, row, hurried=hurried):
                return int(row)
        return NONE if end < store.chunks.used else None

    def drop(self, lower: Lower, row: int, why: str, place: tuple[int, int] | None = None) -> int:
        """Take a chunk out of a tier; the payload bytes that it had there. Pre: it is in nobody's
        hands. The row may be gone afterwards."""
        store, chunks = self._store, self._store.chunks
        space = store.spaces.of(chunks.space[row])
        first = chunks.cell[row]
        freed = 0
        store.pin(row)
        for shard in range(space.shards):
            if lower.state[first + shard] == READY:
                freed += space.nbytes[shard]
                if place is not None:
                    self._deleting[place] = self._deleting.get(place, 0) + 1
                self._fetches.delete(lower, first + shard, place)
        counts = store.counters.tenant(space.namespace)
        counts["chunks_evicted_below", why] += 1
        store.unpin(row)
        return freed

    def _descended(self, descent: Descent) -> None:
        """A chunk is in the next tier, or will not get there: here it goes."""
        store, row, lower = self._store, descent.row, descent.source
        self._down[descent.place] -= 1
        chunks = store.chunks
        same = chunks.space[row] and chunks.key_of(row) == descent.key and lower.count[row]
        if same and self.legal(lower, row):
            self.drop(lower, row, "capacity" if descent.failed else "demoted", descent.place)

    def deleted(self, job: TierJob) -> None:
        """A deletion came back, however it ended: the shard is forgotten."""
        place = job.owner
        self._store.ladder.release(job.row)
        if isinstance(place, tuple):
            left = self._deleting[place] - 1
            self._deleting[place] = left
            if not left and place not in self._running:
                self._answer(place, room=True)

    def late(self, job: TierJob) -> None:
        """A deletion did not come back in time: nobody waits for its room any longer."""
        place = job.owner
        if isinstance(place, tuple):
            self._answer(place, room=False)

    def _answer(self, place: tuple[int, int], *, room: bool) -> None:
        waiting = self._waiting.pop(place, None)
        for move, cell in waiting or ():
            self.retry(move, cell, room=room)
