"""Least frequently used with dynamic ageing (Arlitt et al., PER 2000), leaf-first.

The law of this module: a chunk's score is its uses plus the score of the last victim at the time
of its last use, so what was popular once is overtaken.
"""

from __future__ import annotations

from array import array
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly
from kvd.eviction.leaves import SAME_USE_S, LeafPolicy
from kvd.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Lfuda(LeafPolicy):
    """Score: uses + age of the cache at the last use, both in uses."""

    name: ClassVar[str] = "lfuda"

    def __init__(self, same_use_s: float = SAME_USE_S) -> None:
        super().__init__(same_use_s)
        self._uses = array("I")
        self._age = 0.0

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._uses[chunk] = 1
        return 1.0 + self._age + time * 1e-18  # among equals, the less recent goes

    def _use(self, chunk: int, time: int, same: bool) -> None:
        if not same:
            self._uses[chunk] = min(self._uses[chunk] + 1, 0xFFFFFFFF)
        self._score[chunk] = self._uses[chunk] + self._age + time * 1e-18

    def _gone(self, chunk: int, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, float(int(self._score[chunk])))

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        np.frombuffer(self._uses, np.uint32)[chunks] = 1
        np.frombuffer(self._score)[chunks] = 1.0 + self._age + times * 1e-18

    def value(self, chunk: int, now: int) -> float:
        return max(0.0, self._score[chunk] - self._age) if self.resident(chunk) else 0.0

    def _columns(self) -> list[tuple[array[Any], float | int]]:
        return [*super()._columns(), (self._uses, 0)]

    def _kept(self) -> list[array[Any]]:
        return [self._score, self._uses]

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "age": self._age}

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        super().restore(state, ghosts, now)
        self._age = float(state["age"])
