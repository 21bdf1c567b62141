"""Least recently used, leaf-first, whatever order the chunks come in.

The law of this module: a chunk's score is its last use, so one that is loaded late stands where it
belongs. It costs more than `Lru`, whose list has no place but the ends; it takes over from a policy
that failed, and knows nothing of it.
"""

from __future__ import annotations

from typing import ClassVar

from kvd.eviction.leaves import LeafPolicy
from kvd.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Recency(LeafPolicy):
    """Score: last use, ns."""

    name: ClassVar[str] = "recency"

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        return float(time)

    def _use(self, chunk: int, time: int, same: bool) -> None:
        self._score[chunk] = float(time)
