"""A write lets a load go first, also in its middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_kit import disk
from tiers_kit import CONFIG, NEVER, SECOND, Chunk, Rig, aligned

from kvd.chunk import ChunkHeader
from kvd.tiers.backend import Stored
from kvd.tiers.base import Answer, Key
from kvd.tiers.faults import Fault
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.pieces import PATIENCE_NS, PIECE, Pieces

LONG = 4 * PIECE


class Medium:
    """What `Pieces` asks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.beside = True
        self.loads = 0
        self.pieces = Pieces(
            self.lock, lambda now: self.beside, lambda: bool(self.loads), time.monotonic_ns
        )


def test_without_loads_a_write_is_one_call() -> None:
    medium = Medium()
    medium.beside = False
    medium.loads = 1
    assert medium.pieces.next(LONG) == LONG
    assert medium.pieces.take_waited() == 0


def test_beside_loads_it_is_made_in_pieces() -> None:
    medium = Medium()
    assert [medium.pieces.next(left) for left in (LONG, PIECE + 1, PIECE, 7)] == [
        PIECE, PIECE, PIECE, 7,
    ]  # fmt: skip


def test_a_piece_waits_for_the_load_and_goes_on_at_its_end() -> None:
    medium = Medium()
    medium.loads = 1

    def end() -> None:
        with medium.lock:
            medium.loads = 0
            medium.pieces.through()

    timer = threading.Timer(PATIENCE_NS / 2e9, end)
    timer.start()
    assert medium.pieces.next(LONG) == PIECE
    assert medium.loads == 0
    timer.join()
    waited = medium.pieces.take_waited()
    assert waited > 0
    assert medium.pieces.take_waited() == 0, "what was told is not told again"


def test_loads_without_an_end_do_not_stop_it_for_ever() -> None:
    medium = Medium()
    medium.loads = 1
    assert medium.pieces.next(LONG) == PIECE
    assert medium.pieces.take_waited() >= PATIENCE_NS


class Slow(MemoryBackend):
    """Writes as a disk does: it asks before each piece."""

    def __init__(self) -> None:
        super().__init__(1 << 26)
        self.pieces: list[int] = []

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        left = len(source)
        while left:
            self.pieces.append(self.give_way(left))
            left -= self.pieces[-1]
        return super().put(key, header, source, deadline)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def rig(slow: Slow) -> Iterator[Rig]:
    rig = Rig(slow, config=CONFIG._replace(quiet_ns=60 * SECOND)).start()
    yield rig
    rig.close()


def test_through_a_real_pool_a_long_write_is_whole_before_any_load_and_in_pieces_after(
    rig: Rig, slow: Slow
) -> None:
    first = Chunk(1, LONG)
    place = rig.one(first.write()).place
    assert slow.pieces == [LONG]
    assert rig.one(first.read(place)).answer is Answer.OK
    slow.pieces.clear()
    assert rig.one(Chunk(2, LONG).write()).answer is Answer.OK
    assert slow.pieces == [PIECE] * 4


def test_through_a_real_pool_a_load_under_way_goes_before_the_next_piece(
    rig: Rig, slow: Slow
) -> None:
    first = Chunk(1, LONG)
    place = rig.one(first.write()).place
    rig.faults.add("get", Fault.HANG)
    load, write = first.read(place), Chunk(2, LONG).write()
    begun = time.monotonic_ns()
    rig.tier.submit([load])
    rig.until(lambda: rig.faults.calls.get("get") == 1)
    assert rig.one(write).answer is Answer.OK
    assert time.monotonic_ns() - begun >= 4 * PATIENCE_NS  # each piece lets it go first in vain
    rig.faults.release()
    assert rig.wait([load])[0].answer is Answer.OK


@pytest.mark.parametrize("length", [LONG, LONG + 5, 3 * 4096, 100])
def test_what_nvme_writes_in_pieces_is_read_as_it_was(tmp_path: Path, length: int) -> None:
    backend = disk(tmp_path, 64 << 20)
    backend.open()
    try:
        asked: list[int] = []

        def give_way(left: int) -> int:
            asked.append(left)
            return min(left, 8192)

        backend.give_way = give_way
        chunk, into = Chunk(3, length), aligned(length)
        place = backend.put(chunk.key, chunk.header, chunk.memory, NEVER).place
        assert asked == list(range(length, 0, -8192))
        assert backend.get(chunk.key, place, into, NEVER).header.length == length
        assert into == chunk.memory
    finally:
        backend.close()
