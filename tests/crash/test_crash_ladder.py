"""SIGKILL at random moments, over DRAM and NVMe: what comes back is right, or does not come back.

CRASH_ROUNDS (default 30) says how often; CRASH_SEED makes the moments those of an earlier run.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DaemonProcess
from journal import Journal, chain, content, fingerprints

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client, Selector
from kvd.errors import KvdError

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "30"))
SEED = int(os.environ.get("CRASH_SEED", "0")) or time.time_ns() % 1_000_000
SIZE = 64 * 1024
LENGTH = 4  # chunks of a chain
ARENA, LIMIT = 8 << 20, 24 << 20
WRITERS = 3
CALL_S = 0.7  # how long a writer waits for a daemon that was killed
OK = Outcome.OK


def spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec("crash", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-crash-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def load(
    client: Client, handle: Any, hashes: list[bytes], timeout_s: float = 20.0
) -> list[Outcome]:
    """Load, and judge every byte that is called OK by its key."""
    seen: dict[int, bytes] = {}

    def take(result: int, view: memoryview) -> None:
        seen[result] = bytes(view)

    outcomes = client.load_chunks(handle, hashes, take, timeout_s=timeout_s)
    for n, outcome in enumerate(outcomes):
        if outcome is OK:
            assert seen[n] == content(hashes[n], SIZE), "altered, partial, or another key's"
    return outcomes


class Writer(threading.Thread):
    """One engine: stores, loads back, aborts, leaves writes unfinished, evicts; until the daemon
    is gone."""

    def __init__(self, number: int, round_: int, socket: str, journal: Journal) -> None:
        super().__init__(name=f"writer-{number}")
        self.random = random.Random(f"{SEED}/{round_}/{number}")
        self.prefix = f"{round_}-{number}"
        self.socket = socket
        self.journal = journal
        self.wrong: BaseException | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            with Client(self.socket, timeout_s=CALL_S) as client:
                handle = client.register(spec())
                for n in range(100_000):
                    if self.stop.is_set():
                        return
                    self.step(client, handle, f"{self.prefix}-{n}")
        except KvdError:
            return  # the daemon is gone
        except Exception as error:  # noqa: BLE001 - judged by the test's own thread
            self.wrong = error

    def step(self, client: Client, handle: Any, name: str) -> None:
        dice = self.random.random()
        if dice < 0.55:
            self.store(client, handle, name)
        elif dice < 0.80 and self.journal.acknowledged:
            one = self.random.choice(self.journal.acknowledged)
            load(client, handle, chain(one, LENGTH), CALL_S)
        elif dice < 0.90:
            self.unfinished(client, handle, name, abort=self.random.random() < 0.5)
        elif dice < 0.93 and self.journal.acknowledged:
            one = self.random.choice(self.journal.acknowledged)
            self.journal.write("gone", one)
            client.evict(Selector(keys=tuple(chain(one, LENGTH))))
        elif dice < 0.94:
            self.journal.write("gone", "")
            client.evict(Selector(tier=self.random.choice(["dram", "nvme"]), everything=True))
            self.journal.write("gone", "")

    def store(self, client: Client, handle: Any, name: str) -> None:
        hashes = chain(name, LENGTH)
        self.journal.write("tried", name)
        data = [content(h, SIZE) for h in hashes]
        outcomes = client.store_chunks(
            handle, hashes, fingerprints(hashes), data, seal=self.random.random() < 0.3
        )
        if set(outcomes) == {OK}:
            self.journal.write("acknowledged", name)

    def unfinished(self, client: Client, handle: Any, name: str, *, abort: bool) -> None:
        """Bytes are written, and never committed."""
        hashes = chain(name, LENGTH)
        self.journal.write("never", name)
        reservation = client.reserve(handle, hashes, fingerprints(hashes))
        for n, outcome in enumerate(reservation.outcomes):
            if outcome is Outcome.GRANTED:
                reservation.view(n)[:] = content(hashes[n], SIZE)
        if abort:
            reservation.abort()


def on_disk(path: Path) -> int:
    """What `du` says."""
    said = subprocess.run(["du", "-sB1", str(path)], capture_output=True, text=True, check=True)
    return int(said.stdout.split()[0])


def judge(daemon: DaemonProcess, journal: Journal, tier: Path, recent: list[str]) -> int:
    """After a restart: everything that may be true is. How many chunks were there."""
    with Client(daemon.socket, timeout_s=20) as client:
        stat = client.stat()
        assert stat["counters"]["active_leases"] == stat["counters"]["active_writes"] == 0
        handle = client.register(spec())
        _limits(client, tier)
        for name in recent:
            found = client.lookup(handle, chain(name, LENGTH), lease=False)
            assert found.leading == LENGTH, f"{name} was acknowledged a moment before the kill"
        for name in journal.never:
            found = client.lookup(handle, chain(name, LENGTH), lease=False, every=True)
            assert OK not in found.outcomes, f"{name} was never committed"
        rows = {row["hash"] for row in client.rows("chunks")}
        mine = {h.hex(): name for name in journal.tried for h in chain(name, LENGTH)}
        assert rows <= mine.keys(), "a chunk that nobody stored"
        there = 0
        for name in {mine[row] for row in rows}:
            there += load(client, handle, chain(name, LENGTH)).count(OK)
        _limits(client, tier)
        name = f"first-{time.time_ns()}"  # it serves: stores, and gives back
        hashes = chain(name, LENGTH)
        journal.write("tried", name)
        data = [content(h, SIZE) for h in hashes]
        assert client.store_chunks(handle, hashes, fingerprints(hashes), data) == [OK] * LENGTH
        assert load(client, handle, hashes) == [OK] * LENGTH
        return there


def _limits(client: Client, tier: Path) -> None:
    dram, nvme = client.stat()["tiers"]
    assert dram["used_bytes"] <= dram["limit_bytes"] == ARENA
    assert nvme["used_bytes"] <= nvme["held_bytes"] <= nvme["limit_bytes"] == LIMIT
    assert nvme["chunks"] <= nvme["stored"]
    assert on_disk(tier) <= LIMIT


@pytest.mark.timeout(120 + 12 * ROUNDS)
def test_a_daemon_that_is_killed_at_any_moment_brings_back_what_is_right(home: Path) -> None:
    tier = home / "tier"
    flags = ["--nvme-path", str(tier), "--nvme-limit", str(LIMIT), "--nvme-reserve", "0"]
    chance = random.Random(SEED)
    journal = Journal(home / "journal")
    came_back = 0
    try:
        with DaemonProcess(arena_size=str(ARENA), args=flags) as daemon:
            for round_ in range(ROUNDS):
                writers = [Writer(n, round_, daemon.socket, journal) for n in range(WRITERS)]
                for writer in writers:
                    writer.start()
                time.sleep(chance.uniform(0.05, 0.9))
                daemon.kill()
                for writer in writers:
                    writer.stop.set()
                    writer.join(20)
                    assert not writer.is_alive()
                    assert writer.wrong is None, repr(writer.wrong)
                daemon.start()
                came_back += judge(daemon, journal, tier, journal.last(f"{round_}-", 3))
                assert "Traceback" not in daemon.log, daemon.log
    except AssertionError as error:
        raise AssertionError(f"CRASH_SEED={SEED}: {error}") from error
    finally:
        journal.close()
    assert came_back > ROUNDS, f"hardly anything came back: {came_back}, {journal.state()}"
