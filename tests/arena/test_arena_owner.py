"""Owners: one at a time, adopting what is there, replacing what can't be adopted."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from arena_kit import NOW, SIZE, Open, Spawn

from kvd.arena import ArenaMap, ArenaOwner, plan
from kvd.arena import files as files_module
from kvd.arena import owner as owner_module
from kvd.arena.os_call import punch_hole
from kvd.chunk import ChunkHeader, State
from kvd.errors import ArenaError

HEADER = ChunkHeader(kind=1, state=State.READY, chunk=b"c" * 32, length=4096, generation=5)


def used(path: Path) -> int:
    return path.stat().st_blocks * 512


def table_of(base: Path) -> Path:
    return base.with_name(base.name + ".table")


# -- geometry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "slab_size", "slabs"),
    [
        (1 << 20, 64 << 10, 16),
        (64 << 20, 2 << 20, 32),
        (1 << 30, 32 << 20, 32),
        (4_000_000_000, 124_997_632, 32),  # "4GB"
        (3 << 20, 96 << 10, 32),
        ((64 << 20) - 1, 2093056, 32),
    ],
)
def test_a_slab_is_a_32nd_of_the_arena_in_whole_pages(
    size: int, slab_size: int, slabs: int
) -> None:
    geometry = plan(size)
    assert (geometry.slab_size, geometry.slab_count) == (slab_size, slabs)
    assert geometry.slab_size * 16 <= geometry.size
    assert geometry.size == slabs * slab_size <= size  # nothing is taken that can't be used
    assert plan(geometry.size) == plan(geometry.size, slab_size) == geometry
    assert geometry.records == slabs * slab_size // 4096
    assert geometry.table_bytes == (2 << 20) + 512 * geometry.records


@pytest.mark.parametrize(
    ("size", "slab_size", "message"),
    [
        (1000, None, "too small: give it at least 1048576"),
        (SIZE, 128 << 10, "at most 65536"),
        (SIZE, 5000, "multiple of 4096"),
        (SIZE, 0, "multiple of 4096"),
        (1 << 30, 4096, "limit 4096: choose larger slabs"),
    ],
)
def test_sizes_that_can_not_be_are_refused_with_the_limit(
    base: Path, open_arena: Open, size: int, slab_size: int | None, message: str
) -> None:
    with pytest.raises(ArenaError, match=message):
        open_arena(size, slab_size=slab_size)
    assert not base.exists()


# -- making -------------------------------------------------------------------------------------


def test_a_new_arena_is_reserved_private_and_its_table_takes_little(
    base: Path, open_arena: Open
) -> None:
    owner = open_arena(64 << 20)
    assert not owner.adopted and owner.previous_epoch == 0 and owner.epoch == NOW
    assert owner.reserved == owner.size == used(base) == 64 << 20
    table = table_of(base)
    assert table.stat().st_size == (2 << 20) + (8 << 20)
    # superblock, registry, and one page of records a slab
    assert used(table) == plan(64 << 20).reserved_table_bytes < 1280 << 10
    for path in (base, table, base.with_name(base.name + ".lock")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(base.with_name(base.name + ".s").stat().st_mode) == 0o700
    assert owner.slot_sizes() == [0] * 32
    assert owner.scan().records.size == 0


def test_memory_is_reserved_in_steps_and_nothing_beyond_is_ready(
    base: Path, open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "RESERVE_STEP", 300 << 10)
    owner = open_arena()
    steps = [owner.reserved]
    while not owner.reserve_step():
        steps.append(owner.reserved)
        assert used(base) >= owner.reserved
    assert steps == [300 << 10, 600 << 10, 900 << 10]
    assert owner.reserved == SIZE == used(base)
    assert owner.reserve_step()
    assert used(table_of(base)) >= 16 * 4096 + (64 << 10)  # each slab's first records


def test_an_owner_killed_while_it_reserved_is_followed_by_one_that_goes_on(
    base: Path, open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K89"""
    monkeypatch.setattr(owner_module, "RESERVE_STEP", 256 << 10)
    first = open_arena()
    assert first.reserved == 256 << 10
    first.close()
    second = open_arena()
    assert second.adopted and second.id == first.id
    assert second.reserved == 512 << 10


def test_memory_that_others_gave_back_is_reserved_again(base: Path, open_arena: Open) -> None:
    first = open_arena()
    first.close()
    fd = os.open(base, os.O_RDWR)
    punch_hole(fd, 0, 64 << 10)
    os.close(fd)
    assert used(base) < SIZE
    assert open_arena().adopted and used(base) == SIZE


# -- one owner ----------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_told_who_the_first_is(
    base: Path, open_arena: Open, spawn: Spawn
) -> None:
    owner = open_arena()
    owner.view[:5] = b"mine!"
    epoch = owner.epoch
    with pytest.raises(ArenaError, match=f"held by process {os.getpid()}: .*instance"):
        open_arena()
    child = spawn("""
        try:
            arena()
        except Exception as error:
            say(type(error).__name__, error)
    """)
    out, _ = child.communicate(timeout=30)
    assert out.startswith("ArenaError") and f"process {os.getpid()}" in out
    assert (bytes(owner.view[:5]), owner.epoch) == (b"mine!", epoch)


def test_the_lock_goes_with_the_process_that_held_it(
    base: Path, open_arena: Open, spawn: Spawn
) -> None:
    child = spawn("owner = arena(); say('up'); time.sleep(600)")
    assert child.stdout and child.stdout.readline() == "up\n"
    with pytest.raises(ArenaError, match=f"process {child.pid}"):
        open_arena()
    child.send_signal(signal.SIGSTOP)  # a stopped owner is an owner
    with pytest.raises(ArenaError, match=f"process {child.pid}"):
        open_arena()
    child.kill()
    child.wait()
    assert open_arena().adopted


def test_a_lock_file_that_its_holder_removed_meanwhile_is_not_taken_for_the_lock(
    base: Path, open_arena: Open
) -> None:
    open_arena().destroy()
    lock = base.with_name(base.name + ".lock")
    assert not lock.exists()
    owner = open_arena()
    lock.unlink()  # by hand, which it must survive: the next owner has its own file
    owner.close()
    assert open_arena().adopted


# -- adoption -----------------------------------------------------------------------------------


def test_an_owner_that_ends_leaves_an_arena_for_the_next(base: Path, open_arena: Open) -> None:
    first = open_arena()
    first.assign_slab(2, 8192)
    record = 2 * 16 + 3
    first.view[2 * 65536 + 3 * 8192 :][:4] = b"data"
    first.write_record(record, HEADER)
    first.lease_horizon = 123
    first.registry_store(["default"], [b"spec"])
    arena_id = first.id
    first.set_clean()
    first.close()
    first.close()

    second = open_arena()
    assert second.adopted and second.was_clean and second.id == arena_id
    assert second.previous_epoch == NOW and second.epoch == NOW + 1
    assert second.slot_sizes() == [0, 0, 8192] + [0] * 13
    assert second.lease_horizon == 123
    assert second.registry_load() == (["default"], [b"spec"])
    scan = second.scan()
    assert scan.indices.tolist() == [record]
    assert scan.records[0].tobytes() == HEADER.pack()[:256]
    assert scan.invalid.size == 0 and scan.bad_slabs == ()
    assert bytes(second.view[2 * 65536 + 3 * 8192 :][:4]) == b"data"
    second.close()
    assert not open_arena().was_clean


def test_an_arena_whose_owner_was_killed_is_adopted_and_takes_no_more_memory(
    base: Path, open_arena: Open, spawn: Spawn
) -> None:
    """K89: SIGKILL and restart, five times; a second instance beside it is not touched."""
    other = base.with_name(base.name + "-b")
    neighbour = open_arena(at=other)
    neighbour.view[:4] = b"stay"
    ids = set()
    for life in range(5):
        child = spawn(f"""
            owner = arena()
            say(owner.id.hex(), owner.adopted, len(owner.scan().records))
            owner.assign_slab({life}, 4096)
            owner.write_record(16 * {life}, ChunkHeader(kind=1, state=2, generation={life} + 1))
            say("written")
            time.sleep(600)
        """)
        assert child.stdout is not None
        arena_id, adopted, records = child.stdout.readline().split()
        assert child.stdout.readline() == "written\n"
        assert (adopted, int(records)) == (str(life > 0), life)
        ids.add(arena_id)
        child.kill()
        child.wait()
        assert used(base) == SIZE
    assert len(ids) == 1
    names = sorted(p.name for p in base.parent.glob(base.name + "*"))
    assert len(names) == 8  # arena, table, lock and sessions, of the two
    assert bytes(neighbour.view[:4]) == b"stay"
    neighbour.destroy()


@pytest.mark.parametrize("stage", ["os.ftruncate", "os.posix_fallocate", "os.pwrite"])
@pytest.mark.parametrize("call", [1, 2])
def test_an_owner_killed_during_its_start_does_not_hinder_the_next(
    base: Path, open_arena: Open, spawn: Spawn, stage: str, call: int
) -> None:
    """K89"""
    child = spawn(f"""
        calls = 0
        real = {stage}
        def die(*args):
            global calls
            path = os.readlink(f"/proc/self/fd/{{args[0]}}")
            calls += not path.endswith(".lock")
            if calls == {call}:
                os.kill(os.getpid(), 9)
            return real(*args)
        {stage} = die
        arena()
    """)
    assert child.wait(30) == -signal.SIGKILL
    owner = open_arena()
    assert owner.reserved == SIZE and used(base) == SIZE
    assert owner.scan().records.size == 0


def test_another_size_or_slab_size_replaces_the_arena_and_gives_its_memory_back(
    base: Path, open_arena: Open
) -> None:
    """K89, K119: even a client that still maps the old one reads zeros there, and no SIGBUS."""
    first = open_arena(2 << 20)
    first.assign_slab(0, 4096)
    first.write_record(0, HEADER)
    first.view[:5] = b"hello"
    client = ArenaMap(first.fd_arena, first.fd_table)
    ref = np.array([(0, 0, 0, 5, 5)], "<u4,<u4,<u8,<u8,<u8")
    ref.dtype.names = ("arena", "record", "offset", "length", "generation")
    assert client.check(ref).tolist() == [True]
    old = os.dup(first.fd_arena)
    first.close()

    second = open_arena(1 << 20, now=5)
    assert not second.adopted and second.id != client.id
    assert second.epoch == NOW + 1  # never back, whatever the clock says
    assert os.fstat(old).st_blocks == 0
    os.close(old)
    assert bytes(client.view_at(0, 5)) == bytes(5)
    assert client.epoch() == 0 and client.check(ref).tolist() == [False]
    client.close()
    second.close()
    third = open_arena(1 << 20, slab_size=32 << 10)
    assert not third.adopted and third.slab_count == 32


def test_an_arena_of_another_boot_or_instance_is_not_adopted(
    base: Path, open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_arena()
    first.close()
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "_boot_id", lambda: b"b" * 16)
        second = open_arena()
        assert not second.adopted
        second.close()
    third = ArenaOwner.open(base, SIZE, instance="other", now_unix_ns=NOW)
    assert not third.adopted
    third.destroy()


def test_a_table_beside_a_foreign_arena_is_not_believed(base: Path, open_arena: Open) -> None:
    first = open_arena()
    first.close()
    copy = base.read_bytes()
    base.unlink()
    base.write_bytes(copy)
    assert not open_arena().adopted


def test_an_arena_that_is_replaced_says_why(
    base: Path, open_arena: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_arena()
    assert first.replaced == ""
    first.close()
    again = open_arena()
    assert again.adopted and again.replaced == ""
    again.close()
    assert caplog.records == []

    def replaced(size: int = SIZE, instance: str = "test", slab_size: int | None = None) -> str:
        owner = ArenaOwner.open(base, size, slab_size=slab_size, instance=instance, now_unix_ns=NOW)
        owner.close()
        assert not owner.adopted
        (told,) = caplog.messages
        assert told == f"discarded the arena {base} with all chunks: it {owner.replaced}"
        caplog.clear()
        return owner.replaced

    def write(at: int, data: bytes) -> None:
        with table_of(base).open("r+b") as file:
            file.seek(at)
            file.write(data)

    assert replaced(2 * SIZE) == "had 1 MiB, not 2 MiB"
    assert replaced(2 * SIZE - 4096).startswith("had 2 MiB, not ")
    assert replaced(SIZE).endswith(", not 1 MiB")
    assert replaced(slab_size=32 << 10) == "had slabs of 64 KiB, not 32 KiB"
    assert replaced(instance="other") == "was of instance 'test', not 'other'"
    assert replaced() == "was of instance 'other', not 'test'"
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "_boot_id", lambda: b"b" * 16)
        assert replaced() == "was of another boot of the machine"
    assert replaced() == "was of another boot of the machine"
    write(0, b"garbage")
    assert replaced().startswith("had a table that does not hold (superblock magic")
    write(20, b"x")
    assert replaced() == "had a table that does not hold (superblock check sum does not hold)"
    write(64, b"\xff" * 8)
    assert replaced() == "had an epoch that does not hold"
    os.truncate(table_of(base), 4 << 20)
    assert replaced().startswith(f"had a table of {4 << 20} bytes, not ")
    os.truncate(base, SIZE // 2)
    assert replaced() == f"had a file of {SIZE // 2} bytes for payloads, not {SIZE}"
    copy = base.read_bytes()
    base.rename(base.with_name(base.name + "-old"))  # so that its inode is not taken again
    base.write_bytes(copy)
    base.with_name(base.name + "-old").unlink()
    assert replaced() == "had a table that belongs to another file"
    base.unlink()
    assert replaced() == "had no file for its payloads"
    table_of(base).unlink()
    assert replaced() == "had no table"


def test_a_start_that_is_refused_discards_nothing_and_says_nothing_of_it(
    base: Path, open_arena: Open, caplog: pytest.LogCaptureFixture
) -> None:
    open_arena().close()
    with pytest.raises(ArenaError, match="bytes more"):
        open_arena(1 << 46, slab_size=1 << 36)
    assert caplog.records == []
    assert open_arena().adopted


@pytest.mark.parametrize("what", ["arena", "table"])
@pytest.mark.parametrize("change", ["absent", "empty", "short", "noise"])
def test_what_is_left_of_an_arena_never_stops_a_start(
    base: Path, open_arena: Open, what: str, change: str
) -> None:
    """K89"""
    open_arena().close()
    path = base if what == "arena" else table_of(base)
    size = path.stat().st_size
    if change == "absent":
        path.unlink()
    elif change == "noise":
        path.write_bytes(os.urandom(size))
    else:
        os.truncate(path, 0 if change == "empty" else size // 2)
    owner = open_arena()
    # noise in the payload alone can't be seen here; digests are there for that
    assert owner.adopted == (what == "arena" and change == "noise")
    assert owner.reserved == SIZE and owner.size == base.stat().st_size
    owner.assign_slab(0, 4096)
    owner.write_record(0, HEADER)


def test_a_superblock_with_any_byte_changed_is_adopted_or_replaced_but_never_in_the_way(
    base: Path, open_arena: Open
) -> None:
    """K89"""
    first = open_arena()
    first.assign_slab(1, 8192)
    first.write_record(16, HEADER)
    first.close()
    good = table_of(base).read_bytes()
    payload = os.stat(base).st_ino
    adopted = []
    for at in range(512):
        if not base.exists() or os.stat(base).st_ino != payload:
            owner = open_arena()
            owner.assign_slab(1, 8192)
            owner.write_record(16, HEADER)
            owner.close()
            good, payload = table_of(base).read_bytes(), os.stat(base).st_ino
        broken = bytearray(good)
        broken[at] ^= 0xFF
        table_of(base).write_bytes(broken)
        owner = open_arena()
        assert owner.reserved == SIZE
        assert owner.epoch >= NOW
        if owner.adopted:
            adopted.append(at)
            scan = owner.scan()
            assert scan.indices.tolist() == [16], at
            assert scan.records[0].tobytes() == HEADER.pack()[:256]
        owner.close()
    # the words that change while it runs are not under the check sum, and do no harm
    assert set(adopted) <= set(range(64, 128))


def test_a_descriptor_with_any_byte_changed_unassigns_its_slab(
    base: Path, open_arena: Open
) -> None:
    first = open_arena()
    first.assign_slab(1, 8192)
    first.write_record(16, HEADER)
    first.close()
    good = table_of(base).read_bytes()
    for at in range(4096 + 8, 4096 + 16):
        for bit in range(8):
            broken = bytearray(good)
            broken[at] ^= 1 << bit
            with table_of(base).open("r+b") as file:
                file.write(broken)
            owner = open_arena()
            assert owner.adopted and owner.slot_sizes() == [0] * 16
            scan = owner.scan()
            assert scan.bad_slabs == (1,) and scan.records.size == 0
            owner.close()


# -- files that are not ours --------------------------------------------------------------------


def test_a_link_in_place_of_a_file_is_refused_and_its_target_untouched(
    base: Path, open_arena: Open, tmp_path: Path
) -> None:
    """K93: /dev/shm is writable for all, so a planted name must not lead anywhere."""
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    for suffix in ("", ".table", ".lock"):
        link = base.with_name(base.name + suffix)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(ArenaError, match="remove it"):
            open_arena()
        link.unlink()
    assert target.read_bytes() == b"precious"
    sessions = base.with_name(base.name + ".s")
    if sessions.exists():
        sessions.rmdir()
    sessions.symlink_to(tmp_path)
    with pytest.raises(ArenaError, match="not a directory of this user"):
        open_arena()
    sessions.unlink()


def test_a_directory_in_place_of_a_file_is_refused(base: Path, open_arena: Open) -> None:
    """K93"""
    base.mkdir()
    with pytest.raises(ArenaError, match="remove it"):
        open_arena()
    base.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(base: Path, open_arena: Open) -> None:
    """K93"""
    base.write_bytes(b"theirs")
    os.chown(base, 12345, 12345)
    with pytest.raises(ArenaError, match="not a regular file of this user"):
        open_arena()
    assert base.read_bytes() == b"theirs"


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, open_arena: Open) -> None:
    with pytest.raises(ArenaError, match="does not exist: make it"):
        open_arena(at=tmp_path / "absent" / "arena")


# -- the end ------------------------------------------------------------------------------------


def test_a_destroyed_arena_leaves_no_name_and_no_memory(base: Path, open_arena: Open) -> None:
    owner = open_arena()
    fd = owner.session_lock_create(b"s" * 16)
    mapped = os.dup(owner.fd_arena)
    owner.destroy()
    owner.destroy()
    assert not list(base.parent.glob(base.name + "*"))
    assert os.fstat(mapped).st_blocks == 0
    os.close(mapped)
    os.close(fd)
