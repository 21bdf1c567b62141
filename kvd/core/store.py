"""What all parts of the core share: rows, slots, spaces, the policy, and the life of a chunk.

The law of this module: a chunk's row exists while it has bytes (here or in a tier below), a writer,
a lease, or children. One with children only is a *hole*: its children are orphans, in no leading
run, and the first to go. All changes of a chunk's counts end in `settle`, which alone moves it in
and out of the policy, the holes and the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import State
from kvd.core import columns as col
from kvd.core.actions import Action, PatchRecord, PolicyFailed
from kvd.core.advice import Advice
from kvd.core.columns import NONE, Cells, Chunks
from kvd.core.config import CoreConfig
from kvd.core.counters import Counters
from kvd.core.headers import Headers
from kvd.core.index import Index
from kvd.core.keeping import Keeping
from kvd.core.lower import Ladder
from kvd.core.sessions import Sessions
from kvd.core.shares import PUBLIC, Shares, TierUse
from kvd.core.slabs import DETACHED, Slabs
from kvd.core.spaces import Space, Spaces
from kvd.core.timers import Timers
from kvd.core.touches import Touches
from kvd.eviction.base import Policy
from kvd.native import i64, named

_FREE: Final = State.FREE  # a member is looked up in its class at every mention
STAY_WEIGHT: Final = 0.01


class Store:
    """The state of the core, without what belongs to one kind of request."""

    def __init__(self, config: CoreConfig, policy: Policy, below: Sequence[Policy] = ()) -> None:
        self.config = config
        self.policy = Advice(policy, "dram")
        self.policy.failed = self.policy_failed
        self.chunks = Chunks(config.rows)
        self.cells = Cells(config.rows)
        self.shares = Shares(
            config.isolate,
            [("dram", config.size), *((tier.name, tier.limit) for tier in config.tiers)],
            dict(config.tenants),
        )
        self.slabs = Slabs(config, self.shares)
        self.index = Index(self.chunks, config.seed)
        self.spaces = Spaces(self.index, self.shares)
        self.headers = Headers(config, self.chunks, self.cells, self.spaces)
        self.sessions = Sessions()
        self.counters = Counters()
        self.timers = Timers()
        self.out: list[Action] = []
        self.now = 0
        self.units = 0  # work done in this slice, see jobs.py
        self.keeping = Keeping(config, self.timers)  # what hints have pinned or spared
        self.stay_ns = 0.0  # how long ago victims were used last, on the average
        self.draining = False  # takes no stores any more
        # Handles and generations go on from the epoch, so that none is ever given twice, in this
        # life or another.
        self._handle = config.epoch
        self._generation = config.epoch
        self.holes: list[dict[int, None]] = []  # by queue
        self.bad: list[dict[int, None]] = []  # by queue: nothing left but quarantined shards
        self.residents: list[int] = []  # by queue: chunks in the policy
        self.husks: deque[int] = deque()  # rows that may be empty by now
        self.pinned: dict[int, int] = {}  # chunks that a request in progress relies on
        self.touches = Touches(self)
        self.unsealed: deque[int] = deque()  # cells
        self.leased_chunks = 0
        self.writing_bytes = 0
        self.condemned_bytes = 0
        self.hold = False  # adopted slots may still have readers of an earlier life
        self.held: list[int] = []  # their records, freed meanwhile
        self.held_bytes = 0
        self.layered = bool(config.tiers)  # there are tiers below DRAM
        self.ladder = Ladder(self, list(below))
        self.both: dict[int, int] = {}  # by tenant: chunks with shards here and below
        self.transients: dict[int, int] = {}  # chunks read from below for one lease: slot bytes
        self.transient_bytes = 0  # of these, and of reads under way for them
        self.fleeting: deque[int] = deque()  # transients that nobody may hold any more
        self.sealed: deque[int] = deque()  # cells that have a digest since the last look

    # -- numbers --------------------------------------------------------------------------------

    def handle(self) -> int:
        """A new lease, write, transfer or copy id."""
        self._handle += 1
        return self._handle

    def generation(self) -> int:
        self._generation += 1
        return self._generation

    def seen_generation(self, generation: int) -> None:
        """Generations given from now on are higher."""
        self._generation = max(self._generation, generation)

    def unix_ns(self) -> int:
        return self.now + self.config.unix_offset_ns

    def recount_all(self) -> None:
        """`recount` of all rows at once, after adoption. Pre: nothing lies below yet."""
        chunks = self.chunks
        used = slice(0, chunks.used)
        here = (chunks.np_ready[used] | chunks.np_writing[used] | chunks.np_bad[used]) > 0
        here &= chunks.np_space[used] != 0
        chunks.np_tally[used][here] = col.HERE
        parents = chunks.np_parent[used][here]
        parents = parents[parents != NONE]
        chunks.np_kids[used] = np.bincount(parents, minlength=chunks.used)

    # -- rows -----------------------------------------------------------------------------------

    def add_chunk(
        self, space: Space, key: bytes, parent: int, index: int, hash_: i64 = NONE
    ) -> int:
        """A new, empty row in the index and in the tree, or NONE if there is no row left. The
        caller gives it something to live for, or calls `settle`. `hash_`: the index's, if it is
        known."""
        chunks = self.chunks
        row = chunks.take()
        if row == NONE:
            return NONE
        chunks.set_key(row, key)
        chunks.space[row] = space.number
        chunks.index[row] = index
        chunks.child[row] = NONE
        chunks.cell[row] = NONE
        chunks.leases[row] = chunks.hits[row] = chunks.flags[row] = 0
        self.index.put(row, hash_)
        self.link(row, parent)
        return row

    def link(self, row: int, parent: int) -> None:
        """Make a chunk, so far without parent, the first child of another (NONE: of none)."""
        chunks = self.chunks
        first = NONE if parent == NONE else chunks.child[parent]
        chunks.parent[row] = parent
        chunks.prev[row] = NONE
        chunks.next[row] = first
        if parent != NONE:
            if first != NONE:
                chunks.prev[first] = row
            chunks.child[parent] = row
            if self.layered and chunks.tally[row] & col.HERE:
                chunks.kids[parent] += 1

    def unlink(self, row: int) -> None:
        chunks = self.chunks
        parent, before, after = chunks.parent[row], chunks.prev[row], chunks.next[row]
        if self.layered and parent != NONE and chunks.tally[row] & col.HERE:
            chunks.kids[parent] -= 1
        if after != NONE:
            chunks.prev[after] = before
        if before != NONE:
            chunks.next[before] = after
        elif parent != NONE:
            chunks.child[parent] = after
            if after == NONE and self.is_empty(parent):
                self.husks.append(parent)
        chunks.parent[row] = NONE

    def is_empty(self, row: int) -> bool:
        """Neither bytes nor a writer: a hole, or about to go."""
        chunks = self.chunks
        if chunks.ready[row] or chunks.writing[row] or chunks.bad[row]:
            return False
        return not (self.layered and chunks.below[row])

    def resident(self, row: int) -> bool:
        return bool(self.chunks.ready[row] or self.chunks.bad[row])

    def orphan(self, row: int) -> bool:
        """Its parent is absent, or not ready yet."""
        parent = self.chunks.parent[row]
        return not (self.chunks.ready[parent] or self.chunks.below[parent])

    def leaf(self, row: int) -> bool:
        """Nothing that hangs below it is in DRAM, or being written."""
        if self.layered:
            return not self.chunks.kids[row]
        return bool(self.chunks.child[row] == NONE)

    def present(self, row: int) -> bool:
        """Whether there is a chunk in this row that has bytes, here or below."""
        chunks = self.chunks
        return row != NONE and bool(chunks.ready[row] or chunks.below[row])

    def bridged(self, hole: int) -> bool:
        """Whether a hole stands for a chunk of the namespace `public`: what hangs under it may be
        in a leading run."""
        space = self.spaces.of(self.chunks.space[hole])
        public = self.spaces.find(PUBLIC, space.digest, space.kind)
        if public is None or public is space:
            return False
        return self.present(public.get(self.chunks.key_of(hole)))

    def recount(self, row: int) -> None:
        """The chunk may have come to DRAM or left it: say so to its parent and its space."""
        if not self.layered:
            return
        chunks = self.chunks
        here = chunks.ready[row] or chunks.writing[row] or chunks.bad[row]
        alone = chunks.below[row] and not (chunks.ready[row] or chunks.bad[row])
        both = chunks.below[row] and chunks.ready[row]
        tally = (col.HERE if here else 0) | (col.ALONE if alone else 0)
        tally |= col.BOTH if both else 0
        changed = tally ^ chunks.tally[row]
        if not changed:
            return
        chunks.tally[row] = tally
        parent = chunks.parent[row]
        if changed & col.HERE and parent != NONE:
            chunks.kids[parent] += 1 if here else -1
        if changed & col.BOTH:
            tenant = self.tenant(row)
            self.both[tenant] = self.both.get(tenant, 0) + (1 if both else -1)
        if changed & col.ALONE:
            self.spaces.of(chunks.space[row]).alone += 1 if alone else -1

    def tenant(self, row: int) -> int:
        """Whose the chunk is."""
        return self.spaces.of(self.chunks.space[row]).tenant

    def evicts(self, row: int, by: int, tier: TierUse) -> None:
        """A tenant is about to lose a chunk, for want of room of another (NOBODY: of none)."""
        tenant = self.tenant(row)
        if tier is self.shares.dram and self.layered:
            for size in self.slots(row):
                self.slabs.made_room(size, by, tenant)
        if tenant == by:
            return
        label = "dram" if tier is self.shares.dram else "below"
        counts = self.counters.tenant(self.shares.names[tenant])
        counts["evictions_suffered", label] += 1
        if tier.use[tenant] <= tier.minimum[tenant]:
            counts["evictions_below_minimum", label] += 1
        if by:
            self.counters.tenant(self.shares.names[by])["evictions_inflicted", label] += 1

    def slots(self, row: int) -> list[int]:
        """Sizes of the slots that a chunk has."""
        first, space = self.chunks.cell[row], self.spaces.of(self.chunks.space[row])
        held = (col.READY, col.BAD)
        return [n for s, n in enumerate(space.slot_sizes) if self.cells.state[first + s] in held]

    def queue(self, row: int) -> int:
        """The policy's queue of a chunk."""
        chunks = self.chunks
        return self._queue(self.spaces.of(chunks.space[row]), chunks.cell[row])

    def _queue(self, space: Space, cell: int) -> int:
        """That of a chunk with this first cell."""
        adopted = cell != NONE and self.cells.marks[cell] & col.ADOPTED
        return space.queues[1 if adopted else 0]

    def settle(self, row: int) -> None:
        """The chunk's counts have changed: put it where it belongs now. The row may be gone
        afterwards."""
        chunks = self.chunks
        if self.layered:
            self.recount(row)
        if row in self.pinned or not self.is_empty(row):
            return
        if self.layered and chunks.leases[row]:
            return  # its last copy below is gone; the lease's end sees to it
        space = self.spaces.of(chunks.space[row])
        cell = chunks.cell[row]
        if cell != NONE:
            self.cells.give(cell, space.shards)
            chunks.cell[row] = NONE
        holes = self.holes[space.queues[0]]
        if chunks.child[row] != NONE:
            holes[row] = None
            return
        if holes:
            holes.pop(row, None)
        self.unlink(row)
        self.index.remove(row)
        if self.layered:
            chunks.warm[row] = 0
        if self.keeping.by_row:
            self.keeping.drop(row)
        chunks.give(row)

    def sweep(self, budget: int) -> int:
        """Remove rows that lost their last child; a chain of holes goes one after the other."""
        while self.husks and budget > 0:
            row = self.husks.popleft()
            budget -= 1
            if self.chunks.space[row] and self.is_empty(row):
                self.settle(row)
        return budget

    def pin(self, row: int) -> None:
        """Keep the row, and its bytes from being chosen, until `unpin`."""
        self.pinned[row] = self.pinned.get(row, 0) + 1

    def unpin(self, row: int) -> None:
        left = self.pinned.pop(row) - 1
        if left:
            self.pinned[row] = left
        else:
            self.settle(row)

    def grow_queues(self) -> None:
        """A new space may have brought new queues."""
        while len(self.holes) < len(self.spaces.queue_classes):
            self.holes.append({})
            self.bad.append({})
            self.residents.append(0)

    # -- shards ---------------------------------------------------------------------------------

    def enter(self, row: int) -> None:
        """A first shard became ready: the chunk is resident, and the policy's business."""
        chunks = self.chunks
        space = self.spaces.of(chunks.space[row])
        queue = self._queue(space, chunks.cell[row])
        if holes := self.holes[space.queues[0]]:
            holes.pop(row, None)
        if bad := self.bad[queue]:
            bad.pop(row, None)
        self.residents[queue] += 1
        self.policy.insert(
            row,
            parent=chunks.parent[row],
            queue=queue,
            size=space.chunk_slot_bytes,
            ghost=self.ghost(row),
            now=self.now,
        )

    def leave(self, row: int, queue: int, *, evicted: bool) -> None:
        """No shard is ready any more."""
        self.residents[queue] -= 1
        self.policy.forget(row, evicted=evicted)

    def policy_failed(self, told: PolicyFailed) -> None:
        """A policy that raises costs order, never service."""
        self.counters.own["policy_errors", ""] += 1
        self.out.append(told)

    def free_slot(self, record: int, *, earlier: bool = False) -> None:
        """The slot's generation changes now, before anybody can get it."""
        self.out.append(named(PatchRecord, (record, _FREE, self.generation(), None, None)))
        if earlier and self.hold:
            self.slabs.set_cell(record, DETACHED)
            self.held.append(record)
            self.held_bytes += self.slabs.size_of(record)
        else:
            self.slabs.give(record)

    def drop(self, row: int, reason: str, *, evicted: bool) -> int:
        """Remove all ready and quarantined shards; the payload bytes that they had. The row may
        be gone afterwards."""
        chunks, cells = self.chunks, self.cells
        space = self.spaces.of(chunks.space[row])
        first = chunks.cell[row]
        queue = self._queue(space, first)
        freed = 0
        if chunks.ready[row]:
            if evicted:
                self.stay_ns += (self.now - chunks.last[row] - self.stay_ns) * STAY_WEIGHT
            self.leave(row, queue, evicted=evicted)
        if bad := self.bad[queue]:
            bad.pop(row, None)
        for shard in range(space.shards):
            state = cells.state[first + shard]
            if state == col.READY or state == col.BAD:
                freed += space.nbytes[shard]
                self.clear_cell(first + shard)
        chunks.ready[row] = chunks.bad[row] = 0
        if self.layered:
            self._left_dram(row, space)
        space.chunks -= 1
        space.bytes -= freed
        counts = self.counters.tenant(space.namespace)
        counts["chunks_evicted", reason] += 1
        counts["bytes_evicted", ""] += freed
        self.settle(row)
        return freed

    def _left_dram(self, row: int, space: Space) -> None:
        """What stays below is no longer what an earlier life left here, and has to earn its way
        back."""
        chunks = self.chunks
        transient = self.transients.pop(row, None)
        if transient is None:
            chunks.warm[row] = 0
        else:
            self.transient_bytes -= transient
        if not chunks.writing[row]:
            first = chunks.cell[row]
            for cell in range(first, first + space.shards):
                self.cells.marks[cell] = 0

    def clear_cell(self, cell: int) -> None:
        """Free the slot of a ready or quarantined cell. Counts are the caller's."""
        cells = self.cells
        marks = cells.marks[cell]
        self.free_slot(cells.record[cell], earlier=bool(marks & col.EARLIER))
        cells.state[cell] = col.ABSENT
        # ADOPTED stays: it names the chunk's queue until its last cell is given back
        cells.marks[cell] = marks & col.ADOPTED

    def quarantine(self, cell: int) -> None:
        """The payload is not what its digest says: invisible from now on."""
        cells, chunks = self.cells, self.chunks
        row = cells.chunk[cell]
        cells.state[cell] = col.BAD
        self.out.append(PatchRecord(cells.record[cell], state=State.QUARANTINED))
        chunks.ready[row] -= 1
        chunks.bad[row] += 1
        if not chunks.ready[row]:
            queue = self.queue(row)
            self.leave(row, queue, evicted=False)
            self.bad[queue][row] = None

    def ghost(self, row: int) -> int:
        """64 bits that stand for a chunk in a policy's memory of what it evicted."""
        word: int = self.chunks.word[4 * row + 1]
        return word ^ self.spaces.salts[self.chunks.space[row]]

    def ghosts(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The same of many."""
        salts = np.array(self.spaces.salts, np.uint64)
        ghosts: NDArray[np.uint64] = self.chunks.np_key[rows, 1] ^ salts[self.chunks.np_space[rows]]
        return ghosts
