"""Which blocks a step writes to.

The law of this module: a block that a step may write to and that was given out for it is named;
naming one too many costs a store at most, leaving one out would keep wrong bytes under a right
key. A block that its request held before is not: only unfinished ones are written to then, and
those are in no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["written_by"]


def written_by(output: Any, block_tokens: Sequence[int]) -> set[int]:
    """Block ids, from vLLM's SchedulerOutput; `block_tokens`: of each KV group."""
    written: set[int] = set()
    for new in output.scheduled_new_reqs:
        for size, ids in zip(block_tokens, new.block_ids, strict=True):
            written.update(ids[new.num_computed_tokens // size :])
    cached = output.scheduled_cached_reqs
    for name, ids_by_group, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if ids_by_group is None:
            continue
        for size, ids in zip(block_tokens, ids_by_group, strict=True):
            written.update(ids[computed // size :] if name in cached.resumed_req_ids else ids)
    for copy in output.kv_cache_block_copies or ():
        written.add(int(copy[1]))
    return written
