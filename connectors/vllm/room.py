"""Whether one more load finds room among the engine's blocks.

The law of this module: requests that hold blocks for a load, and do not run, can't be preempted;
so all of them, whole, fit into the pool together, and whichever is first in line can go on when
nobody runs. vLLM sees to that by itself as long as a request is let in only if all of it fits
(`scheduler_reserve_full_isl`, its default). Without that, loads that arrive together can wait for
each other's blocks for ever: of two, the one with the higher priority lacks what the other holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Room"]


class Room:
    """`blocks`: that requests may have, over all KV groups; `block_tokens`: of each group."""

    def __init__(self, blocks: int, block_tokens: Sequence[int]) -> None:
        self._blocks = blocks
        self._block_tokens = tuple(block_tokens)

    def has(self, tokens: int, holding: Iterable[int]) -> bool:
        """Whether a request of `tokens` fits beside those that hold blocks (their tokens)."""
        return self._needed(tokens) + sum(map(self._needed, holding)) <= self._blocks

    def _needed(self, tokens: int) -> int:
        return sum(-(-tokens // size) for size in self._block_tokens)
