"""Writing chunks down: what gets cold in DRAM goes to the tier below, then it is dropped here.

The law of this module: DRAM is kept between two close marks by demoting the policy's victims, a
small batch at a time. A chunk is sealed before it is written, written only where it is not yet,
and dropped only when all of it lies below and nobody holds it. What can't be demoted (the tier is
full, away, or refuses, or its tenant has its maximum there) is dropped all the same, and counted
with the reason: the ladder never wedges. A tenant near its maximum in DRAM is thinned out likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Final

from kvd.core import columns as col
from kvd.core.backlog import Backlog
from kvd.core.columns import NONE
from kvd.core.config import WritePolicy
from kvd.core.drains import Drains
from kvd.core.events import TierAnswer
from kvd.core.evictions import Evictions
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.lower import READY, Lower, TierJob
from kvd.core.outbox import Move, Outbox
from kvd.core.rooms import Rooms
from kvd.core.shares import NOBODY
from kvd.core.store import Store
from kvd.core.victims import Found, Search

_ATTEMPTS: Final = 3  # of one write that finds no room
_BACKOFF_NS: Final = 50_000_000  # after a batch in which nothing could go
_MOVES: Final = 256  # named ahead for a drain
_THROUGH: Final = 16  # chunks looked at in one event


class Demotions:
    """All writes to the tiers below."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        evictions: Evictions,
        rooms: Rooms,
        urge: Callable[[int], None],
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._evictions = evictions
        self._rooms = rooms
        self._urge = urge
        rooms.retry = self._retry
        evictions.coming = self._is_coming
        evictions.thinning = self._is_thinning
        evictions.moving = lambda size: self._held.get(size, 0) > 0
        evictions.settled = self._settled
        evictions.lost = self._lost
        self.by_row: dict[int, Move] = {}
        self._sealing: dict[int, Move] = {}  # cell -> who waits for its digest
        self.outbox = Outbox(store, self._lost_shard)
        self._coming: dict[int, int] = {}  # size -> slots that moves under way will free
        self._held: dict[int, int] = {}  # size -> slots that can't be freed before a move is done
        self._running: set[int] = set()  # sizes whose victims are being chosen
        self._not_before: dict[int, int] = {}  # size -> when to try again
        self._thinning: dict[int, int] = {}  # tenant -> gathers under way for its maximum
        self._thin_after: dict[int, int] = {}  # tenant -> when to try again
        self._backlog = Backlog(store)
        self._after: dict[int, list[Lower]] = {}  # row -> further tiers
        self.drains = Drains(
            store, jobs, self._backlog.add, lambda lower: self._backlog.waiting(lower) < _MOVES
        )

    @property
    def busy(self) -> bool:
        """Whether more could be begun in the next slice."""
        return self._backlog.ready

    @property
    def moving(self) -> int:
        return len(self.by_row) + len(self._backlog) + self.drains.left

    # -- when -----------------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin what is due. After every event."""
        store = self._store
        self._sealed()
        for lower in store.ladder.lowers:
            for _ in range(_THROUGH):
                if (row := self._backlog.next(lower)) == NONE:
                    break
                if row in self.by_row:  # it is on its way to another tier: this one's turn is next
                    self._after.setdefault(row, []).append(lower)
                else:
                    self._begin(row, lower, "through")
        self.drains.pump()
        slabs = store.slabs
        for size, slots in slabs.slots.items():
            if slabs.blank() < 0:
                self._level(size, slots)
            else:
                slabs.ample(size)
        self.outbox.send()

    def _level(self, size: int, slots: int) -> None:
        """Demote of a class if it is above its high mark."""
        store, config = self._store, self._store.config
        if not slots:
            return
        free = slots - store.slabs.used[size]
        coming = self._coming.get(size, 0)
        if free > ceil(slots * (1 - config.low)):
            store.slabs.ample(size)
        least = max(1, ceil(slots * (1 - config.high)), self._evictions.kept(size) + 1)
        if free + coming >= least:
            return
        if size in self._running or store.now < self._not_before.get(size, 0):
            return
        if store.slabs.empty(but=size) >= 0 or not self._takers():
            return
        need = max(least, ceil(slots * (1 - config.low))) - free - coming
        batch = max(1, int(config.size * config.batch_share) // size)
        need = min(need, batch - coming)
        if need > 0:
            self._running.add(size)
            self._jobs.start(self._gather(size, need))

    def _is_coming(self, size: int) -> bool:
        """Whether a slot of a class will be free soon; begins to demote if none is."""
        if not self._coming.get(size, 0) and self._takers():
            self._level(size, self._store.slabs.slots.get(size, 0))
            self.outbox.send()
        return self._coming.get(size, 0) > 0

    def _is_thinning(self, size: int, tenant: int) -> bool:
        """Whether a tenant at its maximum will have less soon; begins to demote its own if not."""
        store, use = self._store, self._store.shares.dram
        if use.leaving[tenant]:
            return True
        if store.now < self._thin_after.get(tenant, 0) or not self._takers():
            return False
        if not self._thinning.get(tenant):
            need = max(size, int(use.maximum[tenant] * (1 - store.config.low)))
            self._thinning[tenant] = 1
            self._jobs.start(self._thin(need, tenant))
            self.outbox.send()
        return use.leaving[tenant] > 0

    def _thin(self, need: int, tenant: int) -> Work[None]:
        """Demote so many bytes of a tenant's own chunks."""
        store = self._store
        search, begun = Search(), False
        while need > 0:
            found, row, reason = self._evictions.victims.choose(None, search, tenant, own=True)
            if found is Found.NOTHING:
                break
            if found is Found.DONE:
                need -= sum(store.slots(row))
                if reason != "capacity":
                    self._evictions.remove(row, reason, tenant)
                elif not self._demote(row, tenant):
                    break
                begun = True
                spent(store, 2)
            if spent(store):
                yield Pause.SLICE
        del self._thinning[tenant]
        if not begun:
            self._thin_after[tenant] = store.now + _BACKOFF_NS
        self._jobs.wake(Pause.DEMOTION)

    def _gather(self, size: int, need: int) -> Work[None]:
        """Choose victims until enough slots are free or will be. For whose room each goes is told
        when it goes: of whom most of the growth is not made up for then."""
        store = self._store
        search = Search()
        begun = False
        while need > 0:
            found, row, reason = self._evictions.victims.choose(size, search)
            if found is Found.NOTHING:
                break
            if found is Found.DONE:
                mine = store.slots(row).count(size)
                if reason != "capacity":
                    self._evictions.remove(row, reason, store.slabs.needy(size))
                elif not self._demote(row, None, size):
                    break
                need -= mine
                begun = True
                spent(store, 2)
            if spent(store):
                yield Pause.SLICE
        self._running.discard(size)
        if not begun:
            self._not_before[size] = store.now + _BACKOFF_NS
            store.timers.add(store.now + _BACKOFF_NS, "room", store.handle())
        self._jobs.wake(Pause.DEMOTION)

    def _demote(self, row: int, by: int | None, size: int = 0) -> bool:
        """Send a victim down, or drop it if it is there. `by`: for whose room; None: for theirs
        whose growth needs some of this class. False if no tier takes anything now."""
        store, ladder = self._store, self._store.ladder
        now = store.slabs.needy(size) if by is None else by
        lower = self._target(row)
        if lower is None:
            if not self._takers():
                return False
            self._evictions.remove(row, "capacity", now)
            return True
        if ladder.holds(lower, row) and lower.readable:
            self._count(row, "present")
            store.evicts(row, now, store.shares.dram)
            store.drop(row, "demoted", evicted=True)
        elif not self._begin(row, lower, "demote", by, size):
            self._evictions.remove(row, "capacity", now)
        return True

    def _target(self, row: int) -> Lower | None:
        """The tier that the chunk goes to: the next one below that takes it."""
        for lower in self._store.ladder.lowers:
            if lower.writable and self._store.ladder.wants(lower, row):
                return lower
        return None

    def _settled(self, row: int) -> bool:
        """Whether a demotion would have nothing to write."""
        ladder = self._store.ladder
        lower = self._target(row)
        if lower is not None:
            return lower.readable and ladder.holds(lower, row)
        return any(low.readable and ladder.holds(low, row) for low in ladder.lowers)

    def _takers(self) -> bool:
        """Whether any tier below takes writes now."""
        return any(lower.writable for lower in self._store.ladder.lowers)

    def _lost(self, row: int) -> None:
        """A chunk goes for good, for want of time or of a tier."""
        if not self._takers():
            why = "off"
        elif self._target(row) is None:
            why = "unwanted"
        else:
            why = "no_time"
        self._count(row, why)

    # -- one chunk ------------------------------------------------------------------------------

    def _begin(
        self, row: int, lower: Lower, why: str, by: int | None = NOBODY, size: int = 0
    ) -> bool:
        """Write what the tier does not have of a chunk. False if that can't be done now."""
        store, chunks, cells = self._store, self._store.chunks, self._store.cells
        if row in self.by_row or row in store.ladder.active or not chunks.ready[row]:
            return False
        if chunks.writing[row] or not lower.writable:
            return False
        space = store.spaces.of(chunks.space[row])
        first = chunks.cell[row]
        every = range(first, first + space.shards)
        if any(cells.marks[cell] & col.MOVING for cell in every):
            return False
        missing = [c for c in every if cells.state[c] == col.READY and lower.state[c] != READY]
        if not missing:
            return False
        nbytes = sum(space.slot_sizes[cell - first] for cell in missing)
        store.pin(row)  # what makes room below may take the row's other copies
        fits = self._rooms.fit(lower, space.tenant, space.slot_sizes[missing[0] - first], nbytes)
        store.unpin(row)
        if not fits:
            self._count(row, "over_quota")
            return False
        move = self.by_row[row] = Move(row, chunks.key_of(row), lower, why, space.tenant, by, size)
        store.ladder.hold(row)
        move.left = len(missing)
        move.nbytes = nbytes
        lower.use.coming[space.tenant] += nbytes
        move.sizes = store.slots(row)
        held = self._held
        if why == "demote":
            held = self._coming
            store.shares.dram.leaving[space.tenant] += sum(move.sizes)
        else:
            self._backlog.begun(move)
        for size in move.sizes:
            held[size] = held.get(size, 0) + 1
        for cell in missing:
            if cells.marks[cell] & col.SEALED:
                self.outbox.post(move, cell)
            else:
                self._sealing[cell] = move
                self._urge(cell)
        return True

    def _sealed(self) -> None:
        """Digests were taken: demotions go on, and chunks for write-through are complete."""
        store, cells = self._store, self._store.cells
        while store.sealed:
            cell = store.sealed.popleft()
            if cells.state[cell] != col.READY:
                continue
            move = self._sealing.pop(cell, None)
            if move is not None:
                if cells.marks[cell] & col.SEALED:
                    self.outbox.post(move, cell)
                else:
                    self._lost_shard(move, TierAnswer.FAILED)
                    continue  # the chunk may have gone with it
            row = cells.chunk[cell]
            for lower in store.ladder.lowers:
                if lower.config.policy is WritePolicy.THROUGH and not self._unsealed(row):
                    self._backlog.add(row, lower)

    def _unsealed(self, row: int) -> bool:
        store = self._store
        if store.chunks.writing[row]:
            return True
        first = store.chunks.cell[row]
        shards = store.spaces.of(store.chunks.space[row]).shards
        return any(
            store.cells.state[cell] == col.READY and not store.cells.marks[cell] & col.SEALED
            for cell in range(first, first + shards)
        )

    def hit(self, row: int) -> None:
        """A chunk was hit for the second time."""
        for lower in self._store.ladder.lowers:
            if lower.config.policy is WritePolicy.ON_SECOND_HIT and lower.writable:
                self._backlog.add(row, lower)

    # -- one shard ------------------------------------------------------------------------------

    def done(
        self, job: TierJob, answer: TierAnswer, at: int, generation: int, room: int,
        empty: tuple[int, ...],
    ) -> None:  # fmt: skip
        """A write came back."""
        store, cells = self._store, self._store.cells
        move, lower, cell = job.owner, job.lower, job.cell
        assert isinstance(move, Move)
        store.counters.own["shards_written", answer.value] += 1
        size = store.slabs.size_of(cells.record[cell])
        store.ladder.release(job.row)  # the move's own hold is still there
        if answer in (TierAnswer.OK, TierAnswer.EXISTS):
            store.ladder.put(lower, cell, at, generation)
            self._left(move)
            if 0 <= room < self._rooms.ahead(lower):
                self._rooms.make(lower, size, (), move.tenant)
        elif answer is TierAnswer.NO_SPACE and move.attempts < _ATTEMPTS and lower.writable:
            move.attempts += 1
            self._rooms.wait(lower, size, move, cell, empty, move.tenant)
        else:
            if answer is TierAnswer.CORRUPT:  # what is here is not what was sealed
                store.quarantine(cell)
            self._lost_shard(move, answer)

    def late(self, job: TierJob) -> None:
        """A write did not come back in time; the slot stays the tier's until it does."""
        self._store.counters.own["shards_written", "late"] += 1

    def _retry(self, move: object, cell: int, *, room: bool) -> None:
        """There may be room for it now, or there will be none."""
        assert isinstance(move, Move)
        if room:
            self.outbox.post(move, cell)
        else:
            self._lost_shard(move, TierAnswer.NO_SPACE)

    def _lost_shard(self, move: Move, answer: TierAnswer) -> None:
        move.failed = answer
        self._left(move)

    def _left(self, move: Move) -> None:
        """A shard is dealt with; with the last, so is the chunk."""
        move.left -= 1
        if move.left:
            return
        store, row = self._store, move.row
        del self.by_row[row]
        for lower in self._after.pop(row, ()):
            self._backlog.add(row, lower)
        move.lower.use.coming[move.tenant] -= move.nbytes
        held = self._held
        if move.why == "demote":
            held = self._coming
            store.shares.dram.leaving[move.tenant] -= sum(move.sizes)
        else:
            self._backlog.ended(move)
        for size in move.sizes:
            held[size] -= 1
        self._count(row, "written" if move.failed is None else move.failed.value)
        goes = move.why == "demote"
        if goes and move.failed is None:
            self._evictions.hopeful(move.sizes, move.tenant)
        store.ladder.release(row)
        if goes:
            self._ended(move)
        elif row in store.transients and not store.chunks.leases[row]:
            store.fleeting.append(row)
        self._jobs.wake(Pause.DEMOTION)

    def _ended(self, move: Move) -> None:
        """Drop the chunk here, if nobody has come to hold it meanwhile."""
        store, chunks, row = self._store, self._store.chunks, move.row
        same = chunks.space[row] and chunks.key_of(row) == move.key
        if not (same and chunks.ready[row] and self._evictions.victims.legal(row)):
            return
        dram = store.shares.dram
        by = store.slabs.needy(move.size) if move.by is None else move.by
        if by == move.tenant or not store.shares.isolate or dram.above(move.tenant):
            store.evicts(row, by, dram)
            written = move.failed is None and store.ladder.holds(move.lower, row)
            store.drop(row, "demoted" if written else "undemoted", evicted=True)

    def _count(self, row: int, how: str) -> None:
        store = self._store
        if row == NONE or not store.chunks.space[row]:
            return
        space = store.spaces.of(store.chunks.space[row])
        store.counters.tenant(space.namespace)["demotions", how] += 1
