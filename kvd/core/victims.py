"""Whose chunk goes, and which: the choice behind every slot that is made free.

The law of this module: only a leaf goes, and only one that is neither leased, nor being written,
nor relied on by a request in progress, nor possibly read since before a restart. What can be in no
leading run goes first: chunks in quarantine, and what hangs under a hole. Whose chunk goes is
decided before which (kvd.core.shares); the policy only says in which order that tenant's others go.
NOTHING means that every candidate was looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from kvd.core import columns as col
from kvd.core.columns import NONE
from kvd.core.shares import NOBODY
from kvd.core.store import Store
from kvd.native import plain_members

SKIPS: Final = 64  # candidates that are passed over at a time, and then put behind the others
_DESCENT: Final = 8192  # steps down one hole's subtree at a time
_FEW: Final = 64
_SCAN: Final = 1024  # rows looked at where a policy does not know all


@plain_members
class Found(Enum):
    DONE = auto()  # something was evicted
    AGAIN = auto()  # not all candidates were looked at yet
    NOTHING = auto()


class Search:
    """How far one search for victims has got: candidates passed over, by queue."""

    def __init__(self) -> None:
        self.passed: dict[int, int] = {}
        self.failing = False  # the policy does not know all: rows are scanned instead
        self.sparing = True  # what hints spare goes only when nothing else can
        self.spared = False  # something was
        self.turn = 0  # of the policy, see Advice


class Victims:
    """Chooses, and changes nothing but the order of candidates that were passed over."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hand = 0  # of the scan
        # the next to go under a hole, so that a long chain is not walked down for each: by queue
        self._under: dict[int, tuple[int, bytes, int, bytes]] = {}

    def legal(self, row: int) -> bool:
        """Whether the chunk may go for room now."""
        store, chunks = self._store, self._store.chunks
        if not (chunks.ready[row] or chunks.bad[row]) or chunks.leases[row] or chunks.writing[row]:
            return False
        if not store.leaf(row) or row in store.pinned:
            return False
        if store.keeping.by_row and store.keeping.pinned(row, store.now):
            return False
        return not (store.hold and store.cells.marks[chunks.cell[row]] & col.ADOPTED)

    def queues(self, size: int | None) -> Sequence[int]:
        store = self._store
        every = range(len(store.residents)) if size is None else store.spaces.class_queues.get(size)
        if store.hold:
            return [q for q in every or () if not store.spaces.queue_adopted[q]]
        return every or ()

    def allowed(self, queue: int, by: int) -> bool:
        """Whether this queue's tenant may lose a chunk for want of room of another."""
        shares = self._store.shares
        owner = self._store.spaces.queue_tenants[queue]
        return owner == by or not shares.isolate or shares.dram.above(owner)

    def givers(self, queues: list[int], by: int, size: int) -> list[int]:
        """Those of the queues that belong to the tenant whose turn it is to give."""
        shares, owners = self._store.shares, self._store.spaces.queue_tenants
        if not shares.isolate or not queues:
            return queues
        giver = shares.dram.victim({owners[queue] for queue in queues}, by, size)
        return [queue for queue in queues if owners[queue] == giver]

    def choose(
        self, size: int | None, search: Search, by: int = NOBODY, *, own: bool = False
    ) -> tuple[Found, int, str]:
        """The chunk with slots of this class that is worth least, and the reason to drop it."""
        store = self._store
        if search.turn != store.policy.turn:  # it names others than it did
            search.turn = store.policy.turn
            search.failing = False
            search.passed.clear()
        everyone = self.queues(size)
        queue = self._only(everyone, search, by)
        if queue >= 0:
            row = self._victim(queue, search)
            return (Found.AGAIN, NONE, "") if row == NONE else (Found.DONE, row, "capacity")
        if own:
            owners = store.spaces.queue_tenants
            everyone = [queue for queue in everyone if owners[queue] == by]
        queues = [queue for queue in everyone if self.allowed(queue, by)]
        for queue in queues:
            for row in store.bad[queue]:
                if not store.chunks.leases[row] and row not in store.pinned:
                    return Found.DONE, row, "quarantine"
        for queue in queues:
            row = self._orphan(queue)
            if row != NONE:
                return Found.DONE, row, "orphan"
        left = [queue for queue in everyone if self._left(queue, search)]
        queue = self._coldest(left if own else self.givers(left, by, size or 0), search)
        if queue < 0 and search.spared:
            search.sparing = search.spared = False
            search.passed.clear()
            return Found.AGAIN, NONE, ""
        if queue < 0:
            if not store.policy.partial or search.failing:
                return Found.NOTHING, NONE, ""
            search.failing = True
            search.passed.clear()
            return Found.AGAIN, NONE, ""
        row = self._victim(queue, search)
        if row == NONE:
            return Found.AGAIN, NONE, ""
        return Found.DONE, row, "capacity"

    def _only(self, queues: Sequence[int], search: Search, by: int) -> int:
        """The queue of these whose first candidate alone can be the next to go: as a rule where
        there is one model and one tenant; else -1."""
        store, only = self._store, -1
        if search.failing:
            return -1
        for queue in queues:
            if store.bad[queue] or store.holes[queue]:
                return -1
            if store.residents[queue]:
                if only >= 0:
                    return -1
                only = queue
        if only < 0 or (search.passed and search.passed.get(only, 0) >= store.residents[only]):
            return -1
        mine = not store.shares.isolate or store.spaces.queue_tenants[only] == by
        return only if mine else -1

    def _left(self, queue: int, search: Search) -> bool:
        """Whether a queue has candidates that were not passed over."""
        store = self._store
        count = store.chunks.used if search.failing else store.residents[queue]
        return bool(store.residents[queue]) and search.passed.get(queue, 0) < count

    def _coldest(self, queues: Sequence[int], search: Search) -> int:
        """The queue to take from among those that have candidates left, or -1."""
        if len(queues) == 1:  # as a rule: then its coldness need not be worked out
            return queues[0]
        store = self._store
        best, least = -1, 0.0
        for queue in queues:
            cold = None if search.failing else store.policy.coldness(queue, store.now)
            if best < 0 or (cold is not None and cold < least):
                best, least = queue, 0.0 if cold is None else cold
        return best

    def _victim(self, queue: int, search: Search) -> int:
        """The first legal candidate of a queue, or NONE after a bounded number of others."""
        store = self._store
        if search.failing:
            return self._scan(queue, search)
        policy = store.policy
        row = policy.first(queue, store.now)
        if row != NONE and not store.keeping.by_row and self.legal(row):
            return row  # as a rule
        skipped: list[int] = []
        for row in policy.leaves(queue, store.now):  # above what stays, nothing may go
            if self.legal(row):
                if not search.sparing or not store.keeping.spared(row, store.now):
                    break
                search.spared = True
            skipped.append(row)
            if len(skipped) >= SKIPS:
                row = NONE
                break
        else:
            row = NONE
            search.passed[queue] = store.residents[queue]
        if skipped:  # else what is in use now would be met every time
            policy.defer(skipped, store.now)
        search.passed[queue] = search.passed.get(queue, 0) + len(skipped)
        return row

    def _scan(self, queue: int, search: Search) -> int:
        """A legal chunk of a queue by its row number, where the policy gives no advice."""
        store, chunks = self._store, self._store.chunks
        for _ in range(_SCAN):
            self._hand = (self._hand + 1) % max(chunks.used, 1)
            search.passed[queue] = search.passed.get(queue, 0) + 1
            row = self._hand
            if chunks.space[row] and self.legal(row) and store.queue(row) == queue:
                return row
        return NONE

    def _orphan(self, queue: int) -> int:
        """A legal leaf under a hole, or NONE."""
        store = self._store
        chunks = store.chunks
        holes = store.holes[queue]
        if not holes:
            return NONE
        if queue in self._under:
            hole, hole_key, row, key = self._under.pop(queue)
            same = chunks.key_of(hole) == hole_key and chunks.key_of(row) == key
            if hole in holes and same and row != hole:
                leaf = self._leaf(row)
                if leaf != NONE:
                    return self._found(queue, hole, leaf)
        few = len(holes) < 64 and not store.layered
        for hole in list(holes)[:4] if few else [next(iter(holes))]:
            if store.bridged(hole):  # no worse than others, as long as it stays so
                del holes[hole]
                continue
            leaf = self._leaf(hole)
            if leaf != NONE:
                return self._found(queue, hole, leaf)
            holes.pop(hole)
            holes[hole] = None  # others first, next time
        return NONE

    def _found(self, queue: int, hole: int, leaf: int) -> int:
        chunks = self._store.chunks
        above = chunks.parent[leaf]
        self._under[queue] = (hole, chunks.key_of(hole), above, chunks.key_of(above))
        return leaf

    def _leaf(self, top: int) -> int:
        """The first legal leaf below a chunk (or itself), or NONE within a bounded walk."""
        chunks = self._store.chunks
        row = top
        # with tiers below, a subtree may have nothing here: then it is not worth a long walk
        for _ in range(_FEW if self._store.layered else _DESCENT):
            while chunks.child[row] != NONE:
                row = chunks.child[row]
            if self.legal(row):
                return row
            while row != top and chunks.next[row] == NONE:
                row = chunks.parent[row]
            if row == top:
                return NONE
            row = chunks.next[row]
        return NONE
