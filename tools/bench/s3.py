"""The S3 tier against bare boto3, on one server in one run.

The law of this module: both sides move the same bytes at the same concurrency, in turns, to names
that are new each time. The bare side is boto3 as it comes, with a connection for each thread; both
check sums as they do by themselves. The server is one of our own, on this machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from kvd.chunk import ChunkHeader, HeaderFlag, State, payload_digest
from kvd.tiers import base as t
from kvd.tiers.pool import PoolConfig, PooledTier
from kvd.tools.bench.daemon import BenchError
from kvd.tools.bench.machine import doing
from kvd.tools.services import ACCESS, SECRET, Seaweed, ServiceFailed

__all__ = ["run_s3"]

MIB = 1 << 20
BUCKET = "kvd-bench"


def run_s3(
    folder: Path, sizes: tuple[int, ...], total: int, *, concurrency: int = 8, rounds: int = 5
) -> list[dict[str, Any]]:
    """A row a chunk size; none where boto3 or a server is not installed."""
    (home := folder / "s3").mkdir()
    try:
        server = Seaweed(home)
    except ServiceFailed as missing:
        doing(f"s3 left out: {missing}")
        return []
    try:
        server.make_bucket(BUCKET)
        return [
            _row(server, size, max(concurrency, total // size), concurrency, rounds)
            for size in sizes
        ]
    except ServiceFailed as failed:
        raise BenchError(str(failed)) from failed
    finally:
        server.stop()


def _row(server: Seaweed, size: int, count: int, workers: int, rounds: int) -> dict[str, Any]:
    doing(f"s3, {count} x {size // MIB} MiB, {workers} at a time")
    memory = mmap(-1, size * count)
    view = np.frombuffer(memory, np.uint8)
    some = np.random.default_rng(1).integers(0, 256, 8 * MIB + 13, np.uint8)
    view[:] = np.resize(some, len(view))
    bare = _Bare(server, memory, size, count, workers)
    tier = _Tier(server, memory, size, count, workers)
    took: dict[str, list[float]] = {"bp": [], "p": [], "bg": [], "g": []}
    try:
        for turn in range(-1, rounds):  # the first turn warms connections and the server up
            sides: list[tuple[str, Callable[[int], float]]] = [
                ("bp", bare.put), ("p", tier.put), ("bg", bare.get), ("g", tier.get),
            ]  # fmt: skip
            if turn % 2:  # neither side always comes after the other
                sides = [sides[1], sides[0], sides[3], sides[2]]
            for name, side in sides:
                seconds = side(turn)
                if turn >= 0:
                    took[name].append(seconds)
            bare.clear(turn)
            tier.clear(turn)
    finally:
        bare.close()
        tier.close()
    gigabytes = size * count / 1e9
    middle = {name: statistics.median(values) for name, values in took.items()}
    return {
        "chunk_bytes": size,
        "concurrency": workers,
        "limit_put_gbps": gigabytes / middle["bp"],
        "limit_get_gbps": gigabytes / middle["bg"],
        "put_ratio": middle["bp"] / middle["p"],
        "get_ratio": middle["bg"] / middle["g"],
    }


class _Bare:
    """boto3 and nothing else."""

    def __init__(self, server: Seaweed, memory: mmap, size: int, count: int, workers: int) -> None:
        import boto3
        from botocore.config import Config

        self.memory, self.size, self.count = memory, size, count
        self.client = boto3.client(
            "s3", endpoint_url=server.endpoint, region_name="us-east-1",
            aws_access_key_id=ACCESS, aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=workers),
        )  # fmt: skip
        self.pool = ThreadPoolExecutor(workers)

    def _all(self, one: Callable[[int], None]) -> float:
        begun = time.perf_counter()
        for _ in self.pool.map(one, range(self.count)):
            pass
        return time.perf_counter() - begun

    def put(self, turn: int) -> float:
        def one(n: int) -> None:
            body = bytes(memoryview(self.memory)[n * self.size : (n + 1) * self.size])
            self.client.put_object(Bucket=BUCKET, Key=f"bare/{turn}/{n}", Body=body)

        return self._all(one)

    def get(self, turn: int) -> float:
        def one(n: int) -> None:
            body = self.client.get_object(Bucket=BUCKET, Key=f"bare/{turn}/{n}")["Body"].read()
            if len(body) != self.size:
                raise BenchError(f"{len(body)} bytes where {self.size} should be")

        return self._all(one)

    def clear(self, turn: int) -> None:
        names = [{"Key": f"bare/{turn}/{n}"} for n in range(self.count)]
        self.client.delete_objects(Bucket=BUCKET, Delete={"Objects": names, "Quiet": True})

    def close(self) -> None:
        self.pool.shutdown()
        self.client.close()


class _Tier:
    """The tier as the daemon has it."""

    def __init__(self, server: Seaweed, memory: mmap, size: int, count: int, workers: int) -> None:
        from kvd.tiers.s3 import S3Backend, S3Config

        self.memory, self.size, self.count = memory, size, count
        self.completions = t.Completions()
        os.environ.update(AWS_ACCESS_KEY_ID=ACCESS, AWS_SECRET_ACCESS_KEY=SECRET)
        config = S3Config(
            BUCKET, "bench", 4 * size * count + MIB, endpoint=server.endpoint, addressing="path",
            concurrency=workers,
        )  # fmt: skip
        pool = PoolConfig(workers=workers, writers=workers)
        self.tier = PooledTier("s3", S3Backend(config), self.completions, pool)
        self.tier.start()
        self.digests = [payload_digest(self._view(n)) for n in range(count)]

    def _view(self, n: int) -> memoryview:
        return memoryview(self.memory)[n * self.size : (n + 1) * self.size]

    def _header(self, turn: int, n: int) -> ChunkHeader:
        return ChunkHeader(
            kind=1, state=State.READY, namespace_digest=bytes(32), spec=bytes(32),
            chunk=(turn + 2).to_bytes(16, "little") + n.to_bytes(16, "little"), shard_count=1,
            tokens=16, flags=HeaderFlag.SEALED, length=self.size, digest=self.digests[n],
        )  # fmt: skip

    def _run(self, jobs: list[t.Job]) -> float:
        begun = time.perf_counter()
        self.tier.submit(jobs)
        left = len(jobs)
        while left:
            taken = self.completions.take()
            bad = [c for c in taken if c.answer is not t.Answer.OK]
            if bad:
                raise BenchError(f"tier s3: {bad[0].answer.value}: {bad[0].detail}")
            left -= len(taken)
            if not taken:
                time.sleep(0.001)
        return time.perf_counter() - begun

    def put(self, turn: int) -> float:
        return self._run(
            [t.Write(n, self._header(turn, n), self._view(n)) for n in range(self.count)]
        )

    def get(self, turn: int) -> float:
        keys = [t.Key.of(self._header(turn, n)) for n in range(self.count)]
        return self._run([t.Read(n, k, t.NOWHERE, self._view(n)) for n, k in enumerate(keys)])

    def clear(self, turn: int) -> None:
        keys = [t.Key.of(self._header(turn, n)) for n in range(self.count)]
        self._run([t.Delete(n, key, t.NOWHERE) for n, key in enumerate(keys)])

    def close(self) -> None:
        self.tier.close()
        self.completions.close()
