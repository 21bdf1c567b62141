"""Least recently used, leaf-first.

The law of this module: one list a queue, coldest first. A use moves a whole chain to the hot end,
its leaf first and its root last, so that an ancestor is never colder than what hangs below it.
Links stand in flat arrays (20 bytes a chunk); a use of one chunk costs a fixed number of steps.
What was deferred is in no list; each eviction brings one back, to the cold end. A restart takes
nothing with it: the order is that of the last uses, which the core knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import inf
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.aside import Aside
from kvd.eviction.base import Policy
from kvd.native import mypyc_attr

ABSENT: Final = -1
_NS: Final = 1e9


@mypyc_attr(allow_interpreted_subclasses=True)
class Lru(Policy):
    """Worth of a chunk: 1 / (1 + seconds since its last use)."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._colder = array("i")  # neighbour towards the cold end, or ABSENT
        self._hotter = array("i")
        self._queue = array("i")  # ABSENT: not here; below that: deferred, see `_aside`
        self._used = array("q")  # last use, ns
        self._coldest: dict[int, int] = {}  # by queue; a queue without chunks has no entry
        self._hottest: dict[int, int] = {}
        self._late = Aside()
        self._len = 0

    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        if chunk >= len(self._queue):
            self._grow(chunk + 1)
        self._queue[chunk] = queue
        self._used[chunk] = now
        self._append(chunk, queue)
        self._len += 1

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
        rows = order
        first, last = int(rows[0]), int(rows[-1])
        self._grow(int(rows.max()) + 1)
        if queue in self._hottest:  # what is here already stays the colder part
            before = self._hottest[queue]
            self._hotter[before] = first
        else:
            before = ABSENT
            self._coldest[queue] = first
        self._hottest[queue] = last
        colder = np.frombuffer(self._colder, np.int32)
        hotter = np.frombuffer(self._hotter, np.int32)
        colder[rows[1:]] = rows[:-1]
        colder[rows[0]] = before
        hotter[rows[:-1]] = rows[1:]
        hotter[rows[-1]] = ABSENT
        np.frombuffer(self._queue, np.int32)[rows] = queue
        # who stands hotter than a chunk was used as late as that one
        np.frombuffer(self._used, np.int64)[rows] = np.maximum.accumulate(born)
        self._len += len(rows)

    def touch(self, chain: Sequence[int], now: int) -> None:
        queues, used, known = self._queue, self._used, len(self._queue)
        colder, hotter, hottest = self._colder, self._hotter, self._hottest
        for chunk in reversed(chain):
            if not 0 <= chunk < known:
                continue
            queue = queues[chunk]
            if queue < 0:
                if queue < ABSENT:
                    self._back(chunk)
                    self._append(chunk, queues[chunk])
                    used[chunk] = now
                continue
            used[chunk] = now
            after = hotter[chunk]
            if after < 0:
                continue
            before = colder[chunk]
            colder[after] = before
            if before < 0:
                self._coldest[queue] = after
            else:
                hotter[before] = after
            last = hottest[queue]
            hotter[last] = chunk
            colder[chunk] = last
            hotter[chunk] = ABSENT
            hottest[queue] = chunk

    def victims(self, queue: int, now: int) -> Iterator[int]:
        chunk = self._coldest.get(queue, ABSENT)
        hotter = self._hotter
        while chunk >= 0:
            yield chunk
            chunk = hotter[chunk]
        yield from self._late.of(queue)

    def defer(self, chunks: Sequence[int], now: int) -> None:
        for chunk in chunks:
            if 0 <= chunk < len(self._queue) and self._queue[chunk] != ABSENT:
                queue = self._queue[chunk]
                if queue < 0:
                    queue = _aside(queue)
                else:
                    self._unlink(chunk, queue)
                    self._queue[chunk] = _aside(queue)
                self._late.put(chunk, queue)

    def cool(self, chunks: Sequence[int], now: int) -> None:
        for chunk in reversed(chunks):
            if 0 <= chunk < len(self._queue) and self._queue[chunk] != ABSENT:
                if self._queue[chunk] < 0:
                    self._back(chunk)
                else:
                    self._unlink(chunk, self._queue[chunk])
                self._prepend(chunk, self._queue[chunk])

    def coldness(self, queue: int, now: int) -> float | None:
        chunk = self._coldest.get(queue, ABSENT)
        if chunk >= 0:
            return self.value(chunk, now)
        return inf if self._late.first(queue) >= 0 else None

    def forget(self, chunk: int, *, evicted: bool) -> None:
        if not 0 <= chunk < len(self._queue) or self._queue[chunk] == ABSENT:
            return
        queue = self._queue[chunk]
        if queue < 0:
            self._late.take(chunk)
        else:
            self._unlink(chunk, queue)
        self._queue[chunk] = ABSENT
        self._len -= 1
        if evicted and self._late:
            chunk = self._late.first()
            self._back(chunk)
            self._prepend(chunk, self._queue[chunk])

    def value(self, chunk: int, now: int) -> float:
        if not 0 <= chunk < len(self._queue) or self._queue[chunk] == ABSENT:
            return 0.0
        return 1.0 / (1.0 + max(0, now - self._used[chunk]) / _NS)

    def __len__(self) -> int:
        return self._len

    def _back(self, chunk: int) -> None:
        """A deferred chunk is no longer; the caller puts it into its queue's list."""
        self._late.take(chunk)
        self._queue[chunk] = _aside(self._queue[chunk])

    def _unlink(self, chunk: int, queue: int) -> None:
        """Take a chunk out of its list."""
        before, after = self._colder[chunk], self._hotter[chunk]
        if before >= 0:
            self._hotter[before] = after
        elif after >= 0:
            self._coldest[queue] = after
        else:
            del self._coldest[queue]
        if after >= 0:
            self._colder[after] = before
        elif before >= 0:
            self._hottest[queue] = before
        else:
            del self._hottest[queue]

    def _prepend(self, chunk: int, queue: int) -> None:
        """Put a chunk that is in no list at the cold end of one."""
        first = self._coldest.get(queue, ABSENT)
        if first < 0:
            self._append(chunk, queue)
            return
        self._colder[chunk], self._hotter[chunk] = ABSENT, first
        self._colder[first] = chunk
        self._coldest[queue] = chunk

    def _append(self, chunk: int, queue: int) -> None:
        """Put a chunk that is in no list at the hot end of one."""
        last = self._hottest.get(queue, ABSENT)
        self._colder[chunk] = last
        self._hotter[chunk] = ABSENT
        if last >= 0:
            self._hotter[last] = chunk
        else:
            self._coldest[queue] = chunk
        self._hottest[queue] = chunk

    def _grow(self, need: int) -> None:
        if need <= len(self._queue):
            return
        more = max(need - len(self._queue), 4096)
        self._colder.extend(array("i", [ABSENT]) * more)
        self._hotter.extend(array("i", [ABSENT]) * more)
        self._queue.extend(array("i", [ABSENT]) * more)
        self._used.extend(array("q", [0]) * more)


def _aside(queue: int) -> int:
    """What stands in place of a queue while a chunk is deferred, and back."""
    return -2 - queue
