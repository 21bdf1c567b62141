"""A tmpfs that others fill, and a directory that is no tmpfs at all.

Small chunks need record pages beyond those that every slab has from the start; there must be an
answer when they can't be had, and no SIGBUS on either side of the shared memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import DaemonProcess, run_kvd

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.errors import InternalError

SIZE = 4096
KEYS = [hashlib.sha256(b"%d" % n).digest() for n in range(300)]
DATA = [bytes([n % 251]) * SIZE for n in range(300)]


def spec(size: int = SIZE) -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, size),)
    return KVSpec(f"m{size}", "", "w", "e", "bf16", "", "c", 16, 1, 1, 1, (), (), shards)


@pytest.fixture
def small_tmpfs() -> Iterator[Path]:
    """A tmpfs of 40 MiB; needs root."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a tmpfs")
    path = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "kvd-test", path], capture_output=True
    )
    if done.returncode:
        os.rmdir(path)
        pytest.skip(f"can't mount a tmpfs: {done.stderr.decode().strip()}")
    yield Path(path)
    subprocess.run(["umount", "-l", path], check=True)
    os.rmdir(path)


def fill(directory: Path) -> None:
    with open(directory / "filler", "ab", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            assert error.errno == 28
    assert os.statvfs(directory).f_bavail == 0


def give_inodes(directory: Path, count: int) -> None:
    """So many in all; the directory itself has one. 0: no limit."""
    option = f"remount,size=40m,nr_inodes={count}"
    subprocess.run(["mount", "-o", option, str(directory)], check=True)


def stored(client: Client) -> Counter[Outcome]:
    return Counter(client.store_chunks(spec(), KEYS, None, DATA))


def readable(client: Client) -> int:
    back = [bytearray(SIZE) for _ in KEYS]
    outcomes = client.load_chunks(spec(), KEYS, back, every=True)
    found = [n for n, outcome in enumerate(outcomes) if outcome is Outcome.OK]
    assert all(back[n] == DATA[n] for n in found)
    return len(found)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_full_tmpfs_costs_stores_and_never_a_process(small_tmpfs: Path, mapped: bool) -> None:
    """K119"""
    where = ("--arena-path", str(small_tmpfs))
    with DaemonProcess(arena_size="32MiB", args=where) as daemon:
        with Client(daemon.socket, map_memory=mapped) as client:
            client.stat()
            fill(small_tmpfs)
            client.register(spec())  # the registry's pages are there
            assert stored(client) == {Outcome.NO_SPACE: 300}
            assert readable(client) == 0
            big = [bytes([n]) * (256 << 10) for n in range(4)]  # their records are there, too
            assert client.store_chunks(spec(256 << 10), KEYS[:4], None, big) == [Outcome.OK] * 4
            counters = client.stat()["counters"]
            assert counters["slabs_refused"] > 0 and not any(counters["faults"].values())
            (small_tmpfs / "filler").unlink()
            assert stored(client) == {Outcome.OK: 300}
            assert readable(client) == 300
            fill(small_tmpfs)
            assert readable(client) == 300
        daemon.restart()  # over an arena in a tmpfs that is still full
        with Client(daemon.socket, map_memory=mapped) as client:
            assert readable(client) == 300
        assert daemon.stop() == 0


def test_a_slab_that_goes_to_larger_slots_leaves_no_hole_behind(small_tmpfs: Path) -> None:
    """K119: whoever still holds a reference to one of its old records may look at it."""
    where = ("--arena-path", str(small_tmpfs))
    with (
        DaemonProcess(arena_size="32MiB", args=where) as daemon,
        Client(daemon.socket) as client,
    ):
        assert stored(client) == {Outcome.OK: 300}
        found = client.lookup(spec(), KEYS)
        assert found.lease is not None
        transfer = found.lease.load()
        assert len(list(transfer)) == 300
        found.lease.release(wait=True)
        size = 1 << 20
        keys = [hashlib.sha256(b"big%d" % n).digest() for n in range(40)]
        assert Outcome.OK in client.store_chunks(spec(size), keys, None, [bytes(size)] * 40)
        fill(small_tmpfs)
        transfer._slots.fresh()  # reads the generation of every old record
        readable(client)
        assert daemon.stop() == 0


def test_an_arena_path_that_is_no_memory_is_refused_in_one_line() -> None:
    """K119: on a disk every store would be written out."""
    folder = tempfile.mkdtemp(prefix="kvd-", dir=os.path.expanduser("~"))
    try:
        kind = subprocess.run(
            ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True
        ).stdout.strip()
        if kind in ("tmpfs", "hugetlbfs", "ramfs"):
            pytest.skip("the home directory is in memory")
        args = ("--arena-path", folder, "--arena-size", "4MiB", "--socket", f"{folder}/k")
        for extra in ((), ("--check",)):
            done = run_kvd(*args, *extra)
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done
            assert "arena.path" in done.stderr and "arena.any_file_system" in done.stderr
        assert os.listdir(folder) == []
        assert run_kvd(*args, "--arena-any-file-system", "true", "--check").returncode == 0
    finally:
        shutil.rmtree(folder)


def test_a_start_refused_for_room_leaves_nothing_in_the_arenas_directory(
    small_tmpfs: Path,
) -> None:
    """K119"""
    socket = str(small_tmpfs.with_name(small_tmpfs.name + ".sock"))
    done = run_kvd("--arena-path", str(small_tmpfs), "--arena-size", "64MiB", "--socket", socket)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert os.listdir(small_tmpfs) == []


OWN = 5  # inodes: the directory, the arena, its table, its lock, the directory of session locks


@pytest.mark.parametrize("count", [*range(1, OWN + 16, 3), OWN + 15])
def test_a_start_without_inodes_is_refused_with_the_way_out(small_tmpfs: Path, count: int) -> None:
    """K119: there is room for bytes, but for no more files."""
    give_inodes(small_tmpfs, count)
    socket = str(small_tmpfs.with_name(small_tmpfs.name + ".sock"))
    done = run_kvd("--arena-path", str(small_tmpfs), "--arena-size", "16MiB", "--socket", socket)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert f"of its {count} inodes free" in done.stderr and "nr_inodes" in done.stderr
    assert "remove it" not in done.stderr
    assert os.listdir(small_tmpfs) == []


@pytest.mark.parametrize("count", [0, OWN + 16])
def test_a_start_with_just_enough_inodes_or_no_limit_is_none_to_refuse(
    small_tmpfs: Path, count: int
) -> None:
    """K119"""
    give_inodes(small_tmpfs, count)
    with DaemonProcess(arena_size="16MiB", args=("--arena-path", str(small_tmpfs))) as daemon:
        assert ("has inodes for 16 sessions of 1024" in daemon.log) == bool(count)
        with Client(daemon.socket) as client:
            assert stored(client) == {Outcome.OK: 300}
            daemon.restart()  # over an arena that is there, with a session that is there still
        with Client(daemon.socket) as client:
            assert readable(client) == 300


def test_a_client_without_an_inode_for_its_lock_is_told_so(small_tmpfs: Path) -> None:
    """K119: it is let in as soon as there is one."""
    give_inodes(small_tmpfs, OWN + 2)
    args = ("--arena-path", str(small_tmpfs), "--limits-sessions", "2")
    with DaemonProcess(arena_size="16MiB", args=args) as daemon, Client(daemon.socket) as client:
        client.stat()
        (small_tmpfs / "filler").touch()
        with pytest.raises(InternalError) as refused, Client(daemon.socket) as late:
            late.stat()
        assert f"has none of its {OWN + 2} inodes free" in str(refused.value)
        assert "nr_inodes" in str(refused.value)
        (small_tmpfs / "filler").unlink()
        with Client(daemon.socket) as late:
            late.stat()


def test_a_socket_that_there_is_no_inode_for_is_refused_with_the_way_out(
    small_tmpfs: Path,
) -> None:
    """K119"""
    socket = str(small_tmpfs / "kvd.sock")
    for count in (1, 2, 3):  # for nothing, for the lock, for one of the two sockets
        give_inodes(small_tmpfs, count)
        done = run_kvd("--arena-size", "4MiB", "--instance", small_tmpfs.name, "--socket", socket)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        assert f"none of its {count} inodes free" in done.stderr
        assert "remove it" not in done.stderr
