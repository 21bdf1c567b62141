"""Sealing: digests of stored payloads, taken in the background.

The law of this module: a chunk is readable before it is sealed, for a copy from a GPU has no CPU
pass that could hash on its way; and a digest counts only for the very slot and generation that was
hashed.
"""

from __future__ import annotations

from typing import Final

from kvd.chunk.header import FLAG_SEALED
from kvd.core import columns as col
from kvd.core.actions import PatchRecord, Seal
from kvd.core.store import Store
from kvd.native import named

_LOOKS: Final = 256  # cells looked at in one event; many may be gone by now


class Seals:
    """Digests taken in the background, oldest first, a few at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._in_flight: dict[tuple[int, int], int] = {}

    @property
    def waiting(self) -> bool:
        """Whether there is something to seal, and a worker for it."""
        in_flight = len(self._in_flight)
        return bool(self._store.unsealed) and in_flight < self._store.config.seals_in_flight

    def pump(self) -> None:
        store, cells = self._store, self._store.cells
        for _ in range(_LOOKS):
            if not self.waiting:
                return
            cell = store.unsealed.popleft()
            if cells.state[cell] != col.READY or cells.marks[cell] & (col.SEALED | col.SEALING):
                continue
            cells.marks[cell] |= col.SEALING
            record, generation = cells.record[cell], cells.generation[cell]
            self._in_flight[record, generation] = cell
            row = cells.chunk[cell]
            space = store.spaces.of(store.chunks.space[row])
            nbytes = space.nbytes[cell - store.chunks.cell[row]]
            offset = store.slabs.offset(record)
            store.out.append(named(Seal, (record, generation, offset, nbytes, False)))

    def urge(self, cell: int) -> None:
        """Take a digest now: a demotion waits for it. Pre: the cell is ready and not sealed."""
        store, cells = self._store, self._store.cells
        cells.marks[cell] |= col.SEALING
        record, generation = cells.record[cell], cells.generation[cell]
        self._in_flight[record, generation] = cell
        row = cells.chunk[cell]
        nbytes = store.spaces.of(store.chunks.space[row]).nbytes[cell - store.chunks.cell[row]]
        offset = store.slabs.offset(record)
        store.out.append(Seal(record, generation, offset, nbytes, urgent=True))

    def sealed(self, record: int, generation: int, digest: bytes) -> None:
        """A digest was computed; an empty one says that it could not be."""
        store, cells = self._store, self._store.cells
        cell = self._in_flight.pop((record, generation), None)
        if cell is None:
            return
        same = (
            cells.state[cell] == col.READY
            and cells.generation[cell] == generation
            and cells.record[cell] == record
        )
        if same and len(digest) == 16:
            cells.set_digest(cell, digest)
            cells.marks[cell] = (cells.marks[cell] | col.SEALED) & ~col.SEALING & 0xFF
            flags = store.chunks.flags[cells.chunk[cell]] | FLAG_SEALED
            store.out.append(named(PatchRecord, (record, None, None, flags, digest)))
            store.counters.own["shards_sealed", "daemon"] += 1
        elif same:
            cells.marks[cell] &= ~col.SEALING & 0xFF
            store.counters.own["seals_failed", ""] += 1
        if same and store.layered:
            store.sealed.append(cell)
