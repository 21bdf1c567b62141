"""Every policy against its naive twin, over random lives of random forests."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from naive_policies import (
    NONE,
    Make,
    NaiveAdaptive,
    NaiveArc,
    NaiveCrf,
    NaiveFifo,
    NaiveLfuda,
    NaiveReuse,
    NaiveS3Fifo,
    S,
    Twin,
)
from policy_conformance import Chunk, reborn, settle

from kvd.eviction.adaptive import Adaptive
from kvd.eviction.arc import Arc
from kvd.eviction.base import Policy
from kvd.eviction.crf import Crf
from kvd.eviction.fifo import Fifo
from kvd.eviction.lfuda import Lfuda
from kvd.eviction.registry import POLICIES
from kvd.eviction.reuse import Reuse
from kvd.eviction.s3fifo import S3Fifo


def adaptive() -> tuple[Adaptive, NaiveAdaptive]:
    policy = Adaptive(period_s=30.0)
    return policy, NaiveAdaptive(policy)


def reuse() -> tuple[Reuse, NaiveReuse]:
    policy = Reuse(prior=1.0)
    return policy, NaiveReuse(policy)


PAIRS: dict[str, Make] = {
    "fifo": lambda: (Fifo(), NaiveFifo()),
    "lfuda": lambda: (Lfuda(), NaiveLfuda()),
    "crf": lambda: (Crf(60.0), NaiveCrf(60.0)),
    "arc": lambda: (Arc(), NaiveArc()),
    "s3fifo": lambda: (S3Fifo(), NaiveS3Fifo()),
    "adaptive": adaptive,
    "reuse": reuse,
}

IDS, QUEUES = 14, 2
calls = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert"),
            st.integers(0, IDS - 1),
            st.integers(-1, IDS - 1),
            st.integers(0, QUEUES - 1),
            st.integers(0, 9),
        ),
        st.tuples(st.just("touch"), st.lists(st.integers(-1, IDS + 1), max_size=6, unique=True)),
        st.tuples(st.just("evict"), st.integers(0, QUEUES - 1), st.integers(0, 3)),
        st.tuples(st.just("defer"), st.integers(0, QUEUES - 1), st.integers(1, 4)),
        st.tuples(st.just("cool"), st.lists(st.integers(-1, IDS + 1), max_size=4, unique=True)),
        st.tuples(st.just("remove"), st.integers(-1, IDS)),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, S // 2, 3 * S, 40 * S, 400 * S])),
    ),
    max_size=80,
)


@pytest.mark.parametrize("name", sorted(PAIRS))
@settings(max_examples=120, deadline=None)
@given(some=calls, restart=st.booleans())
def test_the_order_is_one_that_the_twin_allows(
    name: str, some: list[tuple[object, ...]], restart: bool
) -> None:
    policy, twin = PAIRS[name]()
    now = 5_000 * S
    above: dict[int, int] = {}
    for step, call in enumerate(some):
        now += S // 1000
        match call:
            case ("insert", int(chunk), int(parent), int(queue), int(ghost)):
                if chunk in twin.here or climbs_to(parent, chunk, above):
                    continue
                if ghost in {r.ghost for r in twin.here.values()}:
                    continue  # a key is resident once
                policy.insert(chunk, parent=parent, queue=queue, size=1, ghost=ghost, now=now)
                twin.insert(chunk, parent, queue, ghost, now)
                above[chunk] = parent
            case ("touch", list(chain)):
                policy.touch(chain, now)
                twin.touch(chain, now)
            case ("evict", int(queue), int(skip)):
                order = twin.check(policy, queue, now)
                assert (policy.coldness(queue, now) is None) == (not order)
                if order:
                    victim = order[min(skip, len(order) - 1)]
                    policy.forget(victim, evicted=True)
                    twin.forget(victim, evicted=True)
            case ("defer", int(queue), int(count)):
                some_first = twin.check(policy, queue, now)[:count]
                policy.defer(some_first, now)
                twin.defer(some_first)
            case ("cool", list(chain)):
                policy.cool(chain, now)
                twin.cool(chain)
            case ("remove", int(chunk)):
                policy.forget(chunk, evicted=False)
                twin.forget(chunk, evicted=False)
            case ("wait", int(ns)):
                now += ns
        assert len(policy) == len(twin.here)
        if restart and step == len(some) // 2 and not (twin.late or twin.over):
            policy = restarts_as_it_was(policy, PAIRS[name]()[0], twin, now)
    for queue in range(QUEUES):
        twin.check(policy, queue, now)


def restarts_as_it_was(policy: Policy, other: Policy, twin: Twin, now: int) -> Policy:
    for keeper in (policy, twin):
        keeper.touch([], now)
    settle(policy, now)
    twin.insert(5_000, NONE, 77, 5_000 * 2654435761, now)
    twin.forget(5_000, evicted=False)
    if isinstance(policy, Reuse):
        policy._due = 0  # a restored one works its odds out at once
    orders = [twin.check(policy, queue, now) for queue in range(QUEUES)]
    chunks = [
        Chunk(
            chunk,
            chunk,
            NONE if (above := twin.parent(twin.here[chunk])) is None else above.chunk,
            queue,
            twin.here[chunk].ghost,
        )
        for queue in range(QUEUES)
        for chunk in orders[queue]
    ]
    reborn(policy, other, chunks, now)
    if len(chunks) < len(twin.here):  # a child in another queue keeps some from being named
        return policy
    assert len(other) == len(policy)
    assert [list(other.victims(queue, now)) for queue in range(QUEUES)] == orders
    return policy


def climbs_to(chunk: int, target: int, above: dict[int, int]) -> bool:
    """Whether `target` is `chunk` or above it: chains have no rings."""
    seen = set()
    while chunk != NONE and chunk not in seen:
        if chunk == target:
            return True
        seen.add(chunk)
        chunk = above.get(chunk, NONE)
    return False


def test_every_policy_of_the_table_has_a_twin() -> None:
    assert set(PAIRS) | {"lru"} == set(POLICIES)
