"""Reported failures of disks, each behind a real daemon on a real disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemon import DaemonProcess
from diskuse import on_disk
from remote_kit import (
    MIB,
    OK,
    SIZE,
    chain,
    counters,
    daemon,
    drain,
    empty,
    flags,
    load,
    no_shm,
    payload,
    spec,
    store,
    tier,
    until,
)

from kvd.chunk import HEADER_BYTES, Outcome
from kvd.client import Client
from kvd.tiers.nvme.layout import Geometry


@pytest.fixture
def disk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-nvme-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def on(disk: Path, limit: int, **more: object) -> list[str]:
    told = {"nvme_limit": limit, "nvme_reserve": 0, "nvme_slab_size": "1MiB", **more}
    return flags(nvme_path=disk / "tier", **told)


def slabs(disk: Path) -> list[Path]:
    return sorted((disk / "tier").glob("kvd-slab-*"))


def du(disk: Path) -> int:
    return on_disk(disk / "tier")


def read_back(client: Client, handle: Any, singles: list[list[bytes]]) -> list[Outcome]:
    """One chunk at a time, each compared to the byte."""
    return [load(client, handle, single)[0] for single in singles]


def test_files_that_vanish_are_misses_and_the_books_are_right_after_each_step(disk: Path) -> None:
    """K55: some of the slabs of fifty chunks are removed behind its back."""
    with daemon(*on(disk, 32 * MIB)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        singles = [chain(n, 1) for n in range(50)]
        for single in singles:
            store(client, handle, single)
        drain(client, "nvme")
        cost = tier(client, "nvme")["used_bytes"] // 50
        for slab in slabs(disk)[:3]:
            slab.unlink()
        empty(client, "dram")
        got = read_back(client, handle, singles)
        lost = [n for n, outcome in enumerate(got) if outcome is not OK]
        assert 3 <= len(lost) < 25
        again = read_back(client, handle, [singles[n] for n in lost])
        assert set(again) == {Outcome.MISS}, "known by now"
        there = tier(client, "nvme")
        assert there["chunks"] == there["stored"] == 50 - len(lost)
        assert there["used_bytes"] == cost * there["chunks"] and there["state"] == "ok"
        empty(client, "nvme", "dram")
        until(lambda: tier(client, "nvme")["stored"] == 0)
        assert tier(client, "nvme")["used_bytes"] == 0
        for single in singles:
            assert store(client, handle, single) == [OK]
        drain(client, "nvme")
        empty(client, "dram")
        assert read_back(client, handle, singles) == [OK] * 50
        assert tier(client, "nvme")["used_bytes"] == cost * 50


def test_bytes_on_disk_stay_within_the_limit_with_files_of_before_and_of_others(
    disk: Path,
) -> None:
    """K57: eight clients, chunks of three sizes, four times the limit; then again over what the
    first run left, beside a file of somebody else."""
    limit = 16 * MIB
    sizes = (SIZE, SIZE // 2 + 512, SIZE // 8)
    other = disk / "tier" / "kvd-slab-of-somebody"
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            now = du(disk) - (other.stat().st_blocks * 512 if other.exists() else 0)
            if now > limit:
                over.append(now)

    def write(process: DaemonProcess, number: int) -> None:
        with Client(process.socket, timeout_s=30) as client:
            handles = [client.register(spec(size)) for size in sizes]
            for n in range(24):
                for handle, size in zip(handles, sizes, strict=True):
                    store(client, handle, chain(f"{number}/{n}", 1), size)

    with daemon(*on(disk, limit)) as process:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for foreign in (0, 1):
                with ThreadPoolExecutor(8) as pool:
                    for one in [pool.submit(write, process, n) for n in range(8)]:
                        one.result()
                with Client(process.socket) as client:
                    until(lambda c=client: not counters(c)["moving"])
                    there = tier(client, "nvme")
                    assert there["held_bytes"] <= limit and there["chunks"] > 20
                    assert there["notes"]["foreign_files"] == foreign
                process.kill()
                no_shm(process)
                other.write_bytes(bytes(MIB))
                process.start()
        finally:
            done.set()
            watcher.join()
    assert not over
    assert other.read_bytes() == bytes(MIB)


FULL = """
import subprocess, sys
from pathlib import Path
from remote_kit import *
from kvd.chunk import Outcome
from kvd.client import Client, Selector

where = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(where)], check=True)
tiers = flags(nvme_path=where / "tier", nvme_limit="1GiB", nvme_reserve=0, nvme_slab_size="1MiB")
with daemon(*tiers) as process, Client(process.socket) as client:
    handle = client.register(spec())
    old = [chain(("old", n), 1) for n in range(20)]
    for single in old:
        assert store(client, handle, single) == [OK]
    drain(client, "nvme")
    assert tier(client, "nvme")["chunks"] == 20
    hog = where / "hog"
    with open(hog, "wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass
    for n in range(100):  # no store fails because of the disk
        assert store(client, handle, chain(("new", n), 1)) == [OK]
    until(lambda: not counters(client)["moving"])
    got = [load(client, handle, single)[0] for single in old]
    there = tier(client, "nvme")
    assert set(got) <= {OK, Outcome.MISS} and there["state"] == "ok", (got, there)
    assert OK in got or there["chunks"] >= 20, "what it held was given up for nothing"
    assert load(client, handle, chain(("new", 99), 1)) == [OK]
    asked = there["answers"]["write"]
    assert asked.get("no_space", 0) < 400, asked  # no busy loop
    hog.unlink()
    last = [chain(("last", n), 1) for n in range(30)]
    keys = tuple(single[0] for single in last)

    def kept():
        for single in last:
            assert store(client, handle, single)[0] in (OK, Outcome.EXISTS)
        drain(client, "nvme")
        rows = list(client.rows("chunks", Selector(keys=keys)))
        return len(rows) == 30 and all("nvme" in row["tiers"] for row in rows)

    until(kept, 30)
    empty(client, "dram")
    assert [load(client, handle, single)[0] for single in last] == [OK] * 30
    assert "Traceback" not in process.log
"""


def test_a_disk_that_others_fill_costs_room_and_recovers_by_itself(tmp_path: Path) -> None:
    """K61: the file system is full long before the limit."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no mount namespace")
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests / 'ladder'}"},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    if "mount: " in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


TENANTS = ("a", "b", "c")


def test_after_a_restart_each_tenants_bytes_are_what_lies_there_and_a_lower_limit_holds(
    disk: Path,
) -> None:
    """K85: three tenants, SIGKILL; and a limit of half as much at the next start."""
    config = ""
    tokens = {}
    for name in TENANTS:
        tokens[name] = f"the-token-of-{name}-0123456789".encode()
        (disk / name).write_bytes(tokens[name])
        (disk / name).chmod(0o600)
        config += f'[tenants.{name}]\ntoken_file = "{disk / name}"\n'
    limit = 24 * MIB

    def used(admin: Client) -> dict[str, int]:
        told = admin.stat()["tenants"]
        return {name: told[name]["tiers"]["nvme"]["used_bytes"] for name in TENANTS}

    with daemon(*on(disk, limit), config=config, arena_size="32MiB") as process:
        for number, name in enumerate(TENANTS):
            with Client(process.socket, token=tokens[name]) as client:
                handle = client.register(spec())
                for n in range(10 * (number + 1)):
                    store(client, handle, chain((name, n), 1))
        with Client(process.socket) as admin:
            drain(admin, "nvme")
            before = used(admin)
            assert [before[name] // before["a"] for name in TENANTS] == [1, 2, 3]
            total = tier(admin, "nvme")["used_bytes"]
        process.kill()
        process.start()
        with Client(process.socket) as admin:
            assert tier(admin, "nvme")["used_bytes"] == total
            assert total == sum(before.values()) + 60 * HEADER_BYTES
            assert used(admin) == before
        process.kill()
        process.args[process.args.index("--nvme-limit") + 1] = str(limit // 2)
        process.start()
        with Client(process.socket) as admin:
            there = tier(admin, "nvme")
            assert du(disk) <= limit // 2 and there["held_bytes"] <= there["limit_bytes"]
            records = there["chunks"] * HEADER_BYTES
            assert 0 < sum(used(admin).values()) == there["used_bytes"] - records
        with Client(process.socket, token=tokens["a"]) as client:
            handle = client.register(spec())
            for n in range(60):
                assert store(client, handle, chain(("later", n), 1)) == [OK]
            with Client(process.socket) as admin:
                drain(admin, "nvme")
                assert tier(admin, "nvme")["held_bytes"] <= limit // 2 and du(disk) <= limit // 2


@pytest.mark.parametrize("hard", [True, False], ids=["SIGKILL", "SIGTERM"])
def test_what_was_acknowledged_is_a_hit_after_a_restart_and_another_format_is_not_served(
    disk: Path, hard: bool
) -> None:
    """K86: three models, one of whose slabs is of a version of tomorrow by then."""
    sizes = (SIZE, SIZE // 2, SIZE // 4)
    with daemon(*on(disk, 64 * MIB, nvme_write="through"), arena_size="32MiB") as process:
        with Client(process.socket) as client:
            handles = [client.register(spec(size)) for size in sizes]
            for handle, size in zip(handles, sizes, strict=True):
                assert store(client, handle, chain(size, 12), size) == [OK] * 12
            until(lambda: tier(client, "nvme")["chunks"] == 36)
        if hard:
            process.kill()
        else:
            assert process.stop() == 0
        alien = 0
        for slab in slabs(disk):
            data = slab.read_bytes()
            if Geometry.unpack(data[:128]).slot_bytes == sizes[2]:
                alien += 1
                with open(slab, "r+b") as file:
                    file.seek(8)
                    file.write(bytes([2]))
        assert alien
        process.start()
        with Client(process.socket) as client:
            handles = [client.register(spec(size)) for size in sizes]
            until(lambda: counters(client)["records_waiting"] == 0)
            empty(client, "dram")
            for handle, size in zip(handles[:2], sizes, strict=False):
                assert load(client, handle, chain(size, 12), size) == [OK] * 12
            assert client.lookup(handles[2], chain(sizes[2], 12), lease=False).leading == 0
            assert tier(client, "nvme")["chunks"] == 24
            assert len([s for s in slabs(disk) if s.read_bytes()[8] == 2]) == alien, "left alone"
            assert store(client, handles[2], chain(sizes[2], 12), sizes[2]) == [OK] * 12


def test_no_chunk_comes_back_as_another_models(disk: Path) -> None:
    """K35: the payloads of two chunks of one size are exchanged on the disk."""
    with daemon(*on(disk, 16 * MIB)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        both = [chain("a", 1), chain("b", 1)]
        for one in both:
            store(client, handle, one)
        drain(client, "nvme")
        (slab,) = slabs(disk)
        data = slab.read_bytes()
        bytes_of = [payload(one[0]).tobytes() for one in both]
        at = [data.index(one) for one in bytes_of]
        with open(slab, "r+b") as file:
            for place, wrong in zip(at, reversed(bytes_of), strict=True):
                file.seek(place)
                file.write(wrong)
        empty(client, "dram")
        assert read_back(client, handle, both) == [Outcome.CORRUPT] * 2
        assert counters(client)["shards_fetched"]["corrupt"] == 2
        assert tier(client, "nvme")["notes"]["quarantined"] == 2
        for one in both:
            assert store(client, handle, one) == [OK]
        drain(client, "nvme")
        empty(client, "dram")
        assert read_back(client, handle, both) == [OK] * 2
