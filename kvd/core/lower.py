"""The tiers below DRAM, as the core knows them: which shards lie where.

The law of this module: a place stands here only while the tier would answer a read of it, as far as
anybody knows; a tier that is away keeps its places, and its chunks are misses meanwhile. A chunk
may lie in several tiers at once. For one key one job is under way at a time: while it is, the row
is *active* and pinned, so it can't go, here or there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import ChunkHeader, State
from kvd.core import columns as col
from kvd.core.advice import Advice
from kvd.core.columns import NONE, column
from kvd.core.config import TierConfig, WritePolicy, slot_size
from kvd.core.shares import TierUse
from kvd.errors import BadKey
from kvd.eviction.base import Policy

if TYPE_CHECKING:
    from kvd.core.spaces import Space
    from kvd.core.store import Store

ABSENT: Final = 0
READY: Final = 1


class Lower:
    """One tier. Arrays by cell, beside those of `Cells`; `count` by row of `Chunks`."""

    def __init__(
        self, number: int, config: TierConfig, policy: Policy, rows: int, use: TierUse
    ) -> None:
        self.number = number  # 0: the tier right below DRAM
        self.bit = 1 << number
        self.config = config
        self.name = config.name
        self.policy = Advice(policy, config.name)
        self.np_at, self.at = column(rows, np.uint64)
        self.np_generation, self.generation = column(rows, np.uint64)
        self.np_state, self.state = column(rows, np.uint8)
        self.np_count, self.count = column(rows + 1, np.uint16)  # shards of a chunk
        self.residents: dict[int, int] = {}  # by queue
        self.chunks = 0  # with at least one shard here
        self.bytes = 0  # payload bytes
        self.use = use  # by tenant
        self.told_readable = False
        self.told_writable = False
        self.overdue = 0  # jobs that did not come back in time: the medium hangs
        self.reading = 0  # jobs in flight
        self.writing = 0

    @property
    def readable(self) -> bool:
        return self.told_readable and not self.overdue

    @property
    def writable(self) -> bool:
        return self.told_writable and not self.overdue


def unknown_tier(name: str, known: list[str]) -> BadKey:
    """What to answer who names a tier below DRAM that there is not; `known`: those there are."""
    if known:
        return BadKey(f"tier {name!r} is unknown: known below DRAM are {', '.join(known)}")
    return BadKey(
        f"tier {name!r} is unknown: no tier below DRAM is configured; a section [tiers.NAME] of "
        "the configuration adds one"
    )


class TierJob:
    """One job in a tier's hands."""

    __slots__ = ("cell", "deadline", "kind", "late", "lower", "owner", "row")

    def __init__(
        self, kind: str, lower: Lower, row: int, cell: int, deadline: int, owner: object
    ) -> None:
        self.kind = kind  # read, write, delete, scrub or descent
        self.lower = lower
        self.row = row
        self.cell = cell
        self.deadline = deadline
        self.owner = owner
        self.late = False


GRACE_NS: Final = 250_000_000  # a tier is given this beyond a deadline to say so itself


class Ladder:
    """All tiers below, in order; and the jobs in their hands."""

    def __init__(self, store: Store, policies: list[Policy]) -> None:
        self._store = store
        rows = store.config.rows
        self.lowers = [
            Lower(n, config, policy, rows, store.shares.tiers[n + 1])
            for n, (config, policy) in enumerate(zip(store.config.tiers, policies, strict=True))
        ]
        for lower in self.lowers:
            lower.policy.failed = store.policy_failed
        self.jobs: dict[int, TierJob] = {}
        self.active: dict[int, int] = {}  # row -> jobs and moves under way
        self.readable = 0  # bits of the tiers that can be read now

    def find(self, name: str) -> Lower | None:
        return next((lower for lower in self.lowers if lower.name == name), None)

    def named(self, name: str) -> Lower:
        """BadKey if there is no such tier."""
        lower = self.find(name)
        if lower is None:
            raise unknown_tier(name, [low.name for low in self.lowers])
        return lower

    def refresh(self) -> None:
        """A tier's health may have changed."""
        self.readable = sum(lower.bit for lower in self.lowers if lower.readable)

    # -- places ---------------------------------------------------------------------------------

    def source(self, cell: int, tried: int = 0) -> Lower | None:
        """The nearest tier that a shard can be read from now; `tried`: bits of those that are out
        of the question."""
        for lower in self.lowers:
            if lower.state[cell] == READY and lower.readable and not lower.bit & tried:
                return lower
        return None

    def sources(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of many shards: numbers of tiers, NONE for what is in none."""
        found: NDArray[np.int64] = np.full(cells.shape, NONE, np.int64)
        for lower in reversed(self.lowers):
            if lower.readable:
                found[lower.np_state[cells] == READY] = lower.number
        return found

    def reachable(self, cell: int) -> bool:
        """Whether a shard can be delivered: from DRAM, or from below into a slot."""
        state = self._store.cells.state[cell]
        return bool(state == col.READY or (state == col.ABSENT and self.source(cell) is not None))

    def wants(self, lower: Lower, row: int) -> bool:
        """Whether a tier takes a chunk that leaves the one above, by its write policy."""
        if lower.config.policy is WritePolicy.ON_SECOND_HIT:
            return bool(self._store.chunks.hits[row] > 1)
        return True

    def holds(self, lower: Lower, row: int) -> bool:
        """Whether the tier has every shard that DRAM has."""
        store = self._store
        if not lower.count[row]:
            return False
        first = store.chunks.cell[row]
        shards = store.spaces.of(store.chunks.space[row]).shards
        return all(
            store.cells.state[cell] != col.READY or lower.state[cell] == READY
            for cell in range(first, first + shards)
        )

    def backed(self, row: int) -> bool:
        """Whether every shard that DRAM has lies in some tier, too."""
        store = self._store
        first = store.chunks.cell[row]
        shards = store.spaces.of(store.chunks.space[row]).shards
        return all(
            store.cells.state[cell] != col.READY
            or any(lower.state[cell] == READY for lower in self.lowers)
            for cell in range(first, first + shards)
        )

    def elsewhere(self, lower: Lower, row: int) -> bool:
        """Whether all shards that the tier has are also in DRAM or another tier."""
        store = self._store
        first = store.chunks.cell[row]
        shards = store.spaces.of(store.chunks.space[row]).shards
        others = [other for other in self.lowers if other is not lower]
        return all(
            lower.state[cell] != READY
            or store.cells.state[cell] == col.READY
            or any(other.state[cell] == READY for other in others)
            for cell in range(first, first + shards)
        )

    def record(self, lower: Lower, space: Space, key: bytes, shard: int) -> ChunkHeader | None:
        """The record of a shard that lies in the tier, as far as anybody knows. None if it doesn't,
        or if its digest isn't known here."""
        store = self._store
        row = space.get(key)
        if row == NONE or store.chunks.cell[row] == NONE:
            return None
        cell = store.chunks.cell[row] + shard
        if lower.state[cell] != READY or not store.cells.marks[cell] & col.SEALED:
            return None
        return store.headers.of(cell, State.READY, 0)

    def put(self, lower: Lower, cell: int, at: int, generation: int) -> None:
        """A shard lies in a tier from now on."""
        store, chunks = self._store, self._store.chunks
        row = store.cells.chunk[cell]
        space = store.spaces.of(chunks.space[row])
        lower.at[cell] = at
        lower.generation[cell] = generation
        if lower.state[cell] == READY:
            return
        lower.state[cell] = READY
        nbytes = space.nbytes[cell - chunks.cell[row]]
        lower.bytes += nbytes
        lower.use.use[space.tenant] += slot_size(nbytes)
        space.below_bytes += nbytes
        count = lower.count[row] + 1
        lower.count[row] = count
        chunks.below[row] += 1
        if count == 1:
            queue = space.queues[0]
            lower.chunks += 1
            lower.residents[queue] = lower.residents.get(queue, 0) + 1
            lower.policy.insert(
                row,
                parent=chunks.parent[row],
                queue=queue,
                size=space.chunk_slot_bytes,
                ghost=store.ghost(row),
                now=store.now,
            )
        if count == space.shards:
            chunks.full[row] |= lower.bit
        store.holes[space.queues[0]].pop(row, None)
        store.recount(row)

    def forget(self, lower: Lower, cell: int) -> None:
        """A shard lies there no more. The caller settles the row."""
        store, chunks = self._store, self._store.chunks
        if lower.state[cell] != READY:
            return
        row = store.cells.chunk[cell]
        space = store.spaces.of(chunks.space[row])
        lower.state[cell] = ABSENT
        nbytes = space.nbytes[cell - chunks.cell[row]]
        lower.bytes -= nbytes
        lower.use.use[space.tenant] -= slot_size(nbytes)
        space.below_bytes -= nbytes
        lower.count[row] -= 1
        chunks.below[row] -= 1
        chunks.full[row] &= ~lower.bit & 0xFF
        if not lower.count[row]:
            lower.chunks -= 1
            lower.residents[space.queues[0]] -= 1
            lower.policy.forget(row, evicted=True)
        store.recount(row)

    # -- jobs -----------------------------------------------------------------------------------

    def begin(self, kind: str, lower: Lower, cell: int, within: int, owner: object) -> int:
        """A job is about to be handed over; its number. The row stays until `end`."""
        store = self._store
        row = store.cells.chunk[cell]
        number = store.handle()
        job = TierJob(kind, lower, row, cell, store.now + within, owner)
        self.jobs[number] = job
        self.hold(row)
        if kind == "read":
            lower.reading += 1
        elif kind == "write":
            lower.writing += 1
        store.timers.add(job.deadline + GRACE_NS, "tier", number)
        return number

    def end(self, number: int) -> TierJob | None:
        """A job came back. The caller calls `release(row)` when it is done with the row."""
        job = self.jobs.pop(number, None)
        if job is None:
            return None
        if job.kind == "read":
            job.lower.reading -= 1
        elif job.kind == "write":
            job.lower.writing -= 1
        if job.late:
            job.lower.overdue -= 1
            self.refresh()
        else:
            self._store.timers.remove(job.deadline + GRACE_NS, "tier", number)
        return job

    def late(self, number: int) -> TierJob | None:
        """A job has not come back in time: its tier is away until it does."""
        job = self.jobs.get(number)
        if job is not None and not job.late:
            job.late = True
            job.lower.overdue += 1
            self.refresh()
            return job
        return None

    def hold(self, row: int) -> None:
        self._store.pin(row)
        self.active[row] = self.active.get(row, 0) + 1

    def release(self, row: int) -> None:
        left = self.active[row] - 1
        if left:
            self.active[row] = left
        else:
            del self.active[row]
        self._store.unpin(row)
