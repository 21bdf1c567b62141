"""Specs and keys for benchmarks."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvd.chunk import KVSpec, ShardSpec


class Chain(NamedTuple):
    """Keys of one prompt: random, so nobody has them yet, but in chain order. Packed, as an engine
    that hashes ahead holds them."""

    hashes: bytes  # 32 bytes a key
    fingerprints: bytes  # 16 bytes a key

    @property
    def length(self) -> int:
        return len(self.hashes) // 32

    def part(self, begin: int, end: int) -> Chain:
        """Keys [begin, end)."""
        return Chain(self.hashes[32 * begin : 32 * end], self.fingerprints[16 * begin : 16 * end])


def chain(length: int) -> Chain:
    """`length` new keys."""
    return Chain(os.urandom(32 * length), os.urandom(16 * length))


def spec(name: str, chunk_bytes: int, chunk_tokens: int = 256) -> KVSpec:
    """A spec of one shard of `chunk_bytes`. Its weights are random: no engine ever shares it."""
    shard = ShardSpec(
        pp=0, tp=0, group=0, part=0,
        layer_begin=0, layer_end=32, head_begin=0, head_end=8, nbytes=chunk_bytes,
    )  # fmt: skip
    return KVSpec(
        model=f"kvd-bench/{name}",
        revision="",
        weights=os.urandom(32).hex(),
        engine="kvd-bench",
        dtype="float16",
        quantisation="none",
        codec=name,
        chunk_tokens=chunk_tokens,
        pipeline=1,
        tensor=1,
        groups=1,
        rope=(),
        extra=(),
        shards=(shard,),
    )
