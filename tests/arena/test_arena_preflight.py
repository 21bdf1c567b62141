"""Before a byte is taken: is there room, and if not, which limit is it and what helps."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_kit import Open, Spawn

from kvd.arena import check_room, plan
from kvd.arena import preflight as preflight_module
from kvd.arena.preflight import cgroup_rooms, file_system_room, machine_room
from kvd.chunk import ChunkHeader
from kvd.errors import ArenaError

MIB = 1 << 20
HEADER = ChunkHeader(kind=1, state=2, length=1, generation=1)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(root: Path, group: str, limit: str, usage: int, cache: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", limit)
    write(folder / "memory.current", str(usage))
    write(folder / "memory.stat", f"anon 1\nactive_file {cache}\ninactive_file 0\n")


def test_every_cgroup_above_counts_and_page_cache_gives_way(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    v2(tmp_path, "a/b", "max\n", 5)
    v2(tmp_path, "a", f"{100 * MIB}\n", 80 * MIB, cache=30 * MIB)
    v2(tmp_path, ".", f"{500 * MIB}\n", 10 * MIB)
    rooms = cgroup_rooms(tmp_path)
    assert [(r.free // MIB, r.total // MIB) for r in rooms] == [(50, 100), (490, 500)]
    check_room(Path("/dev/shm"), 50 * MIB, root=tmp_path)
    with pytest.raises(
        ArenaError,
        match=rf"needs {51 * MIB} bytes more, but memory cgroup .*/a has"
        rf" {50 * MIB} free of {100 * MIB}: .*--arena-size.*raise the cgroup",
    ):
        check_room(Path("/dev/shm"), 51 * MIB, root=tmp_path)
    check_room(Path("/dev/shm"), 51 * MIB, reclaim=1 * MIB, root=tmp_path)


def test_version_1_cgroups_count_too(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "9:cpu:/x\n4:memory:/x/y\n1:name=systemd:/\n")
    base = tmp_path / "sys/fs/cgroup/memory"
    for group, limit, usage in [("x/y", 100 * MIB, 90 * MIB), ("x", 1 << 63, 0), ("", 1 << 63, 0)]:
        write(base / group / "memory.limit_in_bytes", f"{limit}\n")
        write(base / group / "memory.usage_in_bytes", f"{usage}\n")
        write(base / group / "memory.stat", f"total_inactive_file {20 * MIB}\nactive_file 1\n")
    assert [(r.free, r.total) for r in cgroup_rooms(tmp_path)] == [(30 * MIB, 100 * MIB)]


@pytest.mark.parametrize("path", ["/host/only/path", "/../../outside", "/"])
def test_in_a_container_the_mounts_own_root_counts(tmp_path: Path, path: str) -> None:
    write(tmp_path / "proc/self/cgroup", f"0::{path}\n")
    v2(tmp_path, ".", f"{64 * MIB}\n", 4 * MIB)
    assert [r.free for r in cgroup_rooms(tmp_path)] == [60 * MIB]


@pytest.mark.parametrize("text", ["", "noise\n", "0::\n", "::::\n", "4:memory\n"])
def test_what_can_not_be_read_refuses_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc/self/cgroup", text)
    assert cgroup_rooms(tmp_path) == []
    assert cgroup_rooms(tmp_path / "absent") == []
    assert machine_room(tmp_path) == []
    write(tmp_path / "proc/meminfo", "MemTotal: many kB\n")
    assert machine_room(tmp_path) == []


def test_the_machines_memory_counts(tmp_path: Path) -> None:
    write(
        tmp_path / "proc/meminfo",
        "MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapTotal: 20 kB\nSwapFree: 10 kB\n",
    )
    assert [(r.free, r.total) for r in machine_room(tmp_path)] == [(510 * 1024, 1020 * 1024)]
    with pytest.raises(ArenaError, match="machine's memory"):
        check_room(Path("/dev/shm"), MIB, root=tmp_path)


def test_an_arena_larger_than_its_file_system_is_refused_and_leaves_nothing(
    base: Path, open_arena: Open
) -> None:
    """K119"""
    room = file_system_room(Path("/dev/shm"))
    size = plan(room.total + (1 << 30)).size
    need = size + plan(size).reserved_table_bytes
    with pytest.raises(ArenaError, match=f"needs {need} bytes more.*/dev/shm.*--shm-size"):
        open_arena(size)
    assert not list(base.parent.glob(base.name + "*"))  # no lock and no folder either


def test_an_arena_that_fits_only_in_place_of_the_old_one_is_made(
    base: Path, open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K89: what the old one gives back counts."""
    open_arena(4 * MIB).close()

    def tight(directory: Path) -> preflight_module.Room:
        return preflight_module.Room("the file system", 2 * MIB, 6 * MIB, "enlarge it")

    monkeypatch.setattr(preflight_module, "file_system_room", tight)
    need = 8 * MIB + plan(8 * MIB).reserved_table_bytes
    with pytest.raises(ArenaError, match=f"needs {need} bytes more.* free of {6 * MIB}"):
        open_arena(8 * MIB)
    assert base.stat().st_size == 4 * MIB  # refused before anything was given up
    assert open_arena(3 * MIB).size == 3 * MIB


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB; needs root."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a tmpfs")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "kvd-test", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"can't mount a tmpfs: {done.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_real_small_tmpfs_refuses_at_start(small_tmpfs: Path, open_arena: Open) -> None:
    """K119"""
    with pytest.raises(ArenaError, match=f"{small_tmpfs} has .* free of {8 * MIB}"):
        open_arena(16 * MIB, at=small_tmpfs / "arena")
    assert list(small_tmpfs.iterdir()) == []


def test_a_tmpfs_filled_by_others_after_the_start_hurts_nothing(
    small_tmpfs: Path, open_arena: Open
) -> None:
    """K119: every page of the arena and of the records of large slots is there already; a slab of
    small slots, which needs more, is refused with an error."""
    owner = open_arena(5 * MIB, at=small_tmpfs / "arena")
    with open(small_tmpfs / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(65536))
        except OSError as error:
            assert error.errno == 28
    assert os.statvfs(small_tmpfs).f_bavail == 0
    owner.view[:] = bytes([7]) * owner.size
    for slab in range(owner.slab_count):
        owner.assign_slab(slab, owner.slab_size)
        first = slab * owner.slab_size // 4096
        owner.write_record(first, HEADER)
    refused = 0
    for slab in range(owner.slab_count):
        try:
            owner.assign_slab(slab, 4096)
        except ArenaError as error:
            assert "free space" in str(error)
            refused += 1
        else:
            for record in range(slab * owner.slab_size // 4096, owner.slab_size // 4096):
                owner.write_record(record, HEADER)
    assert refused > 0
    owner.destroy()


def test_five_kills_fit_into_one_and_a_half_arenas(
    small_tmpfs: Path, open_arena: Open, spawn: Spawn
) -> None:
    """K89: shared memory of 1.5 arenas, SIGKILL and restart five times."""
    # five of one size, then each start asks for another
    for size in (5, 5, 5, 5, 5, 4, 5, 3, 6):
        child = spawn(f"""
            base = {str(small_tmpfs / "arena")!r}
            owner = ArenaOwner.open(base, {size * MIB}, instance="test", now_unix_ns=1)
            say(owner.reserved)
            time.sleep(600)
        """)
        assert child.stdout and int(child.stdout.readline()) == size * MIB
        child.kill()
        child.wait()
