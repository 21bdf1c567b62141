"""LRU against the conformance suite and against its naive twin."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from naive_lru import NaiveLru
from policy_conformance import NONE, PolicyConformance, S, insert

from kvd.eviction.lru import Lru

QUEUES = 3
calls = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 15), st.integers(0, QUEUES - 1)),
        st.tuples(st.just("touch"), st.lists(st.integers(-1, 16), max_size=6), st.just(0)),
        st.tuples(st.just("forget"), st.integers(-1, 16), st.integers(0, 1)),
        st.tuples(st.just("cool"), st.lists(st.integers(-1, 16), max_size=6), st.just(0)),
        st.tuples(st.just("defer"), st.lists(st.integers(-1, 16), max_size=6), st.just(0)),
    ),
    max_size=60,
)


class TestLru(PolicyConformance):
    make = staticmethod(Lru)


@settings(max_examples=300, deadline=None)
@given(calls)
def test_the_order_is_the_naive_twins(some: list[tuple[str, object, int]]) -> None:
    policy, twin = Lru(), NaiveLru()
    here: set[int] = set()
    for now, (call, what, queue) in enumerate(some):
        if call == "insert" and isinstance(what, int) and what not in here:
            insert(policy, what, now * S, queue=queue)
            twin.insert(what, queue)
            here.add(what)
        elif call == "touch" and isinstance(what, list):
            policy.touch(what, now * S)
            twin.touch(what)
        elif call == "cool" and isinstance(what, list):
            policy.cool(what, now * S)
            twin.cool(what)
        elif call == "defer" and isinstance(what, list):
            policy.defer(what, now * S)
            twin.defer(what)
        elif call == "forget" and isinstance(what, int):
            policy.forget(what, evicted=bool(queue))
            twin.forget(what, evicted=bool(queue))
            here.discard(what)
        for queue in range(QUEUES):
            assert list(policy.victims(queue, now * S)) == twin.victims(queue)
            assert (policy.coldness(queue, now * S) is None) == (not twin.victims(queue))
        assert len(policy) == len(here)


def test_worth_falls_with_the_time_since_the_last_use() -> None:
    policy = Lru()
    insert(policy, 0, 0)
    insert(policy, 1, 9 * S)
    assert policy.value(0, 9 * S) == pytest.approx(0.1)
    assert policy.value(1, 9 * S) == 1.0
    assert policy.value(5, 9 * S) == 0.0


def test_what_comes_at_once_stands_as_hot_as_who_stands_behind_it() -> None:
    """A parent was stored before its child, but is as recent as it."""
    policy = Lru()
    insert(policy, 5, 0)
    policy.load(
        np.array([2, 1, 0]),
        np.array([9, 8, 7]) * S,
        parents=np.array([1, 0, NONE]),
        queue=0,
        size=1,
        ghosts=np.arange(3, dtype=np.uint64),
    )
    assert list(policy.victims(0, 10 * S)) == [5, 2, 1, 0]
    assert policy.value(0, 10 * S) == policy.value(2, 10 * S)
