"""What is on its way down, and the writes of it that wait for their tier.

The law of this module: a tier is handed no more writes than it takes at a time, and tenants share
it by weight. A write that a tier will not take any more is given back, never forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.chunk import State
from kvd.core.actions import TierWrite
from kvd.core.events import TierAnswer
from kvd.core.lower import Lower
from kvd.core.store import Store
from kvd.fair import FairQueue


class Move:
    """One chunk on its way down. `why`: demote, through or drain."""

    __slots__ = (
        "attempts",
        "by",
        "failed",
        "key",
        "left",
        "lower",
        "nbytes",
        "row",
        "size",
        "sizes",
        "tenant",
        "why",
    )

    def __init__(
        self,
        row: int,
        key: bytes,
        lower: Lower,
        why: str,
        tenant: int,
        by: int | None,
        size: int,
    ) -> None:
        self.row = row
        self.tenant = tenant
        self.by = by  # for whose room; None: whose growth needs some of a class when it goes
        self.size = size  # of this class
        self.nbytes = 0  # that it will take below
        self.key = key
        self.lower = lower
        self.why = why
        self.left = 0  # shards that are not written yet
        self.failed: TierAnswer | None = None
        self.attempts = 0
        self.sizes: list[int] = []  # of the slots that it holds


class Outbox:
    """Sealed shards that are to be written, by tier. `lost`: what becomes of a shard whose tier
    takes no more writes."""

    def __init__(self, store: Store, lost: Callable[[Move, TierAnswer], None]) -> None:
        self._store = store
        self._lost = lost
        self._boxes: list[FairQueue[tuple[Move, int]]] = [FairQueue() for _ in store.ladder.lowers]

    def post(self, move: Move, cell: int) -> None:
        """A sealed shard is ready to be written."""
        store, row = self._store, move.row
        space = store.spaces.of(store.chunks.space[row])
        nbytes = space.nbytes[cell - store.chunks.cell[row]]
        self._boxes[move.lower.number].push(space.namespace, nbytes, (move, cell))

    def set_weight(self, tier: int, namespace: str, weight: float) -> None:
        """A tenant's share of a tier's bandwidth, against others that want some."""
        self._boxes[tier].set_weight(namespace, weight)

    def send(self) -> None:
        """Hand writes over, as many as the tier takes at a time."""
        store, cells, chunks = self._store, self._store.cells, self._store.chunks
        for lower, box in zip(store.ladder.lowers, self._boxes, strict=True):
            while box and (lower.writing < lower.config.writes or not lower.writable):
                move, cell = box.pop()
                if not lower.writable:
                    self._lost(move, TierAnswer.OFF)
                    continue
                space = store.spaces.of(chunks.space[move.row])
                nbytes = space.nbytes[cell - chunks.cell[move.row]]
                within = lower.config.write_ns
                number = store.ladder.begin("write", lower, cell, within, move)
                header = store.headers.of(cell, State.READY, cells.generation[cell])
                offset = store.slabs.offset(cells.record[cell])
                store.out.append(
                    TierWrite(number, lower.number, header, offset, nbytes, store.now + within)
                )
