"""First in, first out, from the leaves.

The law of this module: a use changes nothing. The cheapest policy, and friendly to flash. Leaves
go by the time they were stored, and a session's leaves are its newest chunks, so it stays close to
LRU on conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvd.eviction.leaves import LeafPolicy
from kvd.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Fifo(LeafPolicy):
    """Score: time of insertion, ns."""

    name: ClassVar[str] = "fifo"

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        return float(time)

    def touch(self, chain: Sequence[int], now: int) -> None:
        """Nothing."""
