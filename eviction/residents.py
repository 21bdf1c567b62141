"""Resident chunks as a forest: who is here, below whom, in which list of its queue, used when.

The law of this module: an id that was given to another chunk since is another chunk, so a link to a
parent holds only for the parent's life in which it was made. Time is our own: it starts near 0,
rises strictly, and no restart moves it.

Arrays are indexed by the core's small ids, 52 bytes a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from math import nan
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly, Policy
from kvd.native import mypyc_attr

ABSENT: Final = -1
_STEP: Final = 1 << 14  # rows that the columns grow by: doubling a million took 6 ms


@mypyc_attr(allow_interpreted_subclasses=True)
class Residents(Policy):
    """Columns, time, and what is told of them for another life; a subclass knows who goes first.

    It may split a queue in several lists (`_lists`): a chunk's home is `queue * _lists + list`.
    """

    _lists: ClassVar[int] = 1

    def __init__(self) -> None:
        self._parent = array("i")  # id, or -1
        self._parent_life = array("I")  # the parent's life when it was our parent
        self._life = array("I")  # raised when an id leaves: ids are used again
        self._kids = array("i")  # resident children, also of an id that is not here yet
        self._home = array("i")  # queue * _lists + list, or -1: not here
        self._score = array("d")
        # score under which the chunk is in its heap; nan: it isn't; inf: it was deferred; -inf:
        # it was cooled
        self._entry = array("d")
        self._used = array("d")  # last use on our clock, ns
        self._digest = array("Q")
        self._count: list[int] = []  # chunks at a home
        self._len = 0
        self._origin: int | None = None  # the core's time at our time 0
        self._time = 0  # ns since the origin, strictly rising

    @abstractmethod
    def _expose(self, chunk: int) -> None:
        """The chunk is a leaf: it may be named from now on."""

    def resident(self, chunk: int) -> bool:
        """Whether the id is here now."""
        return 0 <= chunk < len(self._home) and self._home[chunk] >= 0

    def _parent_of(self, chunk: int) -> int:
        """The resident parent, or -1. An id that was given to another chunk since isn't it. In a
        lower tier a child may come before its parent: the link holds when that comes."""
        parent = self._parent[chunk]
        if parent < 0 or self._home[parent] < 0:
            return ABSENT
        return parent if self._life[parent] == self._parent_life[chunk] else ABSENT

    def __len__(self) -> int:
        return self._len

    # -- time -----------------------------------------------------------------------------------

    def _clock(self, now: int) -> int:
        """Our own time: starts near 0, never twice the same, not moved by a restart."""
        if self._origin is None:
            self._origin = now - self._time - 1
        time = now - self._origin
        if time <= self._time:
            time = self._time + 1
        self._time = time
        return time

    def _peek(self, now: int) -> int:
        """Our own time, without using it up."""
        return self._time if self._origin is None else max(now - self._origin, self._time)

    # -- columns --------------------------------------------------------------------------------

    def _grow(self, need: int) -> None:
        if need <= len(self._home):
            return
        known = len(self._home)
        more = max(need - known, min(max(known, 64), _STEP))
        for field, fill in self._columns():
            field.extend(array(field.typecode, [fill]) * more)

    def _grow_homes(self, queue: int) -> None:
        """There are chunks of this queue."""
        more = (queue + 1) * self._lists - len(self._count)
        if more > 0:
            self._count.extend([0] * more)

    def _at(self, home: int) -> int:
        """How many chunks are at a home."""
        return self._count[home] if home < len(self._count) else 0

    def _columns(self) -> list[tuple[array[Any], float | int]]:
        """Every per-chunk array and what it holds for an id that isn't here."""
        return [
            (self._parent, ABSENT),
            (self._parent_life, 0),
            (self._life, 0),
            (self._kids, 0),
            (self._home, ABSENT),
            (self._score, 0.0),
            (self._entry, nan),
            (self._used, 0.0),
            (self._digest, 0),
        ]

    # -- restart --------------------------------------------------------------------------------

    def load(
        self,
        order: NDArray[np.int64],
        born: NDArray[np.int64],
        *,
        parents: NDArray[np.int64],
        queue: int,
        size: int,
        ghosts: NDArray[np.uint64],
        memory: NDArray[np.float64] | None = None,
    ) -> None:
        if not len(order):
            return
        self._grow(int(max(order.max(), parents.max())) + 1)
        if self._origin is None:
            self._origin = int(born.min()) - self._time - 1
        # None before its descendants: an ancestor was used as late as they were.
        times = np.maximum.accumulate(born) - self._origin
        self._time = max(self._time, int(times[-1]))
        homes = np.frombuffer(self._home, np.int32)
        homes[order] = queue * self._lists
        np.frombuffer(self._used)[order] = times
        np.frombuffer(self._entry)[order] = nan
        np.frombuffer(self._parent, np.int32)[order] = parents
        np.frombuffer(self._digest, np.uint64)[order] = ghosts
        linked = order[parents >= 0]
        above = parents[parents >= 0]
        lives = np.frombuffer(self._life, np.uint32)
        np.frombuffer(self._parent_life, np.uint32)[linked] = lives[above]
        np.add.at(np.frombuffer(self._kids, np.int32), above, 1)
        self._len += len(order)
        self._came(order, times)
        if memory is not None:
            self._recollect(order, memory, queue)
        self._settled(order)
        self._grow_homes(queue)
        for home, count in zip(*np.unique(homes[order], return_counts=True), strict=True):
            self._count[int(home)] += int(count)
        for chunk in order[np.frombuffer(self._kids, np.int32)[order] == 0].tolist():
            self._expose(chunk)

    def _recollect(self, order: NDArray[np.int64], memory: NDArray[np.float64], queue: int) -> None:
        """Put loaded chunks back where they stood, as far as that is known."""
        kept = self._kept()
        if memory.shape != (len(order), 2 + len(kept)):
            raise ValueError(f"memory of shape {memory.shape} for {len(order)} chunks")
        known = np.isfinite(memory).all(axis=1)
        known &= (memory[:, 0] >= 0) & (memory[:, 0] < self._lists)
        rows, some = order[known], memory[known]
        home = queue * self._lists + some[:, 0].astype(np.int32)
        np.frombuffer(self._home, np.int32)[rows] = home
        np.frombuffer(self._used)[rows] = np.minimum(some[:, 1], self._time)
        for column, values in zip(kept, some[:, 2:].T, strict=True):
            into: NDArray[Any] = np.frombuffer(column, column.typecode)
            if column.typecode != "d":
                values = np.clip(values, 0, np.iinfo(into.dtype).max)
            into[rows] = values.astype(into.dtype)

    def _settled(self, chunks: NDArray[np.int64]) -> None:
        """Many were loaded, and what is known of them has been put in place."""

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Scores of many that became resident at once, of whom nothing is known; in list 0."""
        np.frombuffer(self._score)[chunks] = times

    def _kept(self) -> list[array[Any]]:
        """The columns that `memory` tells besides the list and the last use."""
        return [self._score]

    def snapshot(self) -> dict[str, Any]:
        """Scores and time are our own."""
        return {"policy": self.name, "time": self._time}

    def memory(self, chunks: NDArray[np.int64]) -> NDArray[np.float64]:
        """[list, last use, score, ...] of each."""
        lists = np.frombuffer(self._home, np.int32)[chunks] % self._lists
        columns = [np.frombuffer(c, c.typecode)[chunks] for c in (self._used, *self._kept())]
        return np.stack([lists, *columns], axis=1).astype(np.float64)

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        if self._len:
            raise ValueError("restore needs an empty policy")
        if state.get("policy") != self.name:
            raise ValueError(f"snapshot of policy {state.get('policy')!r}, this is {self.name!r}")
        self._time = max(0, int(state["time"]))
        self._origin = now - self._time  # the time in between is nobody's age
