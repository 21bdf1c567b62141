"""Seats: at most so many calls in a medium, and digests taken beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tiers_kit import CONFIG, SECOND, Chunk, Rig

from kvd.tiers.backend import Refused
from kvd.tiers.base import Answer, Job
from kvd.tiers.crossing import Crossing
from kvd.tiers.faults import Fault, Faults, FaultyBackend
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.meter import Meter
from kvd.tiers.poolconfig import DEFAULT
from kvd.tiers.seats import Seats

LONG_S = 60.0


def test_who_finds_all_seats_taken_waits_for_one() -> None:
    seats = Seats(2, patience_s=LONG_S)
    assert seats.take(write=True) and seats.take(write=True)
    had: list[bool] = []
    waiter = threading.Thread(target=lambda: had.append(seats.take(write=True)))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive() and not had
    seats.give_back(write=True)
    waiter.join(LONG_S)
    assert had == [True]


def test_reads_and_writes_have_their_own() -> None:
    seats = Seats(1, patience_s=LONG_S)
    assert seats.take(write=True) and seats.take(write=False)


def test_who_waited_long_enough_goes_in_without() -> None:
    seats = Seats(1, patience_s=0.01)
    assert seats.take(write=True)
    assert not seats.take(write=True)
    seats.give_back(write=True)
    assert seats.take(write=True)


def test_a_medium_of_any_depth_has_none() -> None:
    seats = Seats(0, patience_s=LONG_S)
    assert not any(seats.take(write=write) for write in (True, False) for _ in range(99))


def test_a_call_that_fails_gives_its_seat_back() -> None:
    faults = Faults()
    backend = FaultyBackend(MemoryBackend(1 << 20), faults)
    backend.open()
    seats = Seats(1, patience_s=LONG_S)
    crossing = Crossing("t", backend, Meter(), time.monotonic_ns, True, seats)
    chunk = Chunk(1)
    for call, job in (("put", chunk.write()), ("get", chunk.read())):
        faults.add(call, Fault.EIO, times=1)
        with pytest.raises(Refused):
            crossing.carry_out([job])
    (stored,) = crossing.carry_out([chunk.write()])  # at once, or it would take a minute
    (loaded,) = crossing.carry_out([chunk.read(stored.place)])
    assert (stored.answer, loaded.answer) == (Answer.OK, Answer.OK)


def test_a_digest_is_taken_while_the_medium_has_all_that_it_takes() -> None:
    seats = Seats(1, patience_s=LONG_S)
    assert seats.take(write=True)
    crossing = Crossing("t", MemoryBackend(1 << 20), Meter(), time.monotonic_ns, True, seats)
    broken = Chunk(1)
    broken.memory[0] ^= 1
    found: list[Answer] = []
    looking = threading.Thread(
        target=lambda: found.append(crossing.carry_out([broken.write()])[0].answer), daemon=True
    )
    looking.start()
    looking.join(LONG_S / 4)
    assert found == [Answer.CORRUPT]


@pytest.fixture
def rig() -> Iterator[Rig]:
    config = CONFIG._replace(workers=4, writers=3, depth=1, spares=0, stuck_ns=60 * SECOND)
    rig = Rig(MemoryBackend(1 << 26), config=config).start()
    yield rig
    rig.close()


def test_through_a_real_pool_loads_go_beside_writes_that_hang(rig: Rig) -> None:
    first, other = Chunk(1), Chunk(2)
    place = rig.one(first.write()).place
    rig.faults.add("put", Fault.HANG)
    hanging: list[Job] = [other.write()]
    rig.tier.submit(hanging)
    rig.until(lambda: rig.faults.calls["put"] == 2)
    assert rig.one(first.read(place)).answer is Answer.OK
    rig.faults.release()
    assert [done.answer for done in rig.wait(hanging)] == [Answer.OK]


def test_through_a_real_pool_calls_that_hang_keep_nobody_out(rig: Rig) -> None:
    rig.faults.add("put", Fault.HANG, times=1)
    jobs: list[Job] = [Chunk(n).write() for n in range(1, 6)]
    rig.tier.submit(jobs)
    assert {done.answer for done in rig.wait(jobs[1:])} == {Answer.OK}
    rig.faults.release()
    assert [done.answer for done in rig.wait(jobs[:1])] == [Answer.OK]


def test_a_disk_has_a_worker_more_for_digests_and_one_for_a_load() -> None:
    pool = DEFAULT.for_disk(4, quiet_ns=7)
    assert (pool.workers, pool.writers, pool.depth, pool.spares, pool.quiet_ns) == (6, 5, 4, 4, 7)
