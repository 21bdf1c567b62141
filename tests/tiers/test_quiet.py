"""How much of what nobody waits for a medium is given while loads come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiers_kit import CONFIG, SECOND, Chunk, Rig

from kvd.tiers.base import Answer, Job, Use
from kvd.tiers.faults import Fault
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.quiet import Quiet

LOAD = Chunk(1).read()._replace(tenant=b"a")
OWN = Chunk(2).write()._replace(tenant=b"a")
OTHERS = Chunk(3).write()._replace(tenant=b"b")


def test_without_loads_nothing_is_held_back() -> None:
    quiet = Quiet(50, 3)
    quiet.begun([OTHERS], 1000)
    quiet.ended([OTHERS], 1000, 1010)
    quiet.begun([LOAD._replace(use=Use.PREFETCH)], 1011)
    assert quiet.most(1011) == 3


def test_after_a_load_one_at_a_time_until_none_came_for_a_while() -> None:
    quiet = Quiet(50, 3)
    quiet.begun([LOAD], 1000)
    assert [quiet.most(now) for now in (1000, 1049, 1050)] == [1, 1, 3]


def test_after_anothers_job_the_medium_rests_for_twice_as_long_as_it_took() -> None:
    quiet = Quiet(50, 3)
    quiet.begun([LOAD], 1000)
    quiet.ended([OTHERS], 1005, 1015)
    assert [quiet.most(now) for now in (1015, 1034, 1035)] == [0, 0, 1]


def test_who_loads_does_not_rest_from_its_own_writes() -> None:
    quiet = Quiet(50, 3)
    quiet.begun([LOAD], 1000)
    quiet.ended([OWN], 1005, 1015)
    assert quiet.most(1015) == 1


@pytest.mark.parametrize(("most", "third"), [(1, 1), (3, 1), (5, 1), (6, 2), (17, 5)])
def test_while_engines_ask_a_third_as_many_run_and_nothing_rests(most: int, third: int) -> None:
    quiet = Quiet(50, most)
    quiet.asked(1000)
    quiet.ended([OTHERS], 1000, 1010)
    assert [quiet.most(now) for now in (1010, 1049, 1050)] == [third, third, most]
    assert not quiet.lasts(1010), "writes are not made in pieces: there is no load to let through"


def test_a_job_that_hung_makes_no_long_rest() -> None:
    quiet = Quiet(50, 3)
    quiet.begun([LOAD], 10_000)
    quiet.ended([OTHERS], 0, 10_001)
    quiet.begun([LOAD], 10_030)
    assert quiet.most(10_050) == 0 and quiet.most(10_051) == 1


def test_a_medium_whose_requests_do_not_slow_each_other_has_none() -> None:
    quiet = Quiet(0, 3)
    quiet.asked(1000)
    quiet.begun([LOAD], 1000)
    quiet.ended([OTHERS], 1000, 1010)
    assert quiet.most(1010) == 3 and quiet.left_ns(1010) is None


@pytest.fixture
def rig() -> Iterator[Rig]:
    config = CONFIG._replace(workers=4, writers=3, spares=0, stuck_ns=60 * SECOND)
    rig = Rig(MemoryBackend(1 << 26), config=config._replace(quiet_ns=60 * SECOND)).start()
    yield rig
    rig.close()


def test_through_a_real_pool_one_write_at_a_time_runs_beside_loads_and_all_get_done(
    rig: Rig,
) -> None:
    first = Chunk(1)
    place = rig.one(first.write()).place
    assert rig.one(first.read(place)).answer is Answer.OK
    rig.faults.add("put", Fault.HANG)
    writes: list[Job] = [Chunk(n).write() for n in range(2, 8)]
    rig.tier.submit(writes)
    rig.until(lambda: rig.faults.calls.get("put") == 2)
    assert rig.one(first.read(place)).answer is Answer.OK  # the workers had time to begin more
    assert rig.faults.calls["put"] == 2
    rig.faults.release()
    assert {done.answer for done in rig.wait(writes)} == {Answer.OK}


def test_through_a_real_pool_fewer_writes_run_while_engines_ask(rig: Rig) -> None:
    rig.faults.add("put", Fault.HANG)
    rig.tier.asked()
    writes: list[Job] = [Chunk(n).write() for n in range(2, 8)]
    rig.tier.submit(writes)
    rig.until(lambda: rig.faults.calls.get("put") == 1)
    missed = rig.one(Chunk(1).read())  # the workers had time to begin more
    assert missed.answer is Answer.MISS and rig.faults.calls["put"] == 1
    rig.faults.release()
    assert {done.answer for done in rig.wait(writes)} == {Answer.OK}


def test_through_a_real_pool_what_rests_goes_on_by_itself(rig: Rig) -> None:
    """Nobody wakes the workers after the rest: they wake themselves."""
    first = Chunk(1)
    place = rig.one(first.write()).place
    rig.faults.add("put", Fault.LATENCY, seconds=0.02)
    assert rig.one(first.read(place)).answer is Answer.OK
    writes: list[Job] = [Chunk(n).write() for n in range(2, 8)]
    assert {done.answer for done in rig.do(writes)} == {Answer.OK}
