"""What hints at the end of sessions are worth, and what wrong ones cost.

The law of this module: the trace itself says which requests were the last of their session (nobody
asks for their last full block again); a share of these say so, and a share of the others say it
wrongly. What a hint does is what the daemon does: what is shared with no other session, and was not
used again for an eighth of the time that blocks stay, is cooled.

    python -m kvd.tools.simulate.hints conversation_trace.jsonl --policy default
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from kvd.core.hints import PATIENCE
from kvd.core.store import STAY_WEIGHT
from kvd.eviction.base import Policy
from kvd.eviction.registry import factory
from kvd.tools.simulate.replay import Tier
from kvd.tools.simulate.trace import Trace, read_trace

CASES = ((0.0, 0.0), (0.25, 0.0), (0.5, 0.0), (0.5, 0.1), (1.0, 0.0), (0.0, 0.1))
PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Hinted(NamedTuple):
    """Blocks found, in percent of block accesses. `told`: share of the sessions that end and say
    so; `false`: share of the requests that go on and say the same."""

    trace: str
    policy: str
    capacity_pct: float
    told: float
    false: float
    block_hit_pct: float


def endings(trace: Trace) -> list[bool]:
    """Of each request, whether it was the last of its session."""
    last: dict[int, int] = {}
    for number, request in enumerate(trace.requests):
        for block in request.blocks:
            last[block] = number
    # the last block may be a part of one, whose hash is another with the next turn
    return [
        last[request.blocks[max(len(request.blocks) - 2, 0)]] == number if request.blocks else False
        for number, request in enumerate(trace.requests)
    ]


class Stay:
    """How long ago victims were used last, on the average."""

    def __init__(self, last: Sequence[int]) -> None:
        self.now = 0
        self.mean_ns = 0.0
        self._last = last

    def watch(self, policy: Policy) -> Policy:
        forget = policy.forget

        def watched(chunk: int, *, evicted: bool) -> None:
            if evicted:
                self.mean_ns += (self.now - self._last[chunk] - self.mean_ns) * STAY_WEIGHT
            forget(chunk, evicted=evicted)

        policy.forget = watched  # type: ignore[method-assign]
        return policy


def replay(
    trace: Trace, make: Callable[[], Policy], capacity: int, told: float, false: float
) -> float:
    """One tier; the share of blocks found, in percent."""
    rng = random.Random(1)
    over = endings(trace)
    blocks = len(trace.parents)
    tier = Tier(make(), capacity, blocks, None)
    children = [0] * blocks  # that are known, resident or not
    waiting: deque[tuple[float, int, tuple[int, ...]]] = deque()
    last = [0] * blocks  # use, ns
    stay = Stay(last)
    tier.policy = stay.watch(tier.policy)
    known = bytearray(blocks)
    used = [-1] * blocks
    total = hits = 0
    for number, (now, _, chain) in enumerate(trace.requests):
        stay.now = now
        while waiting and waiting[0][0] <= now:
            _, when, told_chain = waiting.popleft()
            suffix = _private(told_chain, children)
            tier.policy.cool([block for block in suffix if last[block] <= when], now)
        found = 0
        while found < len(chain) and tier.here[chain[found]]:
            found += 1
        hits += found
        total += len(chain)
        for block in chain:
            used[block] = number
            last[block] = now
            if not known[block]:
                known[block] = 1
                if trace.parents[block] >= 0:
                    children[trace.parents[block]] += 1
        if found:
            tier.policy.touch(chain[:found], now)
        for block in chain:
            if not tier.here[block] and not tier.store(block, trace.parents, used, now):
                break
        tier.policy.touch(chain, now)
        if rng.random() < (told if over[number] else false):
            waiting.append((now + stay.mean_ns / PATIENCE, now, chain))
    return 100.0 * hits / total if total else 0.0


def _private(chain: Sequence[int], children: Sequence[int]) -> list[int]:
    """What no other session shares, from the leaf on."""
    suffix: list[int] = []
    for block in reversed(chain):
        if children[block] > (1 if suffix else 0):
            break
        suffix.append(block)
    return suffix


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--policy", "-p", default="default")
@click.option("--capacity", "-c", default=",".join(f"{p:g}" for p in PERCENTS))
def main(traces: tuple[Path, ...], policy: str, capacity: str) -> None:
    """One JSON line a cell."""
    make = factory(policy)
    for path in traces:
        trace = read_trace(path)
        for percent in map(float, capacity.split(",")):
            blocks = max(1, round(trace.unique_blocks * percent / 100.0))
            for told, false in CASES:
                hit = replay(trace, make, blocks, told, false)
                row = Hinted(trace.name, policy, percent, told, false, round(hit, 2))
                sys.stdout.write(json.dumps(row._asdict()) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
