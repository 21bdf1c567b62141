"""Combined recency and frequency (LRFU; Lee et al., IEEE ToC 2001), leaf-first, with ghosts.

The law of this module: a chunk's worth is the sum over its uses of 2^(-age / half-life). Kept as
S = log2 of that sum at time 0, S <- x + log2(1 + 2^(S - x)) with x = now / half-life, it is static
between uses: nothing is ever re-aged. An evicted chunk leaves its S in a ghost, so frequency is
that of the key, not of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp2, log2
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly
from kvd.eviction.ghosts import Ghosts
from kvd.eviction.leaves import SAME_USE_S, LeafPolicy, worth
from kvd.native import mypyc_attr

FAR: Final = 64.0  # half-lives beyond which the smaller term is lost in a double


@mypyc_attr(allow_interpreted_subclasses=True)
class Crf(LeafPolicy):
    """Score: S in half-lives. `half_life_s` seconds; ghosts: `ghost_factor` x resident chunks."""

    name: ClassVar[str] = "crf"

    def __init__(
        self,
        half_life_s: float = 60.0,
        ghost_factor: float = 2.0,
        same_use_s: float = SAME_USE_S,
    ) -> None:
        super().__init__(same_use_s)
        if half_life_s <= 0:
            raise ValueError("half_life_s must be above 0; with no memory of uses, take lru")
        self._half_ns = half_life_s * 1e9
        self._factor = ghost_factor
        self._ghosts = Ghosts(2)  # S, last use
        self._peak = 0

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._peak = max(self._peak, self._len)
        x = time / self._half_ns
        old = self._ghosts.take(ghost)
        if old is None:
            return x
        gap = old[0] - x
        if gap >= FAR or time - old[1] < self._same_ns:
            return max(old[0], x)
        return x + log2(1.0 + exp2(gap))

    def touch(self, chain: Sequence[int], now: int) -> None:
        time = self._clock(now)
        if self._late or self._over:
            self._recall(chain)
        x, same_ns = time / self._half_ns, self._same_ns
        score, home, used = self._score, self._home, self._used
        known = len(home)
        for chunk in chain:
            if 0 <= chunk < known and home[chunk] >= 0:
                gap = score[chunk] - x
                if time - used[chunk] < same_ns:
                    if gap < 0.0:
                        score[chunk] = x
                elif gap < FAR:
                    score[chunk] = x + log2(1.0 + exp2(gap))
                used[chunk] = time

    def _gone(self, chunk: int, evicted: bool) -> None:
        if evicted:
            values = (self._score[chunk], self._used[chunk])
            self._ghosts.put(self._digest[chunk], values, int(self._factor * self._peak))

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        np.frombuffer(self._score)[chunks] = times / self._half_ns
        self._peak = max(self._peak, self._len)

    def value(self, chunk: int, now: int) -> float:
        if not self.resident(chunk):
            return 0.0
        return worth(self._peek(now) - self._score[chunk] * self._half_ns)

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "half_ns": self._half_ns, "peak": self._peak}

    def ghosts(self, begin: int, count: int) -> Ghostly | None:
        return self._ghosts.part(begin, count)

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        if state["half_ns"] != self._half_ns:  # S counts half-lives
            raise ValueError("snapshot was taken with another half-life")
        super().restore(state, ghosts, now)
        self._peak = int(state["peak"])
        self._ghosts.restore(*ghosts)
