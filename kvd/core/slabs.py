"""Where slots are: slabs of the arena, each cut into slots of one size class.

The law of this module: a record number is a slot and a slot is in one hand at a time: free, or
taken (by a cell, a condemned write, or the hold after a restart). A slab holds one size class;
it changes class only when nothing in it is taken. A taken slot is one tenant's, and counts in what
that one uses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.core.columns import column
from kvd.core.config import CoreConfig
from kvd.core.shares import NOBODY as NO_TENANT
from kvd.core.shares import Shares

NOBODY: Final = -1  # the slot is free
DETACHED: Final = -2  # taken, but by no cell


class Slabs:
    """Slots by size class. Bytes told are bytes of slots."""

    def __init__(self, config: CoreConfig, shares: Shares) -> None:
        self._use = shares.dram
        self.size = config.slab_size
        self.count = config.slab_count
        # with tiers below, what is above the low mark is nobody's: it is always being emptied
        self._headroom = config.low if config.tiers else 1.0
        self.records = config.records_per_slab
        # Whether a slab's records have memory for slots of a size: asked before it is cut so.
        self.room: Callable[[int, int], bool] = lambda slab, size: True
        self.open = 0  # slabs whose memory is reserved: those below
        self.slot_sizes = [0] * self.count  # 0: no class yet
        self.np_slot_size = np.zeros(max(self.count, 1), np.int64)
        self.taken = [0] * self.count
        self.draining: set[int] = set()  # no slot of these is given out
        self.owner: list[NDArray[np.int32] | None] = [None] * self.count  # slot -> cell
        self.tenant: list[NDArray[np.uint16] | None] = [None] * self.count  # slot -> whose
        # the same two for single values: a memoryview takes a third of what an array does
        self._owner: list[memoryview] = [memoryview(b"")] * self.count
        self._tenant: list[memoryview] = [memoryview(b"")] * self.count
        self._free: list[array[int]] = [array("i") for _ in range(self.count)]
        self._fresh = [0] * self.count  # slots from here on were never taken
        self._capacity = [0] * self.count
        self._partial: dict[int, list[int]] = {}  # size -> heap of slabs with free slots
        self._listed = [False] * self.count  # is it in its heap?
        self._blank: list[int] = []  # heap of open slabs without a class
        self._empty: dict[int, None] = {}  # slabs with a class and nothing taken
        self.taken_bytes = 0
        self.slots: dict[int, int] = {}  # size -> slots of its slabs that are open
        self.used: dict[int, int] = {}  # size -> slots of these that are taken
        # size -> tenant -> slots that it took and no room was made for yet; with tiers below only
        self.grown: dict[int, dict[int, int]] = {}
        self._demotes = bool(config.tiers)
        self.blanks = 0

    # -- places ---------------------------------------------------------------------------------

    def slab_of(self, record: int) -> int:
        return record // self.records

    def offset(self, record: int) -> int:
        """Bytes from the arena's start to the slot."""
        slab = record // self.records
        return slab * self.size + (record - slab * self.records) * self.slot_sizes[slab]

    def offsets(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        slab, slot = np.divmod(records, self.records)
        result: NDArray[np.int64] = slab * self.size + slot * self.np_slot_size[slab]
        return result

    def size_of(self, record: int) -> int:
        return self.slot_sizes[record // self.records]

    def cell_of(self, record: int) -> int:
        """The cell in whose hand the slot is, or NOBODY, or DETACHED."""
        slab, slot = divmod(record, self.records)
        if not 0 <= slab < self.count:
            return NOBODY
        owner = self._owner[slab]
        return NOBODY if slot >= len(owner) else owner[slot]

    def set_cell(self, record: int, cell: int) -> None:
        slab = record // self.records
        self._owner[slab][record - slab * self.records] = cell

    # -- slabs ----------------------------------------------------------------------------------

    def grow(self, reserved: int) -> None:
        """The arena's memory is there up to `reserved` bytes."""
        upto = min(self.count, reserved // self.size)
        for slab in range(self.open, upto):
            size = self.slot_sizes[slab]
            if size:
                self.slots[size] = self.slots.get(size, 0) + self._capacity[slab]
                self._list(slab)
            else:
                heappush(self._blank, slab)
        self.open = max(self.open, upto)
        self._resized()

    def _resized(self) -> None:
        """What can be used has changed: slots do not fill a slab to its last byte."""
        self.blanks = len(self._blank)
        usable = sum(size * slots for size, slots in self.slots.items())
        usable += (self.blanks + self.count - self.open) * self.size
        self._use.resize(int(usable * self._headroom))

    def capacity(self, slab: int) -> int:
        """Slots of a slab."""
        return self._capacity[slab]

    def blank(self) -> int:
        """An open slab without a class, or -1."""
        return self._blank[0] if self._blank else -1

    def empty(self, but: int) -> int:
        """An open slab of another class than `but` in which nothing is taken, or -1."""
        for slab in self._empty:
            if self.slot_sizes[slab] != but and slab < self.open and slab not in self.draining:
                return slab
        return -1

    def assign(self, slab: int, size: int) -> None:
        """Give a slab to a size class. Pre: nothing in it is taken; slab_size >= size."""
        if self._blank and self._blank[0] == slab:
            heappop(self._blank)
        self._cut(slab, size)
        self._list(slab)
        self._resized()

    def _cut(self, slab: int, size: int) -> None:
        slots = self.size // size
        before = self.slot_sizes[slab]
        if slab < self.open:
            if before:
                self.slots[before] -= self._capacity[slab]
            self.slots[size] = self.slots.get(size, 0) + slots
        self.used.setdefault(size, 0)
        self.slot_sizes[slab] = size
        self.np_slot_size[slab] = size
        self._capacity[slab] = slots
        self.owner[slab], self._owner[slab] = column(slots, np.int32, NOBODY)
        self.tenant[slab], self._tenant[slab] = column(slots, np.uint16)
        self._free[slab] = array("i")
        self._fresh[slab] = 0
        self._listed[slab] = False
        self._empty[slab] = None
        self.draining.discard(slab)

    def adopt(
        self,
        slab: int,
        size: int,
        taken: NDArray[np.int64],
        cells: NDArray[np.int32],
        tenants: NDArray[np.uint16],
    ) -> None:
        """A slab of an earlier life, with its taken slots, and in whose hand and whose they are."""
        self._cut(slab, size)
        owner, tenant = self.owner[slab], self.tenant[slab]
        assert owner is not None and tenant is not None
        owner[taken] = cells
        tenant[taken] = tenants
        for number, slots in enumerate(np.bincount(tenants).tolist()):
            self._use.use[number] += slots * size
        free = np.ones(len(owner), bool)
        free[taken] = False
        self._fresh[slab] = len(owner)
        self._free[slab] = array("i", np.flatnonzero(free)[::-1].astype(np.int32).tobytes())
        self.taken[slab] = len(taken)
        self.used[size] += len(taken)
        if len(taken):
            del self._empty[slab]
        self.taken_bytes += len(taken) * size
        self._list(slab)

    def adopted(self) -> None:
        """All slabs of an earlier life are there: only the others are blank."""
        self._blank = [slab for slab in range(self.open) if not self.slot_sizes[slab]]
        self._resized()

    def classes(self) -> list[int]:
        return sorted({size for size in self.slot_sizes if size})

    def slot_bytes(self) -> int:
        """Bytes of all slots of open slabs that have a class."""
        return sum(self._capacity[s] * self.slot_sizes[s] for s in range(self.open))

    # -- slots ----------------------------------------------------------------------------------

    def take(self, size: int, tenant: int = NO_TENANT) -> int:
        """A free slot of a class as a record number, or -1. Low slabs first, so high ones empty."""
        heap = self._partial.get(size)
        while heap:
            slab = heap[0]
            free = self._free[slab]
            usable = self.slot_sizes[slab] == size and slab not in self.draining
            if usable and slab < self.open:
                if free:
                    slot = free.pop()
                elif self._fresh[slab] < self._capacity[slab]:
                    slot = self._fresh[slab]
                    self._fresh[slab] = slot + 1
                else:
                    usable = False
                if usable:
                    if not self.taken[slab]:
                        del self._empty[slab]
                    self.taken[slab] += 1
                    self.used[size] += 1
                    self.taken_bytes += size
                    self._owner[slab][slot] = DETACHED
                    self._tenant[slab][slot] = tenant
                    self._use.use[tenant] += size
                    if self._demotes:
                        self._grow(size, tenant, 1)
                    return slab * self.records + slot
            heappop(heap)
            if self.slot_sizes[slab] == size:
                self._listed[slab] = False
        return -1

    def give(self, record: int) -> None:
        """Take a slot back. Pre: it is taken."""
        slab = record // self.records
        slot, owner = record - slab * self.records, self._owner[slab]
        assert owner[slot] != NOBODY
        owner[slot] = NOBODY
        self._free[slab].append(slot)
        self.taken[slab] -= 1
        if not self.taken[slab]:
            self._empty[slab] = None
        size = self.slot_sizes[slab]
        self.used[size] -= 1
        self.taken_bytes -= size
        tenant = self._tenant[slab][slot]
        self._use.use[tenant] -= size
        if self._demotes:
            self._grow(size, tenant, -1)
        if not self._listed[slab]:
            self._list(slab)

    # -- whose growth needs room ----------------------------------------------------------------

    def _grow(self, size: int, tenant: int, slots: int) -> None:
        grown = self.grown.setdefault(size, {})
        grown[tenant] = grown.get(tenant, 0) + slots

    def needy(self, size: int) -> int:
        """The tenant whose growth room of a class is made for next: of whom most slots are not made
        up for yet. Nobody, if all are."""
        grown = self.grown.get(size)
        most = max(grown, key=lambda tenant: grown[tenant]) if grown else NO_TENANT
        return most if grown and grown[most] > 0 else NO_TENANT

    def made_room(self, size: int, by: int, giver: int) -> None:
        """A tenant is about to give back a slot of a class for another's sake."""
        if self._demotes:
            self._grow(size, by, -1)
            self._grow(size, giver, 1)  # which goes with the slot: it has not grown less

    def ample(self, size: int) -> None:
        """There is more room of a class than is kept: nobody's growth needs any made."""
        if size in self.grown:
            self.grown[size].clear()

    def charge(self, record: int, tenant: int) -> None:
        """A taken slot is this tenant's from now on."""
        slab, slot = divmod(record, self.records)
        tenants = self._tenant[slab]
        size = self.slot_sizes[slab]
        self._use.use[tenants[slot]] -= size
        self._use.use[tenant] += size
        tenants[slot] = tenant

    def drain(self, slab: int) -> None:
        """Give out no more slots of it."""
        self.draining.add(slab)

    def undrain(self, slab: int) -> None:
        self.draining.discard(slab)
        self._list(slab)

    def _list(self, slab: int) -> None:
        if not self._listed[slab] and slab not in self.draining:
            self._listed[slab] = True
            heappush(self._partial.setdefault(self.slot_sizes[slab], []), slab)
