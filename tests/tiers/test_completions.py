"""Where workers put what is done: told once, taken whole, never lost."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest
from tiers_kit import Chunk

from kvd.tiers.base import Answer, Completion, Completions

THREADS, EACH = 4, 2_000


@pytest.fixture
def completions() -> Iterator[Completions]:
    made = Completions()
    yield made
    made.close()


def done(number: int) -> Completion:
    return Completion(Chunk(1, 1).write(), Answer.OK, nbytes=number)


def readable(completions: Completions, within_s: float = 0.0) -> bool:
    return bool(select.select([completions], [], [], within_s)[0])


def test_the_loop_is_told_once_until_it_has_come(completions: Completions) -> None:
    assert not readable(completions)
    for number in range(3):
        completions.put(done(number))
    assert os.eventfd_read(completions.fileno()) == 1
    assert [one.nbytes for one in completions.take()] == [0, 1, 2]
    assert not readable(completions) and completions.take() == []
    completions.put(done(3))
    assert readable(completions)
    assert [one.nbytes for one in completions.take()] == [3]


def test_what_was_taken_and_not_dealt_with_is_told_again(completions: Completions) -> None:
    completions.put(done(0))
    completions.take()
    completions.again()
    assert readable(completions)
    completions.put(done(1))
    assert [one.nbytes for one in completions.take()] == [1] and not readable(completions)


def test_none_is_left_behind_whoever_puts_it_while_the_loop_takes(completions: Completions) -> None:
    """The loop waits for what is told, and for nothing else."""
    job = done(0)

    def put(begin: int) -> None:
        for number in range(begin, begin + EACH):
            completions.put(job._replace(nbytes=number))

    threads = [threading.Thread(target=put, args=(n * EACH,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < THREADS * EACH:
        assert readable(completions, 10), f"{THREADS * EACH - len(taken)} wait untold"
        taken += [one.nbytes for one in completions.take()]
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(THREADS * EACH))
