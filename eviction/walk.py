"""The order in which chunks would go, seen without changing anything.

The law of this module: what is named counts as gone for the rest of the pass, so a parent follows
when its last resident child has been named, at its own score; unless what is named is said to stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import ClassVar, Final, Protocol

from kvd.eviction.aside import Aside

_RESOLVED: Final = -1  # in place of a position in the heap: this is the chunk's score now


class Forest(Protocol):
    """What a pass reads of a policy (`LeafPolicy`)."""

    _kids: array[int]
    _home: array[int]
    _score: array[float]
    _entry: array[float]
    _heaps: dict[int, list[tuple[float, int]]]
    _newest: int
    _late: Aside
    _soon: Aside
    _over: set[int]
    _lists: ClassVar[int]

    def _top(self, home: int) -> int: ...

    def _parent_of(self, chunk: int) -> int: ...


class Walk:
    """One pass over the lists of a queue as if what was named had gone: nothing is changed.

    A parent joins when its last resident child has been named; never, if what is named `stays`.
    `veto(chunk)` true: the chunk is kept for the end of its list. Before all lists stands what was
    cooled, behind them what was deferred.
    """

    def __init__(
        self,
        policy: Forest,
        homes: tuple[int, ...],
        veto: Callable[[int], bool] | None = None,
        *,
        stays: bool = False,
    ) -> None:
        self._policy = policy
        self._homes = homes
        self._veto = veto
        self._stays = stays
        self._joined: set[int] = set()  # an entry may stand in a heap twice
        self._left: dict[int, int] = {}  # parent -> children not named yet
        self._late: list[list[int]] = [[] for _ in homes]
        self._front: list[list[tuple[float, int, int]]] = [[] for _ in homes]
        for front, home in zip(self._front, homes, strict=True):
            policy._top(home)
            heap = policy._heaps.get(home)
            if heap:
                front.append((*heap[0], 0))
        newest = policy._newest
        held = newest >= 0 and policy._home[newest] in homes and not policy._kids[newest]
        self._last = newest if held else -1
        self._cool = iter(policy._soon.of(homes[0] // policy._lists))
        self._cooler: list[int] = []  # whose last child has been named
        self._deferred = iter(policy._late.of(homes[0] // policy._lists))

    def soon(self) -> int:
        """What was cooled, each once, or -1."""
        chunk = self._cooler.pop() if self._cooler else next(self._cool, -1)
        return self._named(chunk) if chunk >= 0 else -1

    def last(self) -> int:
        """What is named when nothing else is left, each once, or -1."""
        chunk, self._last = self._last, -1
        if chunk >= 0:
            return self._named(chunk)
        chunk = next(self._deferred, -1)
        return self._named(chunk) if chunk >= 0 else -1

    def peek(self, which: int) -> int:
        """The next candidate of list number `which`, or -1."""
        policy, front, home = self._policy, self._front[which], self._homes[which]
        heap = policy._heaps.get(home, [])
        while front:
            score, chunk, place = front[0]
            if place == _RESOLVED:
                return chunk
            heappop(front)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(front, (*heap[child], child))
            if policy._entry[chunk] == score and policy._home[chunk] == home:
                if not policy._kids[chunk]:
                    self._join(chunk, which)
        late = self._late[which]
        return late[0] if late else -1

    def take(self, which: int) -> int:
        """Name the next candidate of a list: its parent may follow. -1: there is none."""
        chunk = self.peek(which)
        if chunk < 0:
            return -1
        if self._front[which]:
            heappop(self._front[which])
        else:
            self._late[which].pop(0)
        return self._named(chunk)

    def take_either(self, which: int, other: int) -> int:
        """The next candidate of a list, of another if it has none, or what is held back."""
        chunk = self.take(which)
        if chunk < 0:
            chunk = self.take(other)
        return chunk if chunk >= 0 else self.last()

    def _join(self, chunk: int, which: int) -> None:
        if chunk in self._joined:
            return
        self._joined.add(chunk)
        if self._veto is not None and self._veto(chunk):
            self._late[which].append(chunk)
        else:
            heappush(self._front[which], (self._policy._score[chunk], chunk, _RESOLVED))

    def _named(self, chunk: int) -> int:
        if self._stays:
            return chunk
        policy = self._policy
        parent = policy._parent_of(chunk)
        if parent >= 0:
            left = self._left.get(parent, policy._kids[parent]) - 1
            self._left[parent] = left
            if left or policy._home[parent] not in self._homes:
                pass
            elif parent in policy._over:
                self._cooler.append(parent)
            elif parent == policy._newest:  # its child was there before it
                self._last = parent
            else:
                self._join(parent, self._homes.index(policy._home[parent]))
        return chunk
