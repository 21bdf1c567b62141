"""Reuse distances against a list that is searched, and their curve against replays by LRU."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvd.eviction.distances import _BINS, SAME_USE_NS, Distances, _bin_of
from kvd.eviction.hot import SHARE, Hot
from kvd.eviction.lru import Lru
from kvd.tools.simulate.replay import digest, replay
from kvd.tools.simulate.trace import Trace, read_trace

DATA = Path(__file__).resolve().parent.parent / "data"
EXCERPTS = [DATA / "conversation_excerpt.jsonl", DATA / "synthetic_excerpt.jsonl"]
TOP = 1 << 64
MIB = 1 << 20


class Naive:
    """All that is followed in a list, coldest first: (digest, size, when, asked)."""

    def __init__(self, samples: int, most: int) -> None:
        self.samples, self.most = samples, most
        self.bar = TOP
        self.list: list[tuple[int, int, int, bool]] = []
        self.hits = [0.0] * _BINS
        self.uses = self.seen = 0.0

    def find(self, key: int) -> int | None:
        return next((n for n, item in enumerate(self.list) if item[0] == key), None)

    def told(self, keys: list[int], size: int, now: int, stored: bool) -> None:
        scale = TOP / self.bar
        if not stored:
            self.uses += len(keys)
        mine = [key for key in keys if key < self.bar]
        for key in mine:
            at = self.find(key)
            if stored:
                known = at is not None
                if known and (self.list[at][3] or now - self.list[at][2] < SAME_USE_NS):
                    continue
                self.uses += scale
            self.seen += scale
            if at is not None:
                nearer = sum(item[1] for item in self.list[at + 1 :])
                self.hits[_bin_of(nearer * scale + self.list[at][1])] += scale
        for key in reversed(mine):
            if key >= self.bar:
                continue
            at = self.find(key)
            if at is not None:
                del self.list[at]
            self.list.append((key, size, now, not stored))
            if len(self.list) > self.samples:
                self.bar = max(item[0] for item in self.list)
                self.list = [item for item in self.list if item[0] < self.bar]
        while sum(i[1] for i in self.list) * TOP > self.most * self.bar and len(self.list) > 1:
            del self.list[0]


keys = st.integers(0, 40).map(digest)
calls = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(keys, min_size=1, max_size=8, unique=True),
        st.sampled_from([4096, 5000, 1 << 21]),
        st.sampled_from([0, SAME_USE_NS // 2, 3 * SAME_USE_NS]),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(calls, st.sampled_from([3, 8, 100]), st.sampled_from([30_000, 1 << 23, 1 << 40]))
def test_distances_are_those_of_a_list(
    some: list[tuple[bool, list[int], int, int]], samples: int, most: int
) -> None:
    real, naive = Distances(samples, most_bytes=most), Naive(samples, most)
    now = 0
    for stored, request, size, wait in some:
        now += wait
        tell = real.stored if stored else real.asked
        tell(np.array(request, np.uint64), size, now)
        naive.told(request, size, now, stored)
        assert real.bar == naive.bar
        assert real.followed == len(naive.list) <= samples
        assert real.uses == pytest.approx(naive.uses)
    assert list(real._hits) == pytest.approx(naive.hits)
    assert real._seen == pytest.approx(naive.seen)


@given(st.lists(st.lists(keys, min_size=1, max_size=3, unique=True), min_size=1, max_size=6))
def test_requests_can_be_told_together(requests: list[list[int]]) -> None:
    alone, together = Distances(5), Distances(5)
    for request in requests:
        alone.asked(np.array(request, np.uint64), 4096, 7)
    flat = np.array([key for request in requests for key in request], np.uint64)
    together.asked(flat, 4096, 7, [len(request) for request in requests])
    if alone.bar == together.bar == TOP:  # else some were left out of the first only
        assert list(alone._hits) == list(together._hits)
    assert alone.uses == together.uses


def told(trace: Trace, *, samples: int, rate: float, salt: int = 0) -> Distances:
    digests = np.array([digest(b + (salt << 32)) for b in range(trace.unique_blocks)], np.uint64)
    distances = Distances(samples, rate)
    for now, _, chain in trace.requests:
        distances.asked(digests[list(chain)], MIB, now)
    return distances


@pytest.mark.parametrize("path", EXCERPTS, ids=["conversation", "synthetic"])
def test_with_all_keys_followed_the_curve_is_lrus(path: Path) -> None:
    """Within a point: a replay holds back the blocks of the request at hand, and bins are an
    eighth of an octave."""
    trace = read_trace(path)
    distances = told(trace, samples=1 << 16, rate=1.0)
    for percent in (5, 10, 20, 50, 100):
        capacity = trace.unique_blocks * percent // 100
        exact = replay(trace, Lru, [capacity]).block_hit_pct
        assert 100 * distances.hit_share(capacity * MIB) == pytest.approx(exact, abs=1.0), percent


@pytest.mark.parametrize("path", EXCERPTS, ids=["conversation", "synthetic"])
def test_a_sample_tells_nearly_the_same(path: Path) -> None:
    trace = read_trace(path)
    whole = told(trace, samples=1 << 16, rate=1.0)
    errors = []
    for salt in range(1, 7):
        part = told(trace, samples=512, rate=0.5, salt=salt)
        assert part.followed <= 512 and part.rate < 0.2
        for percent in (5, 20, 50):
            nbytes = trace.unique_blocks * percent // 100 * MIB
            errors.append(part.hit_share(nbytes) - whole.hit_share(nbytes))
    assert np.sqrt(np.mean(np.square(errors))) < 0.05
    assert abs(np.mean(errors)) < 0.03  # neither always too high nor too low


def test_sizes_count_in_bytes() -> None:
    distances = Distances()
    one, large = np.array([1], np.uint64), np.array([2], np.uint64)
    for now in range(50):
        distances.asked(one, 8192, now * SAME_USE_NS)
        distances.asked(large, 64 * MIB, now * SAME_USE_NS)
    assert distances.hit_share(32 * MIB) == 0.0  # the large one stands between the small one's uses
    assert distances.hit_share(70 * MIB) == pytest.approx(0.98)


def test_a_store_after_a_lookup_is_the_same_use() -> None:
    distances = Distances()
    request = np.array([5, 6], np.uint64)
    distances.asked(request, 4096, 0)
    distances.stored(request, 4096, 5 * SAME_USE_NS)
    assert distances.uses == 2 and distances.hit_share(1 << 40) == 0.0
    distances.stored(request, 4096, 5 * SAME_USE_NS + 1)  # again, in larger parts
    assert distances.uses == 2
    distances.stored(request, 4096, 60 * SAME_USE_NS)  # who never asks uses by storing
    assert distances.uses == 4 and distances.hit_share(1 << 40) == 0.5


def test_what_is_long_ago_counts_less() -> None:
    distances = Distances(half_life_s=16.0)
    one = np.array([1], np.uint64)
    for now in range(100):
        distances.asked(one, 4096, now)
    for n in range(100):
        distances.asked(np.array([1000 + n], np.uint64), 4096, (20 + n) * SAME_USE_NS)
    even = Distances()
    for now in range(100):
        even.asked(one, 4096, now)
    for n in range(100):
        even.asked(np.array([1000 + n], np.uint64), 4096, now)
    assert even.hit_share(1 << 30) == pytest.approx(0.495)
    assert distances.hit_share(1 << 30) < 0.1
    assert distances.sampled < even.sampled


def test_a_long_life_keeps_following_the_living() -> None:
    """Keys that never come back don't push the bar down for ever."""
    distances = Distances(256, most_bytes=200 * 4096)
    for n in range(30_000):
        distances.asked(np.array([digest(n), digest(n - n % 50)], np.uint64), 4096, n)
    assert distances.rate > 0.5
    assert distances.hit_share(200 * 4096) > 0.45


def test_the_curve_rises_and_is_short() -> None:
    distances = told(read_trace(EXCERPTS[0]), samples=2048, rate=1.0)
    curve = distances.curve(24)
    assert 2 <= len(curve) <= 24
    assert all(a.nbytes < b.nbytes and a.hit <= b.hit for a, b in pairwise(curve))
    assert curve[-1].hit == pytest.approx(distances.hit_share(1 << 59))
    assert Distances().curve() == []


def test_hot_keys_are_found_and_no_others() -> None:
    hot = Hot()
    rng = np.random.default_rng(4)
    for n in range(3000):
        request = rng.integers(1 << 20, 1 << 63, 24, np.uint64)
        request[0] = 7
        if n % 4 == 0:
            request[1] = 8
        hot.told(request)
    assert sorted(hot.uses()) == [7, 8]
    mask = hot.among(np.array([3, 7, 9, 8], np.uint64))
    assert mask is not None and mask.tolist() == [False, True, False, True]
    assert hot.among(np.array([3, 9], np.uint64)) is None
    assert SHARE < 1 / 24 / 4  # what was found had more than that


def test_hot_keys_fade_when_they_are_used_no_more() -> None:
    hot = Hot()
    rng = np.random.default_rng(5)
    for n in range(60_000):
        request = rng.integers(1 << 20, 1 << 63, 64, np.uint64)
        if n < 6_000:
            request[0] = 7
        hot.told(request)
        if n == 5_000:
            assert set(hot.uses()) == {7}
    assert hot.uses() == {}


def test_a_hot_key_that_is_not_followed_is_counted() -> None:
    """Whatever its digest: a tenth of all uses is one key's, at a short distance."""
    shares = []
    for key in (TOP - 5, 5):
        distances = Distances(64, 0.01)
        for n in range(20_000):
            request = np.array([digest(10 * n + i) for i in range(10)], np.uint64)
            request[0] = key
            distances.asked(request, 4096, n)
        shares.append(distances.hit_share(1 << 40))
    assert shares == pytest.approx([0.1, 0.1], abs=0.01)
