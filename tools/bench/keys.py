"""Specs and keys for benchmarks."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvd.chunk import KVSpec, ShardSpec


class Chain(NamedTuple):
    """Keys of one prompt: random, so nobody has them yet, but in chain order."""

    hashes: list[bytes]  # 32 bytes each
    fingerprints: list[bytes]  # 16 bytes each


def chain(length: int) -> Chain:
    """`length` new keys."""
    hashes = os.urandom(32 * length)
    prints = os.urandom(16 * length)
    return Chain(
        [hashes[32 * at : 32 * at + 32] for at in range(length)],
        [prints[16 * at : 16 * at + 16] for at in range(length)],
    )


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
