"""The life of a write: granted, then committed, given back, or condemned.

The law of this module: a slot that a client was granted is not given to anybody else until that
client committed it, gave it back, or can't be copying any more. An unfinished write whose time is
over is *condemned*: it is never readable, its key is free for others, and its slot waits. A commit
is the writer's word that it has stopped, also one that comes too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvd.chunk import Outcome, SlotRef, State
from kvd.chunk.header import FLAG_SEALED
from kvd.core import columns as col
from kvd.core.actions import OutcomesResult, PatchRecord
from kvd.core.columns import NONE
from kvd.core.config import SECOND_NS
from kvd.core.jobs import Pause, Work, spent
from kvd.core.sessions import Session
from kvd.core.slabs import DETACHED
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.write import Condemned, Item, Phase, Stored, Write
from kvd.native import named

# A member is looked up in its class at every mention.
_OPEN: Final = Phase.OPEN
_DONE: Final = Phase.DONE
_READY: Final = State.READY
_OK: Final = Outcome.OK
_COMMITTED: Final = ((_OK, "ok"), (Outcome.EVICTED, "evicted"), (Outcome.EXPIRED, "expired"))


class Writes:
    """All unfinished and condemned writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.by_number: dict[int, Write] = {}
        self._writer: dict[int, tuple[Write, Item]] = {}  # cell -> who writes it
        self.condemned: dict[bytes, dict[int, Condemned]] = {}  # public id -> record -> slot

    # -- grant ----------------------------------------------------------------------------------

    def grant(self, write: Write, place: int, row: int, shard: int, record: int) -> Item | None:
        """A slot becomes a shard's, to be written; it stands as item `place` of the write. None,
        and the slot is free again, if there is no row left for the chunk's cells."""
        store, space, session = self._store, write.space, write.session
        chunks, cells = store.chunks, store.cells
        first = chunks.cell[row]
        if first == NONE:
            first = cells.take(space.shards, row)
            if first == NONE:
                store.slabs.give(record)
                return None
            chunks.cell[row] = first
        cell = first + shard
        if cells.state[cell] == col.BAD:
            self._replace_bad(row, cell, shard)
        size = space.slot_sizes[shard]
        generation = store.generation()
        cells.state[cell] = col.WRITING
        cells.marks[cell] &= col.ADOPTED
        cells.record[cell] = record
        cells.generation[cell] = generation
        store.slabs.set_cell(record, cell)
        chunks.writing[row] += 1
        if holes := store.holes[space.queues[0]]:
            holes.pop(row, None)
        session.write_bytes += size
        store.writing_bytes += size
        store.shares.writing[space.tenant] += size
        if not write.open:
            session.writes[write.number] = self.by_number[write.number] = write
            store.timers.add(write.deadline, "write", write.number)
        write.open += 1
        config = store.config
        offset, nbytes = store.slabs.offset(record), space.nbytes[shard]
        ref = named(SlotRef, (config.arena, record, offset, nbytes, generation))
        item = write.items[place] = Item(cell, size, ref)
        self._writer[cell] = (write, item)
        if store.layered:
            store.recount(row)
        who = session.public_id
        store.out.append(store.headers.granted(row, space, shard, cell, record, generation, who))
        return item

    def _replace_bad(self, row: int, cell: int, shard: int) -> None:
        store = self._store
        space = store.spaces.of(store.chunks.space[row])
        store.clear_cell(cell)
        store.chunks.bad[row] -= 1
        space.bytes -= space.nbytes[shard]
        if not store.resident(row):
            space.chunks -= 1
            store.bad[store.queue(row)].pop(row, None)
            counts = store.counters.tenant(space.namespace)
            counts["chunks_evicted", "quarantine"] += 1
            counts["bytes_evicted", ""] += space.nbytes[shard]
            if store.is_empty(row):  # what is stored now is another chunk, that nobody has used yet
                store.chunks.hits[row] = 0
                store.chunks.born[row] = max(store.unix_ns(), 0) // SECOND_NS

    def take_back(self, write: Write, place: int) -> None:
        """Undo a grant that the client has not been told."""
        item = write.items[place]
        write.items[place] = None
        if item is None or item.phase is Phase.DONE:
            return
        if item.phase is Phase.CONDEMNED:  # its time was over before it was told
            self._reclaim(write.session.public_id, item.record, "aborted")
        else:
            self._give_back(write, item)
        self.drop_if_done(write)

    # -- commit and abort -----------------------------------------------------------------------

    def commit(
        self, write: Write, items: Sequence[int], digests: bytes | None
    ) -> Work[OutcomesResult]:
        """Make items readable. What an evict named or the clock overtook is told so."""
        store = self._store
        outcomes = bytearray()
        stored = Stored()
        told = 0  # outcomes that were counted
        last = NONE
        try:
            for n, i in enumerate(items):
                item = write.items[i]
                if item is None:
                    outcome = Outcome.FAILED
                elif item.phase is _OPEN and store.now < write.deadline:
                    digest = None if digests is None else digests[16 * n : 16 * n + 16]
                    last = self._finish(write, item, digest, stored)
                    outcome = _OK
                else:
                    outcome = self._too_late(write, item)
                outcomes.append(outcome)
                if spent(store):
                    self._count(write.space, outcomes[told:], stored)
                    told = len(outcomes)
                    yield Pause.SLICE
        finally:
            self._count(write.space, outcomes[told:], stored)
        if last != NONE and store.chunks.ready[last]:
            store.touches.use(last)
        self.drop_if_done(write)
        return OutcomesResult(bytes(outcomes))

    def _too_late(self, write: Write, item: Item) -> Outcome:
        """By its commit the writer says all the same that it has stopped."""
        if item.phase is _OPEN:
            self._condemn(write, item, "expired")
        if item.phase is Phase.CONDEMNED:
            self._reclaim(write.session.public_id, item.record, "committed")
            return Outcome.EXPIRED
        if item.phase is Phase.EVICTED:
            self._give_back(write, item)
            return Outcome.EVICTED
        return Outcome.FAILED

    def _count(self, space: Space, outcomes: bytearray, stored: Stored) -> None:
        """Once a slice: to count each shard takes longer than to make it readable."""
        counts = self._store.counters.tenant(space.namespace)
        failed = len(outcomes)
        for outcome, label in _COMMITTED:
            if count := outcomes.count(outcome):
                counts["shards_committed", label] += count
                failed -= count
        if failed:
            counts["shards_committed", "failed"] += failed
        if stored.chunks:
            counts["chunks_stored", ""] += stored.chunks
        if stored.nbytes:
            counts["bytes_stored", ""] += stored.nbytes
        if stored.sealed:
            self._store.counters.own["shards_sealed", "client"] += stored.sealed
        stored.chunks = stored.nbytes = stored.sealed = 0

    def _finish(self, write: Write, item: Item, digest: bytes | None, stored: Stored) -> int:
        """The shard becomes ready; its chunk's row."""
        store, space = self._store, write.space
        chunks, cells = store.chunks, store.cells
        cell = item.cell
        row = cells.chunk[cell]
        self._release(write, item)
        cells.state[cell] = col.READY
        flags = None
        if digest is not None:
            cells.set_digest(cell, digest)
            cells.marks[cell] |= col.SEALED
            flags = chunks.flags[row] | FLAG_SEALED
            stored.sealed += 1
            if store.layered:
                store.sealed.append(cell)
        elif store.config.seals_in_flight:
            store.unsealed.append(cell)
        store.out.append(named(PatchRecord, (item.record, _READY, None, flags, digest)))
        chunks.writing[row] -= 1
        ready = chunks.ready[row]
        if not (ready or chunks.bad[row]):
            space.chunks += 1
            stored.chunks += 1
        chunks.ready[row] = ready + 1
        chunks.last[row] = store.now
        size = space.nbytes[cell - chunks.cell[row]]
        space.bytes += size
        stored.nbytes += size
        if not ready:
            store.enter(row)
        if store.layered:
            store.recount(row)
        return row

    def abort(self, write: Write, items: Sequence[int]) -> Work[OutcomesResult]:
        """Give slots back; the writer promises that it has stopped."""
        store = self._store
        counts = store.counters.tenant(write.space.namespace)
        outcomes = bytearray()
        for i in items:
            item = write.items[i]
            if item is None or item.phase is Phase.DONE:
                outcomes.append(Outcome.FAILED)
            else:
                if item.phase is Phase.CONDEMNED:
                    self._reclaim(write.session.public_id, item.record, "aborted")
                else:
                    self._give_back(write, item)
                counts["shards_aborted", ""] += 1
                outcomes.append(Outcome.ABORTED)
            if spent(store):
                yield Pause.SLICE
        self.drop_if_done(write)
        return OutcomesResult(bytes(outcomes))

    def evict_writing(self, row: int) -> int:
        """An evict named a chunk that is being written: commits will answer EVICTED, and the key
        is free for a new write at once. How many shards it met."""
        store = self._store
        chunks, cells = store.chunks, store.cells
        met = 0
        first = chunks.cell[row]
        shards = store.spaces.of(chunks.space[row]).shards
        for cell in range(first, first + shards):
            if cells.state[cell] == col.WRITING:
                _, item = self._writer[cell]
                self._detach(item)
                item.phase = Phase.EVICTED
                met += 1
        store.settle(row)
        return met

    # -- ends -----------------------------------------------------------------------------------

    def expire(self, number: int) -> Work[None]:
        """A write's deadline has passed: what is unfinished is condemned."""
        write = self.by_number.get(number)
        if write is None:
            return
        for item in write.items:
            if item is not None and item.phase in (Phase.OPEN, Phase.EVICTED):
                self._condemn(write, item, "expired")
                if spent(self._store):
                    yield Pause.SLICE

    def close(self, session: Session) -> Work[None]:
        """Its session is over: reclaim what nobody can be copying into, condemn the rest."""
        store = self._store
        for write in list(session.writes.values()):
            store.timers.remove(write.deadline, "write", write.number)
            for item in write.items:
                if item is None or item.phase is Phase.DONE:
                    continue
                if item.phase is not Phase.CONDEMNED:
                    if session.stopped:
                        self._give_back(write, item)
                    else:
                        self._condemn(write, item, "session")
                if spent(store):
                    yield Pause.SLICE
            self.by_number.pop(write.number, None)
        session.writes.clear()
        if session.stopped:
            yield from self.lock_freed(session.public_id, "session")

    def lock_freed(self, public_id: bytes, proof: str = "lock") -> Work[None]:
        """Nobody can be copying into that session's condemned slots any more."""
        while records := self.condemned.get(public_id):
            self._reclaim(public_id, next(iter(records)), proof)
            if spent(self._store):
                yield Pause.SLICE

    def adopt_condemned(self, public_id: bytes, record: int, size: int) -> None:
        """A slot of an earlier life whose writer may still be there. Pre: it is taken."""
        self.condemned.setdefault(public_id, {})[record] = Condemned(size, None, None)
        self._store.condemned_bytes += size
        self._store.counters.own["slots_condemned", "restart"] += 1

    def _condemn(self, write: Write, item: Item, why: str) -> None:
        store = self._store
        row = store.cells.chunk[item.cell] if item.phase is Phase.OPEN else NONE
        if item.phase is Phase.OPEN:
            self._detach(item)
        item.phase = Phase.CONDEMNED
        store.writing_bytes -= item.size
        store.shares.writing[write.space.tenant] -= item.size
        store.condemned_bytes += item.size
        owner = write.session.public_id
        self.condemned.setdefault(owner, {})[item.record] = Condemned(item.size, write, item)
        store.out.append(PatchRecord(item.record, state=State.CONDEMNED))
        store.counters.own["slots_condemned", why] += 1
        if row != NONE:
            store.settle(row)

    def _reclaim(self, public_id: bytes, record: int, proof: str) -> None:
        store = self._store
        records = self.condemned[public_id]
        size, write, item = records.pop(record)
        if not records:
            del self.condemned[public_id]
        store.condemned_bytes -= size
        if write is not None and item is not None:
            write.session.write_bytes -= size
            self._done(write, item)
            self.drop_if_done(write)
        store.counters.own["slots_reclaimed", proof] += 1
        store.free_slot(record)

    def _detach(self, item: Item) -> None:
        """The slot is no longer its chunk's; it is still taken. The caller settles the row."""
        store = self._store
        cell = item.cell
        del self._writer[cell]
        store.cells.state[cell] = col.ABSENT
        store.chunks.writing[store.cells.chunk[cell]] -= 1
        store.slabs.set_cell(item.record, DETACHED)

    def _give_back(self, write: Write, item: Item) -> None:
        """Free the slot of an item that is open or was evicted."""
        store = self._store
        row = NONE
        if item.phase is Phase.OPEN:
            row = store.cells.chunk[item.cell]
            self._detach(item)
        store.writing_bytes -= item.size
        store.shares.writing[write.space.tenant] -= item.size
        write.session.write_bytes -= item.size
        store.free_slot(item.record)
        self._done(write, item)
        if row != NONE:
            store.settle(row)

    def _release(self, write: Write, item: Item) -> None:
        """The slot is no longer the writer's, but its chunk's."""
        del self._writer[item.cell]
        self._store.writing_bytes -= item.size
        self._store.shares.writing[write.space.tenant] -= item.size
        write.session.write_bytes -= item.size
        self._done(write, item)

    def _done(self, write: Write, item: Item) -> None:
        item.phase = _DONE
        write.open -= 1

    def drop_if_done(self, write: Write) -> None:
        if not write.open and self.by_number.pop(write.number, None) is not None:
            write.session.writes.pop(write.number, None)
            self._store.timers.remove(write.deadline, "write", write.number)
