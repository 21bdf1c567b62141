"""A real daemon with a real NVMe tier: what DRAM can't hold is answered from below."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DaemonProcess

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client, Selector
from kvd.wire import messages as m

SIZE = 256 * 1024
MIB = 1 << 20
OK = Outcome.OK


def spec(name: str = "ladder", nbytes: int = SIZE) -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes),)
    return KVSpec(name, "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def chain(name: object, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def payload(hash_: bytes, nbytes: int = SIZE) -> np.ndarray[Any, Any]:
    """Bytes that belong to one key and no other."""
    seed = int.from_bytes(hash_[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def disk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-nvme-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def flags(disk: Path, **more: str) -> list[str]:
    settings = {"nvme-path": str(disk / "tier"), "nvme-limit": "64MiB", "nvme-reserve": "0"}
    settings["tiers-room-wait-s"] = "20"  # a busy machine drops nothing for want of time
    settings.update({name.replace("_", "-"): value for name, value in more.items()})
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


@pytest.fixture
def daemon(disk: Path) -> Iterator[DaemonProcess]:
    """A store waits for demotions as long as they take: a slow machine loses nothing by it."""
    args = flags(disk, tiers_room_wait_s="20")
    with DaemonProcess(arena_size="16MiB", args=args) as process:
        yield process


def store(client: Client, handle: Any, hashes: list[bytes]) -> list[Outcome]:
    prints = [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]
    return client.store_chunks(handle, hashes, prints, [payload(h) for h in hashes])


def load(client: Client, handle: Any, hashes: list[bytes]) -> list[Outcome]:
    """Load, and compare every byte."""
    seen: dict[int, bytes] = {}

    def take(result: int, view: memoryview) -> None:
        seen[result] = bytes(view)

    outcomes = client.load_chunks(handle, hashes, take, timeout_s=30)
    for n, outcome in enumerate(outcomes):
        if outcome is OK:
            assert seen[n] == payload(hashes[n]).tobytes(), "wrong bytes"
    return outcomes


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def below(client: Client) -> dict[str, Any]:
    tier: dict[str, Any] = client.stat()["tiers"][1]
    return tier


def fill(client: Client, handle: Any, chains: int = 24, length: int = 5) -> None:
    """Slow enough for demotions to keep up: nothing is lost."""
    for n in range(chains):
        outcomes = store(client, handle, chain(n, length))
        assert set(outcomes) == {OK}, outcomes
        until(lambda: client.stat()["counters"]["moving"] == 0)


def test_what_was_prefetched_is_in_dram_when_it_is_asked_for(daemon: DaemonProcess) -> None:
    """And goes again if nobody comes for it in time."""
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)

        def tiers(hashes: list[bytes]) -> list[list[str]]:
            return [r["tiers"] for r in client.rows("chunks", Selector(keys=tuple(hashes)))]

        keys = chain(0, 2)
        assert tiers(keys) == [["nvme"]] * 2
        assert client.prefetch(handle, [*keys, bytes(32)], within_s=30) == [OK, OK, Outcome.MISS]
        until(lambda: tiers(keys) == [["dram", "nvme"]] * 2)
        found = client.lookup(handle, keys, lease=False)
        assert found.leading == 2 and not any(found.tiers)
        assert load(client, handle, keys) == [OK] * 2
        other = chain(1, 2)
        assert client.prefetch(handle, other, within_s=0.5) == [OK, OK]
        until(lambda: client.stat()["counters"]["shards_promoted"]["ahead"] == 4)
        until(lambda: tiers(other) == [["nvme"]] * 2)
        assert client.prefetch(handle, [], within_s=1) == []


def test_what_dram_can_not_hold_comes_back_from_nvme_bit_by_bit(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        stat = client.stat()
        assert stat["tiers"][0]["used_bytes"] <= 16 * MIB
        assert stat["counters"]["demotions"]["written"] > 50
        tier = stat["tiers"][1]
        assert (tier["name"], tier["state"]) == ("nvme", "ok") and tier["chunks"] > 50
        assert tier["used_bytes"] <= tier["limit_bytes"] == 64 * MIB
        found = client.lookup(handle, chain(0, 5), lease=False)
        assert found.leading == 5 and set(found.tiers) == {1}
        for n in range(24):
            assert load(client, handle, chain(n, 5)) == [OK] * 5
        assert client.get(handle, chain(0, 1)[0]) == payload(chain(0, 1)[0]).tobytes()
        until(lambda: client.stat()["tiers"][0]["transient_bytes"] == 0)


def test_a_killed_daemon_serves_from_both_again_and_reads_no_payload_for_it(
    daemon: DaemonProcess,
) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        before = {r["hash"]: r["tiers"] for r in client.rows("chunks")}
        daemon.kill()
        daemon.start()
        handle = client.register(spec())
        assert {r["hash"]: r["tiers"] for r in client.rows("chunks")} == before
        assert below(client)["bytes_read"] == 0
        for n in range(24):
            assert load(client, handle, chain(n, 5)) == [OK] * 5


def test_a_tier_outlives_the_arena(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        there = [r for r in client.rows("chunks") if "nvme" in r["tiers"]]
        roots = [n for n in range(24) if chain(n, 1)[0].hex() in {r["hash"] for r in there}]
        daemon.kill()
        for file in Path("/dev/shm").glob(f"kvd-*-{daemon.instance}*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        daemon.start()
        with Client(daemon.socket) as fresh:  # names no spec
            assert fresh.stat()["counters"]["records_waiting"] == len(there)
        handle = client.register(spec())
        until(lambda: client.stat()["counters"]["records_waiting"] == 0)
        assert below(client)["chunks"] == len(there)
        for n in roots:
            assert load(client, handle, chain(n, 1)) == [OK]


def test_slabs_deleted_behind_its_back_are_misses_and_dram_goes_on(
    daemon: DaemonProcess, disk: Path
) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        for slab in (disk / "tier").glob("kvd-slab-*"):
            slab.unlink()
        outcomes = [load(client, handle, chain(n, 5)) for n in range(24)]
        expected = (OK, Outcome.MISS, Outcome.CORRUPT, Outcome.SKIPPED)
        assert all(o in expected for one in outcomes for o in one)
        assert outcomes[23] == [OK] * 5
        assert set(store(client, handle, chain("new", 5))) == {OK}


def test_a_bit_that_turns_on_disk_is_a_miss_that_is_counted(
    daemon: DaemonProcess, disk: Path
) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        first = payload(chain(0, 1)[0]).tobytes()
        for slab in (disk / "tier").glob("kvd-slab-*"):
            data = slab.read_bytes()
            at = data.find(first[:4096])
            if at >= 0:
                with open(slab, "r+b") as file:
                    file.seek(at + SIZE // 2)
                    file.write(b"\xff" if data[at + SIZE // 2] != 0xFF else b"\0")
        found = client.lookup(handle, chain(0, 1), lease=False)
        assert set(found.tiers) == {1}
        assert load(client, handle, chain(0, 5))[0] is not OK
        assert client.stat()["counters"]["shards_fetched"]["corrupt"] == 1
        assert client.lookup(handle, chain(0, 1), lease=False).leading == 0
        assert load(client, handle, chain(23, 5)) == [OK] * 5


def test_eviction_by_command_names_a_tier(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        count = below(client)["chunks"]
        gone = client.evict(Selector(tier="nvme", everything=True))
        assert gone.evicted == count
        until(lambda: below(client)["stored"] == 0)
        assert below(client)["chunks"] == below(client)["used_bytes"] == 0
        client.evict(Selector(everything=True))
        assert list(client.rows("chunks")) == []
        assert store(client, handle, chain(0, 5)) == [OK] * 5


def test_a_lookup_of_protocol_1_0_is_answered_as_ever(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        digest = spec().digest
        message = m.Lookup(digest, 1, (0,), b"".join(chain(0, 5)), None, 0, 0, bytes(32), 0, 0)
        until(lambda: client.submit(message).result(5).tiers == b"\1" * 5)
        assert client.submit(message).result(5).leading == 5


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--nvme-path", "/proc/kvd"], "tier nvme"),
        (["--nvme-limit", "5"], "tiers.nvme.limit"),
        (["--nvme-write", "sometimes"], "tiers.nvme.write"),
        (["--nvme-speed", "9"], "unknown argument"),
        (["--tiers-watermarks", "0.5,0.6"], "tiers.watermarks"),
    ],
)
def test_a_setting_of_a_tier_that_can_not_be_used_stops_the_start(
    args: list[str], says: str
) -> None:
    with DaemonProcess(arena_size="16MiB", args=args, start=False) as daemon:
        process = daemon.spawn()
        assert process.wait(20) == 2
        assert says in daemon.log and "Traceback" not in daemon.log


def test_a_directory_that_another_daemon_has_is_refused(daemon: DaemonProcess, disk: Path) -> None:
    other = DaemonProcess(
        arena_size="16MiB", args=flags(disk), instance=daemon.instance + "b", start=False
    )
    with other:
        assert other.spawn().wait(20) == 2
        assert "in use by process" in other.log


def test_sigterm_in_the_middle_of_demotions_ends_in_order(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        for n in range(24):
            store(client, handle, chain(n, 5))
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
    daemon.start()
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        until(lambda: client.stat()["counters"]["records_waiting"] == 0)
        there = {row["hash"] for row in client.rows("chunks")}
        runs = [[h.hex() in there for h in chain(n, 5)] for n in range(24)]
        assert sum(map(sum, runs)) > 60, "what was on its way is here or there"
        for n, run in enumerate(runs):
            leading = [*run, False].index(False)
            assert load(client, handle, chain(n, leading)) == [OK] * leading


def cli(daemon: DaemonProcess, *args: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvd.tools.cli", *args, "--socket", daemon.socket, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout or "{}")


def test_an_operator_sees_and_asks_each_tier(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        fill(client, handle)
        code, said = cli(daemon, "status")
        dram, nvme = said["tiers"]
        assert code == 0 and dram["name"] == "dram"
        assert nvme["engine"] in ("o_direct", "buffered", "kvikio-posix", "cufile")
        assert nvme["write_gbps"] > 0 and nvme["last_error"] == "" and nvme["state"] == "ok"
        code, said = cli(daemon, "tier", "probe", "nvme")
        assert (code, said["ok"]) == (0, True)
        code, said = cli(daemon, "tier", "drain", "nvme")
        assert code == 0 and said["chunks"] > 0
        until(lambda: client.stat()["counters"]["moving"] == 0)
        assert below(client)["chunks"] == 24 * 5
        code, said = cli(daemon, "tier", "scrub", "nvme")
        assert (code, said["chunks"]) == (0, 120)
        until(lambda: client.stat()["counters"]["shards_scrubbed"]["ok"] >= 120)
        code, said = cli(daemon, "tier", "probe", "tape")
        assert code == 1
        code, said = cli(daemon, "inspect", "chunks", "--tier", "nvme", "--limit", "500")
        assert code == 0 and len(said["rows"]) == 120


def test_sigterm_writes_what_is_hot_down_so_that_a_reboot_finds_it(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("hot", 8))
        assert below(client)["chunks"] == 0
    assert daemon.stop() == 0
    for file in Path("/dev/shm").glob(f"kvd-*-{daemon.instance}*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    daemon.start()
    with Client(daemon.socket) as client:
        handle = client.register(spec())
        until(lambda: client.stat()["counters"]["records_waiting"] == 0)
        assert load(client, handle, chain("hot", 8)) == [OK] * 8


def test_a_scrub_finds_what_rots_and_goes_on_after_a_restart(disk: Path) -> None:
    args = flags(disk, nvme_scrub="64MiB", nvme_write="through")
    with DaemonProcess(arena_size="16MiB", args=args) as daemon, Client(daemon.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("rots", 8))
        until(lambda: below(client)["chunks"] == 8)
        wanted = payload(chain("rots", 8)[7]).tobytes()[:4096]
        for slab in (disk / "tier").glob("kvd-slab-*"):
            at = slab.read_bytes().find(wanted)
            if at >= 0:
                with open(slab, "r+b") as file:
                    file.seek(at + 5)
                    file.write(bytes([wanted[5] ^ 1]))
        until(lambda: client.stat()["counters"]["shards_scrubbed"]["corrupt"] == 1, 30)
        assert below(client)["chunks"] == 7
        assert load(client, handle, chain("rots", 8)) == [OK] * 8  # DRAM has it
        until(lambda: (disk / "tier" / "kvd-scrub").exists(), 30)
        daemon.kill()
        daemon.start()
        assert client.stat()["tiers"][1]["notes"]["foreign_files"] == 0
