"""kvd-cli in this process, as its console script runs it, and specs and chains to look at."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from click.testing import CliRunner

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.tools.cli.guard import run


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.out)
        assert told["schema"] == 1
        return told


def kvd_cli(*words: str, typed: str | None = None) -> Done:
    """Run the command line; `typed` is what a user answers to questions."""
    runner = CliRunner()
    with runner.isolation(input=typed, env={"COLUMNS": "300"}) as streams:
        code = run(words)
        out, err = streams[0].getvalue(), streams[1].getvalue()
    return Done(code, out.decode(), err.decode())


def a_spec(model: str = "test/model", nbytes: int = 65536, dtype: str = "bfloat16") -> KVSpec:
    shard = ShardSpec(
        pp=0, tp=0, group=0, part=0,
        layer_begin=0, layer_end=2, head_begin=0, head_end=2, nbytes=nbytes,
    )  # fmt: skip
    return KVSpec(
        model=model, revision="main", weights="ab" * 32, engine="test", dtype=dtype,
        quantisation="none", codec="opaque", chunk_tokens=64, pipeline=1, tensor=1, groups=1,
        rope=(), extra=(), shards=(shard,),
    )  # fmt: skip


class Stored(NamedTuple):
    """A chain that was stored, and how to ask for it."""

    spec: KVSpec
    hashes: list[bytes]
    prints: list[bytes]

    @property
    def keys(self) -> list[str]:
        return [one.hex() for one in self.hashes]


def store_chain(client: Client, spec: KVSpec, length: int, first: str = "") -> Stored:
    """Store a chain of random keys; `first`: hex digits with which all of them begin."""
    handle = client.register(spec)
    hashes = [bytes.fromhex((first + os.urandom(32).hex())[:64]) for _ in range(length)]
    prints = [os.urandom(16) for _ in range(length)]
    size = spec.shards[0].nbytes
    outcomes = client.store_chunks(
        handle, hashes, prints, [bytes([at % 256]) * size for at in range(length)]
    )
    assert list(outcomes) == [Outcome.OK] * length
    return Stored(spec, hashes, prints)


def resident(client: Client, stored: Stored) -> list[bool]:
    """Which keys of the chain are there; looks without touching."""
    handle = client.register(stored.spec)
    return [
        client.lookup(handle, [one], [mark], lease=False).leading == 1
        for one, mark in zip(stored.hashes, stored.prints, strict=True)
    ]
