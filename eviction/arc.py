"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), leaf-first.

The law of this module: what was used once and what was used again stand in two lists, and ghosts
of either move the share of the first. The policy does not know its capacity: the most chunks that
were resident at a time stand in for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly
from kvd.eviction.ghosts import Ghosts
from kvd.eviction.leaves import SAME_USE_S, LeafPolicy
from kvd.eviction.walk import Walk
from kvd.native import mypyc_attr

ONCE, AGAIN = 0, 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Arc(LeafPolicy):
    """Score: last use, ns, in the list T1 (used once) or T2 (used again)."""

    name: ClassVar[str] = "arc"
    _lists: ClassVar[int] = 2

    def __init__(self, same_use_s: float = SAME_USE_S) -> None:
        super().__init__(same_use_s)
        self._target = 0.0  # of T1, chunks
        self._peak = 1
        self._ghosts = (Ghosts(0), Ghosts(0))  # B1, B2

    def _list_of(self, chunk: int, ghost: int) -> int:
        once, again = self._ghosts
        if once.take(ghost) is not None:
            step = max(1.0, len(again) / (len(once) + 1))
            self._target = min(float(self._peak), self._target + step)
            return AGAIN
        if again.take(ghost) is not None:
            step = max(1.0, len(once) / (len(again) + 1))
            self._target = max(0.0, self._target - step)
            return AGAIN
        return ONCE

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._peak = max(self._peak, self._len)
        return float(time)

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        super()._came(chunks, times)
        self._peak = max(self._peak, self._len)

    def _use(self, chunk: int, time: int, same: bool) -> None:
        self._score[chunk] = float(time)
        home = self._home[chunk]
        if not same and home % 2 == ONCE:
            self._rehome(chunk, home + 1)

    def _gone(self, chunk: int, evicted: bool) -> None:
        if evicted:
            which = self._home[chunk] % 2
            self._ghosts[which].put(self._digest[chunk], (), self._peak)

    def _pass(self, queue: int, now: int, *, stays: bool) -> Iterator[int]:
        home = queue * 2
        walk = Walk(self, (home, home + 1), stays=stays)
        once, again = self._at(home), self._at(home + 1)
        share = self._target / max(self._len, 1)
        while True:
            chunk = walk.soon()
            if chunk < 0:
                which = ONCE if once > share * (once + again) else AGAIN
                chunk = walk.take_either(which, 1 - which)
            if chunk < 0:
                return
            if self._home[chunk] == home:
                once -= 1
            else:
                again -= 1
            yield chunk

    def coldness(self, queue: int, now: int) -> float | None:
        return self._coldness_of(next(self.victims(queue, now), -1), now)

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "target": self._target, "peak": self._peak}

    def ghosts(self, begin: int, count: int) -> Ghostly | None:
        """Those of T1, then those of T2; the number says of which."""
        once, again = self._ghosts
        second = begin >= once.places
        told = again.part(begin - once.places, count) if second else once.part(begin, count)
        return told and (told[0], np.full((len(told[0]), 1), float(second)))

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        super().restore(state, ghosts, now)
        self._target, self._peak = float(state["target"]), int(state["peak"])
        digests, lists = ghosts
        for number, kept in enumerate(self._ghosts):
            mine = digests[lists[:, 0] == number] if len(digests) else digests
            kept.restore(mine, np.empty((len(mine), 0)))
