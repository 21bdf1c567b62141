"""Room made ahead: slots for the next store, freed while its client copies this one.

The law of this module: who stores at a full arena pays for victims in the pauses between its
requests, not inside them. Nothing goes before a request has had to evict: what fits the arena to
its last slot stays. No more is made free than the last request took, nor more than a small share of
the class, and only as that request itself could have done it: by the same choice, at the cost of
the same tenants. With tiers below, demotion keeps slots free instead (see Demotions).
"""

from __future__ import annotations

from typing import Final

from kvd.core.evictions import Evictions
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.victims import Found, Search

_SWEEP: Final = 256


class Ahead:
    """At most one job a size class."""

    def __init__(self, store: Store, jobs: Jobs, evictions: Evictions) -> None:
        self._store = store
        self._jobs = jobs
        self._evictions = evictions
        self._share = store.config.ahead_share
        self._making: set[int] = set()

    def took(self, space: Space, shard: int, slots: int) -> None:
        """A store took so many slots for a shard: its next one will want as many."""
        store, size = self._store, space.slot_sizes[shard]
        slabs = store.slabs
        wanted = min(slots, int(slabs.slots.get(size, 0) * self._share))
        if not self._short(size, wanted):
            self._evictions.pressed.discard(size)
        elif size in self._evictions.pressed and size not in self._making and not store.layered:
            self._making.add(size)
            self._jobs.later(self._make(size, space.tenant, wanted))

    def _short(self, size: int, wanted: int) -> bool:
        """Whether so many slots are neither free nor to be had from a slab with nothing in it."""
        slabs = self._store.slabs
        if slabs.slots.get(size, 0) - slabs.used.get(size, 0) >= wanted:
            return False
        # memory that is still being taken, at the start, will be slabs
        return slabs.open == slabs.count and slabs.blank() < 0 and slabs.empty(but=size) < 0

    def _make(self, size: int, tenant: int, wanted: int) -> Work[None]:
        store, evictions = self._store, self._evictions
        search = Search()
        try:
            while self._short(size, wanted) and self._may(size, tenant):
                if store.touches.waiting:
                    store.touches.apply()
                if store.husks:
                    store.sweep(_SWEEP)  # who has only husks below is a leaf
                found = evictions.evict_one(size, search, tenant)
                if found is Found.DONE:
                    evictions.reclass.evicted(size)
                elif found is Found.NOTHING:
                    return
                if spent(store, 1 if found is Found.DONE else 10):
                    yield Pause.SLICE
        finally:
            self._making.discard(size)

    def _may(self, size: int, tenant: int) -> bool:
        """Whether the next store would evict, too, rather than be refused or empty a slab."""
        store, reclass = self._store, self._evictions.reclass
        if store.draining or reclass.active(size) or reclass.due(size):
            return False
        return not (store.shares.isolate and store.shares.dram.full(tenant, size))
