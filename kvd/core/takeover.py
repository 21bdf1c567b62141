"""After a policy has failed: what took over is told of all that is resident.

The law of this module: a few rows in each slice, in any order, for the policy that takes over puts
each where its last use belongs.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvd.core.advice import Advice
from kvd.core.jobs import Pause, Work, spent
from kvd.core.lower import Lower
from kvd.core.store import Store
from kvd.eviction.recency import Recency

_SLICE: Final = 256  # rows looked at in one go


def take_over(store: Store, advice: Advice, lower: Lower | None) -> Work[None]:
    """Tell the policy that took over of all that is resident. `lower`: the tier, None for DRAM."""
    chunks = store.chunks
    policy, begin = advice.policy, 0
    while begin < chunks.used:
        if not isinstance(policy, Recency) or advice.policy is not policy:
            return  # it failed as well
        some = slice(begin, min(begin + _SLICE, chunks.used))
        there = (chunks.np_ready[some] if lower is None else lower.np_count[some]) > 0
        there &= chunks.np_space[some] != 0
        queues: dict[int, list[int]] = {}
        for row in (np.flatnonzero(there) + begin).tolist():
            if not policy.resident(row):
                space = store.spaces.of(chunks.space[row])
                queue = store.queue(row) if lower is None else space.queues[0]
                queues.setdefault(queue, []).append(row)
        for queue, rows in queues.items():
            order = np.array(rows, np.int64)
            depth = chunks.np_index[order].astype(np.int64)
            order = order[np.lexsort((-depth, chunks.np_last[order]))]
            advice.load(
                order,
                chunks.np_last[order],
                parents=chunks.np_parent[order].astype(np.int64),
                queue=queue,
                size=store.spaces.of(chunks.space[rows[0]]).chunk_slot_bytes,
                ghosts=store.ghosts(order),
            )
        begin = some.stop
        if spent(store, 2 + int(there.sum()) // 10):
            yield Pause.SLICE
    advice.partial = False
    advice.turn += 1
