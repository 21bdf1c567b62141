"""One medium, by the tier and by plain system calls.

The law of this module: both sides move the same bytes from and to the same memory, at the same
queue depth, on the same file system. They take turns, each first in every other round, and a ratio
is the median of the rounds' own: what the disk does by itself for a while slows both.
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
from kvd.tiers.nvme import NvmeBackend, NvmeConfig
from kvd.tiers.pool import PoolConfig, PooledTier
from kvd.tools.bench.daemon import BenchError
from kvd.tools.bench.machine import doing

__all__ = ["DEPTH", "Rig", "run_medium"]

MIB = 1 << 20
DEPTH = 4  # reads or writes at a time
ROUNDS = 10  # an even number: each side is first as often as the other


class Rig:
    """A tier of its own, and memory for its payloads that O_DIRECT takes."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.memory = mmap(-1, size * count)
        rng = np.random.default_rng(1)
        view = np.frombuffer(self.memory, np.uint8)
        view[:] = np.resize(rng.integers(0, 256, 8 * MIB + 13, np.uint8), len(view))
        self.completions = t.Completions()
        config = NvmeConfig(
            folder, "bench", size * count * 2 + 64 * MIB, size * count + MIB, reserve_bytes=0,
            threads=DEPTH,
        )  # fmt: skip
        # as the daemon has it, but that no write makes way for the reads before it
        pool = PoolConfig().for_disk(DEPTH, quiet_ns=0)
        self.tier = PooledTier("nvme", NvmeBackend(config), self.completions, pool)
        self.report = self.tier.start()
        self.headers = [self._header(n) for n in range(count)]
        self.places: list[t.Place] = []

    def _header(self, n: int) -> ChunkHeader:
        return ChunkHeader(
            kind=1, state=State.READY, namespace_digest=bytes(32), spec=bytes(32),
            chunk=n.to_bytes(32, "little"), shard_count=1, tokens=16, flags=HeaderFlag.SEALED,
            length=self.size, digest=payload_digest(self.view(n)),
        )  # fmt: skip

    def view(self, n: int) -> memoryview:
        return memoryview(self.memory)[n * self.size : (n + 1) * self.size]

    def run(self, jobs: list[t.Job]) -> tuple[float, list[t.Completion]]:
        """Seconds until all are back."""
        begun = time.perf_counter()
        self.tier.submit(jobs)
        done: list[t.Completion] = []
        while len(done) < len(jobs):
            taken = self.completions.take()
            done += taken
            if not taken:
                time.sleep(0.0002)
        took = time.perf_counter() - begun
        bad = [c for c in done if c.answer is not t.Answer.OK]
        if bad:
            raise BenchError(f"tier nvme: {bad[0].answer.value}: {bad[0].detail}")
        return took, done

    def write(self) -> float:
        took, done = self.run([t.Write(n, h, self.view(n)) for n, h in enumerate(self.headers)])
        self.places = [c.place for c in sorted(done, key=lambda c: int(str(c.job.token)))]
        return took

    def read(self) -> float:
        jobs: list[t.Job] = [
            t.Read(n, t.Key.of(h), self.places[n], self.view(n)) for n, h in enumerate(self.headers)
        ]
        return self.run(jobs)[0]

    def clear(self) -> None:
        jobs: list[t.Job] = [
            t.Delete(n, t.Key.of(h), self.places[n]) for n, h in enumerate(self.headers)
        ]
        self.run(jobs)

    def close(self) -> None:
        self.tier.close()
        self.completions.close()


class Plain:
    """The same bytes by pread and pwrite alone."""

    def __init__(self, path: Path, rig: Rig, *, direct: bool) -> None:
        self.rig = rig
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self.fd, 0, rig.size * rig.count)
        self.pool = ThreadPoolExecutor(DEPTH)

    def _all(self, one: Any) -> float:
        begun = time.perf_counter()
        list(self.pool.map(one, range(self.rig.count)))
        return time.perf_counter() - begun

    def write(self) -> float:
        return self._all(lambda n: os.pwrite(self.fd, self.rig.view(n), n * self.rig.size))

    def read(self) -> float:
        return self._all(lambda n: os.preadv(self.fd, [self.rig.view(n)], n * self.rig.size))

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.fd)


def run_medium(folder: Path, size: int, count: int, *, quick: bool = False) -> dict[str, Any]:
    """The row of one chunk size: gigabytes a second of plain system calls, and the tier's share."""
    doing(f"nvme, {count} x {size // MIB} MiB")
    rig = Rig(folder / f"tier-{size}", size, count)
    plain = Plain(folder / "plain", rig, direct=rig.report.engine != "buffered")
    writes: list[tuple[float, float]] = []
    reads: list[tuple[float, float]] = []
    try:
        plain.write()  # what has never been written to is slower, for both
        rig.write()
        rig.clear()
        for n in range(2 if quick else ROUNDS):
            writes.append(_turns(plain.write, rig.write, swapped=bool(n % 2)))
            reads.append(_turns(plain.read, rig.read, swapped=bool(n % 2)))
            rig.clear()
    finally:
        plain.close()
        rig.close()
        (folder / "plain").unlink()
    gigabytes = size * count / 1e9
    return {
        "chunk_bytes": size,
        "engine": rig.report.engine,
        "limit_write_gbps": gigabytes / statistics.median(plain for plain, _ in writes),
        "limit_read_gbps": gigabytes / statistics.median(plain for plain, _ in reads),
        "write_ratio": statistics.median(plain / tier for plain, tier in writes),
        "read_ratio": statistics.median(plain / tier for plain, tier in reads),
    }


def _turns(
    plain: Callable[[], float], tier: Callable[[], float], *, swapped: bool
) -> tuple[float, float]:
    """Seconds of both, one right after the other."""
    if swapped:
        second = tier()
        return plain(), second
    return plain(), tier()
