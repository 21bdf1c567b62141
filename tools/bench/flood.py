"""Loads from NVMe while a neighbour floods that tier, and what of the difference is whose.

The law of this module: the victim and the neighbour are processes of their own, and loads alone and
beside the neighbour alternate in one daemon; their times are put together, not averaged. Three
controls say what part of the ratio the tier can do nothing about: a process that knows no daemon
and copies for as much processor time as the flood takes, its own and the daemon's for it (what a
busy machine does); the same stores at the same pace, of which nothing goes down; and bare reads
with O_DIRECT beside bare writes (what the disk does).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvd.client import Client, Selector
from kvd.tools.bench.beside import Event, beside
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.measure import process_cpu_s
from kvd.tools.bench.tenants import NEIGHBOUR, VICTIM, Pair, Tenant

LOADED = 64  # chunks that are loaded
CHUNK = 1 << 20
BATCH = 16  # chunks of one store of the flood
PAUSE_S = 0.002  # between two loads: the tier is idle in between
START_S = 1.0  # until the flood has filled what it can


class _Times(NamedTuple):
    """Seconds of each load."""

    alone: list[float]
    beside: list[float]
    busy: list[float]  # beside the process that only copies
    cpu: float = 0.0  # which takes as many cores as the flood
    pace: float = 0.0  # of the neighbour's stores: chunks a second
    written: float = 0.0  # of them, written to the tier: chunks a second beside the loads
    written_alone: float = 0.0  # and without them

    def ratio(self, percentile: float) -> float:
        return _ratio(self.beside, self.alone, percentile)


def run_flood(folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """Ratios of loads beside the flood over those alone, and of both controls."""
    rounds, loads = (1, 50) if quick else (4, 250)
    flood = _daemon(folder / "flood", rounds, loads)
    same = _daemon(folder / "pace", rounds, loads, "--nvme-write", "on-second-hit", pace=flood.pace)
    return {
        "chunk_bytes": CHUNK,
        "stores_per_s": round(flood.pace),
        "written_per_s": round(flood.written),
        "written_per_s_alone": round(flood.written_alone),
        "alone_p50_ms": _ms(flood.alone, 50),
        "alone_p99_ms": _ms(flood.alone, 99),
        "beside_p50_ms": _ms(flood.beside, 50),
        "beside_p99_ms": _ms(flood.beside, 99),
        "p50_ratio": flood.ratio(50),
        "p99_ratio": flood.ratio(99),
        "cpu": round(flood.cpu, 3),
        "same_cpu_p50_ratio": _ratio(flood.busy, flood.alone, 50),
        "same_cpu_p99_ratio": _ratio(flood.busy, flood.alone, 99),
        "p99_ratio_over_same_cpu": _ratio(flood.beside, flood.busy, 99),
        "same_pace_p50_ratio": same.ratio(50),
        "same_pace_p99_ratio": same.ratio(99),
        **_bare(folder, rounds * loads),
    }


def _ms(times: list[float], percentile: float) -> float:
    return round(1000 * float(np.percentile(times, percentile)), 2)


def _ratio(one: list[float], other: list[float], percentile: float) -> float:
    return round(float(np.percentile(one, percentile) / np.percentile(other, percentile)), 3)


# -- through a daemon -----------------------------------------------------------------------------


def _daemon(folder: Path, rounds: int, loads: int, *flags: str, pace: float = 0.0) -> _Times:
    """Loads of a daemon of its own. `pace`: the most chunks a second that the neighbour stores."""
    folder.mkdir()
    pair = Pair(folder)
    common = (
        "--nvme-path", str(folder / "nvme"), "--nvme-limit", "512MiB", "--nvme-reserve", "0",
        "--arena-size", "256MiB",
    )  # fmt: skip
    times = _Times([], [], [])
    paces: list[float] = []
    without: list[float] = []
    within: list[float] = []
    quiet: list[float] = []  # cores: the daemon's for loads alone
    taken: list[float] = []  # and what the flood takes
    with Daemon(None, "--config", pair.config("nvme", tier="nvme"), *common, *flags) as daemon:
        victim = Tenant(daemon.socket, pair.tokens[VICTIM], 1, CHUNK)
        try:
            _below(daemon, victim)
            _loads(victim, loads // 4)  # the first ones are not like the others
            for _ in range(rounds):
                with _cores(daemon, quiet):
                    times.alone.extend(_loads(victim, loads))
                neighbour = daemon.socket, pair.tokens[NEIGHBOUR], pace
                with beside(_store, *neighbour) as reached:
                    time.sleep(START_S)
                    with _written(daemon, without):
                        time.sleep(START_S)
                    with _written(daemon, within), _cores(daemon, taken):
                        times.beside.extend(_loads(victim, loads))
                paces += reached
                taken[-1] = max(0.01, taken[-1] - quiet[-1])
                if not pace:
                    with beside(_copy, taken[-1]):
                        times.busy.extend(_loads(victim, loads))
        finally:
            victim.close()
    return times._replace(
        cpu=_mean(taken),
        pace=_mean(paces),
        written=_mean(within),
        written_alone=_mean(without),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def _written(daemon: Daemon, paces: list[float]) -> Iterator[None]:
    """Adds how many of the neighbour's chunks a second were written down meanwhile."""

    def count() -> int:
        tenant = admin.stat()["tenants"].get(NEIGHBOUR, {})
        return int(tenant.get("counters", {}).get("demotions", {}).get("written", 0))

    with Client(daemon.socket, timeout_s=60, map_memory=False) as admin:
        before, begun = count(), time.monotonic()
        yield
        paces.append((count() - before) / (time.monotonic() - begun))


@contextmanager
def _cores(daemon: Daemon, shares: list[float]) -> Iterator[None]:
    """Adds how many cores the daemon and the processes beside this one had meanwhile."""

    def spent() -> float:
        pids = [child.pid for child in multiprocessing.active_children() if child.pid]
        return daemon.cpu_s() + sum(map(process_cpu_s, pids))

    before, begun = spent(), time.monotonic()
    yield
    shares.append((spent() - before) / (time.monotonic() - begun))


def _below(daemon: Daemon, tenant: Tenant) -> None:
    """The tenant's chunks lie in the tier, and nowhere else."""
    tenant.ask(np.arange(LOADED))
    with Client(daemon.socket, timeout_s=60, map_memory=False) as admin:
        end = time.monotonic() + 60
        admin.tier("nvme", "drain")
        while admin.stat()["counters"]["moving"]:
            if time.monotonic() > end:
                raise BenchError("the tier did not take what it was to hold")
            time.sleep(0.02)
        admin.evict(Selector(tier="dram", everything=True))


def _loads(tenant: Tenant, count: int) -> list[float]:
    """Seconds of loads of one chunk each, from the question to the last byte's arrival."""
    took = []
    hashes = tenant.hashes(np.arange(LOADED))
    for n in range(count):
        at = 32 * (n % LOADED)
        begun = time.perf_counter()
        with tenant.client.lookup(
            tenant.handle, [hashes[at : at + 32]], load=True, every=True
        ) as f:
            transfer = f.transfer
            if transfer is None:
                raise BenchError("nothing came back from nvme")
            for _index in transfer:
                pass
            took.append(time.perf_counter() - begun)
        tenant.client.evict(Selector(tier="dram", keys=(hashes[at : at + 32],)))
        time.sleep(PAUSE_S)
    return took


def _store(stop: Event, begun: Callable[[], None], socket: str, token: bytes, pace: float) -> float:
    """The neighbour: it stores as much as it can, or at a pace. Chunks a second."""
    tenant = Tenant(socket, token, 2, CHUNK)
    first = made = time.time_ns() >> 10 << 8  # chunks that nobody stored before
    begun()
    since = time.monotonic()
    while not stop.is_set():
        tenant.ask(np.arange(made, made + BATCH))
        made += BATCH
        early = (made - first) / pace - (time.monotonic() - since) if pace else 0.0
        if early > 0:
            time.sleep(early)
    took = time.monotonic() - since
    tenant.close()
    return (made - first) / took


def _copy(stop: Event, begun: Callable[[], None], cores: float) -> float:
    """Copies as large as the flood's stores, for a part of a core. How many a second."""
    source = np.ones(BATCH * CHUNK, np.uint8)
    target = np.zeros_like(source)
    begun()
    made, since = 0, time.monotonic()
    while not stop.is_set():
        at = time.perf_counter()
        np.copyto(target, source)
        made += 1
        time.sleep((time.perf_counter() - at) * max(0.0, 1 / cores - 1))
    return made / (time.monotonic() - since)


# -- the disk alone -------------------------------------------------------------------------------


def _bare(folder: Path, reads: int) -> dict[str, float]:
    """Bare reads beside one writer of the same size, over those alone; both with O_DIRECT."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        source, target = Path(directory, "read"), Path(directory, "written")
        for path in (source, target):
            _fill(path)
        times = _Times(_reads(source, reads), [], [])
        with beside(_write, str(target)):
            time.sleep(START_S)
            times.beside.extend(_reads(source, reads))
    return {"bare_p50_ratio": times.ratio(50), "bare_p99_ratio": times.ratio(99)}


def _fill(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        memory = mmap(-1, CHUNK)
        memory.write(os.urandom(CHUNK))
        for n in range(LOADED):
            os.pwritev(fd, [memory], n * CHUNK)
    finally:
        os.close(fd)


def _reads(path: Path, count: int) -> list[float]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    took = []
    try:
        memory = mmap(-1, CHUNK)
        for n in range(count):
            begun = time.perf_counter()
            os.preadv(fd, [memory], n % LOADED * CHUNK)
            took.append(time.perf_counter() - begun)
            time.sleep(PAUSE_S)
    finally:
        os.close(fd)
    return took


def _write(stop: Event, begun: Callable[[], None], path: str) -> float:
    """The writer. Chunks a second."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    memory = mmap(-1, CHUNK)
    memory.write(os.urandom(CHUNK))
    begun()
    n, since = 0, time.monotonic()
    while not stop.is_set():
        os.pwritev(fd, [memory], n % LOADED * CHUNK)
        n += 1
    os.close(fd)
    return n / (time.monotonic() - since)
