"""What a real disk, other processes and other people do to an NVMe tier."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvme_kit import MIB, du, rig, script, slabs
from tiers_kit import Chunk, Rig, chunks

from kvd.chunk import HEADER_BYTES, ChunkHeader
from kvd.tiers.base import Answer, Key, Place, Probe, Reason, State
from kvd.tiers.nvme.layout import PAGE, Geometry
from kvd.tiers.nvme.posix import DirectFile, Engine, File, PosixEngine
from kvd.tiers.nvme.slab import LOOK_NS, table_of


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Rig]:
    rig_ = rig(tmp_path)
    yield rig_
    rig_.close()


def _slot(path: Path, place: Place) -> tuple[int, int]:
    """Offsets of the record in the table, and of the payload in the slab."""
    geometry = Geometry.unpack(path.read_bytes()[:128])
    slot = place.at & 0xFFFFFFFF
    return geometry.record_at(slot), geometry.slot_at(slot)


def _patch(path: Path, at: int, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, data, at)
    os.close(fd)


# -- somebody changes bytes ---------------------------------------------------------------------


@pytest.mark.parametrize("offset", [90, 241, 505])
def test_a_record_that_rots_while_it_is_taken_up_is_not_told(tmp_path: Path, offset: int) -> None:
    """Its table is read twice: for the slots, then for who is in them."""
    one = rig(tmp_path)
    chunk, other = Chunk(1), Chunk(2)
    place = one.one(chunk.write()).place
    one.one(other.write())
    one.close()
    again = rig(tmp_path)
    table = table_of(slabs(tmp_path)[0])
    at = _slot(slabs(tmp_path)[0], place)[0] + offset
    _patch(table, at, bytes([table.read_bytes()[at] ^ 4]))
    assert list(again.recovered()) == [other.key]
    again.close()


@pytest.mark.parametrize("where", ["payload", "record", "check", "digest"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_flipped_byte_is_a_counted_miss_and_a_new_store_heals(
    tmp_path: Path, where: str, restart: bool
) -> None:
    """K35: in the payload, in the record, in its check sum; before and after a restart."""
    one = rig(tmp_path)
    chunk, other = Chunk(1), Chunk(2)
    place, neighbour = (d.place for d in one.do([chunk.write(), other.write()]))
    record_at, slot_at = _slot(slabs(tmp_path)[0], place)
    at = {"payload": slot_at + 5_000, "record": record_at + 90, "check": record_at + 505,
          "digest": record_at + 241}[where]  # fmt: skip
    if restart:
        one.close()
    file = slabs(tmp_path)[0] if where == "payload" else table_of(slabs(tmp_path)[0])
    old = file.read_bytes()[at]
    _patch(file, at, bytes((old ^ 0x20,)))
    if restart:
        one = rig(tmp_path)
        there = one.recovered()
        assert (chunk.key in there) == (where == "payload")
    answer = one.one(chunk.read(place)).answer
    assert answer is (Answer.CORRUPT if where == "payload" or not restart else Answer.MISS)
    notes = one.tier.stat().notes
    assert notes.get("quarantined", 0) + notes.get("bad_records", 0) == 1
    assert one.one(chunk.read(place)).answer is Answer.MISS
    assert one.one(other.read(neighbour)).answer is Answer.OK
    assert one.tier.usage().chunks == 1
    again = one.one(chunk.write()).place
    assert one.one(chunk.read(again)).answer is Answer.OK
    one.close()


def test_swapped_payloads_and_swapped_records_are_found(tmp_path: Path, it: Rig) -> None:
    """K35: bytes of another chunk of the same size are never given out under this one's key."""
    a, b, c, d = chunks(4)
    places = [done.place for done in it.do([x.write() for x in (a, b, c, d)])]
    (slab,) = slabs(tmp_path)
    raw = slab.read_bytes()
    (_, pa), (_, pb), (rc, _), (rd, _) = (_slot(slab, place) for place in places)
    _patch(slab, pa, raw[pb : pb + 12_288])
    _patch(slab, pb, raw[pa : pa + 12_288])
    table = table_of(slab)
    records = table.read_bytes()
    _patch(table, rc, records[rd : rd + HEADER_BYTES])
    _patch(table, rd, records[rc : rc + HEADER_BYTES])
    answers = [it.one(x.read(p)).answer for x, p in zip((a, b, c, d), places, strict=True)]
    assert answers == [Answer.CORRUPT] * 4
    assert it.tier.usage().chunks == 0


def test_any_byte_of_a_record_may_be_another(tmp_path: Path, it: Rig) -> None:
    chunk = Chunk(1, 600)
    place = it.one(chunk.write()).place
    (slab,) = slabs(tmp_path)
    at, _ = _slot(slab, place)
    good = table_of(slab).read_bytes()[at : at + HEADER_BYTES]
    for n in range(HEADER_BYTES):
        with pytest.raises(ValueError):
            ChunkHeader.unpack(good[:n] + bytes((good[n] ^ 0x81,)) + good[n + 1 :])
    _patch(table_of(slab), at, good[:8] + bytes((good[8] ^ 0x81,)) + good[9:])
    assert it.one(chunk.read(place)).answer is Answer.CORRUPT


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_in_a_record_or_a_payload_runs_nothing(tmp_path: Path, it: Rig) -> None:
    """K06: what lies on the disk is decoded field by field, or not at all."""
    mark = tmp_path / "it-ran"
    bomb = pickle.dumps(_Bomb(mark))
    places = [it.one(Chunk(n, 600).write()).place for n in (1, 2)]
    (slab,) = slabs(tmp_path)
    at, _ = _slot(slab, places[0])
    _patch(table_of(slab), at, bomb)
    _, data = _slot(slab, places[1])
    _patch(slab, data, bomb)
    answers = [it.one(Chunk(n, 600).read(p)).answer for n, p in zip((1, 2), places, strict=True)]
    assert answers == [Answer.CORRUPT] * 2
    it.close()
    rig(tmp_path).close()  # nor does a start that reads all records
    assert not mark.exists()


def test_a_record_that_is_replayed_from_before_a_delete_is_not_believed(
    tmp_path: Path, it: Rig
) -> None:
    old = Chunk(1)
    place = it.one(old.write()).place
    it.one(old.delete(place))
    assert it.one(old.read(place)).answer is Answer.MISS
    new = it.one(Chunk(2).write()).place
    assert new.at == place.at and new.generation > place.generation
    assert it.one(old.read(place)).answer is Answer.MISS


def until_looked_at() -> None:
    """A file that goes just before a write might as well go after it: that is not noticed."""
    time.sleep(2 * LOOK_NS / 1e9)


# -- somebody takes files away ------------------------------------------------------------------


def test_files_deleted_behind_its_back_are_misses_and_their_bytes_are_free(
    tmp_path: Path, it: Rig
) -> None:
    """K55: exactly the chunks in them are gone; the accounting follows; deletes are idempotent."""
    many = list(chunks(12, 400_000))
    places = [d.place for d in it.do([c.write() for c in many])]
    gone = slabs(tmp_path)[:2]
    numbers = {int(path.name[-5:]) for path in gone}
    for path in gone:
        path.unlink()
    answers = [it.one(c.read(p)).answer for c, p in zip(many, places, strict=True)]
    expected = [Answer.MISS if p.at >> 32 in numbers else Answer.OK for p in places]
    assert answers == expected and Answer.OK in answers and Answer.MISS in answers
    hits = answers.count(Answer.OK)
    assert it.tier.usage().chunks == hits and it.tier.state is State.READY
    assert it.tier.stat().notes["lost_slabs"] == 2
    files = [f for p in slabs(tmp_path) for f in (p, table_of(p))]
    assert it.tier.usage().held_bytes == sum(f.stat().st_size for f in files)
    assert len(list(tmp_path.glob("kvd-table-*"))) == len(slabs(tmp_path))
    for c, p in zip(many, places, strict=True):
        assert it.one(c.delete(p)).answer in (Answer.OK, Answer.MISS)
    assert it.tier.usage().chunks == 0 and it.tier.usage().used_bytes == 0
    assert {d.answer for d in it.do([c.write() for c in many])} == {Answer.OK}
    assert du(tmp_path) <= 8 * MIB


def test_a_write_into_a_deleted_file_is_not_acknowledged(tmp_path: Path, it: Rig) -> None:
    it.one(Chunk(1).write())
    slabs(tmp_path)[0].unlink()
    until_looked_at()
    assert it.one(Chunk(2).write()).answer is Answer.FAILED
    place = it.one(Chunk(2).write()).place
    assert it.one(Chunk(2).read(place)).answer is Answer.OK
    assert it.tier.usage().chunks == 1


@pytest.mark.parametrize("which", ["slab", "table"])
def test_a_file_that_was_cut_is_lost_as_a_whole(tmp_path: Path, it: Rig, which: str) -> None:
    """K64: short reads are misses, and the tier goes on."""
    many = list(chunks(5))
    places = [d.place for d in it.do([c.write() for c in many])]
    (slab,) = slabs(tmp_path)
    os.truncate(slab if which == "slab" else table_of(slab), 4_096 + 600)
    assert {it.one(c.read(p)).answer for c, p in zip(many, places, strict=True)} == {Answer.MISS}
    assert it.tier.usage().chunks == 0 and slabs(tmp_path) == []
    assert it.one(many[0].write()).answer is Answer.OK


def test_another_file_under_the_same_name_is_not_removed(tmp_path: Path, it: Rig) -> None:
    chunk = Chunk(1)
    place = it.one(chunk.write()).place
    (slab,) = slabs(tmp_path)
    slab.unlink()
    slab.write_text("somebody else's")
    assert it.one(chunk.read(place)).answer is Answer.MISS
    assert it.one(chunk.write()).answer is Answer.OK
    assert slab.read_text() == "somebody else's"


def test_a_directory_that_was_removed_heals_when_it_can_be_made_again(
    tmp_path: Path,
) -> None:
    home = tmp_path / "tier"
    one = rig(home)
    place = one.one(Chunk(1).write()).place
    home.rename(tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        path.unlink()
    assert one.one(Chunk(1).read(place)).answer is Answer.MISS
    assert one.one(Chunk(2).write()).answer is Answer.FAILED
    one.until(lambda: one.tier.state is State.READY)
    place = one.one(Chunk(2).write()).place
    assert one.one(Chunk(2).read(place)).answer is Answer.OK and len(slabs(home)) == 1
    one.close()


def test_what_is_asked_of_a_directory_that_is_gone_is_answered_and_holds_nothing(
    tmp_path: Path,
) -> None:
    """Its last slab has just become empty, and how much room there is can't be told."""
    home = tmp_path / "tier"
    one = rig(home, reserve_bytes=1)
    chunk, other = Chunk(1), Chunk(2)
    place, there = (one.one(c.write()).place for c in (chunk, other))
    assert one.one(chunk.delete(place)).answer is Answer.OK
    shutil.rmtree(home)
    until_looked_at()
    assert one.one(other.delete(there)).answer is Answer.OK
    for _ in range(2):
        done = one.one(chunk.write())
        assert done.answer is Answer.FAILED and done.reason is not Reason.OTHER, done
    usage = one.tier.usage()
    assert (usage.chunks, usage.used_bytes, usage.held_bytes) == (0, 0, 0)
    one.close()


class Raising(PosixEngine):
    """One write, when it is `armed`, ends with something that is no OSError."""

    armed = False

    def open(self, path: Path) -> File:
        file = super().open(path)
        kept = file.write

        def raising(at: int, memory: memoryview) -> None:
            if Raising.armed:
                Raising.armed = False
                raise RuntimeError("a driver's own")
            kept(at, memory)

        file.write = raising  # type: ignore[method-assign]
        return file


def test_a_fault_of_an_engine_leaves_no_slot_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.nvme.choose.PosixEngine", Raising)
    one = rig(tmp_path)
    one.one(Chunk(1).write())
    before = one.tier.usage()
    monkeypatch.setattr(Raising, "armed", True)
    done = one.one(Chunk(2).write())
    assert (done.answer, done.detail) == (Answer.FAILED, "RuntimeError: a driver's own")
    assert one.tier.usage() == before
    place = one.one(Chunk(2).write()).place
    assert one.one(Chunk(2).read(place)).answer is Answer.OK and one.tier.usage().chunks == 2
    one.close()


def test_a_probe_that_goes_wrong_is_answered_and_its_worker_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig(tmp_path)

    def wrong(deadline: int, *, write: bool) -> None:
        raise RuntimeError("a driver's own")

    monkeypatch.setattr(one.tier.backend, "probe", wrong)  # type: ignore[attr-defined]
    for _ in range(6):  # more than there are workers
        done = one.one(Probe("p", one.tier._clock() + 10**10))  # type: ignore[attr-defined]
        assert (done.answer, done.detail) == (Answer.FAILED, "RuntimeError: a driver's own")
    assert one.tier.stat().pending == 0
    monkeypatch.undo()
    assert one.one(Chunk(1).write()).answer is Answer.OK
    one.close()


# -- engines ------------------------------------------------------------------------------------


class Refusing(PosixEngine):
    """O_DIRECT that is refused: at open, or only when it writes, or reads."""

    when = "open"
    after = 0
    code = errno.EINVAL

    def open(self, path: Path) -> File:
        if self.name != "o_direct":
            return super().open(path)
        if self.when == "open":
            raise OSError(self.code, os.strerror(self.code))
        file = super().open(path)
        assert isinstance(file, DirectFile)

        def refuse(at: int, memory: memoryview) -> None:
            Refusing.after -= 1
            if Refusing.after < 0:
                raise OSError(self.code, os.strerror(self.code))
            kept(at, memory)

        kept = getattr(file, self.when)
        setattr(file, self.when, refuse)
        return file


@pytest.mark.parametrize("when", ["open", "write", "read"])
def test_o_direct_is_tried_on_the_directory_and_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """K58: refused at open or only at the first write, every length still goes in and out, and
    the tier says how."""
    monkeypatch.setattr("kvd.tiers.nvme.choose.PosixEngine", Refusing)
    monkeypatch.setattr(Refusing, "when", when)
    monkeypatch.setattr(Refusing, "after", 0)
    one = rig(tmp_path)
    assert one.report.engine == "buffered" and "O_DIRECT: Invalid argument" in one.report.detail
    for length in (1, 511, 4095, 4096, 4097):
        chunk = Chunk(length, length)
        job = chunk.read(one.one(chunk.write()).place)
        assert one.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
    one.close()


@pytest.mark.parametrize("when", ["write", "read"])
def test_an_engine_that_fails_later_is_replaced_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """K58, K76: a run-time failure falls back, once, and is counted."""
    monkeypatch.setattr("kvd.tiers.nvme.choose.PosixEngine", Refusing)
    monkeypatch.setattr(Refusing, "when", when)
    monkeypatch.setattr(Refusing, "after", 20)
    one = rig(tmp_path)
    assert one.report.engine == "o_direct"
    for chunk in chunks(30):
        job = chunk.read(one.one(chunk.write()).place)
        assert one.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
    stat = one.tier.stat()
    assert stat.engine == "buffered" and stat.notes["fallbacks"] == 1
    assert stat.reasons == {} and stat.state is State.READY
    one.close()


def test_a_file_system_that_refuses_direct_reads_since_it_is_read_only_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does ext4 after errors=remount-ro: reads are served."""
    monkeypatch.setattr("kvd.tiers.nvme.choose.PosixEngine", Refusing)
    monkeypatch.setattr(Refusing, "when", "read")
    monkeypatch.setattr(Refusing, "after", 1 << 30)
    monkeypatch.setattr(Refusing, "code", errno.EROFS)
    one = rig(tmp_path)
    some = list(chunks(8))
    places = [one.one(chunk.write()).place for chunk in some]
    assert one.tier.stat().engine == "o_direct"
    monkeypatch.setattr(Refusing, "after", 0)
    for chunk, place in zip(some, places, strict=True):
        job = chunk.read(place)
        assert one.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
    stat = one.tier.stat()
    assert (stat.engine, stat.reasons, stat.state) == ("buffered", {}, State.READY)
    one.close()


def test_an_error_of_the_disk_is_not_blamed_on_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K25: EIO is a failed write without a trace; the engine stays."""
    monkeypatch.setattr("kvd.tiers.nvme.choose.PosixEngine", Refusing)
    monkeypatch.setattr(Refusing, "when", "write")
    monkeypatch.setattr(Refusing, "after", 12)
    monkeypatch.setattr(Refusing, "code", errno.EIO)
    one = rig(tmp_path)
    answers = [one.one(c.write()).answer for c in chunks(12)]
    assert answers.count(Answer.OK) > 3 and Answer.FAILED in answers
    assert one.tier.usage().chunks == answers.count(Answer.OK)
    assert one.tier.stat().engine == "o_direct" and one.tier.state is State.DEGRADED
    monkeypatch.setattr(Refusing, "after", 1 << 30)
    one.until(lambda: one.tier.state is State.READY)
    assert one.one(Chunk(99).write()).answer is Answer.OK
    one.close()
    again = rig(tmp_path)
    assert len(again.recovered()) == answers.count(Answer.OK) + 1
    again.close()


def test_a_record_that_can_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K25: payload written, record refused, twice: the slot waits for a restart."""
    one = rig(tmp_path)
    kept = one.one(Chunk(1).write()).place

    def refuse(self: object, slot: int, header: object) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr("kvd.tiers.nvme.slab.Slab.write_record", refuse)
        assert one.one(Chunk(2).write()).answer is Answer.FAILED
        assert one.one(Chunk(1).delete(kept)).answer is Answer.FAILED
    assert one.one(Chunk(1).read(kept)).answer is Answer.OK
    assert one.tier.usage().chunks == 1 and one.tier.stat().notes["lost_slots"] == 1
    one.close()
    again = rig(tmp_path)
    assert set(again.recovered()) == {Chunk(1).key}
    again.close()


# -- file systems -------------------------------------------------------------------------------

MOUNTED = """
import subprocess, sys, os
from pathlib import Path
from typing import Any
sys.path.insert(0, os.environ["PYTHONPATH"])
from nvme_kit import rig, disk, slabs, MIB
from tiers_kit import Chunk, chunks
from kvd.errors import ConfigError
from kvd.tiers.base import Answer, State

where, options = Path(sys.argv[1]), sys.argv[2]
def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], check=True)
mount(options)
"""


def mounted(tmp_path: Path, options: str, source: str) -> str:
    """Run a script that has a file system of its own, in a mount namespace of its own."""
    if script("", prefix=["unshare", "-m"]).returncode:
        pytest.skip("this user may make no mount namespace")
    done = script(MOUNTED + source, str(tmp_path), options, prefix=["unshare", "-m"])
    if "mount: " in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_full_file_system_refuses_stores_reads_on_and_recovers(tmp_path: Path) -> None:
    """K61: another process fills the disk long before the limit."""
    mounted(
        tmp_path,
        "size=12m",
        """
it = rig(where, 1024 * MIB, slab_bytes=MIB, reserve_bytes=65536)
first = list(chunks(8, 200_000))
places = [d.place for d in it.do([c.write() for c in first])]
hog = where / "hog"
with open(hog, "wb", buffering=0) as file:
    try:
        while file.write(bytes(65536)):
            pass
    except OSError:
        pass
answers = [it.one(c.write()).answer for c in chunks(100, 200_000, first=100)]
assert set(answers) <= {Answer.OK, Answer.NO_SPACE} and answers[-1] is Answer.NO_SPACE, answers
assert it.tier.state is State.READY
assert all(it.one(c.read(p)).answer is Answer.OK for c, p in zip(first, places))
assert it.one(first[0].delete(places[0])).answer is Answer.OK
assert it.one(Chunk(500, 200_000).write()).answer is Answer.OK
hog.unlink()
assert it.one(Chunk(501, 200_000).write()).answer is Answer.OK
assert it.tier.usage().held_bytes <= 12 * MIB
it.close()
again = rig(where, 1024 * MIB, slab_bytes=MIB, reserve_bytes=65536)
assert len(again.recovered()) == answers.count(Answer.OK) + 9
again.close()
""",
    )


def test_a_full_file_system_at_start_is_degraded_and_heals(tmp_path: Path) -> None:
    mounted(
        tmp_path,
        "size=4m",
        """
hog = where / "hog"
with open(hog, "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
it = rig(where, 2 * MIB, slab_bytes=MIB, reserve_bytes=0)
assert it.tier.state is State.DEGRADED and "No space" in it.report.detail, it.report
assert it.one(Chunk(1).write()).answer is Answer.OFF
hog.unlink()
it.until(lambda: it.tier.state is State.READY)
assert it.one(Chunk(1).write()).answer is Answer.OK
it.close()
""",
    )


def test_a_read_only_file_system_still_serves_what_it_holds(tmp_path: Path) -> None:
    """Nothing is written then, and an empty one is refused."""
    mounted(
        tmp_path,
        "size=12m",
        """
it = rig(where)
chunk = Chunk(1)
place = it.one(chunk.write()).place
it.close()
subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
before = sorted((p.name, p.stat().st_mtime_ns) for p in where.iterdir())
it = rig(where)
assert it.recovered() == {chunk.key: place}
assert "read-only" in it.report.detail
assert it.one(chunk.read(place)).answer is Answer.OK
done = it.one(Chunk(2).write())
assert done.answer is Answer.FAILED and done.reason.value == "read_only", done
assert it.tier.state is State.DEGRADED
assert it.one(chunk.read(place)).answer is Answer.OK
it.close()
assert before == sorted((p.name, p.stat().st_mtime_ns) for p in where.iterdir())
subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
for path in where.iterdir():
    path.unlink()
subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
try:
    disk(where).open()
    raise SystemExit("an empty read-only directory can be no tier")
except ConfigError as error:
    assert "Read-only" in str(error), error
""",
    )


def test_a_file_system_that_was_read_only_at_start_is_written_when_it_can_be(
    tmp_path: Path,
) -> None:
    """It heals by itself; what is read meanwhile is read on, and all of it survives a restart."""
    mounted(
        tmp_path,
        "size=12m",
        """
it = rig(where)
old = list(chunks(3))
places = [it.one(chunk.write()).place for chunk in old]
engine = it.report.engine
it.close()
subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
it = rig(where)
assert it.recovered() == {c.key: p for c, p in zip(old, places)}
assert it.one(Chunk(50).write()).answer is Answer.FAILED
assert it.tier.state is State.DEGRADED
subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
reading = next(iter(it.tier.backend.below._slabs))
reading.users += 1  # somebody is in it all the time
it.until(lambda: it.tier.state is State.READY)
new = list(chunks(200, 100_000, first=100))[:20]
there = [it.one(chunk.write()).place for chunk in [*new, Chunk(51)]]
assert all(p.generation for p in there), it.tier.stat()
assert it.one(old[0].delete(places[0])).answer is Answer.OK
for chunk, place in [*zip(old[1:], places[1:]), *zip(new, there)]:
    job = chunk.read(place)
    assert it.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
assert it.tier.stat().engine == engine
reading.users -= 1
it.close()
again = rig(where)
assert set(again.recovered()) == {c.key for c in [*old[1:], *new, Chunk(51)]}
again.close()
""",
    )


def test_a_key_is_no_name(it: Rig) -> None:
    """K53, K62: digests of any content go in and out."""
    for namespace in (b"\0" * 32, b"\xff" * 32, b"../../../../etc/passwd".ljust(32, b"/")):
        chunk = Chunk(1, namespace_digest=namespace)
        place = it.one(chunk.write()).place
        assert it.one(chunk.read(place)).answer is Answer.OK
        assert Key.of(chunk.header).namespace == namespace


def test_aligned_memory_takes_no_detour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins at a page is read and written in place, its broken last page aside."""
    calls: list[list[int]] = []
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE * 4))
    engine: Engine = PosixEngine(direct=True)
    file = engine.open(path)
    chunk = Chunk(1, 2 * PAGE + 100)
    write = os.pwritev

    def spy(fd: int, views: list[memoryview], at: int) -> int:
        calls.append([len(v) for v in views])
        return write(fd, views, at)

    monkeypatch.setattr(os, "pwritev", spy)
    file.write(0, chunk.memory)
    file.close()
    assert calls == [[2 * PAGE, PAGE]]
    assert path.read_bytes()[: chunk.length] == bytes(chunk.memory)
