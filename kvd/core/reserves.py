"""Reserving: which keys get slots, and which identity a key must have.

The law of this module: a key that is known has one identity. A request that names it with another
fingerprint, parent, place or shape is refused, and what is there stays as it is. A grant is a
leading run: for lack of room it ends, and nothing behind it is granted. A chunk gets all the slots
that were asked for it, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvd.chunk import NO_PARENT, Outcome, SlotRef, pack_refs
from kvd.chunk.header import FLAG_SEALED
from kvd.core import columns as col
from kvd.core.actions import ReserveResult
from kvd.core.ahead import Ahead
from kvd.core.columns import NONE
from kvd.core.config import SECOND_NS
from kvd.core.evictions import OVER_MAXIMUM, Evictions
from kvd.core.jobs import Pause, Work, spent
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.write import Write
from kvd.core.writes import Writes

_LABELS: Final = {
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
_ENDS = (Outcome.NO_SPACE, Outcome.OVER_QUOTA, Outcome.DEADLINE)
_OTHER: Final = -2  # the key is known under another identity
# A member is looked up in its class at every mention.
_GRANTED: Final = Outcome.GRANTED
_ALL: Final = bytes([_GRANTED])  # what becomes of a chunk of one shard, as a rule


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
        self.flags = flags & ~FLAG_SEALED
        self.ttl = ttl


class Reserves:
    """Grants slots."""

    def __init__(self, store: Store, writes: Writes, evictions: Evictions, ahead: Ahead) -> None:
        self._store = store
        self._writes = writes
        self._evictions = evictions
        self._ahead = ahead
        self._write_cap = store.config.write_cap

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
        pinned: list[int] = []  # what it relies on
        rows: list[int] = []
        try:
            parent = self._parent(ask, pinned) if ended is None else NONE
            for i, key in enumerate(ask.keys):
                if ended is None and parent is None:
                    ended = Outcome.NO_SPACE
                if ended is not None:
                    outcomes += bytes([ended]) * width
                    write.items += [None] * width
                    continue
                assert parent is not None
                row = self._row(ask, i, key, parent)
                if row == NONE:
                    ended = Outcome.NO_SPACE
                    outcomes += bytes([ended]) * width
                    write.items += [None] * width
                    continue
                if row < 0:
                    outcomes += bytes([Outcome.MISMATCH]) * width
                    write.items += [None] * width
                    counts["key_mismatches", "reserve"] += 1
                    parent = self._known(space, key, parent)
                    if parent != NONE:
                        store.pin(parent)
                        pinned.append(parent)
                    continue
                store.pin(row)
                pinned.append(row)
                rows.append(row)
                results = self._at_once(write, row, ask.shards[0], refs) if width == 1 else b""
                if not results:
                    results = yield from self._shards(write, ask, i, row, refs)
                outcomes += results
                if results is not _ALL:
                    for end in _ENDS:
                        if end in results:
                            ended = end
                if space.chained:
                    parent = row
                if session.closed:
                    break
                if spent(store) and i + 1 < len(ask.keys):
                    yield Pause.SLICE
        except Exception:  # a fault: nobody will be told what was granted
            try:
                for place in range(len(write.items)):
                    self._writes.take_back(write, place)
            finally:
                for row in pinned:
                    store.unpin(row)
            raise
        for row in reversed(rows):
            if store.chunks.ready[row]:  # who would store it again has used it
                store.touches.use(row)
                break
        for n, row in enumerate(pinned):
            store.unpin(row)
            if n % 32 == 31 and spent(store):
                yield Pause.SLICE
        for value, label in _LABELS.items():
            if count := outcomes.count(value):
                counts["shards_reserved", label] += count
        for n, shard in enumerate(ask.shards):
            self._ahead.took(space, shard, outcomes[n::width].count(Outcome.GRANTED))
        if not write.open or session.closed:
            self._writes.drop_if_done(write)
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
        or a new one. NONE: no row left. _OTHER: another identity."""
        store, space = self._store, ask.space
        chunks = store.chunks
        index = ask.index0 + i
        if not space.chained:
            return self._content_row(ask, i, key, index)
        if parent != NONE and chunks.index[parent] + 1 != index:
            return _OTHER
        hash_ = store.index.hash(space.number, key)
        row = store.index.find(hash_, space.number, key)
        if row == NONE:
            row = store.add_chunk(space, key, parent, index, hash_)
            if row == NONE:
                return NONE
            self._describe(ask, i, row)
            return row
        if row == parent or chunks.index[row] != index:
            return _OTHER
        if store.is_empty(row):
            known = chunks.parent[row]
            if known == NONE and parent != NONE:
                store.link(row, parent)
            elif known != parent:
                return _OTHER
            self._describe(ask, i, row)
            return row
        return row if self._same(ask, i, row, parent) else _OTHER

    def _content_row(self, ask: Request, i: int, key: bytes, index: int) -> int:
        """As `_row`: a content chunk is the same wherever it stood."""
        store = self._store
        row = ask.space.get(key)
        if row == NONE:
            row = store.add_chunk(ask.space, key, NONE, index)
        elif not store.is_empty(row):
            return row if self._same_content(ask, i, row) else _OTHER
        if row != NONE:
            store.chunks.index[row] = index
            self._describe(ask, i, row)
        return row

    def _describe(self, ask: Request, i: int, row: int) -> None:
        store, chunks = self._store, self._store.chunks
        chunks.set_print(row, ask.fingerprints[16 * i : 16 * i + 16])
        chunks.tokens[row] = ask.tokens[i] if ask.tokens else ask.space.chunk_tokens
        chunks.flags[row] = ask.flags
        chunks.born[row] = max(store.unix_ns(), 0) // SECOND_NS
        chunks.last[row] = store.now
        chunks.hits[row] = 0
        if ask.pos0 is not None:
            pos0 = ask.pos0[i]
            if pos0 != chunks.index[row] * ask.space.chunk_tokens:
                chunks.odd_pos0[row] = pos0
                return
        if chunks.odd_pos0:
            chunks.odd_pos0.pop(row, None)

    def _same_content(self, ask: Request, i: int, row: int) -> bool:
        """Whether second fingerprint and shape are what the request says."""
        chunks = self._store.chunks
        tokens = ask.tokens[i] if ask.tokens else ask.space.chunk_tokens
        return (
            chunks.print_of(row) == ask.fingerprints[16 * i : 16 * i + 16]
            and chunks.tokens[row] == tokens
            and chunks.flags[row] == ask.flags
        )

    def _same(self, ask: Request, i: int, row: int, parent: int) -> bool:
        """Whether parent and position are, too."""
        chunks = self._store.chunks
        usual = chunks.index[row] * ask.space.chunk_tokens
        return (
            self._same_content(ask, i, row)
            and chunks.parent[row] == parent
            and chunks.odd_pos0.get(row, usual) == (ask.pos0[i] if ask.pos0 else usual)
        )

    def _at_once(self, write: Write, row: int, shard: int, refs: list[SlotRef]) -> bytes:
        """What `_shards` does for one shard, as a rule; nothing is done if that has to wait."""
        outcome = self._state(row, shard)
        if outcome is _GRANTED:
            size = write.space.slot_sizes[shard]
            refused = self._refused(write, size)
            if refused is None:
                record = self._evictions.free_slot(size, write.space.tenant)
                if record < 0:
                    return b""
                write.items.append(None)
                item = self._writes.grant(write, len(write.items) - 1, row, shard, record)
                if item is None:
                    return bytes([Outcome.NO_SPACE])
                refs.append(item.ref)
                return _ALL
            outcome = refused
        write.items.append(None)
        return bytes([outcome])

    def _shards(
        self, write: Write, ask: Request, i: int, row: int, refs: list[SlotRef]
    ) -> Work[bytes]:
        """One outcome for each shard asked of one chunk: all that can be granted are, or none."""
        places = len(write.items)
        write.items += [None] * len(ask.shards)
        results = bytearray()
        granted: list[SlotRef] = []
        ended: Outcome | None = None
        old = not self._store.is_empty(row)
        for n, shard in enumerate(ask.shards):
            outcome = self._state(row, shard)
            if outcome is Outcome.GRANTED and ended is None:
                got = yield from self._slot(write, row, shard)
                if isinstance(got, Outcome):
                    outcome = got
                    if got in _ENDS:
                        ended = got
                else:
                    assert isinstance(got, int)
                    if old and self._store.is_empty(row):
                        # what it had was lost while a slot was waited for: another chunk begins
                        self._describe(ask, i, row)
                        old = False
                    item = self._writes.grant(write, places + n, row, shard, got)
                    if item is None:
                        outcome = ended = Outcome.NO_SPACE
                    else:
                        granted.append(item.ref)
            elif outcome is Outcome.GRANTED:
                outcome = ended or outcome
            results.append(outcome)
        if ended is None:
            refs += granted
            return bytes(results)
        for n in range(len(ask.shards)):
            self._writes.take_back(write, places + n)
        return bytes(results).replace(bytes([Outcome.GRANTED]), bytes([ended]))

    def _slot(self, write: Write, row: int, shard: int) -> Work[object]:
        """A slot for a shard as a record number (int), or why there is none (Outcome). Others may
        come first while it waits for room. To a compiler `int | Outcome` is an int, and which of
        both it was is lost."""
        store, session = self._store, write.session
        size, tenant = write.space.slot_sizes[shard], write.space.tenant
        refused = self._refused(write, size)
        if refused is not None:
            return refused
        record = self._evictions.free_slot(size, tenant)
        if record >= 0:
            return record
        record = yield from self._evictions.slot(size, tenant)
        if record < 0:
            return Outcome.OVER_QUOTA if record == OVER_MAXIMUM else Outcome.NO_SPACE
        outcome = self._state(row, shard)
        if session.closed:
            outcome = Outcome.NO_SPACE
        elif store.now >= write.deadline:
            outcome = Outcome.DEADLINE
        elif session.write_bytes + size > self._write_cap or self._busy(tenant, size):
            outcome = Outcome.OVER_QUOTA
        if outcome is Outcome.GRANTED:
            return record
        store.slabs.give(record)
        return outcome

    def _refused(self, write: Write, size: int) -> Outcome | None:
        """Why a write gets no slot of that size, whatever is free."""
        if self._store.now >= write.deadline:
            return Outcome.DEADLINE
        over = write.session.write_bytes + size > self._write_cap
        if over or self._busy(write.space.tenant, size):
            return Outcome.OVER_QUOTA
        return None

    def _busy(self, tenant: int, size: int) -> bool:
        """Whether the tenant may not have so much more in flight. One slot it always may."""
        shares = self._store.shares
        if not shares.rules_given:
            return False
        room = shares.room_in_flight(tenant)
        return room is not None and size > room and shares.writing[tenant] > 0

    def _state(self, row: int, shard: int) -> Outcome:
        store = self._store
        cell = store.chunks.cell[row]
        state = col.ABSENT if cell == NONE else store.cells.state[cell + shard]
        if state == col.READY:
            return Outcome.EXISTS
        if state == col.ABSENT and cell != NONE and store.ladder.source(cell + shard) is not None:
            return Outcome.EXISTS  # below, and readable now
        if state == col.WRITING:
            return Outcome.BUSY
        if state == col.BAD and store.chunks.leases[row]:
            return Outcome.BUSY  # somebody may still be reading what is to be replaced
        return _GRANTED
