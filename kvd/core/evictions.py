"""Making room: a free slot of a size class, by whatever is legal.

The law of this module: a slot comes from what is free, from a slab with nothing in it, from what a
tier below has already, and only then from a victim (kvd.core.victims); a tenant at its maximum pays
with its own. Waiting has a bound, and NO_ROOM means that nothing of these is left.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from math import ceil
from typing import Final

from kvd.core.actions import AssignSlab
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.reclass import Reclass
from kvd.core.shares import NOBODY
from kvd.core.store import Store
from kvd.core.victims import SKIPS, Found, Search, Victims

_SWEEP: Final = 256
_CROWD: Final = 32  # slots of a class, fewer of which are not kept for anybody
_WAITS: Final = 8  # times that one slot waits for slabs to be emptied
NO_ROOM, OVER_MAXIMUM = -1, -2  # what `slot` answers instead of a record


class Evictions:
    """Slots on demand."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self.victims = Victims(store)
        self.reclass = Reclass(store, jobs, self.victims.legal, self.room, self.assign)
        self.pressed: set[int] = set()  # classes in which a store had to evict, see Ahead
        # with tiers below: whether demotions will free slots of a class, and when to stop waiting
        self.coming: Callable[[int], bool] = lambda size: False
        # the same for a tenant that is at its maximum: whether it is being thinned out
        self.thinning: Callable[[int, int], bool] = lambda size, tenant: False
        self.moving: Callable[[int], bool] = lambda size: False  # some are in a tier's hands
        # size classes, and tenants at their maximum, for whom a wait brought nothing: none waits
        # again before a demotion has been done
        self._vain: set[tuple[str, int]] = set()
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
            if self.coming(size) and self._patient(("size", size), until):
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

    def _patient(self, what: tuple[str, int], until: int) -> bool:
        """Whether a demotion that is under way is waited for (on), until then."""
        if until and self._store.now >= until:
            self._vain.add(what)
        return what not in self._vain

    def hopeful(self, sizes: Iterable[int], tenant: int) -> None:
        """A demotion of a tenant's chunk with slots of these classes has been done."""
        if self._vain:
            self._vain.difference_update(("size", size) for size in sizes)
            self._vain.discard(("tenant", tenant))

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
            coming = store.layered and self.thinning(size, tenant)
            if coming and self._patient(("tenant", tenant), until):
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
        queues = self.victims.queues(size)
        here = {store.spaces.queue_tenants[q] for q in queues if store.residents[q]}
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

    def evict_one(
        self, size: int | None, search: Search, by: int = NOBODY, *, own: bool = False
    ) -> Found:
        """Remove the chunk with slots of this class (None: of any) that is worth least. `by`: who
        needs room; `own`: of its own only."""
        found, row, reason = self.victims.choose(size, search, by, own=own)
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
        queues = [queue for queue in self.victims.queues(size) if store.residents[queue]]
        for queue in self.victims.givers(queues, by, size):
            if not store.both.get(store.spaces.queue_tenants[queue]):
                continue  # there is nothing to be found, and a walk costs
            for n, row in enumerate(store.policy.leaves(queue, store.now)):
                if n >= SKIPS:
                    break
                if not store.chunks.below[row] or row in but:
                    continue
                if self.victims.legal(row) and self.settled(row):
                    store.evicts(row, by, store.shares.dram)
                    store.drop(row, "demoted", evicted=True)
                    return True
        return False
