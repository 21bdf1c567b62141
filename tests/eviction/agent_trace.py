"""Made-up agent sessions, as a third kind of requests beside the two published traces.

A few long system prompts that many sessions share; each session asks again and again, mostly within
seconds, its context growing by a few blocks a turn; sometimes a person or a slow tool is waited
for; a context that gets too long is compacted. Unlike in chats, what was used most is soonest dead.

    python tests/eviction/agent_trace.py agents.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK = 512
LONGEST = 250  # blocks before a context is compacted


def agents(sessions: int = 400, seconds: float = 3600.0, seed: int = 1) -> list[dict[str, object]]:
    """Rows of a trace, in the order of time."""
    rng = random.Random(seed)
    blocks = iter(range(10**9))

    def fresh(low: int, high: int) -> list[int]:
        return [next(blocks) for _ in range(rng.randint(low, high))]

    prompts = [fresh(6, 30) for _ in range(4)]
    rows = [
        row for _ in range(sessions) for row in _session(rng, rng.choice(prompts), fresh, seconds)
    ]
    return sorted(rows, key=lambda row: row["timestamp"])  # type: ignore[arg-type,return-value]


def _session(rng, prompt, fresh, seconds) -> Iterator[dict[str, object]]:  # type: ignore[no-untyped-def]
    now = rng.uniform(0, seconds)
    begin = prompt + fresh(4, 40)
    chain = begin
    for _ in range(int(rng.triangular(5, 60, 10))):
        tail = fresh(1, 1) if rng.random() < 0.9 else []  # a partial last block
        yield {
            "timestamp": int(now * 1000),
            "input_length": len(chain) * BLOCK + (rng.randint(1, BLOCK - 1) if tail else 0),
            "output_length": 1,
            "hash_ids": chain + tail,
        }
        more = int(rng.expovariate(0.5) + 0.5)
        chain = chain + fresh(more, more)
        if len(chain) > LONGEST:
            chain = begin
        waits = rng.random() < 0.05
        now += rng.uniform(120, 1200) if waits else min(1500.0, rng.lognormvariate(2.3, 1.0))


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]), agents())
