"""What the tests of this folder share: a spec, prompts whose bytes say which chunk they are, and a
daemon with room for 256 chunks of 64 KiB, of which one session may lease half and write a quarter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvd.chunk import KVSpec, Outcome, ShardSpec, chain_fingerprints, chain_hashes
from kvd.client import Client, SpecHandle

OK, MISS, SKIPPED = Outcome.OK, Outcome.MISS, Outcome.SKIPPED
SIZE = 64 * 1024
SLOTS = 256


def make_spec(nbytes: int = SIZE, ranks: int = 1, chunk_tokens: int = 16) -> KVSpec:
    shards = tuple(ShardSpec(0, rank, 0, 0, 0, 1, rank, rank + 1, nbytes) for rank in range(ranks))
    return KVSpec(
        model="m", revision="r", weights="w", engine="e", dtype="bfloat16", quantisation="none",
        codec="c", chunk_tokens=chunk_tokens, pipeline=1, tensor=ranks, groups=1, rope=(),
        extra=(), shards=shards,
    )  # fmt: skip


class Prompt:
    """A chain of chunks: hashes, fingerprints, and bytes that say which chunk they are."""

    def __init__(self, name: int, chunks: int, nbytes: int = SIZE) -> None:
        tokens = np.arange(chunks * 16, dtype=np.uint32) + name * 1_000_003
        self.hashes = chain_hashes(tokens, 16)
        self.prints = chain_fingerprints(tokens, 16)
        self.data = [np.full(nbytes, (name * 31 + i) % 251, np.uint8) for i in range(chunks)]

    def store(
        self, client: Client, handle: SpecHandle, begin: int = 0, end: int | None = None
    ) -> list[Outcome]:
        part = slice(begin, end)
        return client.store_chunks(
            handle,
            self.hashes[part],
            self.prints[part],
            self.data[part],
            parent=self.hashes[begin - 1] if begin else None,
            index0=begin,
        )


def blank(chunks: int, nbytes: int = SIZE) -> list[np.ndarray[Any, Any]]:
    """Destinations filled with a sentinel that no chunk has."""
    return [np.full(nbytes, 255, np.uint8) for _ in range(chunks)]


def untouched(buffer: np.ndarray[Any, Any]) -> bool:
    return bool((buffer == 255).all())


def tier(client: Client) -> dict[str, Any]:
    return dict(client.stat()["tiers"][0])


def soon(condition: Callable[[], object], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` in threads; what one raises is raised here."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result(90)
