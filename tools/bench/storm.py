"""Lookups of what is in DRAM while a storm of stores keeps NVMe busy with demotions.

The law of this module: who looks up and who stores are processes of their own, as engines are; the
same daemon is quiet and loud in turns, and the times of all turns are put together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvd.chunk import KVSpec, ShardSpec
from kvd.client import Client
from kvd.tools.bench.beside import Event, beside
from kvd.tools.bench.daemon import BenchError, Daemon

CHUNK = 1 << 20
HOT = 32  # chunks that are looked up, all in one request
BATCH = 16  # chunks of one store of the storm
ROUNDS = 5
ROUND_S = 4.0
START_S = 1.0  # until the storm has filled what it can
PAUSE_S = 0.001  # between two lookups
LEASE_S = 600.0


def run_storm(folder: Path, *, quick: bool = False) -> dict[str, float]:
    """Milliseconds of lookups, quiet and beside the storm, and the ratio of their p99."""
    rounds, seconds = (1, 2.0) if quick else (ROUNDS, ROUND_S)
    flags = (
        "--nvme-path", str(folder / "busy"), "--nvme-limit", "2GiB", "--nvme-reserve", "0",
        "--arena-size", "256MiB",
    )  # fmt: skip
    quiet: list[float] = []
    loud: list[float] = []
    written: list[float] = []
    with Daemon(None, *flags) as daemon, Client(daemon.socket, timeout_s=30) as client:
        handle = client.register(_spec())
        hot = _keys(HOT, 0)
        client.store_chunks(handle, hot, None, [_payload()] * HOT)
        with client.lookup(handle, hot, lease_s=LEASE_S):  # so that they stay where they are
            _lookups(client, handle, hot, seconds / 4)  # the first ones are not like the others
            for n in range(rounds):
                _settle(client)
                quiet += _lookups(client, handle, hot, seconds)
                with beside(_store, daemon.socket, 1 + n):
                    time.sleep(START_S)
                    before, begun = _written(client), time.monotonic()
                    loud += _lookups(client, handle, hot, seconds)
                    written.append((_written(client) - before) / (time.monotonic() - begun))
    if not min(written):
        raise BenchError("nothing was written to nvme beside the lookups")
    return {
        "quiet_p50_ms": _ms(quiet, 50),
        "quiet_p99_ms": _ms(quiet, 99),
        "loud_p50_ms": _ms(loud, 50),
        "loud_p99_ms": _ms(loud, 99),
        "written_per_s": round(sum(written) / len(written)),
        "p99_ratio": round(float(np.percentile(loud, 99) / np.percentile(quiet, 99)), 3),
    }


def _ms(times: list[float], percentile: float) -> float:
    return round(1000 * float(np.percentile(times, percentile)), 3)


def _spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, CHUNK),)
    return KVSpec("bench", "", "w", "bench", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def _keys(count: int, *salt: int) -> list[bytes]:
    raw = np.random.default_rng(salt).integers(0, 256, (count, 32), np.uint8)
    return [row.tobytes() for row in raw]


def _payload() -> Any:
    return np.random.default_rng(7).integers(0, 256, CHUNK, np.uint8)


def _lookups(client: Client, handle: Any, keys: list[bytes], seconds: float) -> list[float]:
    """Seconds of each."""
    took = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        found = client.lookup(handle, keys, lease=True)
        found.__exit__(None, None, None)
        took.append(time.perf_counter() - begun)
        if found.leading != len(keys) or any(found.tiers):
            raise BenchError("what is looked up is not in DRAM any more")
        time.sleep(PAUSE_S)
    return took


def _written(client: Client) -> int:
    return int(client.stat()["counters"]["demotions"]["written"])


def _settle(client: Client) -> None:
    """Nothing is on its way down any more."""
    end = time.monotonic() + 60
    while client.stat()["counters"]["moving"]:
        if time.monotonic() > end:
            raise BenchError("demotions do not end")
        time.sleep(0.05)
    time.sleep(START_S)


def _store(stop: Event, begun: Callable[[], None], socket: str, salt: int) -> float:
    """The storm: chunks that nobody stored before, as fast as they are taken. Chunks a second."""
    with Client(socket, timeout_s=30) as client:
        handle, data, made = client.register(_spec()), _payload(), 0
        begun()
        since = time.monotonic()
        while not stop.is_set():
            client.store_chunks(handle, _keys(BATCH, salt, made), None, [data] * BATCH)
            made += BATCH
        return made / (time.monotonic() - since)
