"""Whose directory it is, what lies in it, and that its bytes stay within the limit."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from nvme_kit import MIB, disk, du, rig, slabs
from tiers_kit import Chunk, chunks

from kvd.chunk import HEADER_BYTES
from kvd.errors import ConfigError
from kvd.tiers.base import Answer, Place, State
from kvd.tiers.nvme.directory import Directory
from kvd.tiers.nvme.layout import PAGE, Geometry, OtherVersion, pages, slab_bytes
from kvd.tiers.nvme.slab import table_of


def test_the_superblock_is_fixed_to_the_byte() -> None:
    geometry = Geometry.of(3, 8192, MIB, bytes(range(16)))
    assert geometry.pack().hex() == (
        "4b5644534c4142310100800003000000000010000000000000200000000000007700000000000000"
        "0010000000000000000102030405060708090a0b0c0d0e0f" + "00" * 56 + "dc4667aec1975df4"
    )
    assert Geometry.unpack(geometry.pack()) == geometry


def test_a_superblock_is_believed_only_as_a_whole() -> None:
    good = Geometry.of(3, 8192, MIB, bytes(16)).pack()
    for at in range(len(good)):
        broken = bytearray(good)
        broken[at] ^= 0x41
        with pytest.raises(ValueError):
            Geometry.unpack(bytes(broken))
        with pytest.raises(ValueError):
            Geometry.unpack(good[:at])
    other = bytearray(good)
    other[8] = 2
    with pytest.raises(OtherVersion, match="version 2"):
        Geometry.unpack(bytes(other))


@pytest.mark.parametrize("slot", [4096, 8192, 300 * 4096, MIB, 5 * MIB])
def test_slots_lie_on_pages_and_end_before_the_file_does(slot: int) -> None:
    geometry = Geometry.of(0, slot, slab_bytes(slot, MIB), bytes(16))
    assert geometry.slot_at(0) % PAGE == 0 and geometry.slots >= 1
    assert geometry.record_at(geometry.slots - 1) + HEADER_BYTES <= geometry.table_bytes
    end = geometry.slot_at(geometry.slots - 1) + slot
    assert end <= geometry.payload_bytes < end + slot + HEADER_BYTES + PAGE


def test_two_daemons_never_share_a_directory(tmp_path: Path) -> None:
    """The second refuses, and names the first."""
    first = rig(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        disk(tmp_path).open()
    first.close()
    rig(tmp_path).close()


def test_another_instances_directory_is_refused_and_not_touched(tmp_path: Path) -> None:
    mine = rig(tmp_path)
    place = mine.one(Chunk(1).write()).place
    mine.close()
    with pytest.raises(ConfigError, match="belongs to instance 'test', this is 'other'"):
        disk(tmp_path, instance="other").open()
    again = rig(tmp_path)
    assert again.recovered() == {Chunk(1).key: place}
    again.close()


def test_a_directory_of_another_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    """K86: an unknown format is not served."""
    rig(tmp_path).close()
    marker = tmp_path / "kvd-tier"
    marker.write_text(marker.read_text().replace("version=1", "version=7"))
    before = marker.read_bytes()
    with pytest.raises(ConfigError, match="format 7"):
        disk(tmp_path).open()
    assert marker.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["", "version=1\n", "version=1\ninstance=test\nid=xyz\n", "\0\xff"]
)
def test_a_damaged_marker_is_a_clear_refusal(tmp_path: Path, text: str) -> None:
    (tmp_path / "kvd-tier").write_text(text)
    with pytest.raises(ConfigError, match="tier nvme: "):
        disk(tmp_path).open()


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="choose another"):
            disk(path).open()


def test_names_are_short_whatever_models_are_called(tmp_path: Path) -> None:
    """K53, K62: no part of a key is in a name; a root that is too deep is refused at start."""
    it = rig(tmp_path)
    it.do([c.write() for c in chunks(5)])
    assert all(len(p.name) <= 20 for p in tmp_path.iterdir())
    it.close()
    deep = tmp_path.joinpath(*["d" * 200] * 25)
    with pytest.raises(ConfigError, match="too long"):
        disk(deep).open()


def test_every_file_is_accounted_for(tmp_path: Path) -> None:
    """K87: valid, unfinished (removed), or foreign (left and counted)."""
    first = rig(tmp_path)
    chunk = Chunk(1)
    place = first.one(chunk.write()).place
    first.close()
    (slab,) = slabs(tmp_path)
    good, table = slab.read_bytes(), table_of(slab).read_bytes()
    (tmp_path / "kvd-slab-00007.tmp").write_bytes(good)  # killed while it made a slab
    eighth = Geometry.unpack(good[:128])._replace(number=8).pack()
    (tmp_path / "kvd-slab-00008").write_bytes(eighth + good[128 : len(good) // 2])  # cut
    (tmp_path / "kvd-table-00008").write_bytes(eighth + table[128:])
    (tmp_path / "kvd-table-00006").write_bytes(eighth + table[128:])  # of no slab
    (tmp_path / "kvd-slab-00005").write_bytes(
        eighth.replace(b"\x08\0\0\0", b"\x05\0\0\0") + good[128:]
    )
    (tmp_path / "kvd-table-00004.tmp").write_bytes(b"")
    (tmp_path / "kvd-slab-00009").write_bytes(b"")  # cut to nothing
    (tmp_path / "kvd-slab-00010").write_bytes(bytes(PAGE) + good[PAGE:])  # no superblock
    newer = bytearray(good)
    newer[8] = 9
    (tmp_path / "kvd-slab-00011").write_bytes(newer)  # a newer kvd's
    (tmp_path / "kvd-slab-00012").write_bytes(Geometry.of(12, 4096, len(good), b"o" * 16).pack())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "kvd-slab-1").write_text("mine too")
    (tmp_path / "folder").mkdir()
    (tmp_path / "kvd-slab-00013").symlink_to("/etc/passwd")
    again = rig(tmp_path)
    assert again.recovered() == {chunk.key: place}
    notes = again.tier.stat().notes
    assert notes["foreign_files"] == 4 and notes["removed_files"] == 7
    assert notes["foreign_slabs"] == 2
    assert not (tmp_path / "kvd-slab-00007.tmp").exists()
    assert (tmp_path / "kvd-slab-00011").read_bytes() == bytes(newer)
    assert again.tier.usage().held_bytes == 2 * len(good) + len(table) + 128, (
        "what is left alone counts too"
    )
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "folder").is_dir()
    again.close()


def test_bytes_on_disk_never_pass_the_limit(tmp_path: Path) -> None:
    """K57: mixed sizes, many writers, foreign files and an earlier run; `du` all the while."""
    limit = 12 * MIB
    (tmp_path / "foreign").write_bytes(bytes(100_000))
    most, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.is_set():
            most[0] = max(most[0], du(tmp_path) - 2 * PAGE)
            stop.wait(0.005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    rng = random.Random(7)
    there: list[tuple[Chunk, object]] = []
    try:
        for life in range(3):
            it = rig(tmp_path, limit)
            assert len(it.recovered()) == len(there)
            for round_ in range(12):
                new = [
                    Chunk(life * 1000 + round_ * 10 + n, rng.choice([5_000, 70_000, 400_000]))
                    for n in range(8)
                ]
                for done in it.do([c.write() for c in new]):
                    if done.answer is Answer.OK:
                        there.append((done.job.token, done.place))
                    else:
                        assert done.answer is Answer.NO_SPACE
                        for _ in range(min(4, len(there))):
                            chunk, place = there.pop(rng.randrange(len(there)))
                            assert it.one(chunk.delete(place)).answer is Answer.OK
            usage = it.tier.usage()
            assert usage.used_bytes <= usage.held_bytes <= limit and usage.chunks == len(there)
            it.close()
    finally:
        stop.set()
        sampler.join()
    assert 8 * MIB < most[0] <= limit + 100_000 + PAGE
    assert (tmp_path / "foreign").stat().st_size == 100_000


def test_a_lower_limit_trims_whole_slabs_at_start(tmp_path: Path) -> None:
    """K85: usage equals the real bytes before the first store, and the new limit holds at once."""
    it = rig(tmp_path, 8 * MIB)
    many = list(chunks(12, 400_000))
    places = {d.job.token.key: d.place for d in it.do([c.write() for c in many])}  # type: ignore[attr-defined]
    assert len(places) == 12
    it.close()
    again = rig(tmp_path, 4 * MIB)
    left = again.recovered()
    assert du(tmp_path) <= 4 * MIB and 4 <= len(left) < 12
    assert all(places[key] == place for key, place in left.items())
    usage = again.tier.usage()
    assert usage.chunks == len(left) and usage.used_bytes == len(left) * again.tier.cost(400_000)
    for chunk in many:
        expected = Answer.OK if chunk.key in left else Answer.MISS
        assert again.one(chunk.read(places[chunk.key])).answer is expected
    assert again.tier.stat().notes["trimmed_chunks"] == 12 - len(left)
    again.close()


def test_a_reserve_of_the_file_system_is_left_free(tmp_path: Path) -> None:
    info = os.statvfs(tmp_path)
    it = rig(tmp_path, reserve_bytes=info.f_bavail * info.f_frsize + (1 << 40))
    done = it.one(Chunk(1).write())
    assert done.answer is Answer.NO_SPACE and "reserve" in done.detail
    assert it.tier.room(10_000) == 0 and it.tier.state is State.READY
    assert slabs(tmp_path) == []
    it.close()


@pytest.mark.parametrize("reserve", [0, 5000])
def test_a_file_system_without_room_is_told_in_true_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve: int
) -> None:
    it = rig(tmp_path, reserve_bytes=reserve)
    monkeypatch.setattr(Directory, "free_bytes", lambda self: MIB // 2)
    done = it.one(Chunk(1).write())
    assert done.answer is Answer.NO_SPACE
    assert f"needs {MIB} bytes, the file system has {MIB // 2}" in done.detail
    assert ("the reserve of 5000 stays free" in done.detail) == bool(reserve)
    assert "reserve of 0" not in done.detail
    it.close()


def test_empty_slabs_change_their_size(tmp_path: Path) -> None:
    """Room that another length holds is told by `to_empty`, and used once it is empty."""
    it = rig(tmp_path, 4 * MIB)
    small = list(chunks(60, 60_000))
    kept = [d for d in it.do([c.write() for c in small]) if d.answer is Answer.OK]
    assert it.tier.room(60_000) == 0
    large = Chunk(100, 900_000)
    assert it.one(large.write()).answer is Answer.NO_SPACE
    advice = it.tier.to_empty(large.length)
    assert 0 < len(advice) < len(kept)
    by_place = {d.place: d.job.token for d in kept}
    for place in advice:
        it.one(by_place[place].delete(place))  # type: ignore[attr-defined]
    assert it.tier.room(large.length) == 1
    place = it.one(large.write()).place
    assert it.one(large.read(place)).answer is Answer.OK
    assert it.tier.to_empty(large.length) == ()
    it.close()


@pytest.mark.parametrize("bad", [0, 1 << 20, 4095])
def test_a_limit_that_holds_no_slab_is_refused(tmp_path: Path, bad: int) -> None:
    with pytest.raises(ConfigError, match="too small"):
        disk(tmp_path, bad)


def test_an_engine_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of auto, cufile, kvikio, direct, buffered"):
        disk(tmp_path, engine="warp").open()


def test_room_is_told_without_counting_and_is_what_a_count_says(tmp_path: Path) -> None:
    """Slabs of three sizes fill, empty, get lost and give way to each other."""
    pick = random.Random(7)
    it = rig(tmp_path, 6 * MIB)
    sizes = (9_000, 60_000, 300_000)
    backend = it.tier.backend.below
    there: list[tuple[Chunk, Place]] = []
    for n in range(400):
        if pick.random() < 0.55:
            chunk = Chunk(n, pick.choice(sizes))
            done = it.one(chunk.write())
            if done.answer is Answer.OK:
                there.append((chunk, done.place))
        elif there:
            chunk, place = there.pop(pick.randrange(len(there)))
            it.one(chunk.delete(place))
        if n in (150, 300):
            pick.choice(slabs(tmp_path)).unlink()
            there = [(c, p) for c, p in there if it.one(c.read(p)).answer is Answer.OK]
        for size in sizes:
            assert it.tier.room(size) == counted_room(backend, size)
    assert len(slabs(tmp_path)) > 1 and it.tier.usage().chunks == len(there)
    it.close()


def counted_room(backend: Any, length: int) -> int:
    """By looking at every slab."""
    size = slab_bytes(pages(length), backend._config.usual)
    mine = [s for s in backend._slabs if s.geometry.slot_bytes == pages(length)]
    others = [s for s in backend._slabs if s not in mine and not s.live]
    empty = sum(slab.geometry.file_bytes for slab in others)
    more = max(0, backend._slabs.left + empty) // size
    slots = Geometry.of(0, pages(length), size, bytes(16)).slots
    return sum(slab.free for slab in mine) + more * slots
