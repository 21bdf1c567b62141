"""Making room: a free slot of a size class, by whatever is legal.

The law of this module: only a leaf goes, and only one that is neither leased, nor being written,
nor relied on by a request in progress, nor possibly read since before a restart. What can be in no
leading run goes first: chunks in quarantine, and what hangs under a hole. Whose chunk goes is
decided before which (kvd.core.shares); the policy only says in which order that tenant's others go.
NO_SPACE means that every candidate was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum, auto
from math import ceil
from typing import Final

from kvd.core import columns as col
from kvd.core.actions import AssignSlab
from kvd.core.columns import NONE
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.reclass import Reclass
from kvd.core.shares import NOBODY
from kvd.core.store import Store
from kvd.native import plain_members

_SKIPS: Final = 64  # candidates that are passed over at a time, and then put behind the others
_DESCENT: Final = 8192  # steps down one hole's subtree at a time
_FEW: Final = 64
_SWEEP: Final = 256
_SCAN: Final = 1024  # rows looked at where a policy does not know all
_CROWD: Final = 32  # slots of a class, fewer of which are not kept for anybody
_WAITS: Final = 8  # times that one slot waits for slabs to be emptied
NO_ROOM, OVER_MAXIMUM = -1, -2  # what `slot` answers instead of a record


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


class Evictions:
    """Slots on demand."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self.reclass = Reclass(store, jobs, self.legal, self.room, self.assign)
        self._hand = 0  # of the scan
        self.pressed: set[int] = set()  # classes in which a store had to evict, see Ahead
        # the next to go under a hole, so that a long chain is not walked down for each: by queue
        self._under: dict[int, tuple[int, bytes, int, bytes]] = {}
        # with tiers below: whether demotions will free slots of a class, and when to stop waiting
        self.coming: Callable[[int], bool] = lambda size: False
        # the same for a tenant that is at its maximum: whether it is being thinned out
        self.thinning: Callable[[int, int], bool] = lambda size, tenant: False
        self.moving: Callable[[int], bool] = lambda size: False  # some are in a tier's hands
        self.settled: Callable[[int], bool] = self._clean  # it is where it would be demoted to
        self.lost: Callable[[int], None] = lambda row: None  # a chunk goes and is nowhere below

    def free_slot(self, size: int, tenant: int) -> int:
        """A slot that is free already, taken for a tenant, as a record number; NO_ROOM if there
        is none that it may have."""
        shares = self._store.shares
        if shares.isolate and shares.dram.full(tenant, size):
            return NO_ROOM
        return self._take(size, tenant)

    def slot(self, size: int, tenant: int = NOBODY) -> Work[int]:
        """A slot of a class, taken for a tenant, as a record number; NO_ROOM if nothing can make
        room now, OVER_MAXIMUM if it is the tenant's maximum that can't be kept otherwise."""
        store, slabs = self._store, self._store.slabs
        search, waits, until = Search(), 0, 0
        while True:
            if store.shares.isolate and store.shares.dram.full(tenant, size):
                kept = yield from self._keep_maximum(size, tenant)
                if not kept:
                    return OVER_MAXIMUM
            record = self._take(size, tenant)
            if record >= 0:
                return record
            if self._take_slab(size):
                continue
            if store.touches.waiting:
                store.touches.apply()
            if store.husks:
                store.sweep(_SWEEP)  # who has only husks below is a leaf
            owed = self._owed(size, tenant)
            if self.reclass.due(size) and self.reclass.start(size, tenant, must=owed):
                search = Search()
                record = self._take(size, tenant)
                if record >= 0:
                    return record
            if owed and self.reclass.active(size) and waits < _WAITS:
                waits += 1
                yield Pause.ROOM
                continue
            if store.layered and self._drop_clean(size, tenant):
                continue
            if self.coming(size) and (not until or store.now < until):
                until = until or self._wait()
                yield Pause.DEMOTION
                search = Search()
                continue
            found = self.evict_one(size, search, tenant)
            if found is Found.DONE:
                self.reclass.evicted(size)
                self.pressed.add(size)
                spent(store)
            elif found is Found.AGAIN or store.husks:
                if spent(store, 10):
                    yield Pause.SLICE
            elif self.reclass.active(size) and waits < _WAITS:
                waits += 1
                yield Pause.ROOM
                search = Search()
            elif waits >= _WAITS or not self.reclass.start(size, tenant, must=True):
                if not self.moving(size) or (until and store.now >= until):
                    return slabs.take(size, tenant)  # one that was kept, rather than none
                until = until or self._wait()
                yield Pause.DEMOTION
                search = Search()

    def _take(self, size: int, tenant: int) -> int:
        """A free slot, if it is not one of those that are kept from this tenant; else -1."""
        store, slabs = self._store, self._store.slabs
        if store.layered:  # else none are kept
            free = slabs.slots.get(size, 0) - slabs.used.get(size, 0)
            if free <= self.kept(size) and store.shares.dram.beyond(tenant, size):
                return NO_ROOM
        return slabs.take(size, tenant)

    def kept(self, size: int) -> int:
        """How many of a class's slots, the last free ones, are for tenants within their share: they
        find one at once while another fills whatever becomes free. Half of what demotion keeps
        free; none where nobody demotes, or there is nobody to keep them for."""
        store = self._store
        if not (store.layered and store.shares.isolate and len(store.shares.names) > 2):
            return 0
        slots = store.slabs.slots.get(size, 0)
        return max(1, ceil(slots * (1 - store.config.high)) // 2) if slots >= _CROWD else 0

    def _wait(self) -> int:
        """How long a slot is waited for that may come: ns. The waiting is woken then."""
        store = self._store
        until = store.now + store.config.room_wait_ns
        store.timers.add(until, "room", store.handle())
        return until

    def _keep_maximum(self, size: int, tenant: int) -> Work[bool]:
        """Evict the tenant's own until a slot more keeps to its maximum; False if that can't be."""
        store = self._store
        until = 0
        search = Search()
        use = store.shares.dram
        while use.full(tenant, size):
            if size > use.maximum[tenant]:
                return False
            store.touches.apply()
            if store.layered and (not until or store.now < until) and self.thinning(size, tenant):
                until = until or self._wait()
                yield Pause.DEMOTION
                search = Search()
                continue
            found = self.evict_one(None, search, tenant, own=True)
            if found is Found.NOTHING:
                return False
            if spent(store, 1 if found is Found.DONE else 10):
                yield Pause.SLICE
        return True

    def _owed(self, size: int, tenant: int) -> bool:
        """Whether somebody should give room to the tenant who has nothing of this class to give."""
        store = self._store
        if not store.shares.isolate or tenant == NOBODY or len(store.shares.names) < 3:
            return False
        use = store.shares.dram
        here = {store.spaces.queue_tenants[q] for q in self._queues(size) if store.residents[q]}
        others = {
            owner
            for queue, owner in enumerate(store.spaces.queue_tenants)
            if owner not in here and store.residents[queue]
        }
        if not others:
            return False
        return use.victim({*here, *others, tenant}, tenant, size) in others - {tenant}

    def spare(self, size: int, tenant: int) -> int:
        """A slot of a class that nobody will miss, taken for a tenant: a free one, as long as half
        of what is kept free for stores is left, for what demotion makes up for; or that of
        something cold that lies below already. NO_ROOM if there is none."""
        store, slabs = self._store, self._store.slabs
        if store.shares.isolate and store.shares.dram.full(tenant, size):
            return NO_ROOM
        slots = slabs.slots.get(size, 0)
        keep = ceil(slots * (1 - store.config.high))
        if any(lower.writable for lower in store.ladder.lowers):
            keep //= 2
        if slots - slabs.used.get(size, 0) > keep:
            return slabs.take(size, tenant)
        if self._take_slab(size) or self._drop_clean(size, tenant, but=store.transients):
            return slabs.take(size, tenant)
        return NO_ROOM

    def _take_slab(self, size: int) -> bool:
        """Give the class a slab with nothing in it, if there is one that can be."""
        for slab in (self._store.slabs.blank(), self._store.slabs.empty(but=size)):
            if slab >= 0 and self.room(slab, size):
                self.assign(slab, size)
                return True
        return False

    def room(self, slab: int, size: int) -> bool:
        """Whether the slab's records have memory for slots of a size."""
        if self._store.slabs.room(slab, size):
            return True
        self._store.counters.own["slabs_refused", ""] += 1
        return False

    def assign(self, slab: int, size: int) -> None:
        """Give an empty slab to a class."""
        self._store.slabs.assign(slab, size)
        self._store.out.append(AssignSlab(slab, size))
        self._store.counters.own["slabs_assigned", ""] += 1

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

    def evict_one(
        self, size: int | None, search: Search, by: int = NOBODY, *, own: bool = False
    ) -> Found:
        """Remove the chunk with slots of this class (None: of any) that is worth least. `by`: who
        needs room; `own`: of its own only."""
        found, row, reason = self.choose(size, search, by, own=own)
        if found is Found.DONE:
            self.remove(row, reason, by)
        return found

    def remove(self, row: int, reason: str, by: int = NOBODY) -> None:
        """Drop a chunk that was chosen. If a tier below has all of it, it was demoted."""
        store = self._store
        if reason != "quarantine":
            store.evicts(row, by, store.shares.dram)
        if reason == "capacity" and store.layered:
            if self._clean(row):
                reason = "demoted"
            else:
                self.lost(row)
        why = "capacity" if reason == "orphan" else reason
        store.drop(row, why, evicted=reason != "quarantine")

    def _clean(self, row: int) -> bool:
        ladder = self._store.ladder
        return any(low.readable and ladder.holds(low, row) for low in ladder.lowers)

    def _drop_clean(self, size: int, by: int, but: Container[int] = ()) -> bool:
        """Drop something cold that a tier below has already, and that is not in `but`."""
        store = self._store
        if not store.ladder.readable:
            return False
        queues = [queue for queue in self._queues(size) if store.residents[queue]]
        for queue in self._givers(queues, by, size):
            if not store.both.get(store.spaces.queue_tenants[queue]):
                continue  # there is nothing to be found, and a walk costs
            for n, row in enumerate(store.policy.leaves(queue, store.now)):
                if n >= _SKIPS:
                    break
                if not store.chunks.below[row] or row in but:
                    continue
                if self.legal(row) and self.settled(row):
                    store.evicts(row, by, store.shares.dram)
                    store.drop(row, "demoted", evicted=True)
                    return True
        return False

    def _queues(self, size: int | None) -> Sequence[int]:
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

    def _givers(self, queues: list[int], by: int, size: int) -> list[int]:
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
        everyone = self._queues(size)
        if len(everyone) == 1 and self._simple(queue := everyone[0], search, by):
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
        queue = self._coldest(left if own else self._givers(left, by, size or 0), search)
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

    def _simple(self, queue: int, search: Search, by: int) -> bool:
        """Whether, of a class with this queue alone, the next to go can only be its first
        candidate: as a rule where there is one model and one tenant."""
        store = self._store
        if search.failing or store.bad[queue] or store.holes[queue]:
            return False
        mine = store.spaces.queue_tenants[queue] == by or not store.shares.isolate
        return mine and search.passed.get(queue, 0) < store.residents[queue]

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
        policy, skipped = store.policy, list[int]()
        row = policy.first(queue, store.now)
        if row != NONE and not store.keeping.by_row and self.legal(row):
            return row  # as a rule
        for row in policy.leaves(queue, store.now):  # above what stays, nothing may go
            if self.legal(row):
                if not search.sparing or not store.keeping.spared(row, store.now):
                    break
                search.spared = True
            skipped.append(row)
            if len(skipped) >= _SKIPS:
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
