"""The life of a write: granted, then committed, given back, or condemned.

The law of this module: a slot that a client was granted is not given to anybody else until that
client committed it, gave it back, or can't be copying any more. An unfinished write whose time is
over is *condemned*: it is never readable, its key is free for others, and its slot waits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from kvd.chunk import NO_PARENT, HeaderFlag, Outcome, SlotRef, State, pack_refs
from kvd.core import columns as col
from kvd.core.actions import OutcomesResult, PatchRecord, ReserveResult
from kvd.core.columns import NONE
from kvd.core.config import SECOND_NS
from kvd.core.evictions import Evictions
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.sessions import Session
from kvd.core.slabs import DETACHED
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.errors import BadKey

_RESERVED = {
    Outcome.GRANTED: "granted",
    Outcome.EXISTS: "exists",
    Outcome.BUSY: "busy",
    Outcome.NO_SPACE: "no_space",
    Outcome.TOO_LARGE: "too_large",
    Outcome.OVER_QUOTA: "over_quota",
    Outcome.MISMATCH: "mismatch",
    Outcome.DRAINING: "draining",
    Outcome.DEADLINE: "deadline",
}
_COMMITTED = {Outcome.OK: "ok", Outcome.EVICTED: "evicted", Outcome.EXPIRED: "expired"}


class Phase(Enum):
    OPEN = auto()
    EVICTED = auto()  # an evict named it: its key is free, its slot still the writer's
    CONDEMNED = auto()
    DONE = auto()


class Item:
    """One granted slot."""

    __slots__ = ("cell", "phase", "record", "ref", "size")

    def __init__(self, cell: int, size: int, ref: SlotRef) -> None:
        self.cell = cell  # its shard's, while OPEN
        self.record = ref.record
        self.size = size
        self.ref = ref
        self.phase = Phase.OPEN


class Condemned(NamedTuple):
    """A slot whose writer may still be copying; of an earlier life if `item` is None."""

    size: int
    write: Write | None
    item: Item | None


class Write:
    """What one reserve granted. `items` by result number; None where nothing was granted."""

    def __init__(self, number: int, session: Session, space: Space, deadline: int) -> None:
        self.number = number
        self.session = session
        self.space = space
        self.deadline = deadline
        self.items: list[Item | None] = []
        self.open = 0  # items that are not done

    def granted(self) -> list[int]:
        return [i for i, item in enumerate(self.items) if item is not None]


class Request:
    """A reserve, unpacked: `keys` 32-byte hashes, all other columns by key."""

    def __init__(
        self,
        space: Space,
        shards: Sequence[int],
        hashes: bytes,
        parent: bytes,
        index0: int,
        fingerprints: bytes,
        tokens: Sequence[int] | None,
        pos0: Sequence[int] | None,
        flags: int,
        ttl: int,
    ) -> None:
        self.space = space
        self.shards = shards
        self.keys = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.parent = parent
        self.index0 = index0
        self.fingerprints = fingerprints
        self.tokens = tokens
        self.pos0 = pos0
        self.flags = flags & ~HeaderFlag.SEALED
        self.ttl = ttl


class Writes:
    """All unfinished and condemned writes."""

    def __init__(self, store: Store, evictions: Evictions, jobs: Jobs) -> None:
        self._store = store
        self._evictions = evictions
        self._jobs = jobs
        self.by_number: dict[int, Write] = {}
        self._writer: dict[int, tuple[Write, Item]] = {}  # cell -> who writes it
        self.condemned: dict[bytes, dict[int, Condemned]] = {}  # public id -> record -> slot

    # -- reserve --------------------------------------------------------------------------------

    def reserve(self, session: Session, ask: Request) -> Work[ReserveResult]:
        """Grant a leading run, evicting for it where that is legal."""
        store, space = self._store, ask.space
        counts = store.counters.tenant(space.namespace)
        width = len(ask.shards)
        outcomes = bytearray()
        refs: list[SlotRef] = []
        deadline = store.now + ask.ttl
        write = Write(store.handle(), session, space, deadline)
        ended = self._refusal(space, ask)
        pinned: list[int] = []
        parent = self._parent(ask, pinned)
        for i, key in enumerate(ask.keys):
            if ended is None and parent is None:
                ended = Outcome.NO_SPACE
            if ended is not None:
                outcomes += bytes([ended]) * width
                continue
            assert parent is not None
            row = self._row(ask, i, key, parent)
            if row == NONE:
                ended = Outcome.NO_SPACE
                outcomes += bytes([ended]) * width
                continue
            if row < 0:
                outcomes += bytes([Outcome.MISMATCH]) * width
                counts["key_mismatches", "reserve"] += 1
                parent = self._known(space, key, parent)
                continue
            store.pin(row)
            pinned.append(row)
            results = yield from self._shards(session, write, ask, row, refs)
            outcomes += results
            for end in (Outcome.NO_SPACE, Outcome.OVER_QUOTA, Outcome.DEADLINE):
                if end in results:
                    ended = end
            if space.chained:
                parent = row
            if session.closed:
                break
            if spent(store):
                yield Pause.SLICE
        for row in pinned:
            store.unpin(row)
        for value in outcomes:
            counts["shards_reserved", _RESERVED[Outcome(value)]] += 1
        if not write.open or session.closed:
            self._drop_if_done(write)
            if not write.open:
                return ReserveResult(0, bytes(outcomes), b"", 0)
        return ReserveResult(write.number, bytes(outcomes), pack_refs(refs), deadline)

    def _refusal(self, space: Space, ask: Request) -> Outcome | None:
        """Why nothing of this request can be granted."""
        if self._store.draining:
            return Outcome.DRAINING
        if any(space.slot_sizes[s] > self._store.config.slab_size for s in ask.shards):
            return Outcome.TOO_LARGE
        return None

    def _parent(self, ask: Request, pinned: list[int]) -> int | None:
        """The row of the chunk before the first: NONE at a root, a hole if it is absent; None if
        there is no row left for one."""
        store, space = self._store, ask.space
        if ask.parent == NO_PARENT:
            return NONE
        row = space.get(ask.parent)
        if row == NONE:
            row = store.add_chunk(space, ask.parent, NONE, ask.index0 - 1)
            if row == NONE:
                return None
        store.pin(row)
        pinned.append(row)
        return row

    def _known(self, space: Space, key: bytes, parent: int) -> int:
        """The parent of what follows a refused key: whatever the key's name stands for; if
        nothing, then what follows does not fit its parent's index either."""
        row = space.get(key) if space.chained else NONE
        return parent if row == NONE else row

    def _row(self, ask: Request, i: int, key: bytes, parent: int) -> int:
        """The row of a key: an old one if all of its identity is the same, a hole that is filled,
        or a new one. NONE: no row left. -2: another identity."""
        store, space = self._store, ask.space
        chunks = store.chunks
        index = ask.index0 + i
        if not space.chained:
            return self._content_row(ask, i, key, index)
        if parent != NONE and chunks.index[parent] + 1 != index:
            return -2
        row = space.get(key)
        if row == NONE:
            row = store.add_chunk(space, key, parent, index)
            if row == NONE:
                return NONE
            self._describe(ask, i, row)
            return row
        if row == parent or chunks.index[row] != index:
            return -2
        if store.is_empty(row):
            known = chunks.parent[row]
            if known == NONE and parent != NONE:
                store.link(row, parent)
            elif known != parent:
                return -2
            self._describe(ask, i, row)
            return row
        return row if self._same(ask, i, row, parent) else -2

    def _content_row(self, ask: Request, i: int, key: bytes, index: int) -> int:
        """As `_row`: a content chunk is the same wherever it stood."""
        store = self._store
        row = ask.space.get(key)
        if row == NONE:
            row = store.add_chunk(ask.space, key, NONE, index)
        elif not store.is_empty(row):
            return row if self._same_content(ask, i, row) else -2
        if row != NONE:
            store.chunks.index[row] = index
            self._describe(ask, i, row)
        return row

    def _describe(self, ask: Request, i: int, row: int) -> None:
        store, chunks = self._store, self._store.chunks
        chunks.print[16 * row : 16 * row + 16] = ask.fingerprints[16 * i : 16 * i + 16]
        chunks.tokens[row] = ask.tokens[i] if ask.tokens else ask.space.spec.chunk_tokens
        chunks.flags[row] = ask.flags
        chunks.born[row] = max(store.unix_ns(), 0) // SECOND_NS
        chunks.last[row] = store.now
        chunks.hits[row] = 0
        if ask.pos0 is not None:
            pos0 = ask.pos0[i]
            if pos0 != chunks.index[row] * ask.space.spec.chunk_tokens:
                chunks.odd_pos0[row] = pos0
            else:
                chunks.odd_pos0.pop(row, None)
        else:
            chunks.odd_pos0.pop(row, None)

    def _same_content(self, ask: Request, i: int, row: int) -> bool:
        """Whether second fingerprint and shape are what the request says."""
        chunks = self._store.chunks
        tokens = ask.tokens[i] if ask.tokens else ask.space.spec.chunk_tokens
        return (
            chunks.print[16 * row : 16 * row + 16] == ask.fingerprints[16 * i : 16 * i + 16]
            and chunks.tokens[row] == tokens
            and chunks.flags[row] == ask.flags
        )

    def _same(self, ask: Request, i: int, row: int, parent: int) -> bool:
        """Whether parent and position are, too."""
        chunks = self._store.chunks
        usual = chunks.index[row] * ask.space.spec.chunk_tokens
        return (
            self._same_content(ask, i, row)
            and chunks.parent[row] == parent
            and chunks.odd_pos0.get(row, usual) == (ask.pos0[i] if ask.pos0 else usual)
        )

    def _shards(
        self, session: Session, write: Write, ask: Request, row: int, refs: list[SlotRef]
    ) -> Work[bytes]:
        """One outcome for each shard asked of one chunk: all that can be granted are, or none."""
        store, space = self._store, ask.space
        granted: list[Item] = []
        results = bytearray()
        places: list[Item | None] = []
        ended: Outcome | None = None
        for shard in ask.shards:
            outcome = self._state(row, shard)
            item: Item | None = None
            if outcome is Outcome.GRANTED and ended is None:
                size = space.slot_sizes[shard]
                if store.now >= write.deadline:
                    ended = Outcome.DEADLINE
                elif session.write_bytes + size > store.config.write_cap:
                    ended = Outcome.OVER_QUOTA
                else:
                    record = yield from self._evictions.slot(size)
                    outcome = self._state(row, shard)  # others may have come while it waited
                    if record < 0:
                        ended = Outcome.NO_SPACE
                    elif store.now >= write.deadline:
                        store.slabs.give(record)
                        ended = Outcome.DEADLINE
                    elif session.closed or outcome is not Outcome.GRANTED:
                        store.slabs.give(record)
                    elif session.write_bytes + size > store.config.write_cap:
                        store.slabs.give(record)
                        ended = Outcome.OVER_QUOTA
                    else:
                        item = self._grant(session, write, row, shard, record)
                        if item is None:
                            ended = Outcome.NO_SPACE
                        else:
                            granted.append(item)
            results.append(outcome)
            places.append(item)
        if ended is None:
            write.items += places
            refs += [item.ref for item in granted]
            return bytes(results)
        for item in granted:
            self._give_back(write, item)
        write.items += [None] * len(places)
        return bytes(ended if r == Outcome.GRANTED else r for r in results)

    def _state(self, row: int, shard: int) -> Outcome:
        store = self._store
        cell = store.chunks.cell[row]
        state = col.ABSENT if cell == NONE else store.cells.state[cell + shard]
        if state == col.READY:
            return Outcome.EXISTS
        if state == col.WRITING:
            return Outcome.BUSY
        if state == col.BAD and store.chunks.leases[row]:
            return Outcome.BUSY  # somebody may still be reading what is to be replaced
        return Outcome.GRANTED

    def _grant(
        self, session: Session, write: Write, row: int, shard: int, record: int
    ) -> Item | None:
        """Take a slot for a shard; None if there is no row left for the chunk's cells."""
        store, space = self._store, write.space
        chunks, cells = store.chunks, store.cells
        if chunks.cell[row] == NONE:
            first = cells.take(space.shards, row)
            if first == NONE:
                store.slabs.give(record)
                return None
            chunks.cell[row] = first
        cell = chunks.cell[row] + shard
        if cells.state[cell] == col.BAD:
            self._replace_bad(row, cell, shard)
        size = space.slot_sizes[shard]
        cells.state[cell] = col.WRITING
        cells.marks[cell] &= col.ADOPTED
        cells.record[cell] = record
        cells.generation[cell] = store.generation()
        store.slabs.set_cell(record, cell)
        chunks.writing[row] += 1
        store.holes[space.queues[0]].pop(row, None)
        session.write_bytes += size
        store.writing_bytes += size
        if not write.open:
            session.writes[write.number] = self.by_number[write.number] = write
            store.timers.add(write.deadline, "write", write.number)
        write.open += 1
        config = store.config
        place, nbytes = store.slabs.offset(record), space.nbytes[shard]
        ref = SlotRef(config.arena, record, place, nbytes, cells.generation[cell])
        item = Item(cell, size, ref)
        self._writer[cell] = (write, item)
        store.write_record(cell, State.WRITING, session.public_id)
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

    # -- commit and abort -----------------------------------------------------------------------

    def commit(
        self, write: Write, items: Sequence[int], digests: bytes | None
    ) -> Work[OutcomesResult]:
        """Make items readable. What an evict named or the clock overtook is told so."""
        store = self._store
        counts = store.counters.tenant(write.space.namespace)
        outcomes = bytearray()
        last = NONE
        for n, i in enumerate(items):
            item = write.items[i]
            outcome = Outcome.FAILED
            if item is not None and item.phase is Phase.OPEN:
                if store.now >= write.deadline:
                    self._condemn(write, item, "expired")
                else:
                    digest = None if digests is None else digests[16 * n : 16 * n + 16]
                    last = self._finish(write, item, digest)
                    outcome = Outcome.OK
            if item is not None and outcome is Outcome.FAILED:
                if item.phase is Phase.CONDEMNED:
                    outcome = Outcome.EXPIRED
                elif item.phase is Phase.EVICTED:
                    self._give_back(write, item)  # the writer has stopped: it says so by this
                    outcome = Outcome.EVICTED
            outcomes.append(outcome)
            counts["shards_committed", _COMMITTED.get(outcome, "failed")] += 1
            if spent(store):
                yield Pause.SLICE
        if last != NONE and store.chunks.ready[last]:
            store.touch(last)
        self._drop_if_done(write)
        return OutcomesResult(bytes(outcomes))

    def _finish(self, write: Write, item: Item, digest: bytes | None) -> int:
        """The shard becomes ready; its chunk's row."""
        store, space = self._store, write.space
        chunks, cells = store.chunks, store.cells
        cell = item.cell
        row = cells.chunk[cell]
        counts = store.counters.tenant(space.namespace)
        self._release(write, item)
        cells.state[cell] = col.READY
        flags = None
        if digest is not None:
            cells.set_digest(cell, digest)
            cells.marks[cell] |= col.SEALED
            flags = chunks.flags[row] | HeaderFlag.SEALED
            store.counters.own["shards_sealed", "client"] += 1
        else:
            store.unsealed.append(cell)
        store.out.append(PatchRecord(item.record, state=State.READY, flags=flags, digest=digest))
        chunks.writing[row] -= 1
        if not store.resident(row):
            space.chunks += 1
            counts["chunks_stored", ""] += 1
        chunks.ready[row] += 1
        chunks.last[row] = store.now
        size = space.nbytes[cell - chunks.cell[row]]
        space.bytes += size
        counts["bytes_stored", ""] += size
        if chunks.ready[row] == 1:
            store.enter(row)
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
        self._drop_if_done(write)
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
            self._drop_if_done(write)
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
        write.session.write_bytes -= item.size
        store.free_slot(item.record)
        self._done(write, item)
        if row != NONE:
            store.settle(row)

    def _release(self, write: Write, item: Item) -> None:
        """The slot is no longer the writer's, but its chunk's."""
        del self._writer[item.cell]
        self._store.writing_bytes -= item.size
        write.session.write_bytes -= item.size
        self._done(write, item)

    def _done(self, write: Write, item: Item) -> None:
        item.phase = Phase.DONE
        write.open -= 1

    def _drop_if_done(self, write: Write) -> None:
        if not write.open and self.by_number.pop(write.number, None) is not None:
            write.session.writes.pop(write.number, None)
            self._store.timers.remove(write.deadline, "write", write.number)


_U32 = struct.Struct("<I")


def unpack_items(items: bytes, limit: int) -> list[int]:
    """Packed u32 numbers below `limit`. BadKey otherwise."""
    if len(items) % 4:
        raise BadKey(f"items: {len(items)} bytes are no whole number of u32")
    numbers = [n for (n,) in _U32.iter_unpack(items)]
    for n in numbers:
        if n >= limit:
            raise BadKey(f"item {n} is out of range: there are {limit}")
    return numbers
