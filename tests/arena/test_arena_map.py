"""Clients' maps: bounds before use, generation and epoch after, nothing left in a child."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arena_kit import SIZE, Open, Spawn

from kvd.arena import ArenaMap
from kvd.arena import mapping as mapping_module
from kvd.arena.mapping import Mapping
from kvd.chunk import REF_DTYPE, ChunkHeader, SlotRef, State, pack_refs, unpack_refs
from kvd.errors import ArenaError, ClientClosed, Forked

HEADER = ChunkHeader(kind=1, state=State.READY, length=5, generation=7)


def mapped(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def test_both_sides_see_the_same_bytes(open_arena: Open) -> None:
    owner = open_arena()
    owner.assign_slab(1, 8192)
    owner.write_record(18, HEADER)
    client = ArenaMap(owner.fd_arena, owner.fd_table, arena_id=owner.id)
    assert (client.size, client.slab_size, client.id) == (SIZE, 65536, owner.id)
    assert client.instance == "test" and client.records == 256
    ref = SlotRef(0, 18, 65536 + 2 * 8192, 5, 7)
    view = client.view(ref)
    view[:] = b"hello"
    assert bytes(owner.view[ref.offset : ref.offset + 5]) == b"hello"
    assert client.header(18) == client.header(np.uint32(18)) == HEADER
    assert client.generations(np.array([18, 19])).tolist() == [7, 0]
    packed = unpack_refs(pack_refs([ref]))
    assert bytes(client.view(packed[0])) == b"hello"
    client.close()


def test_an_array_is_a_view_of_the_payload(open_arena: Open) -> None:
    owner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    array = client.as_array(SlotRef(0, 0, 4096, 64, 1), np.float32)
    array[:] = np.arange(16)
    assert np.frombuffer(owner.view[4096 : 4096 + 64], np.float32).tolist() == list(range(16))
    with pytest.raises(ArenaError, match="no whole number"):
        client.as_array(SlotRef(0, 0, 4096, 63, 1), np.float32)
    client.close()


def test_every_bit_pattern_goes_through_the_arena_unchanged(open_arena: Open) -> None:
    """K37: fp8 bytes, NaNs with payload bits, both zeros, denormals."""
    owner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    halves = np.arange(65536, dtype=np.uint16)  # every fp16 and bf16 there is
    source = halves.view(np.float16)[: 65536 // 2 * 1]
    target = client.as_array(SlotRef(0, 0, 0, source.nbytes, 1), np.float16)
    np.copyto(target, source)
    assert bytes(owner.view[: source.nbytes]) == source.tobytes()
    view = client.view(SlotRef(0, 0, 65536, 256, 1))
    view[:] = bytes(range(256))
    assert bytes(owner.view[65536 : 65536 + 256]) == bytes(range(256))
    client.close()


BAD_REFS = [
    SlotRef(0, 256, 0, 1, 1),
    SlotRef(0, 2**32 - 1, 0, 1, 1),
    SlotRef(0, 0, 1, 1, 1),
    SlotRef(0, 0, SIZE, 1, 1),
    SlotRef(0, 0, SIZE - 4096, 4097, 1),
    SlotRef(0, 0, 0, 65537, 1),
    SlotRef(0, 0, 2**63, 1, 1),
    SlotRef(0, 0, 2**64 - 4096, 4096, 1),
    SlotRef(0, 0, 0, 2**64 - 1, 1),
]


@pytest.mark.parametrize("ref", BAD_REFS, ids=str)
def test_a_reference_out_of_bounds_is_refused(open_arena: Open, ref: SlotRef) -> None:
    owner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    with pytest.raises(ArenaError):
        client.view(ref)
    with pytest.raises(ArenaError):
        client.view(unpack_refs(pack_refs([ref]))[0])
    if ref.record >= 256:
        assert client.check(unpack_refs(pack_refs([ref]))).tolist() == [False]
        with pytest.raises(ArenaError, match="beyond"):
            client.header(ref.record)
        with pytest.raises(ArenaError, match="beyond"):
            client.generations(np.array([ref.record]))
    with pytest.raises(ArenaError, match="beyond"):
        client.generations(np.array([-1]))
    client.close()


def test_a_reference_is_stale_once_its_generation_or_the_epoch_changed(open_arena: Open) -> None:
    owner = open_arena()
    owner.assign_slab(0, 4096)
    for record in range(3):
        owner.write_record(record, HEADER._replace(generation=10 + record))
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    refs = np.array([(0, i, 4096 * i, 5, 10 + i) for i in range(3)], REF_DTYPE)
    assert client.check(refs).tolist() == [True] * 3
    owner.patch_record(1, generation=20)
    assert client.check(refs).tolist() == [True, False, True]
    owner.assign_slab(0, 8192)
    assert client.check(refs).tolist() == [False] * 3
    owner.write_record(0, HEADER._replace(generation=10))
    assert client.check(refs)[0]
    owner.close()
    # the same arena under a new daemon: same id, same bytes, another epoch
    again = open_arena()
    assert again.adopted and client.id == again.id
    assert client.epoch() == again.epoch > again.previous_epoch
    assert client.check(refs).tolist() == [False] * 3
    assert client.check(refs, again.epoch)[0]
    client.expected_epoch = again.epoch
    assert client.check(refs)[0]
    assert client.check(refs[:0]).tolist() == []
    client.close()


def test_descriptors_that_do_not_belong_together_are_refused(
    base: Path, open_arena: Open, tmp_path: Path
) -> None:
    one = open_arena()
    two = open_arena(at=base.with_name(base.name + "-b"))
    with pytest.raises(ArenaError, match="do not belong together"):
        ArenaMap(one.fd_arena, two.fd_table)
    with pytest.raises(ArenaError, match="not a record table"):
        ArenaMap(one.fd_arena, one.fd_arena)
    with pytest.raises(ArenaError, match="expected"):
        ArenaMap(one.fd_arena, one.fd_table, arena_id=two.id)
    two.destroy()


def test_a_file_that_is_too_short_is_not_mapped(tmp_path: Path) -> None:
    """K119: touching it would be SIGBUS."""
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with path.open("r+b") as file, pytest.raises(ArenaError, match="100 bytes"):
        Mapping(file.fileno(), 4096, writable=True)


def test_a_record_that_never_holds_is_an_error(open_arena: Open) -> None:
    owner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    with pytest.raises(ArenaError, match="record 4: record magic"):
        client.header(4)
    client.close()


# -- life of a mapping --------------------------------------------------------------------------


def test_a_view_outlives_its_map_and_the_last_one_unmaps(base: Path, open_arena: Open) -> None:
    owner = open_arena()
    owner.view[:5] = b"hello"
    before = len(mapped(base))
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    view = client.view_at(0, 5)
    array = client.as_array(SlotRef(0, 0, 0, 4, 1))
    client.close()
    client.close()
    for use in (
        lambda: client.view_at(0, 1),
        client.epoch,
        lambda: client.header(0),
        lambda: client.generations(np.array([0])),
        lambda: client.check(np.zeros(1, REF_DTYPE)),
        lambda: client.prefault(0, 1),
    ):
        with pytest.raises(ArenaError, match="closed"):
            use()
    assert bytes(view) == b"hello" and array.tobytes() == b"hell"
    assert len(mapped(base)) == before + 1  # the payload; the table has gone
    del view, array
    gc.collect()
    assert len(mapped(base)) == before


def test_whoever_uses_a_closed_map_is_told_why_it_was_closed(open_arena: Open) -> None:
    owner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    refs = unpack_refs(pack_refs([SlotRef(0, 0, 4096, 64, 1)]))
    client.close(ClientClosed("it was time"))
    uses: list[Callable[[], object]] = [
        lambda: client.view(refs[0]),
        lambda: client.view_at(0, 8),
        lambda: client.as_array(refs[0]),
        lambda: client.check(refs),
        lambda: client.unchanged([(0, 0, 4096, 64, 1)], 1),
        lambda: client.generations(np.array([0])),
        lambda: client.header(0),
        lambda: client.prefault(0, 1),
        client.epoch,
        client.reserved,
    ]
    told = []
    for use in uses:
        with pytest.raises(ClientClosed, match="it was time") as caught:
            use()
        told.append(caught.value)
    assert len(set(map(id, told))) == len(uses)
    client.close()
    with pytest.raises(ClientClosed):
        client.epoch()


def test_an_owner_that_closed_has_nothing_mapped(base: Path, open_arena: Open) -> None:
    owner = open_arena()
    assert len(mapped(base)) == 2
    owner.close()
    gc.collect()
    assert mapped(base) == []


def test_a_forked_child_has_no_mapping_and_its_exit_does_not_disturb_the_parent(
    base: Path, open_arena: Open
) -> None:
    owner = open_arena()
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    view = client.view_at(0, 5)
    view[:] = b"hello"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        try:
            said.append(str(len(mapped(base))))
            for use in (lambda: client.view_at(0, 5), client.epoch, lambda: client.header(0)):
                try:
                    use()
                except Forked:
                    said.append("forked")
            # other memory may lie there now; letting go must not unmap it
            own = [np.ones(SIZE, np.uint8) for _ in range(4)]
            del view
            client.close()
            gc.collect()
            said.append(str(sum(int(a.sum()) for a in own) == 4 * SIZE))
        except BaseException as error:  # noqa: BLE001
            said.append(repr(error))
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 1000) == b"0 forked forked forked True"
    os.close(read)
    assert bytes(view) == b"hello" and client.epoch() == owner.epoch
    client.close()


def test_a_client_reads_on_after_its_daemon_was_killed_and_knows_the_next(
    base: Path, open_arena: Open, spawn: Spawn
) -> None:
    """K89"""
    child = spawn("""
        owner = arena()
        owner.assign_slab(0, 4096)
        owner.view[:5] = b"hello"
        owner.write_record(0, ChunkHeader(kind=1, state=2, length=5, generation=3))
        say(owner.fd_arena, owner.fd_table)
        time.sleep(600)
    """)
    assert child.stdout is not None
    fds = [
        os.open(f"/proc/{child.pid}/fd/{n}", flags)
        for n, flags in zip(child.stdout.readline().split(), (os.O_RDWR, os.O_RDONLY), strict=True)
    ]
    client = ArenaMap(*fds)
    for fd in fds:
        os.close(fd)
    refs = np.array([(0, 0, 0, 5, 3)], REF_DTYPE)
    assert client.check(refs).all()
    child.kill()
    child.wait()
    assert bytes(client.view(refs[0])) == b"hello"
    assert client.check(refs).all()  # nobody has taken the arena over yet
    owner = open_arena()
    assert not client.check(refs).any()
    assert client.epoch() == owner.epoch
    client.close()


# -- prefault -----------------------------------------------------------------------------------


def resident(path: Path) -> int:
    text = Path("/proc/self/smaps").read_text()
    total, ours = 0, False
    for line in text.splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("write", [True, False])
def test_prefault_maps_the_pages_and_changes_no_byte(
    base: Path, open_arena: Open, write: bool
) -> None:
    owner = open_arena()
    owner.view[:] = os.urandom(SIZE)
    before, held = bytes(owner.view), resident(base)
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    client.prefault(0, 0, write)
    client.prefault(4096 * 3 + 5, 4096 * 10, write)
    assert held + 4096 * 11 <= resident(base) < held + SIZE
    client.prefault(0, SIZE, write)
    assert resident(base) == held + SIZE
    assert bytes(owner.view) == before
    with pytest.raises(ArenaError, match="outside"):
        client.prefault(1, SIZE, write)
    client.close()


def test_a_kernel_that_can_not_populate_is_prefaulted_by_reading(
    base: Path, open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = open_arena()
    held = resident(base)
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    monkeypatch.setattr(mapping_module, "MADV_POPULATE_WRITE", 9999)
    client.prefault(0, SIZE)
    assert resident(base) == held + SIZE
    client.close()


def test_prefault_leaves_the_interpreter_to_others(open_arena: Open) -> None:
    owner = open_arena(128 << 20, huge_pages="never")  # those are there in no time
    client = ArenaMap(owner.fd_arena, owner.fd_table)
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0002)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    client.prefault(0, client.size)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert any(begin < t < end for t in ticks)
    client.close()
    owner.destroy()
