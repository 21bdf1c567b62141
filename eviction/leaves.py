"""The order in which the leaves of a forest of resident chunks may go.

The law of this module: only leaves are candidates. A chunk enters the order when its last
resident child has left, so a prefix goes from its leaves whatever the scores say. A score only
rises between two visits (or is lowered through `_rescore`), so an entry in a heap is a lower bound
and a touch costs no heap operation: a stale entry is put right when it reaches the top. The chunk
inserted last is held back: it is named when no other is left. What was named and may not go
(`defer`) stands aside, out of the heaps, with its score, until a use or an eviction brings it back.
Heaps hold leaves only.

Uses of a chunk less than `SAME_USE_S` apart are one use (correlated references; O'Neil, SIGMOD
1993): a request touches its chain when it is looked up and again when it stores what was missing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isinf, nan
from typing import Final

from kvd.eviction.aside import Aside
from kvd.eviction.base import LATELY_NS
from kvd.eviction.residents import ABSENT, Residents
from kvd.eviction.walk import Walk
from kvd.native import mypyc_attr

SAME_USE_S: Final = 1.0
_SLACK: Final = 1024  # stale entries that a heap may hold beyond twice its chunks


def worth(age_ns: float) -> float:
    """Worth of a chunk that is as good as one used once, `age_ns` ago: 1 / (1 + seconds), on
    beyond 1 for what is better than just used. Positive, so that a slab's sum means something."""
    age = age_ns * 1e-9
    return 1.0 / (1.0 + age) if age >= 0.0 else 1.0 - age


@mypyc_attr(allow_interpreted_subclasses=True)
class LeafPolicy(Residents):
    """What every policy with one score a chunk shares: who is resident, and who goes first.

    A subclass gives `_first` (score at insertion) and `_use`, and may keep ghosts.
    """

    def __init__(self, same_use_s: float = SAME_USE_S) -> None:
        super().__init__()
        self._same_ns = same_use_s * 1e9
        self._heaps: dict[int, list[tuple[float, int]]] = {}
        self._late = Aside()  # deferred
        self._over: set[int] = set()  # cooled
        self._soon = Aside()  # leaves of these that were not deferred
        self._newest = ABSENT

    # -- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        """Score of a chunk that becomes resident. `time`: ns on our own clock."""

    def _use(self, chunk: int, time: int, same: bool) -> None:
        """A resident chunk is used; `same`: the same use as its last one, at a later moment."""

    def _list_of(self, chunk: int, ghost: int) -> int:
        """The list that a chunk enters; called before `_first`."""
        return 0

    def _gone(self, chunk: int, evicted: bool) -> None:
        """The chunk leaves; its fields still hold."""

    def _rescore(self, chunk: int, score: float) -> None:
        """Set a score that may be lower than before. Pre: resident."""
        self._score[chunk] = score
        if isinf(self._entry[chunk]):
            return
        if chunk != self._newest and not self._kids[chunk]:
            self._entry[chunk] = nan
            self._expose(chunk)

    def _rehome(self, chunk: int, home: int) -> None:
        """Move a resident chunk to another list of its queue."""
        self._count[self._home[chunk]] -= 1
        self._count[home] += 1
        self._home[chunk] = home
        entry = self._entry[chunk]
        if entry == inf or entry == -inf:
            return
        self._entry[chunk] = nan
        if chunk != self._newest and not self._kids[chunk]:
            self._expose(chunk)

    def _expose(self, chunk: int) -> None:
        """The chunk is a leaf: see that its heap has an entry for it."""
        entry = self._entry[chunk]
        if entry == entry:  # not nan: a lower bound is there
            return
        if self._over and chunk in self._over:
            self._entry[chunk] = -inf
            self._soon.put(chunk, self._home[chunk] // self._lists)
            return
        home, score = self._home[chunk], self._score[chunk]
        heap = self._heaps.get(home)
        if heap is None:
            heap = self._heaps[home] = []
        elif len(heap) > 2 * self._count[home] + _SLACK:
            heap[:] = {(s, c) for s, c in heap if self._entry[c] == s and self._home[c] == home}
            heapify(heap)
        self._entry[chunk] = score
        heappush(heap, (score, chunk))

    def _top(self, home: int) -> int:
        """The leaf with the lowest score but for what is held back, or -1; puts stale entries
        right on the way."""
        heap = self._heaps.get(home)
        while heap:
            score, chunk = heap[0]
            if self._entry[chunk] != score or self._home[chunk] != home:
                heappop(heap)
                continue
            if self._kids[chunk]:
                heappop(heap)
                self._entry[chunk] = nan
                continue
            now = self._score[chunk]
            if now == score:
                return chunk
            self._entry[chunk] = now
            heapreplace(heap, (now, chunk))
        return ABSENT

    def _held(self, queue: int) -> int:
        """The chunk that is held back, if it is a leaf of this queue, or -1."""
        newest = self._newest
        if newest < 0 or self._kids[newest] or self._home[newest] // self._lists != queue:
            return ABSENT
        return newest

    def _rest(self, queue: int) -> int:
        """The first of those that are named behind all others of their queue, or -1."""
        held = self._held(queue)
        return held if held >= 0 else self._late.first(queue)

    def _recall(self, chain: Sequence[int]) -> None:
        """What stood aside has been used: it is judged by its score again."""
        for chunk in chain:
            self._over.discard(chunk)
            if self._late.take(chunk) or self._soon.take(chunk):
                self._entry[chunk] = nan
                self._expose(chunk)

    def _return(self) -> None:
        """The first of those that were deferred comes back to where it stood."""
        chunk = self._late.first()
        self._late.take(chunk)
        self._entry[chunk] = nan
        self._expose(chunk)

    def _hot(self, parent: int) -> None:
        """Something was stored below a chunk: it is no leaf, and does not stand aside."""
        self._over.discard(parent)
        if self._late.take(parent) or self._soon.take(parent):
            self._entry[parent] = nan

    # -- the contract ---------------------------------------------------------------------------

    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        self._grow(max(chunk, parent) + 1)
        time = self._clock(now)
        newest, self._newest = self._newest, chunk
        home = queue * self._lists + self._list_of(chunk, ghost)
        self._home[chunk] = home
        if home >= len(self._count):
            self._grow_homes(queue)
        self._count[home] += 1
        self._digest[chunk] = ghost
        self._used[chunk] = time
        self._entry[chunk] = nan
        self._parent[chunk] = parent
        if parent >= 0:
            self._parent_life[chunk] = self._life[parent]
            self._kids[parent] += 1
            if self._late or self._over:
                self._hot(parent)
        self._len += 1
        self._score[chunk] = self._first(chunk, ghost, size, time)
        if newest >= 0 and not self._kids[newest]:
            self._expose(newest)

    def touch(self, chain: Sequence[int], now: int) -> None:
        time = self._clock(now)
        if self._late or self._over:
            self._recall(chain)
        home, used, same_ns = self._home, self._used, self._same_ns
        known = len(home)
        for chunk in chain:
            if 0 <= chunk < known and home[chunk] >= 0:
                self._use(chunk, time, time - used[chunk] < same_ns)
                used[chunk] = time

    def whole_chains(self) -> bool:
        """Not where the end of a chain is the same use as its beginning a moment ago: who has
        something below it is no candidate, whatever its score."""
        return self._same_ns < LATELY_NS

    def forget(self, chunk: int, *, evicted: bool) -> None:
        if not self.resident(chunk):
            return
        self._gone(chunk, evicted)
        if self._over and chunk in self._over:
            self._over.discard(chunk)
            self._soon.take(chunk)
        if self._late:
            self._late.take(chunk)
            if evicted and self._late:
                self._return()
        if chunk == self._newest:
            self._newest = ABSENT
        self._count[self._home[chunk]] -= 1
        self._home[chunk] = ABSENT
        self._entry[chunk] = nan
        self._len -= 1
        parent = self._parent[chunk]
        if parent >= 0 and self._life[parent] == self._parent_life[chunk]:
            kids = self._kids[parent] - 1
            self._kids[parent] = kids
            if not kids and self._home[parent] >= 0 and parent != self._newest:
                self._expose(parent)
        self._life[chunk] = (self._life[chunk] + 1) & 0xFFFFFFFF
        self._kids[chunk] = 0

    def victims(self, queue: int, now: int) -> Iterator[int]:
        return self._pass(queue, now, stays=False)

    def leaves(self, queue: int, now: int) -> Iterator[int]:
        return self._pass(queue, now, stays=True)

    def _pass(self, queue: int, now: int, *, stays: bool) -> Iterator[int]:
        walk = Walk(self, (queue * self._lists,), stays=stays)
        while True:
            chunk = walk.soon()
            if chunk < 0:
                chunk = walk.take(0)
            if chunk < 0:
                chunk = walk.last()
            if chunk < 0:
                return
            yield chunk

    def defer(self, chunks: Sequence[int], now: int) -> None:
        for chunk in chunks:
            if self.resident(chunk) and not self._kids[chunk]:
                if chunk == self._newest:
                    self._newest = ABSENT
                self._soon.take(chunk)
                self._entry[chunk] = inf
                self._late.put(chunk, self._home[chunk] // self._lists)

    def cool(self, chunks: Sequence[int], now: int) -> None:
        for chunk in chunks:
            if self.resident(chunk):
                self._over.add(chunk)
                if chunk == self._newest:
                    self._newest = ABSENT
                if not self._kids[chunk] and chunk not in self._late:
                    self._entry[chunk] = nan
                    self._expose(chunk)

    def coldness(self, queue: int, now: int) -> float | None:
        chunk = self._soon.first(queue)
        if chunk < 0:
            chunk = self._top(queue * self._lists)
        return self._coldness_of(chunk if chunk >= 0 else self._rest(queue), now)

    def _coldness_of(self, first: int, now: int) -> float | None:
        """Coldness of a queue with this first victim (-1: none)."""
        if first < 0:
            return None
        if isinf(self._entry[first]):
            return max(0.0, self._entry[first])
        return self.value(first, now)

    def value(self, chunk: int, now: int) -> float:
        if not self.resident(chunk):
            return 0.0
        return worth(self._peek(now) - self._score[chunk])
