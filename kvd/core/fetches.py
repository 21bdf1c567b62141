"""Reading chunks up: a shard that lies below is read into a slot of DRAM.

The law of this module: one read at a time for one shard, whoever asks; those of one tenant start in
the order asked, and tenants share a tier by weight (kvd/fair.py). A first hit goes into a
*transient* slot: it is let go with its last lease, and all of them together take at most a tenth of
DRAM. A second hit, and what does not fit into that tenth, stays. What a tier gives is delivered
only if the tier vouches for its digest and its record says of the chunk what is known here; else
it is a miss, and its place is forgotten. A read that does not come back in time is a miss too, but
its slot waits for it. What is read ahead, for nobody yet, comes after all of that: it takes room
that costs nobody anything, or is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.chunk import ChunkHeader, Outcome, State, namespace_digest
from kvd.chunk.header import FLAG_SEALED
from kvd.core import columns as col
from kvd.core.actions import Reply, TierDelete, TierRead
from kvd.core.events import TierAnswer
from kvd.core.evictions import Evictions
from kvd.core.fetch import Batch, Fetch
from kvd.core.jobs import Jobs, Pause, Work
from kvd.core.lower import Lower, TierJob
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.fair import FairQueue

if TYPE_CHECKING:
    from kvd.core.transfers import Transfer, Transfers

_SLICE: Final = 64  # transients let go in one event
_PATIENCE_NS = 5_000_000, 200_000_000  # between two looks for room for what is read ahead

_OUTCOMES: Final = {TierAnswer.TIMEOUT: Outcome.DEADLINE, TierAnswer.CORRUPT: Outcome.CORRUPT}


def _again() -> Work[None]:
    """Nothing: what is due is begun with the slice that runs this."""
    yield from ()


class Fetches:
    """All reads from below."""

    def __init__(self, store: Store, jobs: Jobs, evictions: Evictions) -> None:
        self._store = store
        self._jobs = jobs
        self._evictions = evictions
        self.transfers: Transfers  # set by it
        self.by_cell: dict[int, Fetch] = {}
        self._queues: list[FairQueue[Fetch]] = [FairQueue() for _ in store.ladder.lowers]
        self._ahead: list[FairQueue[Fetch]] = [FairQueue() for _ in store.ladder.lowers]
        self._starting = [0] * len(self._queues)  # waiting for a slot, by tier
        self._reading_ahead = [0] * len(self._queues)
        self._no_room_until = 0  # for what is read ahead
        self._no_room_ns = _PATIENCE_NS[0]
        self._telling = False  # the answer of the event under way goes out before more is read

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues)) + sum(map(len, self._ahead))

    @property
    def stalled(self) -> bool:
        """Whether some wait for a tier that is away: the next slice answers them."""
        trios = zip(self._store.ladder.lowers, self._queues, self._ahead, strict=True)
        return any((queue or ahead) and not lower.readable for lower, queue, ahead in trios)

    # -- asking ---------------------------------------------------------------------------------

    def want(self, cell: int, transfer: Transfer, result: int, batch: Batch) -> None:
        """Deliver a shard to a transfer when it is here. Pre: `reachable`, and not in DRAM."""
        fetch = self.by_cell.get(cell)
        if fetch is None:
            store = self._store
            lower = store.ladder.source(cell)
            assert lower is not None
            row = store.cells.chunk[cell]
            fetch = self.by_cell[cell] = Fetch(cell, row, lower, batch, transfer.lease.namespace)
            store.ladder.hold(row)
            self._queue(fetch)
        elif fetch.ahead:  # from now on it is a load like any other
            fetch.ahead = 0
            fetch.tenant = transfer.lease.namespace
            if fetch.ticket is not None and self._ahead[fetch.lower.number].remove(fetch.ticket):
                fetch.batch = batch
                self._queue(fetch)
        fetch.early = 0
        fetch.waiting.append((transfer, result))

    def want_early(self, cell: int, tenant: str) -> None:
        """Begin to read the first shard of what a lookup, which is carried out next, will load. If
        it does not, nobody holds what comes. Pre: `reachable`, not in DRAM, not on its way."""
        store = self._store
        lower = store.ladder.source(cell)
        assert lower is not None
        row = store.cells.chunk[cell]
        fetch = self.by_cell[cell] = Fetch(cell, row, lower, Batch(), tenant)
        fetch.early = store.now
        store.ladder.hold(row)
        self._queue(fetch)
        self.pump()

    def batch_of(self, cell: int) -> Batch:
        """For a load whose first shard from below this is: its own, unless that one was begun
        before."""
        fetch = self.by_cell.get(cell)
        return fetch.batch if fetch is not None and fetch.early else Batch()

    def want_ahead(self, cell: int, tenant: str, until: int) -> None:
        """Read a shard up if that disturbs nobody, before `until`. Pre: `reachable`, and not in
        DRAM."""
        store = self._store
        fetch = self.by_cell.get(cell)
        if fetch is not None:
            if fetch.ahead:
                fetch.ahead = max(fetch.ahead, until)
            return
        lower = store.ladder.source(cell)
        assert lower is not None
        row = store.cells.chunk[cell]
        fetch = self.by_cell[cell] = Fetch(cell, row, lower, Batch(), tenant)
        fetch.ahead = until
        store.ladder.hold(row)
        self._queue(fetch)

    def too_late(self, cell: int) -> None:
        """The time of a shard that is read ahead is over: if it waits still, it is not read."""
        fetch = self.by_cell.get(cell)
        if fetch is None or not fetch.ahead or fetch.wanted(self._store.now):
            return
        if fetch.ticket is not None and self._ahead[fetch.lower.number].remove(fetch.ticket):
            self._give_up(fetch)

    def _queue(self, fetch: Fetch) -> None:
        store = self._store
        space = store.spaces.of(store.chunks.space[fetch.row])
        nbytes = space.nbytes[fetch.cell - store.chunks.cell[fetch.row]]
        queues = self._ahead if fetch.ahead else self._queues
        fetch.ticket = queues[fetch.lower.number].push(fetch.tenant, nbytes, fetch)

    def set_weight(self, tier: int, namespace: str, weight: float) -> None:
        """A tenant's share of a tier's bandwidth, against others that want some."""
        for queues in (self._queues, self._ahead):
            queues[tier].set_weight(namespace, weight)

    def pump(self) -> None:
        """Keep the tiers busy."""
        if self._telling:
            self._telling = False
            self._jobs.later(_again())
            return
        trios = zip(self._store.ladder.lowers, self._queues, self._ahead, strict=True)
        for lower, queue, ahead in trios:
            if not lower.readable:
                for waiting in (queue, ahead):
                    for _ in range(min(_SLICE, len(waiting))):
                        self._elsewhere(waiting.pop(), TierAnswer.OFF)
                continue
            while (head := queue.peek()) and lower.reading + self._starting[
                lower.number
            ] < lower.config.reads:
                fetch = head.item
                batch = fetch.batch
                if lower.config.first_alone and batch.started and not batch.landed:
                    break
                queue.pop()
                if fetch.wanted(self._store.now):
                    batch.started += 1
                    self._starting[lower.number] += 1
                    self._jobs.start(self._start(fetch))
                else:
                    self._give_up(fetch)
            if ahead and not queue:
                self._pump_ahead(lower, ahead)

    def _pump_ahead(self, lower: Lower, ahead: FairQueue[Fetch]) -> None:
        """What nobody waits for, beside loads: half of what the tier takes at a time, at most, and
        never the last place."""
        store, number = self._store, lower.number
        most = max(1, lower.config.reads // 2)
        while (head := ahead.peek()) and self._reading_ahead[number] < most:
            fetch = head.item
            if not fetch.wanted(store.now):
                ahead.pop()
                self._give_up(fetch)
                continue
            if lower.reading + self._starting[number] >= max(1, lower.config.reads - 1):
                break
            size = self._size(fetch)
            if store.now < self._no_room_until:
                break
            record = -1
            if store.transient_bytes + size <= store.config.transient_cap:
                record = self._evictions.spare(size, store.tenant(fetch.row))
            if record < 0:  # there may be some later, before its time is over
                self._no_room_ns = min(2 * self._no_room_ns, _PATIENCE_NS[1])
                self._no_room_until = store.now + self._no_room_ns
                store.timers.add(self._no_room_until, "room", store.handle())
                break
            self._no_room_ns = _PATIENCE_NS[0]
            ahead.pop()
            fetch.transient = size
            store.transient_bytes += size
            self._read(fetch, record)

    def sweep(self) -> None:
        """Let transients go that nobody holds any more."""
        store = self._store
        for _ in range(min(_SLICE, len(store.fleeting))):
            row = store.fleeting.popleft()
            held = store.chunks.leases[row] or row in store.pinned or store.chunks.writing[row]
            if row in store.transients and not held:
                if store.ladder.backed(row):
                    store.drop(row, "transient", evicted=False)
                else:  # what it was read from has been lost since: this is the last copy
                    self.keep(row)

    # -- a slot ---------------------------------------------------------------------------------

    def _start(self, fetch: Fetch) -> Work[None]:
        store, chunks = self._store, self._store.chunks
        row = fetch.row
        size = self._size(fetch)
        hits = chunks.warm[row] + (fetch.early > 0)  # with the lookup that comes
        stays = hits > 1 or (chunks.ready[row] and row not in store.transients)
        if not stays and store.transient_bytes + size <= store.config.transient_cap:
            fetch.transient = size
            store.transient_bytes += size
        tenant = store.spaces.of(chunks.space[row]).tenant
        record = yield from self._evictions.slot(size, tenant)
        self._starting[fetch.lower.number] -= 1
        if record < 0:
            fetch.batch.landed = True  # no others wait for this one
            self._deliver(fetch, Outcome.NO_SPACE)
        else:
            self._read(fetch, record)

    def _size(self, fetch: Fetch) -> int:
        """Of the slot that the shard needs."""
        store = self._store
        space = store.spaces.of(store.chunks.space[fetch.row])
        return space.slot_sizes[fetch.cell - store.chunks.cell[fetch.row]]

    def _read(self, fetch: Fetch, record: int) -> None:
        """There is a slot: hand the read over, if it is still of use."""
        store, chunks = self._store, self._store.chunks
        row, cell, lower = fetch.row, fetch.cell, fetch.lower
        space = store.spaces.of(chunks.space[row])
        shard = cell - chunks.cell[row]
        fetch.record = record
        wanted = fetch.wanted(store.now)
        if not (wanted and store.cells.state[cell] == col.ABSENT and self._there(fetch)):
            fetch.batch.landed = True
            if wanted:
                self._elsewhere(fetch, TierAnswer.MISS)
            else:
                self._give_up(fetch)
            return
        number = store.ladder.begin("read", lower, cell, lower.config.read_ns, fetch)
        ahead = fetch.beside = fetch.ahead > 0
        self._reading_ahead[lower.number] += ahead
        store.out.append(
            TierRead(
                number,
                lower.number,
                *self.name(cell),
                lower.at[cell],
                lower.generation[cell],
                store.slabs.offset(record),
                space.nbytes[shard],
                store.now + lower.config.read_ns,
                ahead,
                self._payer(fetch, space),
            )
        )

    def _payer(self, fetch: Fetch, space: Space) -> bytes:
        """Who asked, if the chunk is another's, one of `public`: in the tier's queue it is that
        one's turn as it was in ours. The slot, and the chunk in every tier, are its owner's."""
        return b"" if fetch.tenant == space.namespace else namespace_digest(fetch.tenant)

    def _there(self, fetch: Fetch) -> bool:
        lower = fetch.lower
        return bool(lower.state[fetch.cell] and lower.readable)

    # -- coming back ----------------------------------------------------------------------------

    def done(self, job: TierJob, answer: TierAnswer, header: ChunkHeader | None) -> None:
        """A read came back."""
        store, ladder = self._store, self._store.ladder
        fetch = job.owner
        assert isinstance(fetch, Fetch)
        lower, cell, row = job.lower, job.cell, job.row
        first = not fetch.batch.landed
        fetch.batch.landed = True
        self._reading_ahead[lower.number] -= fetch.beside
        fetch.beside = False
        store.counters.own["shards_fetched", answer.value] += 1
        if answer is TierAnswer.OK and not (header is not None and self.fits(cell, header)):
            answer = TierAnswer.CORRUPT
            store.counters.own["shards_fetched", "ok"] -= 1
            store.counters.own["shards_fetched", "foreign"] += 1
            self.delete(lower, cell)
        elif answer in (TierAnswer.MISS, TierAnswer.CORRUPT):
            ladder.forget(lower, cell)
        if answer is TierAnswer.OK:
            assert header is not None
            self._land(fetch, header.digest)
        elif self.by_cell.get(cell) is fetch:
            self._elsewhere(fetch, answer)
        else:  # too late for anybody
            self._give_slot(fetch)
        ladder.release(row)
        self._jobs.wake(Pause.DEMOTION)
        # Whoever has waited for a load's first shard hears of it before others are begun: they cost
        # this event, and then the processors that the answer needs on its way.
        self._telling = first and any(isinstance(action, Reply) for action in store.out)

    def late(self, job: TierJob) -> None:
        """A read did not come back in time. Its slot stays the tier's until it does."""
        fetch = job.owner
        assert isinstance(fetch, Fetch)
        fetch.batch.landed = True
        if self.by_cell.get(fetch.cell) is not fetch:
            return
        self._store.counters.own["shards_fetched", "late"] += 1
        successor = Fetch(fetch.cell, fetch.row, fetch.lower, fetch.batch, fetch.tenant)
        successor.waiting, fetch.waiting = fetch.waiting, []
        successor.tried = fetch.tried
        successor.ahead = fetch.ahead
        self.by_cell[fetch.cell] = successor  # which takes over the hold on the row
        self._elsewhere(successor, TierAnswer.TIMEOUT)

    def fits(self, cell: int, header: ChunkHeader) -> bool:
        """Whether a record says of the chunk what is known here."""
        store, chunks = self._store, self._store.chunks
        row = store.cells.chunk[cell]
        space = store.spaces.of(chunks.space[row])
        shard = cell - chunks.cell[row]
        known = store.headers.of(cell, State.READY, 0)
        return (
            header.fingerprint == known.fingerprint
            and header.shard == shard
            and header.shard_count == space.shards
            and header.length == space.nbytes[shard]
            and header.tokens == known.tokens
            and header.flags & ~FLAG_SEALED == chunks.flags[row]
            and (
                not space.chained
                or (header.parent, header.index, header.pos0)
                == (known.parent, known.index, known.pos0)
            )
        )

    def _land(self, fetch: Fetch, digest: bytes) -> None:
        """The bytes are here: the shard is ready in DRAM."""
        store, chunks, cells = self._store, self._store.chunks, self._store.cells
        cell, row, record = fetch.cell, fetch.row, fetch.record
        mine = self.by_cell.get(cell)
        if cells.state[cell] != col.ABSENT or (mine is not None and mine is not fetch):
            ready = cells.state[cell] == col.READY
            self._give_slot(fetch)
            if mine is fetch:
                self._deliver(fetch, Outcome.OK if ready else Outcome.MISS)
            return
        fetch.record = -1
        space = store.spaces.of(chunks.space[row])
        cells.state[cell] = col.READY
        cells.marks[cell] = (cells.marks[cell] & col.ADOPTED) | col.SEALED
        cells.record[cell] = record
        cells.generation[cell] = store.generation()
        cells.set_digest(cell, digest)
        store.slabs.set_cell(record, cell)
        resident = store.resident(row)
        if not resident:
            space.chunks += 1
        chunks.ready[row] += 1
        space.bytes += space.nbytes[cell - chunks.cell[row]]
        store.out.append(store.headers.written(cell, State.READY))
        if chunks.ready[row] == 1:
            store.enter(row)
        if fetch.transient and (not resident or row in store.transients):
            store.transients[row] = store.transients.get(row, 0) + fetch.transient
            kind = "transient"
        else:
            store.transient_bytes -= fetch.transient
            kind = "stays"
        fetch.transient = 0
        counts = store.counters.tenant(space.namespace)
        counts["shards_promoted", "ahead" if fetch.ahead else kind] += 1
        store.recount(row)
        if fetch.ahead > store.now:  # who said that he would come has it for fresh
            store.touches.use(row)
        elif row in store.transients:
            if fetch.ahead:  # too late: nobody came for it
                store.fleeting.append(row)
            elif chunks.warm[row] > 1:
                self.keep(row)
            elif not chunks.leases[row]:
                store.fleeting.append(row)
        if mine is fetch:
            self._deliver(fetch, Outcome.OK)

    def keep(self, row: int) -> None:
        """A transient chunk was hit again: it stays."""
        store = self._store
        store.transient_bytes -= store.transients.pop(row, 0)
        space = store.spaces.of(store.chunks.space[row])
        store.counters.tenant(space.namespace)["chunks_kept", ""] += 1

    # -- ends -----------------------------------------------------------------------------------

    def _elsewhere(self, fetch: Fetch, answer: TierAnswer) -> None:
        """This tier did not deliver: ask the next that has it, or answer. Pre: it stands in no
        queue."""
        store = self._store
        self._give_slot(fetch)
        fetch.tried |= fetch.lower.bit
        other = None
        if store.cells.state[fetch.cell] == col.ABSENT:
            other = store.ladder.source(fetch.cell, fetch.tried)
        if other is not None:
            fetch.lower = other
            self._queue(fetch)
            return
        ready = store.cells.state[fetch.cell] == col.READY
        self._deliver(fetch, Outcome.OK if ready else _OUTCOMES.get(answer, Outcome.MISS))

    def _deliver(self, fetch: Fetch, outcome: Outcome) -> None:
        self._give_slot(fetch)
        if self.by_cell.get(fetch.cell) is fetch:
            del self.by_cell[fetch.cell]
            self._store.ladder.release(fetch.row)
        waiting, fetch.waiting = fetch.waiting, []
        for transfer, result in waiting:
            self.transfers.fetched(transfer, result, outcome)

    def _give_up(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        self._store.counters.own["shards_fetched", "cancelled"] += 1
        self._deliver(fetch, Outcome.CANCELLED)

    def _give_slot(self, fetch: Fetch) -> None:
        """Its slot is free again. No record was written, and nobody was told of it."""
        store = self._store
        if fetch.record >= 0:
            store.slabs.give(fetch.record)
            fetch.record = -1
        store.transient_bytes -= fetch.transient
        fetch.transient = 0

    # -- deleting -------------------------------------------------------------------------------

    def name(self, cell: int) -> tuple[int, bytes, bytes, bytes, int]:
        """What a shard is called in a tier: kind, namespace, spec, chunk, shard."""
        store, chunks = self._store, self._store.chunks
        row = store.cells.chunk[cell]
        space = store.spaces.of(chunks.space[row])
        shard = cell - chunks.cell[row]
        return space.kind, space.namespace_digest, space.digest, chunks.key_of(row), shard

    def delete(self, lower: Lower, cell: int, owner: object = None) -> None:
        """Forget a shard in a tier, and have it deleted there. The caller settles the row."""
        store = self._store
        at, generation = lower.at[cell], lower.generation[cell]
        store.ladder.forget(lower, cell)
        within = lower.config.write_ns
        number = store.ladder.begin("delete", lower, cell, within, owner)
        store.out.append(
            TierDelete(number, lower.number, *self.name(cell), at, generation, store.now + within)
        )
