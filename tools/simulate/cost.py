"""What a policy costs: time a touch and memory a chunk, with many chunks resident.

The law of this module: one policy a process, for memory is read off the process itself. Chunks
stand in chains, as prompts do; a touch is counted for each chunk of the chain.

    python -m kvd.tools.simulate.cost default 1000000
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd.eviction.registry import make
from kvd.tools.simulate.replay import digest

CHUNKS = 1_000_000
CHAIN = 20  # chunks of a prompt
_TOUCHES = 400_000
_EVICTIONS = 50_000
_MS = 1_000_000


def measure(name: str, chunks: int = CHUNKS, *, chain: int = CHAIN) -> dict[str, Any]:
    """`touch_us`: of one chunk in a chain; `lone_touch_us`: of a chain of one; `insert_us`;
    `evict_us`: the first victim found and forgotten, and another chunk put in its place;
    `bytes_per_chunk`: growth of the resident set. CPU time, so that others' work counts little."""
    policy = make(name)
    gc.collect()
    before = _resident()
    now = 1_000 * _MS

    def fill() -> None:
        nonlocal now
        for chunk in range(chunks):
            now += _MS
            parent = chunk - 1 if chunk % chain else -1
            policy.insert(chunk, parent=parent, queue=0, size=1, ghost=digest(chunk), now=now)

    def touch(chains: list[list[int]]) -> None:
        nonlocal now
        for some in chains:
            now += 100 * _MS
            policy.touch(some, now)

    def turn_over() -> None:
        nonlocal now
        for n in range(_EVICTIONS):
            now += _MS
            victim = next(policy.victims(0, now))
            policy.forget(victim, evicted=True)
            policy.insert(victim, parent=-1, queue=0, size=1, ghost=digest(chunks + n), now=now)

    insert_us = _cpu_us(fill) / chunks
    grown = _resident() - before
    rng = random.Random(1)
    tops = [rng.randrange(chunks // chain) * chain for _ in range(_TOUCHES // chain)]
    prompts = [list(range(top, top + chain)) for top in tops]
    lone = [[rng.randrange(chunks)] for _ in range(_TOUCHES // 8)]
    return {
        "policy": name,
        "chunks": chunks,
        "touch_us": round(_cpu_us(lambda: touch(prompts)) / (len(prompts) * chain), 3),
        "lone_touch_us": round(_cpu_us(lambda: touch(lone)) / len(lone), 3),
        "insert_us": round(insert_us, 3),
        "evict_us": round(_cpu_us(turn_over) / _EVICTIONS, 3),
        "bytes_per_chunk": round(grown / chunks),
    }


def _cpu_us(work: Callable[[], None]) -> float:
    """CPU microseconds of the work, without the garbage collector: a daemon freezes its heap."""
    gc.disable()
    try:
        began = time.process_time()
        work()
        return (time.process_time() - began) * 1e6
    finally:
        gc.enable()


def _resident() -> int:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else CHUNKS)))
