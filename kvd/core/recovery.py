"""Taking up what lies in a tier below: chunks of an earlier life, or of another daemon.

The law of this module: no payload is read. A record is taken up only if it fits its spec and its
chain and says of its chunk what is known here already; what does not fit is deleted there. Records
whose spec or namespace nobody has named yet wait until somebody does, for only then could they be
asked for; when nobody has for long, they make room in a tier that is all our own. A digest is
compared when the chunk is read.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import HeaderFlag, Kind, namespace_digest
from kvd.core import columns as col
from kvd.core.actions import TierDelete
from kvd.core.columns import NONE
from kvd.core.jobs import Jobs, Pause, Work
from kvd.core.lower import READY, Lower
from kvd.core.records import Records, Rows, pages, raw
from kvd.core.spaces import Space
from kvd.core.store import Store

_SLICE: Final = 128  # records taken up in one event, once the daemon serves
_STRIDE: Final = 8192
_UNNAMED_NS: Final = 900 * 1_000_000_000  # engines may start as late as that after the daemon


class Found(NamedTuple):
    """Records of one tier, with the place of each."""

    lower: Lower
    records: NDArray[Any]
    at: NDArray[Any]
    generation: NDArray[Any]
    hint: bool = False  # hearsay: what does not fit is passed over
    since: int = 0  # when it was put aside, for nobody had named its spec

    def some(self, which: Any) -> Found:
        return self._replace(
            records=self.records[which], at=self.at[which], generation=self.generation[which]
        )


class Recovery:
    """What waits for its spec or namespace stands in `_waiting`."""

    def __init__(self, store: Store, jobs: Jobs, told: Records) -> None:
        self._store = store
        self._jobs = jobs
        self._records = told
        self._waiting: dict[tuple[bytes, bytes, int], list[Found]] = {}

    @property
    def waiting(self) -> int:
        """Records that nobody could ask for yet."""
        return sum(len(found.at) for many in self._waiting.values() for found in many)

    def whole(self, found: Found) -> None:
        """All at once, before the daemon serves."""
        for space, mine in self._by_space(found):
            self._take(space, mine, at_once=True)

    def slices(self, found: Found) -> Work[None]:
        """A few at a time, beside everything else."""
        for begin in range(0, len(found.at), _SLICE):
            for space, mine in self._by_space(found.some(slice(begin, begin + _SLICE))):
                self._take(space, mine, at_once=False)
            yield Pause.SLICE

    def known(self) -> None:
        """A spec or a namespace is new: what waited for it is taken up."""
        if not self._waiting:
            return
        store = self._store
        names = {namespace_digest(name) for name in store.spaces.namespaces}
        for name, many in list(self._waiting.items()):
            if name[0] in names and name[1] in store.spaces.specs:
                del self._waiting[name]
                for found in many:
                    self._jobs.start(self.slices(found))

    def give_up(self, lower: Lower, most: int, places: tuple[int, ...]) -> int:
        """Room is needed: delete there what nobody has named for long, at these places if any are
        named. How many went. Not of a server, where what lies has no place but its name: most may
        be other daemons', which are not ours to delete and take none of our room."""
        store = self._store
        wanted = np.array(places, np.uint64)
        gone = 0
        for name, many in list(self._waiting.items()):
            for n, found in enumerate(many):
                if gone >= most:
                    return gone
                if found.lower is not lower or store.now - found.since < _UNNAMED_NS:
                    continue
                if not found.generation.any():
                    continue
                which = np.ones(len(found.at), bool) if not places else np.isin(found.at, wanted)
                which[np.flatnonzero(which)[most - gone :]] = False
                gone += int(which.sum())
                self._reject(found.some(which), "unknown_spec")
                many[n] = found.some(~which)
            many[:] = [found for found in many if len(found.at)]
            if not many:
                del self._waiting[name]
        return gone

    # -- sorting --------------------------------------------------------------------------------

    def _by_space(self, found: Found) -> list[tuple[Space, Found]]:
        """Records by (namespace, spec, kind); those of none that is known are put aside."""
        if not len(found.at):
            return []
        store, records = self._store, found.records
        names = {namespace_digest(name): name for name in store.spaces.namespaces}
        marks = np.zeros(len(records), [("n", "V32"), ("s", "V32"), ("k", "u1")])
        marks["n"], marks["s"], marks["k"] = (
            records["namespace_digest"], records["spec"], records["kind"],
        )  # fmt: skip
        packed = np.ascontiguousarray(marks).view(f"V{marks.dtype.itemsize}")
        result = []
        _, firsts, groups = np.unique(packed, return_index=True, return_inverse=True)
        for group, first in enumerate(firsts.tolist()):
            mine = found.some(groups == group) if len(firsts) > 1 else found
            digest, spec = bytes(records["namespace_digest"][first]), bytes(records["spec"][first])
            kind = int(records["kind"][first])
            if kind not in (Kind.PREFIX, Kind.CONTENT):
                self._reject(mine, "unknown_spec")
            elif digest in names and spec in store.spaces.specs:
                space = store.spaces.make(names[digest], spec, kind)
                store.grow_queues()
                result.append((space, mine))
            else:
                if mine.hint:
                    continue
                copy = Found(
                    mine.lower,
                    mine.records.copy(),
                    mine.at.copy(),
                    mine.generation.copy(),
                    since=store.now,
                )
                self._waiting.setdefault((digest, spec, kind), []).append(copy)
        return result

    def _reject(self, found: Found, reason: str) -> None:
        """Of no use: deleted there."""
        if found.hint:
            return
        store = self._store
        store.counters.own["records_rejected", reason] += len(found.at)
        within = found.lower.config.write_ns
        for record, at, generation in zip(
            found.records, found.at.tolist(), found.generation.tolist(), strict=True
        ):
            store.out.append(
                TierDelete(
                    store.handle(),
                    found.lower.number,
                    int(record["kind"]),
                    bytes(record["namespace_digest"]),
                    bytes(record["spec"]),
                    bytes(record["chunk"]),
                    int(record["shard"]),
                    at,
                    generation,
                    store.now + within,
                )
            )

    # -- taking up ------------------------------------------------------------------------------

    def _take(self, space: Space, found: Found, *, at_once: bool) -> None:
        """Records of one space."""
        found, shard = self._fitting(space, found)
        if not len(found.at):
            return
        store, chunks = self._store, self._store.chunks
        words = raw(found.records["chunk"]).view(np.uint64)
        place, firsts = self._records.by_chunk(words, space)
        keys = words[firsts]
        rows = np.concatenate(
            [space.get_many(keys[n : n + _STRIDE].tobytes()) for n in range(0, len(keys), _STRIDE)]
        )
        fresh = np.flatnonzero(rows == NONE)
        old = np.flatnonzero(rows != NONE)
        base = self._add(space, found.records, firsts[fresh], keys[fresh], at_once=at_once)
        if base == NONE and len(fresh):
            self._reject(found, "geometry")
            return
        rows[fresh] = base + np.arange(len(fresh))
        good = np.ones(len(rows), bool)
        for n in old.tolist():
            good[n] = self._same(space, found.records[firsts[n]], int(rows[n]))
        if space.chained:
            good[fresh] &= self._link(space, found.records[firsts[fresh]], rows[fresh])
        keep = good[place]
        self._reject(found.some(~keep), "chain")
        found, row, shard = found.some(keep), rows[place[keep]], shard[keep]
        self._put(space, found, row, chunks.np_cell[row].astype(np.int64) + shard)
        for row_ in rows[~good].tolist():
            store.settle(row_)

    def _fitting(self, space: Space, found: Found) -> tuple[Found, Rows]:
        records = found.records
        shard = records["shard"].astype(np.int64)
        good = (records["shard_count"] == space.shards) & (shard < space.shards)
        nbytes = np.array(space.nbytes)[np.where(good, shard, 0)]
        good &= records["length"] == nbytes
        good &= (records["tokens"] >= 1) & (records["tokens"] <= space.spec.chunk_tokens)
        good &= records["index"] < 1 << 31
        good &= pages(nbytes) <= self._store.config.slab_size
        if not good.all():
            self._reject(found.some(~good), "geometry")
        return found.some(good), shard[good]

    def _add(
        self, space: Space, records: NDArray[Any], lead: Rows, keys: NDArray[np.uint64],
        *, at_once: bool,
    ) -> int:  # fmt: skip
        """New rows in the index, with cells; the first, or NONE if there is no room for all."""
        store, chunks, cells = self._store, self._store.chunks, self._store.cells
        count = len(lead)
        if not count:
            return NONE
        if not at_once:
            return self._add_some(space, records, lead, keys)
        base, first = chunks.take_rows(count), cells.take_rows(count * space.shards)
        if NONE in (base, first):
            return NONE
        self._records.describe(space, records, lead, base, keys)
        rows = np.arange(base, base + count)
        chunks.np_parent[rows] = chunks.np_next[rows] = chunks.np_prev[rows] = NONE
        chunks.np_cell[rows] = first + np.arange(count) * space.shards
        cells.np_chunk[first : first + count * space.shards] = np.repeat(rows, space.shards)
        store.index.load(base, count)
        return base

    def _add_some(
        self, space: Space, records: NDArray[Any], lead: Rows, keys: NDArray[np.uint64]
    ) -> int:
        """As `_add`, in a way that costs the same whatever is there already."""
        store, chunks, cells = self._store, self._store.chunks, self._store.cells
        count = len(lead)
        base = chunks.take_rows(count)
        if base == NONE:
            return NONE
        self._records.describe(space, records, lead, base, keys)
        for row in range(base, base + count):
            chunks.parent[row] = chunks.next[row] = chunks.prev[row] = NONE
            chunks.cell[row] = cells.take(space.shards, row)
            store.index.put(row)
        return base

    def _same(self, space: Space, record: Any, row: int) -> bool:
        """Whether a record says of a row what is known; a hole learns it."""
        store, chunks = self._store, self._store.chunks
        index, parent = int(record["index"]), bytes(record["parent"])
        if store.is_empty(row):
            if space.chained and chunks.index[row] != index:
                return False
            known = chunks.parent_key_of(row)
            if space.chained and parent != known:
                if any(known) or not any(parent):
                    return False
                above = space.get(parent)
                if above == NONE:
                    above = store.add_chunk(space, parent, NONE, index - 1)
                if above == NONE or chunks.index[above] + 1 != index:
                    return False
                store.link(row, above)
            self._fill(space, record, row, index)
            return True
        usual = index * space.spec.chunk_tokens
        return (
            bytes(record["fingerprint"]) == bytes(chunks.print[16 * row : 16 * row + 16])
            and int(record["tokens"]) == chunks.tokens[row]
            and int(record["flags"]) & ~HeaderFlag.SEALED == chunks.flags[row]
            and (
                not space.chained
                or (
                    parent == chunks.parent_key_of(row)
                    and index == chunks.index[row]
                    and int(record["pos0"]) == chunks.odd_pos0.get(row, usual)
                )
            )
        )

    def _fill(self, space: Space, record: Any, row: int, index: int) -> None:
        chunks, cells = self._store.chunks, self._store.cells
        chunks.print[16 * row : 16 * row + 16] = bytes(record["fingerprint"])
        chunks.tokens[row] = int(record["tokens"])
        chunks.flags[row] = int(record["flags"]) & ~int(HeaderFlag.SEALED)
        chunks.index[row] = index
        chunks.born[row] = int(record["created_unix_ns"]) // 1_000_000_000
        chunks.last[row] = min(
            int(record["created_unix_ns"]) - self._store.config.unix_offset_ns, self._store.now
        )
        if int(record["pos0"]) != index * space.spec.chunk_tokens:
            chunks.odd_pos0[row] = int(record["pos0"])
        if chunks.cell[row] == NONE:
            chunks.cell[row] = cells.take(space.shards, row)

    def _link(self, space: Space, lead: NDArray[Any], rows: Rows) -> NDArray[np.bool_]:
        """Hang new rows under their parents; which of them keep to the chain's order."""
        store, chunks = self._store, self._store.chunks
        parents = raw(lead["parent"])
        rooted = (parents == 0).all(axis=1)
        parent = np.full(len(rows), NONE, np.int64)
        some = np.flatnonzero(~rooted)
        for begin in range(0, len(some), _STRIDE):
            part = some[begin : begin + _STRIDE]
            parent[part] = space.get_many(parents[part].tobytes())
        index = lead["index"].astype(np.int64)
        good: NDArray[np.bool_] = rooted | (index > 0)
        for n in np.flatnonzero((parent == NONE) & ~rooted & good).tolist():
            key = parents[n].tobytes()
            hole = space.get(key)
            if hole == NONE:
                hole = store.add_chunk(space, key, NONE, int(index[n]) - 1)
            parent[n] = hole
        linked = parent != NONE
        good &= ~linked | (chunks.np_index[parent].astype(np.int64) + 1 == index)
        some = np.flatnonzero(good & linked)
        some = some[np.argsort(parent[some], kind="stable")]
        child, above = rows[some], parent[some]
        if len(child):
            chunks.np_parent[child] = above
            same = above[1:] == above[:-1]
            heads, tails = np.append(True, ~same), np.append(~same, True)
            before = chunks.np_child[above[tails]].astype(np.int64)
            chunks.np_next[child[:-1][same]] = child[1:][same]
            chunks.np_prev[child[1:][same]] = child[:-1][same]
            chunks.np_next[child[tails]] = before
            had = before != NONE
            chunks.np_prev[before[had]] = child[tails][had]
            chunks.np_child[above[heads]] = child[heads]
        return good

    def _put(self, space: Space, found: Found, row: Rows, cell: Rows) -> None:
        """These shards lie in the tier."""
        store, chunks, lower = self._store, self._store.chunks, found.lower
        once = np.zeros(len(cell), bool)
        once[np.unique(cell, return_index=True)[1]] = True
        once &= lower.np_state[cell] != READY
        row, cell = row[once], cell[once]
        if not len(row):
            return
        lower.np_at[cell] = found.at[once]
        lower.np_generation[cell] = found.generation[once]
        lower.np_state[cell] = READY
        nbytes = int(found.records["length"][once].sum())
        lower.bytes += nbytes
        space.below_bytes += nbytes
        lower.use.use[space.tenant] += int(pages(found.records["length"][once]).sum())
        unique = np.unique(row)
        new = unique[lower.np_count[unique] == 0]
        np.add.at(lower.np_count, row, 1)
        np.add.at(chunks.np_below, row, 1)
        whole = unique[lower.np_count[unique] == space.shards]
        chunks.np_full[whole] |= lower.bit
        lower.chunks += len(new)
        queue = space.queues[0]
        lower.residents[queue] = lower.residents.get(queue, 0) + len(new)
        if store.holes[queue]:
            for filled in unique.tolist():
                store.holes[queue].pop(filled, None)
        self._records.last_uses(new, lower.policy)
        order = self._records.coldest_first(new) if len(new) > _SLICE else new
        lower.policy.load(
            order,
            chunks.np_last[order],
            parents=chunks.np_parent[order].astype(np.int64),
            queue=queue,
            size=space.chunk_slot_bytes,
            ghosts=store.ghosts(order),
        )
        alone = unique[
            (chunks.np_ready[unique] == 0)
            & (chunks.np_bad[unique] == 0)
            & (chunks.np_tally[unique] & col.ALONE == 0)
        ]
        chunks.np_tally[alone] |= col.ALONE
        space.alone += len(alone)
        both = unique[(chunks.np_ready[unique] > 0) & (chunks.np_tally[unique] & col.BOTH == 0)]
        chunks.np_tally[both] |= col.BOTH
        store.both[space.tenant] = store.both.get(space.tenant, 0) + len(both)
        store.counters.own["records_recovered", ""] += len(row)
