"""What an eviction policy costs: time a touch and memory a chunk, at a million chunks.

The law of this module: each policy runs alone in a process of its own, because memory is read off
that process. Times are its CPU time, so that others on the machine count little.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvd.eviction.registry import DEFAULT, POLICIES, factory
from kvd.tools.bench.daemon import BenchError
from kvd.tools.simulate.cost import CHUNKS

_QUICK_CHUNKS = 50_000
# The aims first; `default` is measured under its own name, because that is what a daemon runs.
NAMES = ("lru", "crf", "adaptive", "default")


def run_policy(
    names: Sequence[str] = (), chunks: int | None = None, *, quick: bool = False
) -> list[dict[str, Any]]:
    """A row a policy: `policy`, `chunks`, `touch_us` (one chunk of a chain of twenty),
    `bytes_per_chunk` (before the first eviction), and beside the contract `lone_touch_us`,
    `insert_us`, `evict_us` (see `kvd.tools.simulate.cost.measure`)."""
    if chunks is None:
        chunks = _QUICK_CHUNKS if quick else CHUNKS
    every = names or [*NAMES, *sorted(set(POLICIES) - {*NAMES, DEFAULT})]
    for name in every:
        factory(name)  # a wrong name is told before minutes have passed
    return [measure(name, chunks) for name in every]


def measure(name: str, chunks: int) -> dict[str, Any]:
    """One policy in a process that does nothing else. BenchError if it fails."""
    command = [sys.executable, "-P", "-m", "kvd.tools.simulate.cost", name, str(chunks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"policy {name!r} failed: {done.stderr.strip()[-400:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row
