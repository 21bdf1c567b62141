"""`kvd-bench tiers`: what the ladder gives of what its media can.

The law of this module: a ratio has both its sides from one run, in turns, on the same disk with the
same queue depth; the limit is a plain loop of system calls that does nothing else.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from kvd.arena.mapping import Mapping
from kvd.chunk import ChunkHeader, HeaderFlag, KVSpec, ShardSpec, State, payload_digest
from kvd.client import Client, Selector
from kvd.tiers import base as t
from kvd.tiers.faults import Fault, Faults, FaultyBackend
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.nvme import NvmeBackend, NvmeConfig
from kvd.tiers.pool import PoolConfig, PooledTier
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.machine import busy
from kvd.tools.bench.s3 import run_s3
from kvd.tools.bench.storm import run_storm

MIB = 1 << 20
DEPTH = 4  # reads or writes at a time
ROUNDS = 5
FIRSTS = 15
SLOW_JOBS = 5  # of the slow tier in one round: two more than run there at a time


def run_tiers(directory: str | None, *, quick: bool = False) -> dict[str, Any]:
    """Everything, on a disk of the caller's choice."""
    with _folder(directory) as folder:
        sizes = (4 * MIB,) if quick else (4 * MIB, 32 * MIB)
        total = 64 * MIB if quick else 512 * MIB
        nvme = [_nvme(folder, size, max(DEPTH, total // size)) for size in sizes]
        busy("lookups under demotion")
        storm = run_storm(folder, quick=quick)
        return {
            "nvme": nvme,
            "s3": run_s3(folder, sizes, total // 4, rounds=2 if quick else 5),
            **_first_chunk(folder, quick=quick),
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


def _spec(nbytes: int) -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes),)
    return KVSpec("bench", "", "w", "bench", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


# -- one medium, against plain system calls -------------------------------------------------------


class _Rig:
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
        pool = PoolConfig(workers=DEPTH, writers=DEPTH)
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


class _Plain:
    """The same bytes by pread and pwrite alone."""

    def __init__(self, path: Path, rig: _Rig, *, direct: bool) -> None:
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


def _nvme(folder: Path, size: int, count: int) -> dict[str, Any]:
    busy(f"nvme, {count} x {size // MIB} MiB")
    rig = _Rig(folder / f"tier-{size}", size, count)
    plain = _Plain(folder / "plain", rig, direct=rig.report.engine != "buffered")
    times: dict[str, list[float]] = {"lw": [], "w": [], "lr": [], "r": []}
    try:
        plain.write()  # what has never been written to is slower, for both
        rig.write()
        rig.clear()
        for _ in range(ROUNDS):
            times["lw"].append(plain.write())
            times["w"].append(rig.write())
            times["lr"].append(plain.read())
            times["r"].append(rig.read())
            rig.clear()
    finally:
        plain.close()
        rig.close()
        (folder / "plain").unlink()
    best = {name: statistics.median(values) for name, values in times.items()}
    gigabytes = size * count / 1e9
    return {
        "chunk_bytes": size,
        "engine": rig.report.engine,
        "limit_write_gbps": gigabytes / best["lw"],
        "limit_read_gbps": gigabytes / best["lr"],
        "write_ratio": best["lw"] / best["w"],
        "read_ratio": best["lr"] / best["r"],
    }


# -- the whole daemon -----------------------------------------------------------------------------


def _keys(count: int, salt: int = 0) -> list[bytes]:
    rng = np.random.default_rng(salt + 1)
    raw = rng.integers(0, 256, (count, 32), np.uint8)
    return [row.tobytes() for row in raw]


def _first_chunk(folder: Path, *, quick: bool) -> dict[str, float]:
    """Time until the first of 64 chunks from NVMe can be copied, over a bare read of one into
    ordinary memory, and over one into huge pages, in which the arena lies."""
    busy("first chunk of a load from nvme")
    size, count = 4 * MIB, 16 if quick else 64
    path = folder / "first"
    flags = ("--nvme-path", str(path), "--nvme-limit", str(3 * size * count), "--nvme-reserve", "0")
    bare, huge = _Bare(folder / "bare", size, count), _Bare(folder / "huge", size, count, huge=True)
    firsts, singles, into_huge = [], [], []
    arena = ("--arena-size", str(2 * size * count))
    with closing(bare), closing(huge), Daemon(None, *arena, *flags) as daemon:
        with Client(daemon.socket, timeout_s=30) as client:
            handle = client.register(_spec(size))
            hashes = _keys(count)
            data = np.random.default_rng(3).integers(0, 256, size, np.uint8)
            client.store_chunks(handle, hashes, None, [data] * count, timeout_s=60)
            client.tier("nvme", "drain")
            _until(lambda: client.stat()["tiers"][1]["chunks"] == count)
            for n in range(FIRSTS):
                client.evict(Selector(tier="dram", everything=True))
                singles.append(bare.read(7 * n % count))
                into_huge.append(huge.read(7 * n % count))
                begun = time.perf_counter()
                with client.lookup(handle, hashes, load=True) as found:
                    if found.transfer is None:
                        raise BenchError("nothing came back from nvme")
                    next(iter(found.transfer))
                    firsts.append(time.perf_counter() - begun)
                    for _index in found.transfer:
                        pass
    first = statistics.median(firsts)
    return {
        "first_chunk_ratio": first / statistics.median(singles),
        "first_chunk_huge_ratio": first / statistics.median(into_huge),
    }


class _Bare:
    """Single reads of one chunk, into shared memory from tmpfs. `huge`: in huge pages, where the
    kernel gives them."""

    def __init__(self, path: Path, size: int, count: int, *, huge: bool = False) -> None:
        self._size = size
        shared = os.memfd_create("kvd-bench")
        os.ftruncate(shared, size * count)
        self._mapping = Mapping(shared, size * count, writable=True)
        if huge:
            os.posix_fallocate(shared, 0, size * count)
            self._mapping.collapse(0, size * count)
        os.close(shared)
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(path, flags, 0o600)
        rng = np.random.default_rng(4)
        with self._mapping.bytes.data as view:
            for at in range(0, size * count, size):
                view[at : at + size] = rng.integers(0, 256, size, np.uint8).tobytes()
                os.pwrite(self._fd, view[at : at + size], at)

    def read(self, n: int) -> float:
        """Seconds."""
        at = n * self._size
        with self._mapping.bytes.data as view, view[at : at + self._size] as into:
            begun = time.perf_counter()
            os.preadv(self._fd, [into], at)
            return time.perf_counter() - begun

    def close(self) -> None:
        os.close(self._fd)
        self._mapping.close()


def _until(true: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise BenchError("the daemon did not come to the state that is measured")
        time.sleep(0.05)


def _warm_start(folder: Path, chunks: int) -> dict[str, Any]:
    """From the start of the process to readiness, with that many chunks on NVMe."""
    busy(f"warm start with {chunks} chunks")
    size, path = 4096, folder / "warm"
    limit = chunks * (size + 512) + chunks * size // 16 + 256 * MIB
    flags = (
        "--nvme-path", str(path), "--nvme-limit", str(limit), "--nvme-reserve", "0",
        "--arena-size", "64MiB",
    )  # fmt: skip
    spec = _spec(size)
    with Daemon(None, *flags) as daemon:
        with Client(daemon.socket) as client:
            client.register(spec)  # so that the next life knows it by the arena's registry
            namespace = client.info().namespace
        daemon.kill()
        _put_many(path, daemon.instance, limit, spec, namespace, chunks)
        begun = time.perf_counter()
        daemon.again()
        took = time.perf_counter() - begun
        with Client(daemon.socket, timeout_s=30) as client:
            there = client.stat()["tiers"][1]["chunks"]
    if there != chunks:
        raise BenchError(f"{there} of {chunks} chunks were taken up")
    return {"chunks": chunks, "seconds": took}


def _put_many(
    path: Path, instance: str, limit: int, spec: KVSpec, namespace: str, chunks: int
) -> None:
    from kvd.chunk import namespace_digest

    backend = NvmeBackend(NvmeConfig(path, instance, limit, reserve_bytes=0, preallocate=False))
    backend.open()
    memory = memoryview(mmap(-1, 4096))
    header = ChunkHeader(
        kind=2, state=State.READY, namespace_digest=namespace_digest(namespace), spec=spec.digest,
        shard_count=1, tokens=16, flags=HeaderFlag.SEALED, length=4096,
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
    busy("a slow tier beside nvme")
    rounds, seconds = (2, 0.3) if quick else (24, 2.0)
    rig = _Rig(folder / "beside", MIB, 32)
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
                _until(lambda: not slow.stat().pending)
    finally:
        rig.close()
        slow.close()
    alone = p99[False]
    return {
        "slow_tier_p99_ratio": statistics.median(p99[True]) / statistics.median(alone),
        "slow_tier_control_ratio": statistics.median(alone[1::2]) / statistics.median(alone[::2]),
    }


def _reads(rig: _Rig, seconds: float) -> list[float]:
    """Of one chunk each, one after the other: the seconds of each."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        which = len(took) % rig.count
        key = t.Key.of(rig.headers[which])
        took.append(rig.run([t.Read(which, key, rig.places[which], rig.view(which))])[0])
    return took
