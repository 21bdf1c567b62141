"""Taking over what an earlier life left in the arena.

The law of this module: a record is taken over only if it holds, its spec and namespace are known,
and it fits its slot, its spec and its chain. A digest is compared before the first load. Slots that
were not ready wait for their writer's lock; slots that were may still have readers, and during the
*hold* none of them is used again: until the longest lease of that life is over, or no session of it
is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import ChunkHeader, HeaderFlag, Kind, KVSpec, State, namespace_digest
from kvd.core import columns as col
from kvd.core.actions import PatchRecord, WriteRecord
from kvd.core.columns import NONE
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.records import Records, Rows, pages, raw
from kvd.core.shares import NOBODY
from kvd.core.slabs import DETACHED
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.writes import Writes

_STRIDE: Final = 8192
_UNKNOWN: Final = bytes(
    16
)  # owner of slots whose record does not hold: any earlier session might write there


class Adoption:
    """Runs once, before the first event; then it ends the hold."""

    def __init__(self, store: Store, writes: Writes, jobs: Jobs, told: Records) -> None:
        self._store = store
        self._records = told
        self._writes = writes
        self._jobs = jobs
        self._earlier: set[bytes] = set()  # sessions of the earlier life that still hold a lock
        self._taken: dict[int, int] = {}  # record -> cell or DETACHED, for what is no chunk's

    def run(
        self,
        slot_sizes: Sequence[int],
        records: NDArray[np.void],
        numbers: NDArray[Any],
        namespaces: Sequence[str],
        specs: Sequence[KVSpec],
        locked: Iterable[bytes],
        lease_horizon: int,
        suspects: Sequence[int] | NDArray[Any],
    ) -> None:
        store = self._store
        self._earlier = set(locked)
        for spec in specs:
            store.spaces.register(spec)
        for name in namespaces:
            store.spaces.name(name)
        if len(records):
            store.seen_generation(int(records["generation"].max()))
        where = np.asarray(numbers, np.int64)
        sizes = np.zeros(store.slabs.count, np.int64)
        sizes[: len(slot_sizes)] = slot_sizes
        slab, slot = np.divmod(where, store.config.records_per_slab)
        fits = sizes[slab] > 0
        fits &= (slot + 1) * sizes[slab] <= store.config.slab_size
        state = records["state"]
        self._unfinished(records, where, sizes[slab], fits, state)
        bad = np.flatnonzero(fits & (state == State.QUARANTINED))
        self._reject(where[bad], "quarantined")
        ready = np.flatnonzero(fits & (state == State.READY))
        spots: list[NDArray[np.int64]] = []  # [record, cell] of what was taken over
        rows: list[Rows] = []
        for space, mine in self._by_space(records, where, ready, namespaces):
            taken, new = self._space(space, records, where, mine, sizes[slab[mine]])
            spots.append(taken)
            rows.append(new)
        if not store.layered:  # with tiers below, their records come first
            store.spaces.forget_unused()
        self._suspects(suspects, sizes)
        self._slots(sizes, spots)
        for new in rows:
            self._recency(new)
        if store.layered:
            store.recount_all()
        if self._earlier and lease_horizon > store.now:
            store.hold = True
            store.timers.add(lease_horizon, "hold", 0)

    # -- the hold -------------------------------------------------------------------------------

    def lock_freed(self, public_id: bytes) -> None:
        """A session of the earlier life is gone."""
        if public_id not in self._earlier:
            return
        self._earlier.discard(public_id)
        if not self._earlier:
            self._jobs.start(self._writes.lock_freed(_UNKNOWN))
            self.end_hold()

    def end_hold(self) -> None:
        """No reader of the earlier life can be left: its freed slots may be used."""
        if self._store.hold:
            self._store.hold = False
            self._jobs.start(self._free_held())

    def _free_held(self) -> Work[None]:
        store = self._store
        while store.held:
            record = store.held.pop()
            store.held_bytes -= store.slabs.size_of(record)
            store.slabs.give(record)
            if spent(store):
                yield Pause.SLICE

    # -- what is not taken over -----------------------------------------------------------------

    def _reject(self, records: Rows, reason: str) -> None:
        """Free slots whose records are of no use."""
        store = self._store
        store.counters.own["records_rejected", reason] += len(records)
        for record in records.tolist():
            store.out.append(PatchRecord(record, state=State.FREE, generation=store.generation()))

    def _unfinished(
        self,
        records: NDArray[np.void],
        where: Rows,
        sizes: Rows,
        fits: NDArray[np.bool_],
        state: NDArray[np.uint8],
    ) -> None:
        """Writes that were under way: their writers may still be copying."""
        some = np.flatnonzero(fits & ((state == State.WRITING) | (state == State.CONDEMNED)))
        free = []
        for n in some.tolist():
            record, owner = int(where[n]), bytes(records["session"][n])
            if owner in self._earlier or (owner == _UNKNOWN and self._earlier):
                if state[n] != State.CONDEMNED:
                    self._store.out.append(PatchRecord(record, state=State.CONDEMNED))
                self._writes.adopt_condemned(owner, record, int(sizes[n]))
                self._taken[record] = DETACHED
            else:
                free.append(record)
        self._reject(np.array(free, np.int64), "unfinished")

    def _suspects(self, suspects: Sequence[int] | NDArray[Any], sizes: Rows) -> None:
        """Records that don't hold may have been anybody's."""
        store = self._store
        for record in np.asarray(suspects, np.int64).tolist():
            size = int(sizes[record // store.config.records_per_slab])
            if not size or record in self._taken:
                continue
            state = State.CONDEMNED if self._earlier else State.FREE
            header = ChunkHeader(
                state=state, generation=store.generation(), epoch=store.config.epoch
            )
            store.out.append(WriteRecord(record, header))
            if self._earlier:
                self._writes.adopt_condemned(_UNKNOWN, record, size)
                self._taken[record] = DETACHED

    # -- chunks ---------------------------------------------------------------------------------

    def _by_space(
        self,
        records: NDArray[np.void],
        where: Rows,
        ready: Rows,
        namespaces: Sequence[str],
    ) -> list[tuple[Space, Rows]]:
        """Ready records by their (namespace, spec, kind), if that is known."""
        store = self._store
        if not len(ready):
            return []
        known = {namespace_digest(name): name for name in namespaces}
        mark = _word(records["namespace_digest"], ready) * np.uint64(0x9E3779B97F4A7C15)
        mark ^= _word(records["spec"], ready) + records["kind"][ready]
        found: list[tuple[Space, Rows]] = []
        order = np.argsort(mark, kind="stable")
        edges = np.flatnonzero(np.diff(mark[order], prepend=~mark[order[0]])).tolist()
        for begin, end in zip(edges, [*edges[1:], len(order)], strict=True):
            mine = ready[order[begin:end]]
            first = records[mine[0]]
            for name in ("namespace_digest", "spec", "kind"):
                same = records[name][mine] == first[name]
                self._reject(where[mine[~same]], "duplicate")
                mine = mine[same]
            namespace = known.get(bytes(first["namespace_digest"]))
            spec = bytes(first["spec"])
            if namespace is None:
                self._reject(where[mine], "unknown_namespace")
            elif spec not in store.spaces.specs or int(first["kind"]) not in (
                Kind.PREFIX,
                Kind.CONTENT,
            ):
                self._reject(where[mine], "unknown_spec")
            else:
                space = store.spaces.make(namespace, spec, int(first["kind"]))
                store.grow_queues()
                found.append((space, mine))
        return found

    def _space(
        self,
        space: Space,
        records: NDArray[np.void],
        where: Rows,
        mine: Rows,
        sizes: Rows,
    ) -> tuple[NDArray[np.int64], Rows]:
        """Rows and cells of one space: ([[record, cell], ...], rows)."""
        store, chunks, cells = self._store, self._store.chunks, self._store.cells
        shard = records["shard"][mine].astype(np.int64)
        good = (records["shard_count"][mine] == space.shards) & (shard < space.shards)
        nbytes = np.array(space.nbytes)[np.where(good, shard, 0)]
        good &= (records["length"][mine] == nbytes) & (sizes == pages(nbytes))
        good &= (records["tokens"][mine] >= 1) & (
            records["tokens"][mine] <= space.spec.chunk_tokens
        )
        good &= records["index"][mine] < 1 << 31
        self._reject(where[mine[~good]], "geometry")
        mine, shard = mine[good], shard[good]
        if not len(mine):
            return np.zeros((0, 2), np.int64), mine
        words = raw(records["chunk"][mine]).view(np.uint64)
        place, firsts = self._records.by_chunk(words, space)
        lead = mine[firsts]  # the record that describes each chunk
        count = len(lead)
        base, first = chunks.take_rows(count), cells.take_rows(count * space.shards)
        if NONE in (base, first):
            self._reject(where[mine], "geometry")
            return np.zeros((0, 2), np.int64), mine[:0]
        row = base + place
        self._records.describe(space, records, lead, base, words[firsts])
        store.index.load(base, count)
        keep = self._consistent(records, mine, lead[row - base], row, shard, space)
        keep &= self._link(space, records, mine, lead, base, row)
        self._reject(where[mine[~keep]], "chain")
        mine, shard, row = mine[keep], shard[keep], row[keep]
        rows = np.arange(base, base + count)
        chunks.np_cell[rows] = first + np.arange(count) * space.shards
        cells.np_chunk[first : first + count * space.shards] = np.repeat(rows, space.shards)
        cell = chunks.np_cell[row].astype(np.int64) + shard
        sealed = (records["flags"][mine] & HeaderFlag.SEALED) != 0
        cells.np_record[cell] = where[mine]
        cells.np_generation[cell] = records["generation"][mine]
        cells.np_state[cell] = col.READY
        cells.np_marks[first : first + count * space.shards] = col.ADOPTED
        cells.np_marks[cell] |= np.where(
            sealed, col.EARLIER | col.SEALED | col.UNVERIFIED, col.EARLIER
        ).astype(np.uint8)
        cells.np_digest[cell] = raw(records["digest"][mine])
        np.add.at(chunks.np_ready, row, 1)
        store.unsealed.extend(cell[~sealed].tolist())
        own = store.counters.own
        own["records_adopted", "sealed"] += int(sealed.sum())
        own["records_adopted", "unsealed"] += int((~sealed).sum())
        there = rows[chunks.np_ready[rows] > 0]
        space.chunks += len(there)
        space.bytes += int(np.array(space.nbytes)[shard].sum())
        for empty in rows[chunks.np_ready[rows] == 0].tolist():
            store.settle(empty)
        return np.stack([where[mine], cell], axis=1), there

    def _consistent(
        self,
        records: NDArray[np.void],
        mine: Rows,
        lead: Rows,
        row: Rows,
        shard: Rows,
        space: Space,
    ) -> NDArray[np.bool_]:
        """Which records say of their chunk what its first record says; one for each shard."""
        keep = np.ones(len(mine), bool)
        if len(lead) and int(row.max()) - int(row.min()) + 1 < len(
            row
        ):  # several records of one chunk
            for name in ("parent", "fingerprint"):
                keep &= (raw(records[name][mine]) == raw(records[name][lead])).all(axis=1)
            for name in ("index", "tokens", "pos0"):
                keep &= records[name][mine] == records[name][lead]
            flags = ~np.uint32(HeaderFlag.SEALED)
            keep &= (records["flags"][mine] & flags) == (records["flags"][lead] & flags)
            place = row * space.shards + shard
            once = np.zeros(len(mine), bool)
            once[np.unique(place, return_index=True)[1]] = True
            keep &= once
        return keep

    def _link(
        self,
        space: Space,
        records: NDArray[np.void],
        mine: Rows,
        lead: Rows,
        base: int,
        row: Rows,
    ) -> NDArray[np.bool_]:
        """Parents and siblings; which records keep to the chain's order."""
        store, chunks = self._store, self._store.chunks
        count = len(lead)
        rows = np.arange(base, base + count)
        chunks.np_parent[rows] = chunks.np_next[rows] = chunks.np_prev[rows] = NONE
        if not space.chained:
            return np.ones(len(mine), bool)
        parents = records["parent"][lead]
        rooted = (raw(parents) == 0).all(axis=1)
        parent = np.full(count, NONE, np.int64)
        some = np.flatnonzero(~rooted)
        for begin in range(0, len(some), _STRIDE):
            stride = some[begin : begin + _STRIDE]
            parent[stride] = space.get_many(parents[stride].tobytes())
        index = chunks.np_index[rows].astype(np.int64)
        good = ~((parent == NONE) & ~rooted & (index == 0))
        for n in np.flatnonzero((parent == NONE) & ~rooted & good).tolist():
            key = bytes(parents[n])
            hole = space.get(key)
            if hole == NONE:
                hole = store.add_chunk(space, key, NONE, int(index[n]) - 1)
            parent[n] = hole
        linked = parent != NONE
        good &= ~linked | (chunks.np_index[parent].astype(np.int64) + 1 == index)
        some = np.flatnonzero(good & linked)
        some = some[np.argsort(parent[some], kind="stable")]
        child, above = rows[some], parent[some]
        chunks.np_parent[child] = above
        same = above[1:] == above[:-1]
        chunks.np_next[child[:-1][same]] = child[1:][same]
        chunks.np_prev[child[1:][same]] = child[:-1][same]
        heads = np.ones(len(child), bool)
        heads[1:] = ~same
        chunks.np_child[above[heads]] = child[heads]
        for hole in range(base + count, chunks.used):
            store.settle(hole)
        kept: NDArray[np.bool_] = good[row - base]
        return kept

    # -- slots and recency ----------------------------------------------------------------------

    def _slots(self, sizes: Rows, spots: list[NDArray[np.int64]]) -> None:
        """Tell the slabs which of their slots are taken, and by which cell."""
        store = self._store
        spots.append(np.array(list(self._taken.items()), np.int64).reshape(-1, 2))
        taken = np.concatenate(spots)
        taken = taken[np.argsort(taken[:, 0], kind="stable")]
        slab, slot = np.divmod(taken[:, 0], store.config.records_per_slab)
        edges = np.searchsorted(slab, np.arange(len(sizes) + 1))
        whose = np.array([NOBODY, *(space.tenant for space in store.spaces.all())], np.uint16)
        rows = store.cells.np_chunk[np.maximum(taken[:, 1], 0)]
        tenants = whose[np.where(taken[:, 1] < 0, 0, store.chunks.np_space[rows])]
        for number, size in enumerate(sizes.tolist()):
            if size:
                mine = slice(edges[number], edges[number + 1])
                cells = taken[mine, 1].astype(np.int32)
                store.slabs.adopt(number, size, slot[mine], cells, tenants[mine])
        store.slabs.adopted()
        self._taken.clear()

    def _recency(self, rows: Rows) -> None:
        """Hand chunks to the policy in the order of their creation; who begot a younger one is as
        young as that one."""
        store, chunks = self._store, self._store.chunks
        if not len(rows):
            return
        space = store.spaces.of(chunks.space[int(rows[0])])
        queue = space.queues[1]
        store.residents[queue] += len(rows)
        self._records.last_uses(rows, store.policy)
        order = self._records.coldest_first(rows)
        store.policy.load(
            order,
            chunks.np_last[order],
            parents=chunks.np_parent[order].astype(np.int64),
            queue=queue,
            size=space.chunk_slot_bytes,
            ghosts=store.ghosts(order),
        )


def _word(column: NDArray[Any], rows: Rows) -> NDArray[np.uint64]:
    """The first 8 bytes of a column of 32-byte values."""
    return np.ascontiguousarray(raw(column[rows])[:, :8]).view(np.uint64).reshape(-1)
