"""Leaves go first, whatever comes in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from policy_conformance import NO_GHOSTS, NONE, Chunk, insert, reborn

from kvd.eviction.crf import Crf
from kvd.eviction.fifo import Fifo
from kvd.eviction.reuse import Reuse
from kvd.eviction.s3fifo import S3Fifo

S = 1_000_000_000


def test_a_child_that_came_before_its_parent_is_its_child() -> None:
    """In a lower tier: chains come down leaf first."""
    policy = Fifo()
    insert(policy, 5, 1 * S, parent=4)
    insert(policy, 4, 2 * S, parent=3)
    insert(policy, 3, 3 * S)
    insert(policy, 9, 4 * S)
    insert(policy, 8, 5 * S)
    assert list(policy.victims(0, 6 * S)) == [5, 4, 3, 9, 8]


def test_what_came_last_goes_last_also_where_its_child_was_there_before_it() -> None:
    policy = S3Fifo()
    insert(policy, 9, 1 * S)
    policy.forget(9, evicted=True)
    insert(policy, 5, 2 * S, parent=4)
    insert(policy, 9, 3 * S)  # known: of the main queue, which goes after the small one
    insert(policy, 4, 4 * S)
    assert list(policy.victims(0, 5 * S)) == [5, 9, 4]
    policy.forget(5, evicted=True)
    assert list(policy.victims(0, 6 * S)) == [9, 4]


def test_an_orphan_does_not_hang_on_who_has_its_parents_id_now() -> None:
    policy = Fifo()
    insert(policy, 0, 1 * S)
    insert(policy, 1, 2 * S, parent=0)
    policy.forget(0, evicted=False)
    insert(policy, 0, 3 * S)
    insert(policy, 2, 4 * S)
    assert list(policy.victims(0, 5 * S)) == [1, 0, 2]
    policy.forget(1, evicted=True)
    assert list(policy.victims(0, 5 * S)) == [0, 2]


def test_a_chunk_with_a_child_in_another_queue_waits_for_it() -> None:
    policy = Fifo()
    insert(policy, 0, 1 * S, queue=0)
    insert(policy, 1, 2 * S, parent=0, queue=1)
    insert(policy, 2, 3 * S, queue=0)
    assert list(policy.victims(0, 4 * S)) == [2]
    policy.forget(1, evicted=True)
    assert list(policy.victims(0, 4 * S)) == [0, 2]


def test_touches_leave_no_trail_in_the_heaps() -> None:
    policy = Crf()
    for chunk in range(100):
        insert(policy, chunk, chunk * S)
    for n in range(5_000):
        policy.touch([n % 100], (200 + n) * S)
        next(iter(policy.victims(0, (200 + n) * S)))
    assert sum(map(len, policy._heaps.values())) <= 2 * 100 + 1024


def test_chunks_that_come_and_go_leave_no_trail_in_the_heaps() -> None:
    policy = Reuse()
    for n in range(20_000):
        chunk = n % 200
        policy.forget(chunk, evicted=n % 2 == 0)
        insert(policy, chunk, n * S, parent=(chunk - 1) if chunk % 10 else -1)
        policy.touch([chunk], n * S)
    assert sum(map(len, policy._heaps.values())) <= 2 * 200 + 8 * 1100


def test_one_use_that_is_told_twice_is_one_use() -> None:
    """A request touches its chain at lookup and again when it has stored the rest."""
    policy = Crf(60.0)
    for chunk in (0, 1):
        insert(policy, chunk, 0)
    policy.touch([0], 100 * S)
    for n in range(9):
        policy.touch([1], 100 * S + n * S // 10)
    assert policy._score[1] == pytest.approx(policy._score[0], abs=0.02)


def test_time_that_a_daemon_was_away_ages_nothing() -> None:
    policy = Crf(60.0)
    for chunk in range(3):
        insert(policy, chunk, 1_000 * S + chunk * S)
    other = Crf(60.0)
    chunks = [Chunk(n, n, NONE, 0, n) for n in range(3)]
    reborn(policy, other, chunks, 6 * S)
    other.touch([0], 7 * S)  # another boot: the clock began anew
    insert(other, 3, 8 * S)
    assert list(other.victims(0, 9 * S))[:2] == [1, 2]
    assert other.value(0, 9 * S) > 0.1


@pytest.mark.parametrize("broken", ["time", "half_ns", "policy", "peak"])
def test_a_snapshot_that_does_not_hold_is_refused(broken: str) -> None:
    policy = Crf()
    for chunk in range(3):
        insert(policy, chunk, chunk * S)
    state = policy.snapshot()
    state[broken] = "lru"
    with pytest.raises(ValueError):
        Crf().restore(state, NO_GHOSTS, 0)
    del state[broken]
    with pytest.raises((ValueError, KeyError)):
        Crf().restore(state, NO_GHOSTS, 0)
    with pytest.raises(ValueError):
        policy.restore(policy.snapshot(), NO_GHOSTS, 0)


def test_memory_of_another_shape_is_refused() -> None:
    policy = Crf()
    with pytest.raises(ValueError, match="memory of shape"):
        policy.load(
            np.arange(2),
            np.arange(2),
            parents=np.full(2, NONE),
            queue=0,
            size=1,
            ghosts=np.arange(2, dtype=np.uint64),
            memory=np.zeros((2, 7)),
        )


def test_to_defer_counts_no_use() -> None:
    policy = Crf(60.0)
    for chunk in range(8):
        insert(policy, chunk, chunk * S)
    before = policy.memory(np.arange(8))
    policy.defer([0, 1, 2], 50 * S)
    assert (policy.memory(np.arange(8)) == before).all()
    policy.forget(3, evicted=True)  # one comes back, to where it stood
    assert next(iter(policy.victims(0, 51 * S))) == 0
