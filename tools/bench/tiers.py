"""`kvd-bench tiers`: what the ladder gives of what its media can.

The law of this module: a ratio has both its sides from one run, in turns, on the same disk with the
same queue depth; the limit is a plain loop of system calls that does nothing else.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from kvd.chunk import ChunkHeader, HeaderFlag, KVSpec, State, namespace_digest, payload_digest
from kvd.client import Client
from kvd.tiers import base as t
from kvd.tiers.faults import Fault, Faults, FaultyBackend
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.nvme import NvmeBackend, NvmeConfig
from kvd.tiers.pool import PooledTier
from kvd.tools.bench.daemon import BenchError, Daemon, until
from kvd.tools.bench.first import run_first
from kvd.tools.bench.keys import spec
from kvd.tools.bench.machine import doing
from kvd.tools.bench.medium import DEPTH, Rig, run_medium
from kvd.tools.bench.s3 import run_s3
from kvd.tools.bench.storm import run_storm

MIB = 1 << 20
SLOW_JOBS = 5  # of the slow tier in one round: two more than run there at a time


def run_tiers(directory: str | None, *, quick: bool = False) -> dict[str, Any]:
    """Everything, on a disk of the caller's choice."""
    with _folder(directory) as folder:
        sizes = (4 * MIB,) if quick else (4 * MIB, 32 * MIB)
        total = 64 * MIB if quick else 512 * MIB
        nvme = [
            run_medium(folder, size, max(DEPTH, total // size), quick=quick) for size in sizes
        ]
        doing("lookups under demotion")
        storm = run_storm(folder, quick=quick)
        return {
            "nvme": nvme,
            "s3": run_s3(folder, sizes, total // 4, rounds=2 if quick else 5),
            **run_first(folder, quick=quick),
            "warm_start": _warm_start(folder, 20_000 if quick else 1_000_000),
            "lookup_p99_ratio_under_demotion": storm["p99_ratio"],
            "storm": storm,
            **_slow_tier(folder, quick=quick),
        }


@contextmanager
def _folder(directory: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _warm_start(folder: Path, chunks: int) -> dict[str, Any]:
    """From the start of the process to readiness, with that many chunks on NVMe."""
    doing(f"warm start with {chunks} chunks")
    size, path = 4096, folder / "warm"
    limit = chunks * (size + 512) + chunks * size // 16 + 256 * MIB
    flags = (
        "--nvme-path", str(path), "--nvme-limit", str(limit), "--nvme-reserve", "0",
        "--arena-size", "64MiB",
    )  # fmt: skip
    warm = spec("warm", size)
    with Daemon(None, *flags) as daemon:
        with Client(daemon.socket) as client:
            client.register(warm)  # so that the next life knows it by the arena's registry
            namespace = client.info().namespace
        daemon.kill()
        _put_many(path, daemon.instance, limit, warm, namespace, chunks)
        begun = time.perf_counter()
        daemon.again()
        took = time.perf_counter() - begun
        with Client(daemon.socket, timeout_s=30) as client:
            there = client.stat()["tiers"][1]["chunks"]
    if there != chunks:
        raise BenchError(f"{there} of {chunks} chunks were taken up")
    return {"chunks": chunks, "seconds": took}


def _put_many(
    path: Path, instance: str, limit: int, warm: KVSpec, namespace: str, chunks: int
) -> None:
    backend = NvmeBackend(NvmeConfig(path, instance, limit, reserve_bytes=0, preallocate=False))
    backend.open()
    memory = memoryview(mmap(-1, 4096))
    header = ChunkHeader(
        kind=2, state=State.READY, namespace_digest=namespace_digest(namespace), spec=warm.digest,
        shard_count=1, tokens=warm.chunk_tokens, flags=HeaderFlag.SEALED, length=4096,
        digest=payload_digest(memory),
    )  # fmt: skip
    keys = np.random.default_rng(5).integers(0, 256, (chunks, 32), np.uint8)
    try:
        for n in range(chunks):
            one = header._replace(chunk=keys[n].tobytes())
            backend.put(t.Key.of(one), one, memory, t.NEVER)
    finally:
        backend.close()


def _slow_tier(folder: Path, *, quick: bool) -> dict[str, float]:
    """p99 of NVMe reads beside a tier that takes 2 s a request, over p99 without it. One turn's p99
    is as noisy as the disk, and that drifts: so many short turns, each way first in every other
    round, and the median over the turns. `control`: the same of the turns without it alone, those
    of odd rounds over those of even ones, which is 1 but for the noise and their place in a round.
    """
    doing("a slow tier beside nvme")
    rounds, seconds = (2, 0.3) if quick else (24, 2.0)
    rig = Rig(folder / "beside", MIB, 32)
    faults = Faults()
    faults.add("put", Fault.LATENCY, seconds=2.0)
    slow = PooledTier("slow", FaultyBackend(MemoryBackend(1 << 30), faults), t.Completions())
    slow.start()
    p99: dict[bool, list[float]] = {False: [], True: []}
    try:
        rig.write()
        for n in range(rounds):
            for beside in (False, True) if n % 2 else (True, False):
                if beside:
                    some = [(n * SLOW_JOBS + k) % rig.count for k in range(SLOW_JOBS)]
                    slow.submit([t.Write(k, rig.headers[k], rig.view(k)) for k in some])
                _reads(rig, 0.05)  # the first ones after a pause are not like the others
                p99[beside].append(float(np.percentile(_reads(rig, seconds), 99)))
                if beside and not slow.stat().pending:
                    raise BenchError("the slow tier was done before the reads beside it")
                until(lambda: not slow.stat().pending)
    finally:
        rig.close()
        slow.close()
    alone = p99[False]
    return {
        "slow_tier_p99_ratio": statistics.median(p99[True]) / statistics.median(alone),
        "slow_tier_control_ratio": statistics.median(alone[1::2]) / statistics.median(alone[::2]),
    }


def _reads(rig: Rig, seconds: float) -> list[float]:
    """Of one chunk each, one after the other: the seconds of each."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        which = len(took) % rig.count
        key = t.Key.of(rig.headers[which])
        took.append(rig.run([t.Read(which, key, rig.places[which], rig.view(which))])[0])
    return took
