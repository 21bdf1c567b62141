"""Evicts what is least likely to be used again soon, by what it has seen happen.

The law of this module: chunks that have behaved alike form a class (how often used; whether a
longer prefix ever hung below), each with a list of its own in the order of last use. The next
victim is the coldest leaf of the list whose odds at that leaf's age are lowest, so the only thing
decided by learning is how a chunk of one class compares with an older one of another. With nothing
learned, or classes that behave alike, this is LRU; what was used once and what is used again and
again part ways only where the requests show that they do. Queues (tenants, sizes) learn apart, each
leaning on what all have seen while it has seen little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly
from kvd.eviction.ghosts import Ghosts
from kvd.eviction.leaves import SAME_USE_S, LeafPolicy, worth
from kvd.eviction.odds import BINS, Odds, bin_of, bins_of
from kvd.eviction.residents import ABSENT
from kvd.eviction.walk import Walk
from kvd.native import mypyc_attr

_MOST: Final = 3  # uses after the first that make a difference
_SAMPLE = 4096  # running lives looked at for one refresh
_FADE_NS: Final = 1800 * 1_000_000_000  # what was learned counts half after so long
_GROUPS: Final = 16  # queues that learn for themselves; those that come later share the last
_FRESH: Final = 256  # evictions that the odds hold for at least: to work them out takes a while
_TIE: Final = 1e-6  # of the recency by which equal odds are told apart


@mypyc_attr(allow_interpreted_subclasses=True)
class Reuse(LeafPolicy):
    """Score: last use, ns. Lists: min(uses, 3) * 2 + (1 if it ever had a child).

    `horizon`: "soon", as a multiple of the mean age at which chunks go. `prior`: see `Odds`.
    """

    name: ClassVar[str] = "reuse"
    _lists: ClassVar[int] = 2 * (_MOST + 1)

    def __init__(
        self,
        ghost_factor: float = 8.0,
        horizon: float = 3.0,
        prior: float = 500.0,
        same_use_s: float = SAME_USE_S,
    ) -> None:
        super().__init__(same_use_s)
        self._factor, self._horizon = ghost_factor, horizon
        self._odds = Odds(self._lists, prior, _GROUPS)
        self._rows: list[int] = []  # of the odds' tables, by home; ABSENT: none yet
        self._known = 0  # queues that have rows
        self._queue = 0  # of the chunk that is being inserted
        self._ghosts = Ghosts(2)  # last use, row
        self._peak = 0
        self._evicted = 0
        self._age_out = 60e9  # mean age at eviction, ns
        self._due = 0  # evictions until the odds are worked out anew
        self._fade_at = 0
        self._restored = False  # the last group of the odds may hold what an earlier life learned

    def _row(self, home: int) -> int:
        """The row of the odds' tables for chunks at a home."""
        rows = self._rows
        row = rows[home] if home < len(rows) else ABSENT
        if row < 0:
            group = min(self._known, _GROUPS - 1)
            self._known += 1
            base = home - home % self._lists
            rows.extend([ABSENT] * (base + self._lists - len(rows)))
            for kind in range(self._lists):
                rows[base + kind] = group * self._lists + kind
            row = rows[home]
        return row

    # -- uses -----------------------------------------------------------------------------------

    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        self._queue = queue
        super().insert(chunk, parent=parent, queue=queue, size=size, ghost=ghost, now=now)

    def _list_of(self, chunk: int, ghost: int) -> int:
        old = self._ghosts.take(ghost)
        if old is None:
            return 0
        last, kind = old[0], int(old[1]) % self._lists
        age = self._time - last
        if age < self._same_ns:
            return kind
        self._odds.hits[self._row(self._queue * self._lists + kind)][bin_of(age)] += 1.0
        return min(kind + 2, self._lists - 2 + kind % 2)

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._peak = max(self._peak, self._len)
        parent = self._parent[chunk]  # as it is just now
        if parent >= 0:
            home = self._home[parent]
            if home >= 0 and not home & 1:
                self._rehome(parent, home | 1)
        return float(time)

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        super()._came(chunks, times)
        self._peak = max(self._peak, self._len)

    def _settled(self, chunks: NDArray[np.int64]) -> None:
        had = chunks[np.frombuffer(self._kids, np.int32)[chunks] > 0]
        np.frombuffer(self._home, np.int32)[had] |= 1
        scores = np.frombuffer(self._score)
        scores[chunks] = np.minimum(scores[chunks], self._time)  # ages are not below 0

    def _use(self, chunk: int, time: int, same: bool) -> None:
        if not same:
            home = self._home[chunk]
            kind = home % self._lists
            self._odds.hits[self._row(home)][bin_of(time - self._used[chunk])] += 1.0
            if kind < self._lists - 2:
                self._score[chunk] = float(time)
                self._rehome(chunk, home + 2)
                return
        self._score[chunk] = float(time)

    def _gone(self, chunk: int, evicted: bool) -> None:
        row = self._row(self._home[chunk])
        used = self._used[chunk]
        age = self._time - used
        if not evicted:
            self._odds.ends[row][bin_of(age)] += 1.0
            return
        self._evicted += 1
        self._due -= 1
        self._age_out += (age - self._age_out) * max(0.002, 1.0 / self._evicted)
        values = (used, float(row))
        lost = self._ghosts.put(self._digest[chunk], values, int(self._factor * self._peak))
        if lost is not None:
            self._odds.ends[int(lost[1])][bin_of(self._time - lost[0])] += 1.0

    # -- choosing -------------------------------------------------------------------------------

    def _refresh(self, time: int) -> None:
        self._due = max(_FRESH, min(1024, self._len // 4))
        stride = 1 + self._len // _SAMPLE
        home = np.frombuffer(self._home, dtype=np.int32)[::stride]
        used = np.frombuffer(self._used)[::stride][home >= 0]
        home = home[home >= 0]
        there = np.flatnonzero(np.bincount(home))
        row_of = np.zeros(int(there[-1]) + 1 if len(there) else 0, np.intp)
        row_of[there] = [self._row(one) for one in there.tolist()]
        groups = self._groups()
        living = self._counted(row_of[home], time - used, groups) * float(stride)
        stride = 1 + len(self._ghosts) // _SAMPLE
        ghosts = self._ghosts.values()[::stride]
        rows = ghosts[:, 1].astype(np.intp)
        living += self._counted(rows, time - ghosts[:, 0], groups) * float(stride)
        self._odds.refresh(living, self._age_out * self._horizon, groups)
        if time >= self._fade_at:
            if self._fade_at:
                self._odds.fade(0.5 ** (1.0 / 16.0))
            self._fade_at = time + _FADE_NS // 16

    def _groups(self) -> list[int]:
        """Those of the odds that anything is known of."""
        groups = list(range(min(self._known, _GROUPS)))
        if self._restored and len(groups) < _GROUPS:
            groups.append(_GROUPS - 1)
        return groups

    def _counted(
        self, rows: NDArray[np.intp], ages: NDArray[np.float64], groups: list[int]
    ) -> NDArray[np.float64]:
        """How many there are of each row of the odds' tables for these groups, by age."""
        size = self._lists * len(groups)
        if groups and groups[-1] >= len(groups):  # the rows of the last one come closer
            rows = np.where(rows < size, rows, rows - (groups[-1] + 1 - len(groups)) * self._lists)
        counts = np.bincount(rows * BINS + bins_of(ages), minlength=size * BINS)
        return counts.astype(np.float64).reshape(size, BINS)

    def _worth(self, chunk: int, time: int) -> float:
        age = time - self._score[chunk]
        return self._odds.table[self._row(self._home[chunk])][bin_of(age)] + _TIE * worth(age)

    def _best(self, queue: int, time: int) -> int:
        """The first victim, or -1."""
        if self._due <= 0:
            self._refresh(time)
        if (cool := self._soon.first(queue)) >= 0:
            return cool
        base, best, least, known = queue * self._lists, ABSENT, 0.0, False
        count = self._count
        for home in range(base, min(base + self._lists, len(count))):
            if not count[home] or (chunk := self._top(home)) < 0:
                continue
            if best < 0:
                best = chunk  # what it is worth matters only beside another
                self._row(home)
                continue
            if not known:
                least, known = self._worth(best, time), True
            value = self._worth(chunk, time)
            if value < least:
                best, least = chunk, value
        return best if best >= 0 else self._rest(queue)

    def _pass(self, queue: int, now: int, *, stays: bool) -> Iterator[int]:
        time = self._peek(now)
        first = self._best(queue, time)
        if first < 0:
            return
        yield first
        base = queue * self._lists
        walk = Walk(self, tuple(range(base, base + self._lists)), stays=stays)
        while True:
            if (chunk := walk.soon()) >= 0:
                if chunk != first:
                    yield chunk
                continue
            which, least = ABSENT, 0.0
            for n in range(self._lists):
                chunk = walk.peek(n)
                if chunk >= 0:
                    value = self._worth(chunk, time)
                    if which < 0 or value < least:
                        which, least = n, value
            chunk = walk.take(which) if which >= 0 else walk.last()
            if chunk < 0:
                return
            if chunk != first:
                yield chunk

    def first(self, queue: int, now: int) -> int:
        return self._best(queue, self._peek(now))

    def coldness(self, queue: int, now: int) -> float | None:
        return self._coldness_of(self._best(queue, self._peek(now)), now)

    def value(self, chunk: int, now: int) -> float:
        return self._worth(chunk, self._peek(now)) if self.resident(chunk) else 0.0

    # -- restart --------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        hits, ends = self._odds.together()  # queues have other numbers after a restart
        return {
            **super().snapshot(),
            "peak": self._peak,
            "evicted": self._evicted,
            "age_out": self._age_out,
            "hits": hits.astype("<f8").tobytes(),
            "ends": ends.astype("<f8").tobytes(),
        }

    def ghosts(self, begin: int, count: int) -> Ghostly | None:
        return self._ghosts.part(begin, count)

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        super().restore(state, ghosts, now)
        self._peak, self._evicted = int(state["peak"]), max(0, int(state["evicted"]))
        self._age_out = max(1e6, float(state["age_out"]))
        # the last group is that of whoever has none of its own
        self._restored = True
        for name, counts in (("hits", self._odds.hits), ("ends", self._odds.ends)):
            for row, learned in zip(
                counts[-self._lists :], _table(state[name], self._lists), strict=True
            ):
                row[:] = learned
        digests, values = ghosts
        if len(digests):
            values = values.copy()
            values[:, 0] = np.minimum(values[:, 0], self._time)
            kinds = np.clip(values[:, 1], 0, self._lists * _GROUPS - 1).astype(int) % self._lists
            values[:, 1] = kinds + self._lists * (_GROUPS - 1)
            self._ghosts.restore(digests, values)


def _table(packed: bytes, rows: int) -> NDArray[np.float64]:
    table = np.frombuffer(packed, "<f8").reshape(rows, BINS)
    if not (np.isfinite(table).all() and (table >= 0.0).all()):
        raise ValueError("a life table with something else than counts in it")
    return np.ascontiguousarray(table, np.float64)
