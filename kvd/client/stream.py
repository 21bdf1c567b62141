"""What stores and loads of many chunks have in common: batches, one of them asked for ahead.

The law of this module: an outcome is FAILED until something better or worse is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvd.chunk import NO_PARENT, Kind, Outcome
from kvd.client.call import Call

if TYPE_CHECKING:
    from kvd.client.base import ClientBase

# What goes out right behind something else costs next to nothing: libzmq's I/O thread is awake
# then, and waking it is most of what sending costs. So a batch's last word (commit, release) is
# sent together with the question for the batch after the next, as soon as the next one's answer is
# in.

Copier = Callable[[int, memoryview], object] | Sequence[Any]


class Keys(NamedTuple):
    """What stands in every request of a stream, packed."""

    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    fingerprints: bytes | None
    parent: bytes
    index0: int
    tokens: bytes | None
    pos0: bytes | None

    @property
    def keys(self) -> int:
        """How many."""
        return len(self.hashes) // 32

    def parent_of(self, begin: int) -> bytes:
        """The hash before key `begin` in its chain."""
        if self.kind == Kind.CONTENT:
            return NO_PARENT
        return self.hashes[32 * (begin - 1) : 32 * begin] if begin else self.parent

    def part(self, field: str, each: int, begin: int, end: int) -> bytes | None:
        value: bytes | None = getattr(self, field)
        return None if value is None else value[each * begin : each * end]


class Batch(NamedTuple):
    """Keys [begin, end), asked for. `alone`: nothing of this stream was held meanwhile."""

    begin: int
    end: int
    call: Call
    alone: bool


class Stream:
    """What a store and a load have in common."""

    def __init__(self, client: ClientBase, keys: Keys, copier: Copier, batch: int) -> None:
        self.client = client
        self.keys = keys
        self.width = len(keys.shards)
        self.batch = max(1, batch)
        self.outcomes = [Outcome.FAILED] * (keys.keys * self.width)
        self.copier = copier if callable(copier) else None
        self.buffers: Sequence[Any] = () if callable(copier) else copier
        if self.copier is None and len(self.buffers) != len(self.outcomes):
            raise ValueError(f"{len(self.outcomes)} buffers are due, {len(self.buffers)} came")

    def rest(self, begin: int, outcome: Outcome) -> None:
        """Keys from `begin` on were not tried, because of this."""
        first = begin * self.width
        self.outcomes[first:] = [outcome] * (len(self.outcomes) - first)
