"""Requests of a real service, for the benchmarks that need some.

The law of this module: hashes only, in the order and at the times of the trace. What is shipped is
the first third of the `conversation` trace of the Mooncake project (FAST '25, Apache License 2.0),
shortened and written as runs: [ms, [first id, count, first id, count, …]] a request.
"""

from __future__ import annotations

import json
import lzma
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple


class Request(NamedTuple):
    """One prompt: its blocks from the root on."""

    at_ms: int
    blocks: tuple[int, ...]


def shipped(limit: int | None = None) -> list[Request]:
    """The requests that come with kvd; the first `limit` of them."""
    packed = files("kvd.tools.bench").joinpath("conversation.json.xz").read_bytes()
    return [Request(at, _blocks(runs)) for at, runs in json.loads(lzma.decompress(packed))[:limit]]


def read(path: str, limit: int | None = None) -> list[Request]:
    """Those of a trace file (JSON lines with `timestamp` in ms and `hash_ids`)."""
    found: list[Request] = []
    with Path(path).open("rb") as lines:
        for line in lines:
            if limit is not None and len(found) >= limit:
                break
            if line.strip():
                told = json.loads(line)
                found.append(Request(int(told["timestamp"]), tuple(told["hash_ids"])))
    return found


def _blocks(runs: list[int]) -> tuple[int, ...]:
    return tuple(
        block
        for first, count in zip(runs[::2], runs[1::2], strict=True)
        for block in range(first, first + count)
    )
