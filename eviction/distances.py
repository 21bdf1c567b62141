"""Reuse distances of live requests, and from them what another capacity would have hit.

The law of this module: a fixed sample, whatever the traffic. A key is followed if its digest is
below a bar, so all uses of it are or none; when more than `samples` are followed, the bar sinks
and those above it are let go (SHARDS with a fixed size, Waldspurger et al., FAST 2015). A use's
distance is the bytes of everything used since the last use of the same key, scaled up by the
sampled share: an LRU of at least so many bytes would have hit. What lies further back than
`most_bytes` is let go, too, or a daemon that lives long would follow nothing but the dead.

Of the few keys with much of all uses, a sample has all or nothing; they are counted by themselves
(`hot.py`); one that is not followed at the bytes of all uses since its last, which for such a key
is near enough. What a key had in the sample before it was found hot is taken out again.

Digests must be mixed by a secret, or whoever chooses keys chooses the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import log2
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.hot import Hot
from kvd.eviction.order import Order, Spot

SAMPLES: Final = 8192
SAME_USE_NS: Final = 1_000_000_000
_WORD: Final = 1 << 64
_PER_OCTAVE: Final = 8
_FIRST_OCTAVE: Final = 12  # 4 KiB; whatever is nearer counts there
_BINS: Final = _PER_OCTAVE * 40
_EDGES: Final = 2.0 ** (_FIRST_OCTAVE + np.arange(_BINS + 1) / _PER_OCTAVE)
_FADES: Final = 16  # steps of a half-life


class Point(NamedTuple):
    """An LRU of `nbytes` would have hit `hit` (0..1) of the uses."""

    nbytes: int
    hit: float


class _Key(Spot):
    """A key that is followed. `asked`: looked up, and a store of it belongs to that; `uses`: its
    own, and `weight`: all that these stood for."""

    __slots__ = ("asked", "digest", "last_ns", "uses", "weight")

    def __init__(self, digest: int, weight: float) -> None:
        super().__init__()
        self.digest = digest
        self.last_ns = 0
        self.asked = False
        self.uses, self.weight = 1.0, weight


class Distances:
    """`samples`: keys followed at most. `rate`: of all keys, followed at first. `half_life_s`:
    what was seen so long ago counts half (0: as much as what is seen now)."""

    def __init__(
        self,
        samples: int = SAMPLES,
        rate: float = 1.0,
        most_bytes: int = 1 << 60,
        half_life_s: float = 0.0,
    ) -> None:
        self._samples = max(1, samples)
        self._most = most_bytes
        self._set_bar(min(_WORD, max(1, int(rate * _WORD))))
        self._half_ns = half_life_s * 1e9
        self._fade_at = 0
        self._keys: dict[int, _Key] = {}
        self._order = Order(self._samples + 1)
        self._high: list[int] = []  # heap of negated digests, those let go among them
        self._hits = np.zeros(_BINS)
        self._seen = 0.0  # what the sampled ones stand for, hits and misses
        self._told = 0.0  # how many these are
        self._uses = 0.0  # all that were told, sampled or not
        self._hot_keys = Hot()
        self._hot_last: dict[int, float] = {}  # of the hot keys: bytes of all uses until the last
        self._hot_hits = np.zeros(_BINS)
        self._hot_uses = 0.0
        self._all_bytes = 0.0  # of all uses

    # -- figures --------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """Share of all keys that are followed."""
        return self._bar / _WORD

    @property
    def bar(self) -> int:
        """Digests below it are followed; at most 2^64."""
        return self._bar

    @property
    def followed(self) -> int:
        """Keys followed now."""
        return len(self._keys)

    @property
    def sampled(self) -> int:
        """Uses behind the curve, as they fade: how far it can be trusted."""
        return int(self._told)

    @property
    def uses(self) -> float:
        """All uses that were told, as they fade."""
        return self._uses

    def hit_share(self, nbytes: float) -> float:
        """Share (0..1) of all uses that an LRU of so many bytes would have hit."""
        if self._uses <= 0.0:
            return 0.0
        return float(self._shares(np.array([nbytes]))[0])

    def curve(self, points: int = 48) -> list[Point]:
        """At most `points` of the curve, from the first capacity that hits to where it is flat."""
        filled = np.flatnonzero(self._hits + self._hot_hits)
        if self._uses <= 0.0 or not len(filled):
            return []
        low, high = int(filled[0]), int(filled[-1]) + 1
        at = np.unique(np.linspace(low, high, min(points, high - low + 1)).astype(int))
        shares = self._shares(_EDGES[at])
        return [
            Point(int(nbytes), share)
            for nbytes, share in zip(_EDGES[at].tolist(), shares.tolist(), strict=True)
        ]

    def _shares(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        rest = (self._uses - self._hot_uses) / self._seen if self._seen else 0.0
        hits = self._hits * rest + self._hot_hits
        sums = np.concatenate([[0.0], hits.cumsum()])
        found = np.interp(np.log2(np.maximum(nbytes, 1.0)), np.log2(_EDGES), sums, left=0.0)
        shares: NDArray[np.float64] = np.clip(found / self._uses, 0.0, 1.0)
        return shares

    # -- uses -----------------------------------------------------------------------------------

    def asked(
        self, digests: NDArray[np.uint64], size: int, now: int, lengths: Sequence[int] = ()
    ) -> None:
        """Requests asked for these keys, each of `size` bytes: one after the other, root first,
        of so many keys each (nothing: all are of one). Distances are those before the request."""
        self._fade(now)
        self._uses += len(digests)
        self._all_bytes += len(digests) * size
        if self._hot_keys.told(digests):
            self._change_hot(size)
        hot = self._hot_keys.among(digests)
        if hot is not None:
            self._use_hot(digests[hot].tolist())
        for mine in self._mine(digests, lengths):
            self._use(mine, size, now, stored=False)

    def stored(
        self, digests: NDArray[np.uint64], size: int, now: int, lengths: Sequence[int] = ()
    ) -> None:
        """Requests stored these keys. It is a use of its own if none has asked for the key
        before, or the key was stored already: not the end of a request that began with asking."""
        self._fade(now)
        for mine in self._mine(digests, lengths):
            self._use(mine, size, now, stored=True)

    def _mine(self, digests: NDArray[np.uint64], lengths: Sequence[int]) -> list[list[int]]:
        """Those that are followed, by request."""
        if self._bar >= _WORD:
            at = np.arange(len(digests))
        else:
            at = np.flatnonzero(digests < np.uint64(self._bar))
        if not len(at):
            return []
        mine: list[int] = digests[at].tolist()
        if len(lengths) <= 1:
            return [mine]
        places: list[int] = at.tolist()
        requests: list[list[int]] = []
        begin = end = n = 0
        for length in lengths:
            begin = n
            end += length
            while n < len(places) and places[n] < end:
                n += 1
            if n > begin:
                requests.append(mine[begin:n])
        return requests

    def _change_hot(self, size: int) -> None:
        """Other keys are hot now. What a new one had is moved from the sample's share to its own,
        at the distance that it should have; out of the sample, the shortest."""
        before, self._hot_last = self._hot_last, {}
        for digest, uses in self._hot_keys.uses().items():
            if digest in before:
                self._hot_last[digest] = before[digest]
                continue
            self._hot_last[digest] = self._all_bytes
            key = self._keys.get(digest)
            if key is not None:
                uses = key.uses
                self._hits -= np.diff(np.minimum(self._hits.cumsum(), key.weight), prepend=0.0)
                self._seen = max(0.0, self._seen - key.weight)
                key.uses = key.weight = 0.0
            uses = max(1.0, min(uses, self._uses - self._hot_uses))
            self._hot_uses += uses
            self._hot_hits[_bin_of(size * self._uses / uses)] += uses

    def _use_hot(self, hot: list[int]) -> None:
        last, end = self._hot_last, self._all_bytes
        for digest in hot:
            key = self._keys.get(digest)
            distance = end - last[digest] if key is None else self._distance(key)
            self._hot_uses += 1.0
            self._hot_hits[_bin_of(distance)] += 1.0
            last[digest] = end

    def _use(self, mine: list[int], size: int, now: int, *, stored: bool) -> None:
        """Keys that are followed were used in one request."""
        scale = self._scale
        for digest in mine:
            key = self._keys.get(digest)
            if stored and key is not None and (key.asked or now - key.last_ns < SAME_USE_NS):
                continue
            if digest in self._hot_last:
                continue
            self._seen += scale
            self._told += 1.0
            if stored:
                self._uses += scale  # how many of those not followed were uses is not known
            if key is not None:
                key.uses += 1.0
                key.weight += scale
                self._hits[_bin_of(self._distance(key))] += scale
        for digest in reversed(mine):
            if digest < self._bar:  # it may have sunk meanwhile
                self._move(digest, size, now, asked=not stored)
                if len(self._keys) > self._samples:
                    self._lower()
        while self._order.bytes > self._limit and len(self._keys) > 1:
            self._drop_coldest()

    # -- what is followed -----------------------------------------------------------------------

    def _move(self, digest: int, size: int, now: int, *, asked: bool) -> None:
        """The key is the hottest now."""
        key = self._keys.get(digest)
        if key is None:
            key = self._keys[digest] = _Key(digest, self._scale)
            heappush(self._high, -digest)
        else:
            self._order.take(key)
        key.last_ns, key.asked = now, asked
        self._order.push(key, size)

    def _distance(self, key: _Key) -> float:
        """Bytes of all that was used since, and its own."""
        return self._order.since(key) * _WORD / self._bar + key.size

    def _lower(self) -> None:
        """Follow fewer: the bar sinks to the highest digest of those followed."""
        while True:
            digest = -heappop(self._high)
            key = self._keys.pop(digest, None)
            if key is not None:
                self._order.take(key)
                self._set_bar(max(1, digest))
                return

    def _set_bar(self, bar: int) -> None:
        """Digests below it are followed, each for so many."""
        self._bar = bar
        self._scale = _WORD / bar
        self._limit = self._most * bar // _WORD  # bytes of those followed

    def _drop_coldest(self) -> None:
        key = self._order.coldest()
        self._order.take(key)
        assert isinstance(key, _Key)
        del self._keys[key.digest]
        if len(self._high) > 4 * self._samples:  # a sorted list is a heap
            self._high = sorted(-digest for digest in self._keys)

    def _fade(self, now: int) -> None:
        if not self._half_ns or now < self._fade_at:
            return
        if self._fade_at:
            factor = 0.5 ** (1.0 / _FADES)
            self._hits *= factor
            self._seen *= factor
            self._told *= factor
            self._uses *= factor
            self._hot_hits *= factor
            self._hot_uses *= factor
        self._fade_at = now + int(self._half_ns / _FADES)


def _bin_of(nbytes: float) -> int:
    """The bin below whose upper edge, in bytes, the distance lies."""
    place = int(_PER_OCTAVE * (log2(max(nbytes, 1.0)) - _FIRST_OCTAVE))
    return 0 if place < 0 else min(place, _BINS - 1)
