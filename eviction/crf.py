"""Combined recency and frequency (LRFU; Lee et al., IEEE ToC 2001), leaf-first, with ghosts.

The law of this module: a chunk's worth is the sum over its uses of 2^(-age / half-life). Kept as
S = log2 of that sum at time 0, S <- x + log2(1 + 2^(S - x)) with x = now / half-life, it is static
between uses: nothing is ever re-aged. An evicted chunk leaves its S in a ghost, so frequency is
that of the key, not of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp2, log2
from typing import Any

from kvd.eviction.ghosts import Ghosts
from kvd.eviction.leaves import LeafPolicy

_FAR = 64.0  # half-lives beyond which the smaller term is lost in a double


def combine(score: float, x: float) -> float:
    """S after a use at `x` half-lives, from S before."""
    gap = score - x
    if gap > _FAR:
        return score
    return x + log2(1.0 + exp2(gap)) if gap > -_FAR else x


class Crf(LeafPolicy):
    """Score: S in half-lives. `half_life_s` seconds; ghosts: `ghost_factor` x resident chunks."""

    name = "crf"

    def __init__(self, half_life_s: float = 60.0, ghost_factor: float = 2.0) -> None:
        super().__init__()
        if half_life_s <= 0:
            raise ValueError("half_life_s must be above 0: use lru for no memory of earlier uses")
        self._half_ns = half_life_s * 1e9
        self._factor = ghost_factor
        self._ghosts = Ghosts()
        self._peak = 0

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._peak = max(self._peak, self._len)
        x = time / self._half_ns
        old = self._ghosts.take(ghost)
        return x if old is None else combine(old[0], x)

    def touch(self, chain: Sequence[int], now: int) -> None:
        x = self._clock(now) / self._half_ns
        score, home = self._score, self._home
        known = len(home)
        for chunk in chain:
            if 0 <= chunk < known and home[chunk] >= 0:
                gap = score[chunk] - x
                if gap < _FAR:
                    score[chunk] = x + log2(1.0 + exp2(gap))

    def _gone(self, chunk: int, evicted: bool) -> None:
        if evicted:
            limit = int(self._factor * self._peak)
            self._ghosts.put(self._digest[chunk], (self._score[chunk],), limit)

    def snapshot(self) -> dict[str, Any]:
        return {
            **super().snapshot(),
            "half_ns": self._half_ns,
            "peak": self._peak,
            "ghosts": self._ghosts.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if state["half_ns"] != self._half_ns:  # S counts half-lives: another scale
            raise ValueError("snapshot was taken with another half-life")
        self._peak = int(state["peak"])
        self._ghosts.restore(state["ghosts"])
