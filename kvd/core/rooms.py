"""Making room below: which chunks leave a tier that is full.

The law of this module: the tier itself says when it is full, and what would help; which chunks go
is decided by the tier's own policy among those that may: not leased, not in anybody's hands, and,
if this is the last copy, a leaf. What was chosen is invisible at once and deleted then. Who waits
for room tries again when the deletions are done, or learns that there will be none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvd.core.columns import NONE
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.lower import READY, Lower, TierJob
from kvd.core.store import Store

_BATCH = 32  # chunks deleted at a time, at most
_PART = 50  # of a tier's chunks: a fiftieth is deleted at a time
_SKIPS = 64
_SCAN = 1024  # rows looked at where a policy does not know all
_STRIDE = 1 << 16


class Rooms:
    """`retry(move, cell, room=)`: a write that waited may try again, or has to give up."""

    def __init__(self, store: Store, jobs: Jobs, fetches: Fetches) -> None:
        self._store = store
        self._jobs = jobs
        self._fetches = fetches
        self.retry: Callable[..., None] = lambda move, cell, *, room: None
        self._waiting: dict[tuple[int, int], deque[tuple[object, int]]] = {}  # (tier, size)
        self._deleting: dict[tuple[int, int], int] = {}  # deletions under way
        self._running: set[tuple[int, int]] = set()

    def wait(
        self, lower: Lower, size: int, move: object, cell: int, empty: tuple[int, ...]
    ) -> None:
        """A write found no room: it tries again when some was made."""
        place = (lower.number, size)
        self._waiting.setdefault(place, deque()).append((move, cell))
        self.make(lower, size, empty)

    def make(self, lower: Lower, size: int, empty: tuple[int, ...]) -> None:
        """Delete some chunks of a tier with shards of this class, or those at the places named."""
        place = (lower.number, size)
        if place not in self._running and not self._deleting.get(place):
            self._running.add(place)
            self._jobs.start(self._make(lower, size, empty))

    def _make(self, lower: Lower, size: int, empty: tuple[int, ...]) -> Work[None]:
        store = self._store
        place = (lower.number, size)
        count = max(1, min(_BATCH, lower.chunks // _PART))
        before = lower.chunks
        if empty:
            yield from self._empty(lower, size, empty)
        passed: dict[int, int] = {}
        turn = lower.policy.turn
        while not empty and count > 0:
            row = self._pick(lower, size, passed)
            if lower.policy.turn != turn:  # it names others than it did
                turn = lower.policy.turn
                passed.clear()
            elif row is None:
                break
            if row is None:
                row = NONE
            if row != NONE:
                self.drop(lower, row, "capacity", place)
                count -= 1
            if spent(store, 5):
                yield Pause.SLICE
        self._running.discard(place)
        if not self._deleting.get(place):
            self._answer(place, room=lower.chunks < before)

    def _empty(self, lower: Lower, size: int, empty: tuple[int, ...]) -> Work[None]:
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
                if lower.count[row] and self.legal(lower, row):
                    self.drop(lower, row, "capacity", (lower.number, size))
            if spent(store, 50):
                yield Pause.SLICE

    def legal(self, lower: Lower, row: int) -> bool:
        """Whether the chunk may leave the tier now."""
        store, chunks = self._store, self._store.chunks
        if chunks.leases[row] or chunks.writing[row] or row in store.pinned:
            return False
        if store.keeping.by_row and store.keeping.pinned(row, store.now):
            return False
        return bool(chunks.child[row] == NONE) or store.ladder.elsewhere(lower, row)

    def _pick(self, lower: Lower, size: int, passed: dict[int, int]) -> int | None:
        """The chunk that goes next; NONE after some that may not; None if there is none."""
        store = self._store
        best, least = -1, 0.0
        for queue in store.spaces.class_queues.get(size, ()):
            count = lower.residents.get(queue, 0)
            if not count or passed.get(queue, 0) >= count:
                continue
            cold = lower.policy.coldness(queue, store.now)
            if cold is not None and (best < 0 or cold < least):
                best, least = queue, cold
        if best < 0:
            return self._scan(lower, size, passed) if lower.policy.partial else None
        skipped: list[int] = []
        for row in lower.policy.victims(best, store.now):
            if self.legal(lower, row):
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

    def _scan(self, lower: Lower, size: int, passed: dict[int, int]) -> int | None:
        """As `_pick`, where the policy does not know all: by row numbers."""
        store = self._store
        queues = store.spaces.class_queues.get(size, ())
        begin = passed.get(NONE, 0)
        end = passed[NONE] = min(begin + _SCAN, store.chunks.used)
        for row in (np.flatnonzero(lower.np_count[begin:end]) + begin).tolist():
            space = store.spaces.of(store.chunks.space[row])
            if space.queues[0] in queues and self.legal(lower, row):
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
