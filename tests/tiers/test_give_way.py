"""A caller that gives way lets a free worker begin what it was given; it waits for nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from tiers_kit import CONFIG, Chunk, Rig

from kvd.tiers.base import Answer
from kvd.tiers.faults import Fault
from kvd.tiers.memory import MemoryBackend

LONG_S = 20.0


@pytest.fixture
def rig() -> Iterator[Rig]:
    """One worker, and threads that take the interpreter from nobody."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    rig = Rig(MemoryBackend(8 << 20), config=CONFIG._replace(workers=1, writers=1, spares=0))
    rig.start()
    try:
        yield rig
    finally:
        sys.setswitchinterval(before)
        rig.close()


def gives_way(rig: Rig) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    rig.tier.give_way(LONG_S)
    return time.monotonic() - begun


def test_a_free_worker_has_the_job_when_the_caller_goes_on(rig: Rig) -> None:
    chunk = Chunk(1)
    place = rig.one(chunk.write()).place
    rig.until(lambda: all(worker.task is None for worker in rig.tier._crew.workers))
    rig.faults.add("get", Fault.HANG)
    job = chunk.read(place)
    rig.tier.submit([job])
    assert gives_way(rig) < LONG_S / 4
    assert [worker.task for worker in rig.tier._crew.workers] == [[job]]
    assert not rig.tier._waiting
    rig.faults.release()
    assert rig.wait([job])[0].answer is Answer.OK


def test_where_no_worker_is_free_nobody_waits_for_one(rig: Rig) -> None:
    chunk = Chunk(1)
    place = rig.one(chunk.write()).place
    rig.faults.add("get", Fault.HANG)
    jobs = [chunk.read(place), chunk.read(place)]
    rig.tier.submit(jobs[:1])
    gives_way(rig)
    rig.tier.submit(jobs[1:])
    assert gives_way(rig) < LONG_S / 4
    rig.faults.release()
    assert [done.answer for done in rig.wait(jobs)] == [Answer.OK, Answer.OK]


def test_where_nothing_waits_the_caller_goes_on(rig: Rig) -> None:
    assert gives_way(rig) < LONG_S / 4


def test_a_tier_that_is_closed_holds_up_nobody(rig: Rig) -> None:
    rig.tier.close()
    rig.tier.submit([Chunk(1).read()])
    assert gives_way(rig) < LONG_S / 4
