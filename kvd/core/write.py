"""A write: what one reserve granted, and how far each of its slots has come.

The law of this module: it keeps, and does nothing. All that happens to a write happens in
`writes.py`; what is said here of an item holds for that slot alone, whatever becomes of its chunk.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

from kvd.chunk import SlotRef
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.native import plain_members


@plain_members
class Phase(Enum):
    OPEN = auto()
    EVICTED = auto()  # an evict named it: its key is free, its slot still the writer's
    CONDEMNED = auto()
    DONE = auto()


_OPEN: Final = Phase.OPEN  # a member is looked up in its class at every mention


class Item:
    """One granted slot."""

    __slots__ = ("cell", "phase", "record", "ref", "size")

    def __init__(self, cell: int, size: int, ref: SlotRef) -> None:
        self.cell = cell  # its shard's, while OPEN
        self.record = ref.record
        self.size = size
        self.ref = ref
        self.phase = _OPEN


class Stored:
    """What a commit has made readable since that was counted last."""

    __slots__ = ("chunks", "nbytes", "sealed")

    def __init__(self) -> None:
        self.chunks = self.nbytes = self.sealed = 0


class Condemned(NamedTuple):
    """A slot whose writer may still be copying; of an earlier life if `item` is None."""

    size: int
    write: Write | None
    item: Item | None


class Write:
    """What one reserve granted. `items` by result number; None where nothing was granted."""

    def __init__(self, number: int, session: Session, space: Space, deadline: int) -> None:
        self.number = number
        self.session = session
        self.space = space
        self.deadline = deadline
        self.items: list[Item | None] = []
        self.open = 0  # items that are not done

    def granted(self) -> list[int]:
        return [i for i, item in enumerate(self.items) if item is not None]
