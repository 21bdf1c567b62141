"""Keys in the order of their last use, and how many bytes were used since each.

The law of this module: a use, a removal and a question take a logarithm of the keys, at every
single call. Places are given from the cold end to the hot one and not given again; when they run
out, a second set takes over, into which those of the first move a few at each use. What stands in
the first is colder than all of the second.
"""

from __future__ import annotations

from typing import Final

from kvd.native import i64

_STEP: Final = 4  # places of the first set looked at in each use


class Spot:
    """Where a key stands; a subclass may hold more of it."""

    __slots__ = ("places", "size", "where")

    def __init__(self) -> None:
        self.places: _Places | None = None
        self.where = -1
        self.size = 0


class _Places:
    """So many places; bytes up to each of them in a tree (Fenwick, 1994), which is there for the
    places below `end` only and grows as these are filled. Those below `begin` are open at once."""

    __slots__ = ("bytes", "end", "spots", "tree")

    def __init__(self, room: int, begin: int) -> None:
        self.end = begin
        self.spots: list[Spot | None] = [None] * room
        self.tree = [0] * (room + 1)
        self.bytes = 0

    def put(self, where: int, spot: Spot) -> None:
        """Pre: nothing stands there; `where` is not beyond `end`."""
        spot.places, spot.where = self, where
        self.spots[where] = spot
        if where == self.end:
            self._append(spot.size)
        else:
            self._add(where, spot.size)

    def take(self, spot: Spot) -> None:
        self.spots[spot.where] = None
        self._add(spot.where, -spot.size)

    def after(self, where: int) -> int:
        """Bytes of hotter places."""
        tree, total = self.tree, self.bytes
        at: i64 = where + 1
        while at:
            total -= tree[at]
            at &= at - 1
        return total

    def _append(self, nbytes: int) -> None:
        """One place more, whose node sums up those before that it stands for: one, on the
        average."""
        tree = self.tree
        self.bytes += nbytes
        self.end += 1
        at: i64 = self.end
        step: i64 = 1
        while not at & step:
            nbytes += tree[at - step]
            step += step
        tree[at] = nbytes

    def _add(self, where: int, nbytes: int) -> None:
        tree = self.tree
        self.bytes += nbytes
        at: i64 = where + 1
        end: i64 = self.end
        while at <= end:
            tree[at] += nbytes
            at += at & -at


class Order:
    """Spots, at most `most` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._room = 1 << (4 * most - 1).bit_length()
        self._second = _Places(self._room, most)
        self._hot = self._low = most  # places below are for those of the first set
        self._first: _Places | None = None
        self._move_at = 0  # the next place of the first set to empty, towards the cold end
        self._cold = most  # no spot stands below, in the set that has the coldest

    @property
    def bytes(self) -> int:
        """Of all spots."""
        return self._second.bytes + (self._first.bytes if self._first is not None else 0)

    def push(self, spot: Spot, size: int) -> None:
        """The hottest now. Pre: it stands nowhere."""
        if self._hot == self._room:
            self._turn()
        spot.size = size
        self._second.put(self._hot, spot)
        self._hot += 1
        if self._first is not None:
            self._move(_STEP)

    def take(self, spot: Spot) -> None:
        """It stands nowhere from now on."""
        assert spot.places is not None
        spot.places.take(spot)
        spot.places = None

    def since(self, spot: Spot) -> int:
        """Bytes used after it."""
        assert spot.places is not None
        after = spot.places.after(spot.where)
        return after if spot.places is self._second else after + self._second.bytes

    def coldest(self) -> Spot:
        """Pre: there is one."""
        while True:
            places = self._second if self._first is None else self._first
            while self._cold < (self._hot if self._first is None else self._move_at):
                spot = places.spots[self._cold]
                if spot is not None:
                    return spot
                self._cold += 1
            self._emptied()

    def _turn(self) -> None:
        """The second set is full and becomes the first."""
        while self._first is not None:
            self._move(_STEP)
        self._first, self._second = self._second, _Places(self._room, self._most)
        self._move_at = self._room
        self._hot = self._low = self._most

    def _move(self, steps: int) -> None:
        first = self._first
        assert first is not None
        for _ in range(steps):
            if self._move_at <= self._cold:
                self._emptied()
                return
            self._move_at -= 1
            spot = first.spots[self._move_at]
            if spot is not None:
                first.take(spot)
                self._low -= 1
                self._second.put(self._low, spot)

    def _emptied(self) -> None:
        """Nothing is left in the first set."""
        self._first = None
        self._cold = self._low
