"""SIGKILL at random moments, over DRAM, NVMe and S3: what comes back is right, or nothing does.

CRASH_ROUNDS (default 9; continuous integration does 30) says how often, all tiers together;
CRASH_SEED makes the moments those of an earlier run.
`CRASH_ROUNDS=3000 make test PYTEST_ARGS=tests/crash` goes on for an hour.
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
from servers import ACCESS, SECRET, Seaweed

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client, Lease, Selector
from kvd.errors import KvdError

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "9"))
SEED = int(os.environ.get("CRASH_SEED", "0")) or time.time_ns() % 1_000_000
SIZE = 64 * 1024
LENGTH = 4  # chunks of a chain
LOADED = 32  # chains that are loaded after each restart, of those that are there
ARENA, LIMIT, FAR_LIMIT = 8 << 20, 12 << 20, 256 << 20
WRITERS = 3
KEYS = {
    "AWS_ACCESS_KEY_ID": ACCESS,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
MORE = (
    9  # lives beyond, until enough was demanded: one that begins with full tiers may demand nothing
)
FILL_S = 30.0  # in which something goes down to the last tier: a second, as a rule
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
        self.held: tuple[str, Lease] | None = None
        self.tiers: list[str] = []
        self.wrong: BaseException | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            with Client(self.socket, timeout_s=CALL_S) as client:
                try:
                    self.live(client)
                except KvdError:  # the daemon is gone, or slow: then it is to keep our lease
                    self.stop.wait()
        except KvdError:
            return
        except Exception as error:  # noqa: BLE001 - judged by the test's own thread
            self.wrong = error

    def live(self, client: Client) -> None:
        handle = client.register(spec())
        self.tiers = [tier["name"] for tier in client.stat()["tiers"]]
        for n in range(100_000):
            if self.stop.is_set():
                return
            self.step(client, handle, f"{self.prefix}-{n}")

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
            tier = self.random.choice(self.tiers)
            client.evict(Selector(tier=tier, everything=True))
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
            self.hold(client, handle, name)

    def hold(self, client: Client, handle: Any, name: str) -> None:
        """Under a lease until the next one: whatever the others store, it may not be dropped."""
        if self.held is not None:
            last, lease = self.held
            self.journal.write("let go", last)
            lease.release()
            self.held = None
        found = client.lookup(handle, chain(name, LENGTH), lease_s=300)
        if found.lease is not None:
            self.held = name, found.lease
            if found.leading == LENGTH:
                self.journal.write("held", name)

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


def judge(
    daemon: DaemonProcess, journal: Journal, tier: Path, held: list[str], chance: random.Random
) -> tuple[int, int]:
    """After a restart: everything that may be true is. How many chunks were there, and of how many
    chains it was demanded that they are."""
    with Client(daemon.socket, timeout_s=20) as client:
        stat = client.stat()
        assert stat["counters"]["active_leases"] == stat["counters"]["active_writes"] == 0
        handle = client.register(spec())
        _limits(client, tier)
        wait_s = 10.0 if len(stat["tiers"]) > 2 else 0.0
        missing = [name for name in held if not _there(client, handle, name, wait_s=wait_s)]
        # A life that begins with full tiers may make room before anybody asks.
        demanded = 0 if any(_losses(client).values()) else len(held)
        assert not (demanded and missing), f"were leased at the kill, and are gone: {missing}"
        for name in journal.never:
            found = client.lookup(handle, chain(name, LENGTH), lease=False, every=True)
            assert OK not in found.outcomes, f"{name} was never committed"
        rows = {row["hash"] for row in client.rows("chunks")}
        mine = {h.hex(): name for name in journal.tried for h in chain(name, LENGTH)}
        assert rows <= mine.keys(), "a chunk that nobody stored"
        there = 0
        names = sorted({mine[row] for row in rows})
        for name in chance.sample(names, min(len(names), LOADED)):
            there += load(client, handle, chain(name, LENGTH)).count(OK)
        _limits(client, tier)
        name = f"first-{time.time_ns()}"  # it serves: stores, and gives back
        hashes = chain(name, LENGTH)
        journal.write("tried", name)
        data = [content(h, SIZE) for h in hashes]
        assert client.store_chunks(handle, hashes, fingerprints(hashes), data) == [OK] * LENGTH
        assert load(client, handle, hashes) == [OK] * LENGTH
        return there, demanded


def _losses(client: Client) -> dict[str, int]:
    """Chunks that this life has dropped for want of room or time, as it may: for what it promises
    is that nothing comes back altered, not that all comes back."""
    said = client.stat()["counters"]
    found = {f"here: {why}": said["chunks_evicted"][why] for why in ("capacity", "undemoted")}
    return {**found, "below": said["chunks_evicted_below"]["capacity"]}


def _there(client: Client, handle: Any, name: str, wait_s: float) -> bool:
    """Whether all of a chain can be loaded; what lies in a bucket is known once it is listed."""
    end = time.monotonic() + wait_s
    while client.lookup(handle, chain(name, LENGTH), lease=False).leading < LENGTH:
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def _limits(client: Client, tier: Path) -> None:
    dram, nvme, *far = client.stat()["tiers"]
    assert dram["used_bytes"] <= dram["limit_bytes"] == ARENA
    assert nvme["used_bytes"] <= nvme["held_bytes"] <= nvme["limit_bytes"] == LIMIT
    assert nvme["chunks"] <= nvme["stored"]
    assert on_disk(tier) <= LIMIT
    for s3 in far:
        assert s3["used_bytes"] <= s3["limit_bytes"] == FAR_LIMIT


@pytest.mark.timeout(120 + 12 * ROUNDS)
def test_a_daemon_that_is_killed_at_any_moment_brings_back_what_is_right(home: Path) -> None:
    killed_again_and_again(home, max(1, ROUNDS // 3), [], {})


@pytest.mark.timeout(120 + 12 * ROUNDS)
def test_the_same_holds_with_a_bucket_behind_the_disk(home: Path, seaweed: Seaweed) -> None:
    flags = [
        "--s3-endpoint", seaweed.endpoint, "--s3-bucket", "kvd", "--s3-prefix", f"crash{SEED}",
        "--s3-addressing", "path", "--s3-limit", str(FAR_LIMIT),
    ]  # fmt: skip
    killed_again_and_again(home, ROUNDS - ROUNDS // 3, flags, KEYS)


def fill_the_last_tier(socket: str, journal: Journal) -> None:
    """Store beside the writers until something lies in the last tier: whether it does would
    otherwise depend on how long the first lives happen to be."""
    end = time.monotonic() + FILL_S
    with Client(socket, timeout_s=20) as client:
        handle = client.register(spec())
        for n in range(100_000):
            if client.stat()["tiers"][-1]["chunks"]:
                return
            assert time.monotonic() < end, "nothing went down to the last tier"
            name = f"fill-{n}"
            hashes = chain(name, LENGTH)
            journal.write("tried", name)
            data = [content(h, SIZE) for h in hashes]
            client.store_chunks(handle, hashes, fingerprints(hashes), data)


def killed_again_and_again(home: Path, rounds: int, more: list[str], env: dict[str, str]) -> None:
    tier = home / "tier"
    flags = ["--nvme-path", str(tier), "--nvme-limit", str(LIMIT), "--nvme-reserve", "0", *more]
    chance = random.Random(SEED)
    journal = Journal(home / "journal")
    came_back = demanded = 0
    try:
        with DaemonProcess(arena_size=str(ARENA), args=flags, env=env) as daemon:
            for round_ in range(rounds + MORE):
                if round_ >= rounds and demanded > rounds // 3:
                    break
                writers = [Writer(n, round_, daemon.socket, journal) for n in range(WRITERS)]
                for writer in writers:
                    writer.start()
                if round_ == 0:
                    fill_the_last_tier(daemon.socket, journal)
                time.sleep(chance.uniform(0.05, 0.9))
                daemon.kill()
                for writer in writers:
                    writer.stop.set()
                    writer.join(20)
                    assert not writer.is_alive()
                    assert writer.wrong is None, repr(writer.wrong)
                daemon.start()
                there, asked = judge(daemon, journal, tier, journal.take_held(), chance)
                came_back += there
                demanded += asked
                assert "Traceback" not in daemon.log, daemon.log
    except AssertionError as error:
        raise AssertionError(f"CRASH_SEED={SEED}: {error}") from error
    finally:
        journal.close()
    assert came_back > rounds, f"hardly anything came back: {came_back}, {journal.state()}"
    assert demanded > rounds // 3, f"{demanded} chains in {rounds} lives: hardly any was demanded"
