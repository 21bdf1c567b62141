"""Slabs that change class: one class's memory becomes another's.

The law of this module: a slab is emptied only as cheaply as it can be: of a class whose coldest
chunks are colder than the asking class's own, the slab with the lowest sum of value. What in it is
hot and unleased is copied to another slab of its class, in the place of something colder; what is
leased, being written or condemned makes the attempt end, and the slab stays what it was. A tenant
gives no more of its chunks than its share allows (kvd.core.shares); the others' are moved.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

import numpy as np

from kvd.chunk import State
from kvd.core import columns as col
from kvd.core.actions import Copy
from kvd.core.columns import NONE
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.shares import NOBODY as NO_TENANT
from kvd.core.slabs import DETACHED, NOBODY
from kvd.core.store import Store

_SLABS: Final = 32  # looked at for one decision
_SAMPLE: Final = 16  # slots looked at in each
_DEPTH: Final = 512  # candidates looked at to see how cold a class is
_TRIES: Final = 4
_DEAR: Final = 1e6  # value, in the units of the policy, of what may not be evicted


class Attempt(NamedTuple):
    """Whom one emptying is for, and whose chunks may go for it: None, anybody's."""

    by: int
    givers: frozenset[int] | None


class Move(NamedTuple):
    """A slot on its way to another slab."""

    cell: int
    generation: int
    source: int
    target: int
    slab: int


class Reclass:
    """`legal(row)`: whether a chunk may be evicted; `room(slab, size)`: whether the slab can have
    that class; `assign(slab, size)`: give it."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        legal: Callable[[int], bool],
        room: Callable[[int, int], bool],
        assign: Callable[[int, int], None],
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._legal = legal
        self._room = room
        self._assign = assign
        self._active: dict[int, int] = {}  # asking class -> slab that is being emptied
        self._evicted: dict[int, int] = {}  # asking class -> own evictions since the last look
        self._moves: dict[int, Move] = {}
        self._leaving: dict[int, int] = {}  # slab -> moves that are under way
        self._hand = 0

    @property
    def moves(self) -> int:
        return len(self._moves)

    def active(self, size: int) -> bool:
        """Whether a slab is being emptied for this class."""
        return size in self._active

    def evicted(self, size: int) -> None:
        """The class made room among its own."""
        self._evicted[size] = self._evicted.get(size, 0) + 1

    def due(self, size: int) -> bool:
        """Whether it is time to look at other classes: now and then, for a look costs, but at
        once after one that was worth it."""
        if size in self._active or len(self._store.spaces.class_queues) < 2:
            return False
        seen = self._evicted.get(size)
        return seen is None or seen >= max(4, self._store.config.slab_size // size // 8)

    def start(self, size: int, by: int = NO_TENANT, *, must: bool) -> bool:
        """Begin to empty the best slab of another class for a tenant; `must`: the class has nothing
        of its own to give. False if there is none, or it gives up at once."""
        store = self._store
        self._evicted[size] = 0
        if size in self._active:
            return False
        own = None if must else self._coldness(size)
        tried: set[int] = set()
        while len(tried) < _TRIES:
            best = self._choose(size, own, tried, by)
            if best is None:
                return False
            slab, limit, givers = best
            tried.add(slab)
            if not self._room(slab, size):
                continue
            self._jobs.start(self._empty(slab, size, limit, Attempt(by, givers)))
            if size in self._active or store.slabs.slot_sizes[slab] == size:
                self._evicted.pop(size, None)
                return True
        return False

    # -- which ----------------------------------------------------------------------------------

    def _coldness(self, size: int) -> float | None:
        store = self._store
        best: float | None = None
        for queue in store.spaces.class_queues.get(size, ()):
            if store.residents[queue]:
                cold = store.policy.coldness(queue, store.now)
                if cold is not None and (best is None or cold < best):
                    best = cold
        return best

    def _reach(self, size: int, count: int) -> float | None:
        """Value of about the `count`-th coldest chunk of a class: all below could be evicted."""
        store = self._store
        values: list[float] = []
        for queue in store.spaces.class_queues.get(size, ()):
            if not store.residents[queue]:
                continue
            for n, row in enumerate(store.policy.victims(queue, store.now)):
                if n >= count:
                    break
                values.append(store.policy.value(row, store.now))
        if not values:
            return None
        values.sort()
        return values[min(count, len(values)) - 1]

    def _givers(self, size: int, by: int) -> frozenset[int] | None:
        """Tenants with slots of a class who may give a slab's bytes for another; None: all."""
        store = self._store
        if not store.shares.isolate:
            return None
        owners = store.spaces.queue_tenants
        there = {owners[q] for q in store.spaces.class_queues.get(size, ()) if store.residents[q]}
        nbytes, dram = store.config.slab_size, store.shares.dram
        return frozenset(t for t in there if dram.may_give(t, min(nbytes, dram.use[t]), by))

    def _may_go(self, row: int, attempt: Attempt) -> bool:
        """Whether a chunk's tenant still gives."""
        if attempt.givers is None:
            return True
        tenant = self._store.tenant(row)
        if tenant == attempt.by:
            return tenant in attempt.givers
        return tenant in attempt.givers and self._store.shares.dram.above(tenant)

    def _choose(
        self, size: int, own: float | None, tried: set[int], by: int
    ) -> tuple[int, float, frozenset[int] | None] | None:
        """(slab, value up to which its chunks are evicted rather than moved, whose may go)."""
        slabs = self._store.slabs
        best: tuple[float, int, float, frozenset[int] | None] | None = None
        givers: dict[int, frozenset[int] | None] = {}
        reach: dict[int, float | None] = {}
        looked = 0
        for step in range(slabs.open):
            slab = (self._hand + step) % slabs.open
            other = slabs.slot_sizes[slab]
            if not other or other == size or slab in slabs.draining or slab in tried:
                continue
            if looked >= _SLABS:
                break
            looked += 1
            if other not in givers:
                givers[other] = self._givers(other, by)
            willing = givers[other]
            if willing is not None and not willing and slabs.taken[slab]:
                continue
            if other not in reach:
                reach[other] = self._reach(other, min(_DEPTH, slabs.taken[slab]))
            limit = reach[other]
            if own is not None and (limit is None or limit >= own):
                continue
            cold = self._coldness(other)
            found = self._cost(slab, cold if cold is not None and cold < inf else 0.0, willing)
            if found is None or (best is not None and found[0] >= best[0]):
                continue
            if limit is None or slabs.taken[slab] > _DEPTH:
                limit = max(limit or found[1], found[1])
            best = (found[0], slab, limit, willing)
        self._hand = (self._hand + 1) % max(slabs.open, 1)
        return None if best is None else best[1:]

    def _cost(
        self, slab: int, cold: float, willing: frozenset[int] | None
    ) -> tuple[float, float] | None:
        """Sum of value of a slab's chunks above its class's coldest, and their mean value, from a
        sample; None if something in it can't leave. What has to be moved is dear."""
        store = self._store
        owner = store.slabs.owner[slab]
        assert owner is not None
        held = owner[owner != NOBODY]
        if (held == DETACHED).any():
            return None
        rows = store.cells.np_chunk[held]
        chunks = store.chunks
        if chunks.np_leases[rows].any() or chunks.np_writing[rows].any():
            return None
        if store.hold and (store.cells.np_marks[held] & col.EARLIER).any():
            return None
        sample = rows[:: max(1, len(rows) // _SAMPLE)]
        if not len(sample):
            return 0.0, cold
        values = [store.policy.value(row, store.now) for row in sample.tolist()]
        above = sum(max(0.0, value - cold) for value in values) / len(values)
        if willing is not None:
            tenants = store.slabs.tenant[slab]
            assert tenants is not None
            whose = tenants[owner != NOBODY]
            above += _DEAR * (1.0 - float(np.isin(whose, list(willing)).mean()))
        return (above + 1e-9) * len(rows), sum(values) / len(values)

    # -- emptying -------------------------------------------------------------------------------

    def _empty(self, slab: int, size: int, limit: float, attempt: Attempt) -> Work[None]:
        store, slabs = self._store, self._store.slabs
        self._active[size] = slab
        slabs.drain(slab)
        done = False
        try:
            cleared = yield from self._clear(slab, limit, attempt)
            while self._leaving.get(slab):
                yield Pause.COPY
            done = cleared and not slabs.taken[slab]
        finally:  # come what may, the slab is somebody's, and who waits for it goes on
            del self._active[size]
            if done:
                self._assign(slab, size)
            else:
                slabs.undrain(slab)
            store.counters.own["slab_changes", "done" if done else "given_up"] += 1
            self._jobs.wake(Pause.ROOM)

    def _clear(self, slab: int, limit: float, attempt: Attempt) -> Work[bool]:
        """Evict or move all that is in the slab, leaves first; False if something can't leave."""
        store, cells, chunks = self._store, self._store.cells, self._store.chunks
        owner = store.slabs.owner[slab]
        assert owner is not None
        slots = np.flatnonzero(owner != NOBODY)
        if (owner[slots] == DETACHED).any():
            return False
        depth = chunks.np_index[cells.np_chunk[owner[slots]]].astype(np.int64)
        for slot in slots[np.argsort(-depth, kind="stable")].tolist():
            cell = int(owner[slot])
            if cell == NOBODY:
                continue  # it went meanwhile
            if cell == DETACHED:
                return False
            row = cells.chunk[cell]
            if chunks.leases[row] or chunks.writing[row] or row in store.pinned:
                return False
            if store.hold and cells.marks[cell] & col.EARLIER:
                return False
            if cells.state[cell] == col.BAD:
                store.drop(row, "quarantine", evicted=False)
            elif row in store.transients or self._cold(row, limit, attempt):
                self._drop(row, attempt)
            elif not self._move(cell, slab, attempt):
                if not (self._legal(row) and self._may_go(row, attempt)):
                    return False
                self._drop(row, attempt)
            if spent(store):
                yield Pause.SLICE
            while len(self._moves) >= store.config.copies_in_flight:
                yield Pause.COPY
        return True

    def _cold(self, row: int, limit: float, attempt: Attempt) -> bool:
        """Whether the chunk goes rather than moves."""
        return self._legal(row) and self._value(row) <= limit and self._may_go(row, attempt)

    def _drop(self, row: int, attempt: Attempt) -> None:
        store = self._store
        if row not in store.transients:
            store.evicts(row, attempt.by, store.shares.dram)
        store.drop(row, "slab", evicted=True)

    def _value(self, row: int) -> float:
        return self._store.policy.value(row, self._store.now)

    def _move(self, cell: int, slab: int, attempt: Attempt) -> bool:
        """Start to copy a slot to another slab of its class; False if there is no place."""
        store, cells = self._store, self._store.cells
        if cells.marks[cell] & col.MOVING:
            return True
        row, source = cells.chunk[cell], cells.record[cell]
        space = store.spaces.of(store.chunks.space[row])
        nbytes = space.nbytes[cell - store.chunks.cell[row]]
        size = store.slabs.slot_sizes[slab]
        target = store.slabs.take(size)
        if target < 0:
            other = self._colder(row, slab, size, attempt)
            if other != NONE:
                self._drop(other, attempt)
                if store.slabs.cell_of(source) != cell:
                    return True  # it went with the other
                target = store.slabs.take(size)
        if target < 0:
            return False
        copy = store.handle()
        self._moves[copy] = Move(cell, cells.generation[cell], source, target, slab)
        self._leaving[slab] = self._leaving.get(slab, 0) + 1
        cells.marks[cell] |= col.MOVING
        offset = store.slabs.offset
        store.out.append(Copy(copy, offset(source), offset(target), nbytes))
        return True

    def _colder(self, row: int, slab: int, size: int, attempt: Attempt) -> int:
        """Another chunk of the class that is not worth more and would make place in another slab,
        or NONE. Never the chunk itself: with a shard elsewhere it would look like one. For a chunk
        that may not go any other that may does."""
        store = self._store
        value = self._value(row) if self._may_go(row, attempt) else inf
        for queue in store.spaces.class_queues.get(size, ()):
            if not store.residents[queue]:
                continue
            for n, other in enumerate(store.policy.victims(queue, store.now)):
                if n >= _DEPTH or store.policy.value(other, store.now) > value:
                    break
                if other == row or not (self._legal(other) and self._may_go(other, attempt)):
                    continue
                if self._elsewhere(other, slab, size):
                    return other
        return NONE

    def _elsewhere(self, row: int, slab: int, size: int) -> bool:
        """Whether the chunk has a slot of the class that would be free for others."""
        store = self._store
        first = store.chunks.cell[row]
        shards = store.spaces.of(store.chunks.space[row]).shards
        for cell in range(first, first + shards):
            if store.cells.state[cell] == col.READY:
                record = store.cells.record[cell]
                where = store.slabs.slab_of(record)
                if where not in store.slabs.draining and store.slabs.size_of(record) == size:
                    return True
        return False

    def copied(self, copy: int, ok: bool) -> None:
        """A copy is done: the shard stands in its new slot from now on, unless it has changed or
        somebody got a lease on the old one."""
        store, cells = self._store, self._store.cells
        move = self._moves.pop(copy, None)
        if move is None:
            return
        left = self._leaving[move.slab] - 1
        if left:
            self._leaving[move.slab] = left
        else:
            del self._leaving[move.slab]
        cell = move.cell
        same = (
            cells.state[cell] == col.READY
            and cells.generation[cell] == move.generation
            and cells.record[cell] == move.source
        )
        if same:
            cells.marks[cell] &= ~col.MOVING & 0xFF
        row = cells.chunk[cell]
        if ok and same and not store.chunks.leases[row] and row not in store.ladder.active:
            cells.record[cell] = move.target
            cells.generation[cell] = store.generation()
            store.slabs.set_cell(move.target, cell)
            store.slabs.charge(move.target, store.tenant(row))
            if cells.marks[cell] & col.SEALING:  # the old place is being sealed, in vain
                cells.marks[cell] &= ~col.SEALING & 0xFF
                store.unsealed.append(cell)
            store.out.append(store.headers.written(cell, State.READY))
            store.free_slot(move.source)
            store.counters.own["slots_moved", "done"] += 1
        else:
            store.slabs.give(move.target)
            store.counters.own["slots_moved", "given_up"] += 1
        self._jobs.wake(Pause.COPY)
