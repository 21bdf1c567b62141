"""S3-FIFO (Yang et al., SOSP 2023), leaf-first.

The law of this module: new chunks wait in a small queue, a tenth of all; one that was used there,
or whose key was evicted not long ago, moves on to the main queue, where a use buys another round.
It takes its ancestors along: they were used with it, and can't leave before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly
from kvd.eviction.ghosts import Ghosts
from kvd.eviction.leaves import SAME_USE_S, LeafPolicy
from kvd.eviction.walk import Walk
from kvd.native import mypyc_attr

SMALL, MAIN = 0, 1
_MOST: Final = 3  # uses that count


@mypyc_attr(allow_interpreted_subclasses=True)
class S3Fifo(LeafPolicy):
    """Score: time of entry, ns, into the small or the main queue. `small`: share of the former."""

    name: ClassVar[str] = "s3fifo"
    _lists: ClassVar[int] = 2

    def __init__(self, small: float = 0.1, same_use_s: float = SAME_USE_S) -> None:
        super().__init__(same_use_s)
        self._small = small
        self._uses = array("B")
        self._peak = 1
        self._ghosts = Ghosts(0)

    def _list_of(self, chunk: int, ghost: int) -> int:
        return SMALL if self._ghosts.take(ghost) is None else MAIN

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._peak = max(self._peak, self._len)
        self._uses[chunk] = 0
        if self._home[chunk] % 2 == MAIN:
            self._promote(self._parent_of(chunk), time)
        return float(time)

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        super()._came(chunks, times)
        self._peak = max(self._peak, self._len)

    def _use(self, chunk: int, time: int, same: bool) -> None:
        if not same:
            self._uses[chunk] = min(self._uses[chunk] + 1, _MOST)

    def _gone(self, chunk: int, evicted: bool) -> None:
        if evicted and self._home[chunk] % 2 == SMALL:
            self._ghosts.put(self._digest[chunk], (), self._peak)

    def _which(self, small: int, main: int) -> int:
        return SMALL if small > self._small * (small + main) or not main else MAIN

    def _settle(self, queue: int, now: int) -> int:
        """Give the rounds that uses have bought, until the first victim is one; -1 if none."""
        home = queue * 2
        if (cool := self._soon.first(queue)) >= 0:
            return cool
        while True:
            which = self._which(self._at(home), self._at(home + 1))
            chunk = self._top(home + which)
            if chunk < 0:
                chunk = self._top(home + 1 - which)
            if chunk < 0:
                return self._rest(queue)
            if not self._uses[chunk]:
                return chunk
            time = self._clock(now)
            if self._home[chunk] == home:
                self._promote(chunk, time)
            else:
                self._uses[chunk] -= 1
                self._rescore(chunk, float(time))

    def _promote(self, chunk: int, time: int) -> None:
        """Move to the main queue, with what stands above in the small one."""
        while chunk >= 0 and self._home[chunk] % 2 == SMALL:
            self._uses[chunk] = 0
            self._score[chunk] = float(time)
            self._rehome(chunk, self._home[chunk] + 1)
            chunk = self._parent_of(chunk)

    def _pass(self, queue: int, now: int, *, stays: bool) -> Iterator[int]:
        if self._settle(queue, now) < 0:
            return
        home = queue * 2
        walk = Walk(self, (home, home + 1), veto=lambda chunk: self._uses[chunk] > 0, stays=stays)
        small, main = self._at(home), self._at(home + 1)
        while True:
            chunk = walk.soon()
            if chunk < 0:
                which = self._which(small, main)
                chunk = walk.take_either(which, 1 - which)
            if chunk < 0:
                return
            if self._home[chunk] == home:
                small -= 1
            else:
                main -= 1
            yield chunk

    def coldness(self, queue: int, now: int) -> float | None:
        return self._coldness_of(self._settle(queue, now), now)

    def _columns(self) -> list[tuple[array[Any], float | int]]:
        return [*super()._columns(), (self._uses, 0)]

    def _kept(self) -> list[array[Any]]:
        return [self._score, self._uses]

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "peak": self._peak}

    def ghosts(self, begin: int, count: int) -> Ghostly | None:
        return self._ghosts.part(begin, count)

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        super().restore(state, ghosts, now)
        self._peak = int(state["peak"])
        self._ghosts.restore(*ghosts)
