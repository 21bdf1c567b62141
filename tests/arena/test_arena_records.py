"""The record table: whole or absent, cleared with its slab, never without memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from arena_kit import Open, Spawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.arena import ArenaMap, ArenaOwner
from kvd.arena import table as table_module
from kvd.arena.layout import REDO, REGISTRY_AT, REGISTRY_BYTES
from kvd.chunk import ChunkHeader, HeaderFlag, State, verify_table
from kvd.errors import ArenaError

HEADER = ChunkHeader(kind=1, state=State.WRITING, chunk=b"c" * 32, length=4096, generation=5)


def table_of(base: Path) -> Path:
    return base.with_name(base.name + ".table")


def test_a_record_is_written_and_patched_in_place(open_arena: Open) -> None:
    owner = open_arena()
    owner.assign_slab(0, 4096)
    owner.write_record(3, HEADER)
    owner.patch_record(3, state=State.READY)
    owner.patch_record(3, flags=HeaderFlag.SEALED, digest=b"d" * 16)
    want = HEADER._replace(state=State.READY, flags=HeaderFlag.SEALED, digest=b"d" * 16)
    assert ChunkHeader.unpack(owner.table[3].tobytes()) == want
    owner.patch_record(3, generation=6)
    assert ChunkHeader.unpack(owner.table[3].tobytes()) == want._replace(generation=6)
    assert verify_table(owner.table[:8]).tolist() == [i == 3 for i in range(8)]


def test_a_record_that_is_not_there_is_refused(open_arena: Open) -> None:
    owner = open_arena()
    for record in (-1, len(owner.table)):
        with pytest.raises(ArenaError, match="beyond the table's 256"):
            owner.write_record(record, HEADER)
    with pytest.raises(ArenaError, match="of no slot: slab 0 has 0 slots"):
        owner.write_record(0, HEADER)
    owner.assign_slab(0, 32768)
    for change in (lambda: owner.write_record(2, HEADER), lambda: owner.patch_record(2, state=1)):
        with pytest.raises(ArenaError, match="of no slot: slab 0 has 2 slots"):
            change()
    with pytest.raises(ArenaError, match="never written"):
        owner.patch_record(0, state=State.READY)
    with pytest.raises(ValueError):
        owner.write_record(0, HEADER._replace(chunk=b""))
    owner.write_record(0, HEADER)
    with pytest.raises(ValueError, match="16 bytes"):
        owner.patch_record(0, digest=b"")
    assert ChunkHeader.unpack(owner.table[0].tobytes()) == HEADER


@pytest.mark.parametrize("slot_size", [-4096, 100, 4095, 5000, 128 << 10])
def test_a_slot_size_that_can_not_be_is_refused(open_arena: Open, slot_size: int) -> None:
    with pytest.raises(ArenaError, match="multiple of 4096 and at most 65536"):
        open_arena().assign_slab(0, slot_size)


@pytest.mark.parametrize("slab", [-1, 16])
def test_a_slab_that_is_not_there_is_refused(open_arena: Open, slab: int) -> None:
    with pytest.raises(ArenaError, match="beyond the arena's 16"):
        open_arena().assign_slab(slab, 4096)


def test_a_slab_that_changes_its_class_loses_its_records_and_only_those(open_arena: Open) -> None:
    owner = open_arena()
    for slab in range(3):
        owner.assign_slab(slab, 4096)
        for slot in range(16):
            owner.write_record(slab * 16 + slot, HEADER)
    owner.assign_slab(1, 8192)
    assert owner.slot_sizes()[:4] == [4096, 8192, 4096, 0]
    assert owner.scan().indices.tolist() == [*range(16), *range(32, 48)]
    owner.assign_slab(0, 0)
    assert owner.scan().indices.tolist() == list(range(32, 48))
    assert not owner.table[:32].view(np.uint8).any()


def test_memory_for_records_is_taken_with_the_class_and_stays_for_late_readers(
    base: Path, open_arena: Open
) -> None:
    owner = open_arena(64 << 20)  # slabs of 2 MiB: 512 records, 64 pages' worth of them

    def used() -> int:
        return table_of(base).stat().st_blocks * 512

    idle = used()
    owner.assign_slab(0, 1 << 20)
    assert used() == idle
    owner.assign_slab(0, 4096)
    assert used() == idle + 512 * 512 - 4096
    owner.scan()
    owner.assign_slab(0, 1 << 20)
    assert used() == idle + 512 * 512 - 4096


def test_a_scan_reads_only_records_that_a_class_uses_and_takes_no_memory(
    base: Path, open_arena: Open
) -> None:
    owner = open_arena(64 << 20)
    owner.assign_slab(5, 512 << 10)  # 4 slots of its 512 possible records
    first = 5 * 512
    for record in range(first, first + 4):
        owner.write_record(record, HEADER)
    owner.table[first + 4] = owner.table[first]  # belongs to no slot
    before = table_of(base).stat().st_blocks
    scan = owner.scan()
    assert scan.indices.tolist() == [first, first + 1, first + 2, first + 3]
    assert table_of(base).stat().st_blocks == before


def test_a_scan_counts_what_does_not_hold_and_keeps_what_does(open_arena: Open) -> None:
    owner = open_arena()
    owner.assign_slab(0, 4096)
    owner.assign_slab(1, 8192)
    owner.write_record(0, HEADER)
    owner.write_record(1, HEADER)
    owner.table[1]["length"] = 7  # without its check sum
    owner.write_record(2, HEADER._replace(length=4097))  # longer than its slot
    owner.write_record(16, HEADER._replace(length=8192))
    owner.write_record(17, HEADER._replace(state=State.FREE, length=0))
    scan = owner.scan()
    assert scan.indices.tolist() == [0, 16, 17]
    assert scan.records["length"].tolist() == [4096, 8192, 0]
    assert scan.invalid.tolist() == [1, 2]


@pytest.mark.parametrize("batch", [1, 3, 7, 16384])
def test_a_scan_in_batches_sees_what_one_look_sees(
    open_arena: Open, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(table_module, "_BATCH", batch)
    owner = open_arena()
    rng = np.random.default_rng(3)
    want, broken = [], []
    for slab, slot_size in [(0, 4096), (3, 8192), (4, 65536), (9, 12288)]:
        owner.assign_slab(slab, slot_size)
        for slot in range(65536 // slot_size):
            record = slab * 16 + slot
            choice = rng.integers(3)
            if choice == 0:
                continue
            owner.write_record(record, HEADER._replace(generation=record))
            if choice == 1:
                want.append(record)
            else:
                owner.table[record]["tokens"] = 99
                broken.append(record)
    scan = owner.scan()
    assert scan.indices.tolist() == want
    assert scan.records["generation"].tolist() == want
    assert scan.invalid.tolist() == broken


# -- killed in the middle -----------------------------------------------------------------------


def test_a_record_is_whole_whenever_its_writer_is_killed(
    base: Path, open_arena: Open, spawn: Spawn
) -> None:
    """A writer that patches one record for ever, killed again and again."""
    for _ in range(8):
        child = spawn("""
            owner = arena()
            if not owner.slot_sizes()[0]:
                owner.assign_slab(0, 4096)
            header = ChunkHeader(kind=1, state=1, length=1)
            say("up")
            generation = owner.epoch
            while True:
                generation += 1
                owner.write_record(0, header._replace(generation=generation, chunk=b"a" * 32))
                owner.patch_record(0, state=2, digest=generation.to_bytes(16, "little"))
        """)
        assert child.stdout and child.stdout.readline() == "up\n"
        time.sleep(0.03)
        child.kill()
        child.wait()
        owner = open_arena()
        scan = owner.scan()
        assert scan.invalid.size == 0
        assert len(scan.records) == 1
        header = ChunkHeader.unpack(owner.table[0].tobytes())
        assert header.state == State.WRITING or header.digest == header.generation.to_bytes(
            16, "little"
        )
        owner.close()


@pytest.mark.parametrize("at", range(0, 513, 8))
def test_a_record_torn_at_any_word_is_finished_by_the_next_owner(open_arena: Open, at: int) -> None:
    first = open_arena()
    first.assign_slab(0, 4096)
    first.write_record(2, HEADER)
    newer = HEADER._replace(state=State.CONDEMNED, generation=6, session=b"w" * 16)
    raw = newer.pack()
    table = first._table
    table._raw[512:1024] = raw
    table._words[REDO] = 3
    start = table._geometry.record_at(2)
    table._raw[start : start + at] = raw[:at]  # killed here
    first.close()
    del table
    scan = open_arena().scan()
    assert scan.invalid.size == 0
    assert scan.records[0].tobytes() == newer.pack()[:256]


@pytest.mark.parametrize("redo", [3, 10**6, 2**64 - 1])
def test_a_redo_that_does_not_hold_is_forgotten(open_arena: Open, redo: int) -> None:
    first = open_arena()
    first.assign_slab(0, 4096)
    first.write_record(2, HEADER)
    first._table._raw[512:1024] = os.urandom(512)
    first._table._words[REDO] = redo
    first.close()
    second = open_arena()
    assert second.scan().records[0].tobytes() == HEADER.pack()[:256]
    assert second._table._words[REDO] == 0


def test_a_slab_whose_owner_was_killed_while_it_was_cleared_is_unassigned(
    base: Path, open_arena: Open, spawn: Spawn
) -> None:
    child = spawn("""
        import kvd.arena.table as table
        owner = arena()
        owner.assign_slab(0, 4096)
        owner.write_record(0, ChunkHeader(kind=1, state=2, generation=1))
        table.pack_descriptor = lambda *args: os.kill(os.getpid(), 9)
        owner.assign_slab(0, 8192)
    """)
    assert child.wait(30) == -9
    owner = open_arena()
    assert owner.adopted and owner.slot_sizes()[0] == 0
    assert owner.scan().records.size == 0


# -- no memory ----------------------------------------------------------------------------------


def test_a_full_file_system_makes_an_error_of_a_slab_and_no_sigbus(
    open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K119"""
    owner = open_arena()
    owner.assign_slab(0, 65536)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ArenaError, match=r"no room for the .* of slab 0: free space"):
            owner.assign_slab(0, 4096)
    assert owner.slot_sizes()[0] == 0
    owner.assign_slab(0, 4096)
    assert owner.slot_sizes()[0] == 4096


# -- registry -----------------------------------------------------------------------------------

texts = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), max_size=10)
blobs = st.lists(st.binary(max_size=200), max_size=10)


@given(st.lists(st.tuples(texts, blobs), min_size=1, max_size=4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_registry_is_what_was_stored_last(
    open_arena: Open, base: Path, stores: list[tuple[list[str], list[bytes]]]
) -> None:
    owner = open_arena()
    for names, specs in stores:
        assert owner.registry_store(names, specs) == 0
        assert owner.registry_load() == (names, specs)
    owner.close()
    again = open_arena()
    assert again.registry_load() == stores[-1]
    again.destroy()


def test_a_registry_with_any_byte_changed_is_the_one_before(base: Path, open_arena: Open) -> None:
    owner = open_arena()
    assert owner.registry_load() == ([], [])
    owner.registry_store(["old"], [b"old spec"])
    owner.registry_store(["new"], [b"new spec"])
    good = os.pread(owner.fd_table, REGISTRY_BYTES, REGISTRY_AT)
    fd = os.open(table_of(base), os.O_RDWR)
    for at in range(64):
        broken = bytes([good[at] ^ 0x10])
        os.pwrite(fd, broken, REGISTRY_AT + at)
        got = owner.registry_load()
        assert got in ((["old"], [b"old spec"]), (["new"], [b"new spec"]))
        os.pwrite(fd, good[at : at + 1], REGISTRY_AT + at)
    os.pwrite(fd, bytes(REGISTRY_BYTES), REGISTRY_AT)
    os.close(fd)
    assert owner.registry_load() == ([], [])


def test_a_registry_that_is_too_large_drops_its_oldest_entries_and_says_how_many(
    open_arena: Open,
) -> None:
    owner = open_arena()
    specs = [bytes([i]) * 60000 for i in range(12)]
    dropped = owner.registry_store(["a", "b"], specs)
    names, kept = owner.registry_load()
    assert dropped == len(specs) - len(kept) + 2 - len(names)
    assert kept == specs[-len(kept) :] and 7 <= len(kept) <= 8


def test_a_client_can_not_write_records(open_arena: Open) -> None:
    owner: ArenaOwner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    with pytest.raises(ValueError, match="read-only"):
        client._records["generation"][0] = 1
    with pytest.raises(OSError):
        os.pwrite(owner.fd_table, b"x", 0)
    client.close()
