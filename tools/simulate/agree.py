"""Whether a running daemon hits what a replay says that it hits.

The law of this module: the same requests, the same capacity, the same policy, the same times. The
trace goes through a daemon first; then it is replayed with the moments at which the daemon was
asked, because most policies go by time. Chunks are of a page.

Faster than its own pace a trace is another one: uses within a second are one use, and an hour that
is pressed into a minute has many that lie just within or just beyond it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvd.chunk import KVSpec, ShardSpec
from kvd.client import Client
from kvd.eviction.base import Policy
from kvd.tools.bench.daemon import Daemon
from kvd.tools.simulate.replay import digest, replay
from kvd.tools.simulate.trace import Request, Trace

PAGE = 4096
_SLAB = 16  # chunks: capacities are multiples of it
_LEAST = 512  # chunks of the smallest arena
_TIMEOUT_S = 60.0
_MASK = (1 << 64) - 1


class Agreement(NamedTuple):
    """Blocks found, in percent of all, by a daemon and by a replay of what it was asked."""

    trace: str
    policy: str
    capacity_pct: float
    blocks: int
    daemon_hit_pct: float
    replay_hit_pct: float

    @property
    def difference(self) -> float:
        return self.replay_hit_pct - self.daemon_hit_pct


def agreement(
    trace: Trace,
    policy: str,
    make: Callable[[], Policy],
    percent: float,
    speed: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Agreement:
    """Run a trace through a daemon of its own, and again through `make`. `policy`: the daemon's
    setting; `speed`: at most so many times as fast as the trace's own times (0: as fast as the
    daemon answers); `progress` is told how many requests more are done."""
    capacity = max(_LEAST, int(trace.unique_blocks * percent / 100.0) // _SLAB * _SLAB)
    options = (
        "--arena-size", str(capacity * PAGE), "--arena-slab-size", str(_SLAB * PAGE),
        "--limits-write-share", "1", "--limits-lease-share", "1",
    )  # fmt: skip
    with Daemon(None, *options, *_setting(policy)) as daemon:
        with Client(daemon.socket, timeout_s=_TIMEOUT_S, name="kvd-cli simulate") as client:
            hits, times = _ask(client, trace, speed, progress)
    requests = [
        Request(now, request.tokens, request.blocks)
        for now, request in zip(times, trace.requests, strict=True)
    ]
    count = replay(trace._replace(requests=requests), make, [capacity])
    return Agreement(
        trace.name,
        policy,
        percent,
        capacity,
        100.0 * hits / count.blocks if count.blocks else 0.0,
        count.block_hit_pct,
    )


def _setting(policy: str) -> tuple[str, ...]:
    return ("--eviction-policy", policy)


def _ask(
    client: Client, trace: Trace, speed: float, progress: Callable[[int], None] | None
) -> tuple[int, list[int]]:
    """Every request as an engine makes it: look up, give back, store the rest. Blocks found, and
    when each request was made, ns."""
    spec = client.register(_spec(trace.block_tokens))
    keys = [_key(block) for block in range(trace.unique_blocks)]
    hits, times = 0, []
    began, first = time.monotonic(), trace.requests[0].time_ns
    for now, _, blocks in trace.requests:
        if speed:
            due = began + (now - first) / speed / 1e9
            time.sleep(max(0.0, due - time.monotonic()))
        times.append(time.monotonic_ns())
        if progress is not None:
            progress(1)
        if not blocks:
            continue
        hashes = [keys[block] for block in blocks]
        found = client.lookup(spec, hashes)
        if found.lease is not None:
            found.lease.release()
        hits += found.leading
        if found.leading < len(hashes):
            parent = hashes[found.leading - 1] if found.leading else None
            rest = hashes[found.leading :]
            with client.reserve(spec, rest, parent=parent, index0=found.leading) as write:
                write.commit()
    return hits, times


def _key(block: int) -> bytes:
    """32 well-mixed bytes."""
    return b"".join(digest((block << 2 | n) & _MASK).to_bytes(8, "little") for n in range(4))


def _spec(block_tokens: int) -> KVSpec:
    shard = ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, PAGE)
    return KVSpec(
        "kvd-simulate", "", "none", "kvd-simulate", "uint8", "", "page", min(block_tokens, 4096),
        1, 1, 1, (), (), (shard,),
    )  # fmt: skip
