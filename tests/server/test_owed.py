"""Deletions that a tier could not carry out: they are asked for again when it works."""

from __future__ import annotations

import pytest

from kvd.chunk import ChunkHeader, HeaderFlag, Kind, State
from kvd.server.owed import BATCH, LONGEST_NS, PAUSE_NS, TRIES, UNPAID, Owed
from kvd.tiers.base import NOWHERE, Answer, Completion, Delete, Key, Place, Write


def delete(number: int, place: Place = NOWHERE) -> Delete:
    key = Key(1, b"n" * 32, b"s" * 32, number.to_bytes(32, "little"), 0)
    return Delete("the core's", key, place)


def write(number: int) -> Write:
    key = delete(number).key
    header = ChunkHeader(
        kind=Kind.PREFIX, state=State.READY, namespace_digest=key.namespace, spec=key.spec,
        chunk=key.chunk, shard_count=1, tokens=16, flags=HeaderFlag.SEALED, length=1,
    )  # fmt: skip
    return Write("the core's", header, b"x")


def answer(owed: Owed, jobs: list[Delete], answer: Answer, now: int = 0) -> None:
    for job in jobs:
        owed.answered(Completion(job, answer), now)


def test_all_are_asked_for_in_their_order_some_at_a_time() -> None:
    owed = Owed(by_key=False)
    jobs = [delete(n, Place(n, 7)) for n in range(BATCH + 5)]
    for job in jobs:
        owed.add(job)
    first = owed.due(3, 4)
    assert [(job.key, job.place) for job in first] == [(j.key, j.place) for j in jobs[:BATCH]]
    assert all(job.deadline == 7 for job in first) and owed.due(3, 4) == []
    answer(owed, first, Answer.OK)
    second = owed.due(3, 4)
    assert [job.key for job in second] == [job.key for job in jobs[BATCH:]]
    answer(owed, second, Answer.MISS)
    assert len(owed) == 0 and owed.due(3, 4) == []


def test_a_medium_that_is_away_again_costs_no_try_and_one_that_refuses_does() -> None:
    owed = Owed(by_key=True)
    owed.add(delete(1))
    now = 0
    for _ in range(TRIES + 2):
        now += LONGEST_NS
        answer(owed, owed.due(now, 1), Answer.OFF, now)
    for left in range(TRIES, 0, -1):
        now += LONGEST_NS
        jobs = owed.due(now, 1)
        assert len(jobs) == 1, left
        assert owed.notes() == {}, "it is under way, and nothing is given up yet"
        answer(owed, jobs, Answer.FAILED, now)
    assert len(owed) == 0 and owed.notes() == {"deletes_given_up": 1}


def test_after_a_failure_there_is_a_pause_that_grows_until_something_went_well() -> None:
    owed = Owed(by_key=True)
    for n in range(3):
        owed.add(delete(n))
    now = 0
    for pause in (PAUSE_NS, 2 * PAUSE_NS, 4 * PAUSE_NS):
        jobs = owed.due(now, 1)
        assert len(jobs) == 3
        answer(owed, jobs, Answer.TIMEOUT, now)
        assert owed.due(now + pause - 1, 1) == []
        now += pause
    jobs = owed.due(now, 1)
    answer(owed, jobs[:2], Answer.OK, now)
    answer(owed, jobs[2:], Answer.FAILED, now)
    assert owed.due(now + PAUSE_NS - 1, 1) == [] and len(owed.due(now + PAUSE_NS, 1)) == 1


@pytest.mark.parametrize(("by_key", "left"), [(True, 0), (False, 1)])
def test_what_is_written_anew_under_its_name_stays(by_key: bool, left: int) -> None:
    owed = Owed(by_key=by_key)
    owed.add(delete(1, Place(3, 4)))
    assert not owed.holds(write(1)) and len(owed) == left
    owed.written(delete(1).key, there=True)
    assert len(owed) == left


def test_what_is_written_anew_waits_for_a_deletion_that_is_under_way() -> None:
    """Nothing else orders the two: the deletion would be carried out after the write."""
    owed = Owed(by_key=True)
    for n in range(2):
        owed.add(delete(n))
    jobs = owed.due(0, 1)
    again = write(0)
    assert owed.holds(again) and not owed.holds(write(2))
    assert owed.answered(Completion(jobs[1], Answer.OK), 0) == []
    assert owed.answered(Completion(jobs[0], Answer.OK), 0) == [again]
    owed.written(again_key := delete(0).key, there=False)
    assert not owed.any, "it was deleted"
    owed.add(delete(0))
    assert [job.key for job in owed.due(0, 1)] == [again_key], "it may be deleted anew, too"


def test_what_is_written_anew_while_its_deletion_fails_stays() -> None:
    owed = Owed(by_key=True)
    for n in range(2):
        owed.add(delete(n))
    jobs = owed.due(0, 1)
    assert len(owed) == 0 and owed.any
    assert owed.holds(write(0))
    answer(owed, jobs, Answer.TIMEOUT)
    assert owed.notes() == {"deletes_owed": 1}
    owed.written(delete(0).key, there=True)
    jobs = owed.due(LONGEST_NS, 1)
    assert [job.key for job in jobs] == [delete(1).key]


@pytest.mark.parametrize("under_way", [False, True])
def test_a_write_that_comes_to_nothing_leaves_the_deletion_owed(under_way: bool) -> None:
    """Else what was to be deleted would lie there, counted, and nobody would ask again."""
    owed = Owed(by_key=True)
    owed.add(delete(1))
    if under_way:
        jobs = owed.due(0, 1)
        assert owed.holds(write(1))
        answer(owed, jobs, Answer.FAILED)
    else:
        assert not owed.holds(write(1))
    assert len(owed) == 0 and owed.any
    owed.written(delete(1).key, there=False)
    assert [job.key for job in owed.due(LONGEST_NS, 1)] == [delete(1).key]


def test_who_waits_for_a_deletion_is_answered_at_its_deadline() -> None:
    owed = Owed(by_key=True)
    owed.add(delete(1))
    jobs = owed.due(0, 1)
    soon, later = write(1)._replace(deadline=5), write(1)
    assert owed.holds(soon) and owed.holds(later)
    assert owed.late(4) == [] and owed.late(5) == [soon] and owed.late(5) == []
    assert owed.answered(Completion(jobs[0], Answer.OK), 6) == [later]


def test_beyond_the_bound_the_oldest_are_given_up() -> None:
    owed = Owed(by_key=True, most=3)
    for n in range(5):
        owed.add(delete(n))
    assert owed.notes() == {"deletes_owed": 3, "deletes_given_up": 2}
    assert [job.key for job in owed.due(0, 1)] == [delete(n).key for n in (2, 3, 4)]


def test_every_answer_after_which_it_may_lie_there_is_owed() -> None:
    assert set(Answer) - UNPAID >= {Answer.OK, Answer.MISS}
    assert {Answer.OFF, Answer.FAILED, Answer.TIMEOUT} == UNPAID
