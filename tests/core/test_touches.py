"""What policies are told of uses: all of a chain, but not of what they were just told where they
need no whole chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.core.columns import NONE
from kvd.core.touches import Touches
from kvd.eviction.base import LATELY_NS

pytestmark = pytest.mark.inside

CHAIN = 64


class _Policy:
    def __init__(self) -> None:
        self.told: list[tuple[list[int], int]] = []
        self.cooled: list[list[int]] = []
        self.whole = False

    def whole_chains(self) -> bool:
        return self.whole

    def touch(self, chain: list[int], now: int) -> None:
        self.told.append((list(chain), now))

    def cool(self, chunks: list[int], now: int) -> None:
        self.cooled.append(chunks)


def _store() -> tuple[Any, _Policy]:
    """One chain of chunks, row n + 1 below row n."""
    policy = _Policy()
    words = [n // 4 + 1000 for n in range(4 * CHAIN)]
    chunks = SimpleNamespace(
        parent=[NONE, *range(CHAIN - 1)],
        word=words,
        space=[1] * CHAIN,
        np_key=np.array(words, np.uint64).reshape(-1, 4),
        np_space=np.ones(CHAIN, np.int64),
    )
    return SimpleNamespace(
        chunks=chunks, policy=policy, ladder=SimpleNamespace(lowers=[]), now=1
    ), policy


def _use(store: Any, touches: Touches, row: int, now: int) -> None:
    store.now = now
    touches.use(row)
    touches.apply()


def test_a_chain_that_grows_tells_of_each_chunk_once() -> None:
    store, policy = _store()
    touches = Touches(store)
    for step, last in enumerate(range(15, CHAIN, 16)):
        _use(store, touches, last, 1 + step)
    assert policy.told == [(list(range(16 * n, 16 * n + 16)), 1 + n) for n in range(4)]


def test_what_was_told_long_ago_is_told_again_with_its_chain() -> None:
    store, policy = _store()
    touches = Touches(store)
    _use(store, touches, 15, 1)
    _use(store, touches, 31, LATELY_NS)
    _use(store, touches, 47, 1 + LATELY_NS)  # the first ones were told of that long ago
    assert policy.told[1:] == [
        (list(range(16, 32)), LATELY_NS),
        (list(range(48)), 1 + LATELY_NS),
    ]


def test_the_used_chunk_itself_is_always_told() -> None:
    store, policy = _store()
    touches = Touches(store)
    _use(store, touches, 31, 1)
    _use(store, touches, 31, 2)
    _use(store, touches, 15, 3)  # a shorter prefix: no end of a chain that was told of
    assert [(len(chain), chain[-1], now) for chain, now in policy.told[1:]] == [
        (32, 31, 2),
        (16, 15, 3),
    ]


def test_a_row_that_holds_another_chunk_by_now_ends_nothing() -> None:
    store, policy = _store()
    touches = Touches(store)
    _use(store, touches, 15, 1)
    store.chunks.word[4 * 15] += 1
    _use(store, touches, 31, 2)
    assert policy.told[1:] == [(list(range(32)), 2)]


def test_only_some_ends_are_remembered() -> None:
    store, _ = _store()
    touches = Touches(store)
    for row in range(CHAIN):
        store.chunks.parent[row] = NONE  # all are roots
        _use(store, touches, row, 1 + row)
    assert len(touches._tips) == 16


@pytest.mark.parametrize("which", ["dram", "below"])
def test_where_one_policy_needs_whole_chains_all_are_told_them(which: str) -> None:
    store, policy = _store()
    below = _Policy()
    store.ladder.lowers.append(SimpleNamespace(policy=below))
    (policy if which == "dram" else below).whole = True
    touches = Touches(store)
    for step, last in enumerate(range(15, CHAIN, 16)):
        _use(store, touches, last, 1 + step)
    assert policy.told == [(list(range(16 * n + 16)), 1 + n) for n in range(4)]
    assert below.told == policy.told


def test_whose_turn_it_is_says_what_is_told() -> None:
    """Another policy takes over from one that failed."""
    store, policy = _store()
    policy.whole = True
    touches = Touches(store)
    _use(store, touches, 15, 1)
    policy.whole = False
    _use(store, touches, 31, 2)  # what the one before was told of is not what this one was
    _use(store, touches, 47, 3)
    assert [len(chain) for chain, _ in policy.told] == [16, 32, 16]


def test_what_is_said_to_be_over_is_told_again_with_its_next_use() -> None:
    store, policy = _store()
    touches = Touches(store)
    _use(store, touches, 31, 1)
    rows = np.arange(31, -1, -1)
    touches.over(rows, store.chunks.np_key[rows, 0])
    _use(store, touches, 47, 2)
    assert policy.cooled == [rows.tolist()]
    assert policy.told[1:] == [(list(range(48)), 2)]
