"""Requests against a cache of so many blocks, with a policy of `kvd.eviction` to choose.

The law of this module: the policy sees what the daemon would show it. A request looks up its
chain, which touches the leading run; what is missing is stored from there on, each block making
room for itself; then the whole chain is touched. A victim must be legal: a leaf that is not part
of the request at hand. Two tiers are NINE: a victim above moves down unless its copy is still
there, a hit below is promoted and keeps its copy, and the tier below sees every use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvd.eviction.base import Policy
from kvd.eviction.distances import SAMPLES, Distances
from kvd.tools.simulate.trace import Trace

_MASK = (1 << 64) - 1


class Count(NamedTuple):
    """What a replay came to. Blocks of all requests, and those found above and below."""

    blocks: int
    hits: int
    lower_hits: int
    tokens: int
    token_hits: int
    stored: int
    written_down: int

    @property
    def block_hit_pct(self) -> float:
        return 100.0 * (self.hits + self.lower_hits) / self.blocks if self.blocks else 0.0

    @property
    def token_hit_pct(self) -> float:
        return 100.0 * self.token_hits / self.tokens if self.tokens else 0.0


def digest(block: int) -> int:
    """64 well-mixed bits for a block's number (splitmix64), as the core's digest of a key."""
    x = (block + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class Tier:
    """A set of resident blocks, at most `capacity`. The block's number is the policy's id."""

    def __init__(self, policy: Policy, capacity: int, blocks: int, below: Tier | None) -> None:
        self.policy = policy
        self.capacity = capacity
        self.below = below
        self.here = bytearray(blocks)
        self.stored = 0  # blocks written into this tier
        self._free = capacity
        self._kids = [0] * blocks

    def store(self, block: int, parents: list[int], used: list[int], now: int) -> bool:
        """Take the block in, making room; False when there is no legal victim. `used`: the number
        of each block's last request, that of `block` being the one at hand. Pre: not here."""
        return self._store(block, parents, used, used[block], now)

    def _store(
        self, block: int, parents: list[int], used: list[int], request: int, now: int
    ) -> bool:
        if not self._free and not self._evict(parents, used, request, now):
            return False
        self._free -= 1
        self.here[block] = 1
        parent = parents[block]
        if parent >= 0:
            self._kids[parent] += 1
        self.policy.insert(block, parent=parent, queue=0, size=1, ghost=digest(block), now=now)
        self.stored += 1
        return True

    def _evict(self, parents: list[int], used: list[int], request: int, now: int) -> bool:
        for victim in self.policy.victims(0, now):
            if used[victim] != request and not self._kids[victim]:
                break
        else:
            return False
        self.policy.forget(victim, evicted=True)
        self.here[victim] = 0
        self._free += 1
        if parents[victim] >= 0:
            self._kids[parents[victim]] -= 1
        if self.below is not None and not self.below.here[victim]:
            self.below._store(victim, parents, used, request, now)  # without room it is lost
        return True


def replay(
    trace: Trace,
    make: Callable[[], Policy],
    capacities: Sequence[int],
    every: int = 128,
    progress: Callable[[int], None] | None = None,
) -> Count:
    """Replay a trace. `capacities`: blocks of each tier, from the top (one or two). `progress` is
    told how many requests more are done, at least each `every`."""
    parents = trace.parents
    blocks = len(parents)
    lower = Tier(make(), capacities[1], blocks, None) if len(capacities) > 1 else None
    upper = Tier(make(), capacities[0], blocks, lower)
    policies = [tier.policy for tier in (upper, lower) if tier is not None]
    used = [-1] * blocks
    total = hits = lower_hits = token_hits = 0
    here, below = upper.here, lower.here if lower is not None else bytearray(blocks)
    for number, (now, tokens, chain) in enumerate(trace.requests):
        found = 0
        for block in chain:
            if here[block]:
                hits += 1
            elif below[block]:
                lower_hits += 1
            else:
                break
            found += 1
        total += len(chain)
        token_hits += min(tokens, found * trace.block_tokens)
        for block in chain:
            used[block] = number
        if found:
            for policy in policies:
                policy.touch(chain[:found], now)
        for block in chain:
            if not here[block] and not upper.store(block, parents, used, now):
                break
        for policy in policies:
            policy.touch(chain, now)
        if progress is not None and number % every == every - 1:
            progress(every)
    if progress is not None:
        progress(len(trace.requests) % every)
    return Count(
        total,
        hits,
        lower_hits,
        trace.tokens,
        token_hits,
        upper.stored,
        lower.stored if lower is not None else 0,
    )


def sampled_lru(
    trace: Trace,
    capacities: Sequence[int],
    samples: int = SAMPLES,
    rate: float = 0.25,
    progress: Callable[[int], None] | None = None,
) -> list[Count]:
    """What a daemon's sample of reuse distances says of an LRU of so many blocks. Its hits are
    estimates; so are those in tokens, a block being a block."""
    distances = Distances(samples, rate)
    digests = np.array([digest(block) for block in range(trace.unique_blocks)], np.uint64)
    for now, _, chain in trace.requests:
        if chain:
            distances.asked(digests[list(chain)], 1 << 20, now)
        if progress is not None:
            progress(1)
    blocks, tokens = trace.accesses, trace.tokens
    counts = []
    for capacity in capacities:
        share = distances.hit_share(capacity << 20)
        hits = round(blocks * share)
        counts.append(Count(blocks, hits, 0, tokens, round(tokens * share), 0, 0))
    return counts
