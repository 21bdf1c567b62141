"""Chunks that are to be written to a tier when there is time: write-through, drains, second hits.

The law of this module: what waits holds nothing, so it can be evicted; only what is under way keeps
its slots: a tier that answers late, or not at all, begins no more once it has an eighth of a size
class. Each tier has a line of its own, and in it what needs the same classes: none waits behind
another's.
"""

from __future__ import annotations

from typing import Final

from kvd.core.columns import NONE
from kvd.core.lower import Lower
from kvd.core.outbox import Move
from kvd.core.store import Store

_LEAD: Final = 4  # chunks under way, for each write that a tier takes at a time
_SHARE: Final = 8  # of a class: an eighth of its slots
_STALE: Final = 64  # entries passed over at a time


class Backlog:
    """By tier and size classes, in the order named; each chunk at most once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        tiers = len(store.ladder.lowers)
        # by the classes of their slots: row -> key
        self._lines: list[dict[tuple[int, ...], dict[int, bytes]]] = [{} for _ in range(tiers)]
        self._under_way = [0] * tiers
        self._held: list[dict[int, int]] = [{} for _ in range(tiers)]  # size -> slots

    def __len__(self) -> int:
        return sum(map(self.waiting, self._store.ladder.lowers))

    def waiting(self, lower: Lower) -> int:
        """How many wait for a tier."""
        return sum(map(len, self._lines[lower.number].values()))

    @property
    def ready(self) -> bool:
        """Whether more could be begun now."""
        return any(
            any(line and self._may(lower, need) for need, line in self._lines[lower.number].items())
            for lower in self._store.ladder.lowers
        )

    def add(self, row: int, lower: Lower) -> None:
        """Write this chunk when there is time."""
        chunks = self._store.chunks
        if not chunks.space[row]:
            return  # it has gone since it was looked up
        need = tuple(sorted(set(self._store.spaces.of(chunks.space[row]).slot_sizes)))
        self._lines[lower.number].setdefault(need, {})[row] = chunks.key_of(row)

    def next(self, lower: Lower) -> int:
        """Take the next chunk that may be begun now, or NONE."""
        chunks = self._store.chunks
        for need, line in self._lines[lower.number].items():
            for _ in range(_STALE):
                if not line or not self._may(lower, need):
                    break
                row = next(iter(line))
                key = line.pop(row)
                if chunks.space[row] and chunks.key_of(row) == key:
                    return row
        return NONE

    def _may(self, lower: Lower, need: tuple[int, ...]) -> bool:
        """Whether one more chunk with slots of these classes may be on its way."""
        if not lower.writable:
            return True  # it will not be, and need not wait to learn so
        if self._under_way[lower.number] >= _LEAD * lower.config.writes:
            return False
        if self._store.draining:
            return True  # nobody stores any more
        slabs, held = self._store.slabs, self._held[lower.number]
        free = slabs.blanks + slabs.count - slabs.open  # slabs that any class may yet have
        for size in need:
            slots = slabs.slots.get(size, 0) + free * (slabs.size // size)
            if held.get(size, 0) >= max(1, slots // _SHARE):
                return False
        return True

    def begun(self, move: Move) -> None:
        """One of these is on its way, and keeps its slots."""
        number = move.lower.number
        self._under_way[number] += 1
        held = self._held[number]
        for size in move.sizes:
            held[size] = held.get(size, 0) + 1

    def ended(self, move: Move) -> None:
        """It is dealt with."""
        number = move.lower.number
        self._under_way[number] -= 1
        for size in move.sizes:
            self._held[number][size] -= 1
