"""Which chunks a selector means, and where a visit of them goes on.

The law of this module: a visit looks at a bounded number of rows and can be taken up again at its
cursor whatever happened meanwhile. A subtree is visited leaves first, by keys: the rows of a walk
may be others' by the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import Kind
from kvd.core import columns as col
from kvd.core.columns import NONE
from kvd.core.events import Selector
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.errors import BadKey, LimitExceeded

TIER: Final = "dram"
STATES = ("writing", "unsealed", "sealed", "quarantined")
VISIT: Final = 512  # rows looked at one by one in one call
WALK: Final = 1 << 62  # cursors of walks begin here, others are row numbers

_SCAN: Final = 16384  # rows looked at all at once in one call
_KEYS: Final = 4096
_WALKS: Final = 256  # walks that are remembered


class Walk:
    """A position in a subtree, leaves first. By keys, for rows may be others' by the next call."""

    def __init__(self, space: Space, root: bytes) -> None:
        self.space = space
        self.root = root
        self.next: bytes | None = None  # None: begin
        # sums for a row of `prefixes`
        self.chunks = self.bytes = self.hits = 0
        self.depth = 0
        self.last: int | None = None
        self.after = 0  # where the list of roots goes on


class Selecting:
    """Selectors, and walks that are under way."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._walks: OrderedDict[int, Walk] = OrderedDict()
        self._walk_number = WALK

    def recall(self, cursor: int) -> Walk:
        """The walk of a cursor. BadKey if it is not remembered any more."""
        walk = self._walks.pop(cursor, None)
        if walk is None:
            raise BadKey("the cursor is too old: begin again")
        return walk

    def state(self, row: int) -> str:
        store, chunks = self.store, self.store.chunks
        if chunks.bad[row]:
            return "quarantined"
        if chunks.writing[row]:
            return "writing"
        first = chunks.cell[row]
        shards = store.spaces.of(chunks.space[row]).shards
        for cell in range(first, first + shards):
            if store.cells.state[cell] == col.READY and not store.cells.marks[cell] & col.SEALED:
                return "unsealed"
        return "sealed"

    def there(self, row: int, tier: str | None) -> bool:
        """Whether the chunk lies in the tier, or (None) in any."""
        store = self.store
        if tier == TIER or not store.layered:
            return store.resident(row)
        lower = None if tier is None else store.ladder.find(tier)
        if lower is None:
            return store.resident(row) or bool(store.chunks.below[row])
        return bool(lower.count[row])

    def check(self, selector: Selector) -> None:
        """BadKey for a condition that nothing can fulfil while this daemon lives: a typing error
        would read as emptiness. Namespaces come and go: one that is not there is none."""
        tiers = [TIER, *(lower.name for lower in self.store.ladder.lowers)]
        if selector.tier is not None and selector.tier not in tiers:
            raise BadKey(f"tier {selector.tier!r} is unknown: known are {', '.join(tiers)}")
        if selector.kind is not None and selector.kind not in (Kind.PREFIX, Kind.CONTENT):
            raise BadKey(f"kind {selector.kind} is unknown: 1 (prefix) or 2 (content)")
        if selector.state is not None and selector.state not in STATES:
            raise BadKey(f"state {selector.state!r} is unknown: {', '.join(STATES)}")
        if len(selector.keys) > _KEYS:
            raise LimitExceeded(f"{len(selector.keys)} keys in a selector, at most {_KEYS}")
        if any(len(k) != 32 for k in selector.keys):
            raise BadKey("a key in a selector must have 32 bytes: use key_prefix for a shorter one")
        if selector.subtree is not None and len(selector.subtree) != 32:
            raise BadKey("the key of a subtree must have 32 bytes")

    def spaces(self, session: Session, selector: Selector) -> list[Space]:
        """Spaces that the session may see and the selector names."""
        if selector == Selector():
            return []
        return [
            space
            for space in self.store.spaces.all()
            if (session.admin or space.namespace == session.namespace)
            and (selector.namespace is None or space.namespace == selector.namespace)
            and (selector.spec is None or space.digest == selector.spec)
            and (selector.kind is None or space.kind == selector.kind)
        ]

    def matches(self, row: int, selector: Selector) -> bool:
        """Whether a chunk of a selected space is meant."""
        store, chunks = self.store, self.store.chunks
        if not chunks.space[row] or store.is_empty(row):
            return False
        tier = selector.tier
        if tier is not None and not self.there(row, tier):
            if tier != TIER or not chunks.writing[row]:
                return False
        prefix = selector.key_prefix
        if prefix is not None and not chunks.key_of(row).startswith(prefix):
            return False
        if selector.idle_ns is not None and store.now - chunks.last[row] < selector.idle_ns:
            return False
        return selector.state is None or self.state(row) == selector.state

    def subtree(self, walk: Walk) -> Iterator[int]:
        """Rows of a walk, leaves first. `walk.next` is set on before a row is given, so that the
        row may go; it is None after the last."""
        chunks, space = self.store.chunks, walk.space
        root = space.get(walk.root)
        if root == NONE:
            walk.next = None
            return
        row = NONE if walk.next is None else space.get(walk.next)
        if row == NONE:  # the beginning, or somebody else took that one: begin again
            row = self._deepest(root)
        while True:
            if row == root:
                walk.next = None
            else:
                sibling = chunks.next[row]
                after = chunks.parent[row] if sibling == NONE else self._deepest(sibling)
                walk.next = chunks.key_of(after)
            key = walk.next
            yield row
            if key is None:
                return
            row = space.get(key)
            if row == NONE:
                root = space.get(walk.root)
                if root == NONE:
                    walk.next = None
                    return
                row = self._deepest(root)

    def _deepest(self, row: int) -> int:
        child = self.store.chunks.child
        while child[row] != NONE:
            row = child[row]
        return row

    def remember(self, walk: Walk) -> int:
        self._walk_number += 1
        self._walks[self._walk_number] = walk
        if len(self._walks) > _WALKS:
            self._walks.popitem(last=False)
        return self._walk_number


class Visit:
    """The chunks that a selector means, from a cursor on, and where it got to."""

    def __init__(
        self, select: Selecting, spaces: list[Space], selector: Selector, cursor: int
    ) -> None:
        self._select = select
        self._store = select.store
        self._spaces = spaces
        self._selector = selector
        self._at = cursor
        self._walk: Walk | None = None
        self._ended = False

    def cursor(self) -> int | None:
        """Where to go on; None at the end."""
        if self._ended:
            return None
        if self._selector.subtree is not None:
            if self._walk is None:
                return self._at
            if self._walk.next is None:
                return self._next_tree()
            return self._select.remember(self._walk)
        return self._at

    def rows(self) -> Iterator[int]:
        if not self._spaces:
            self._ended = True
            return iter(())
        if self._selector.subtree is not None:
            return self._trees()
        if self._selector.keys:
            return self._named()
        return self._all()

    def _named(self) -> Iterator[int]:
        keys = list(dict.fromkeys(self._selector.keys))
        pairs = len(keys) * len(self._spaces)
        while self._at < pairs:
            n, s = divmod(self._at, len(self._spaces))
            self._at += 1
            row = self._spaces[s].get(keys[n])
            if row != NONE and self._select.matches(row, self._selector):
                self._ended = self._at >= pairs
                yield row
        self._ended = True

    def _all(self) -> Iterator[int]:
        chunks = self._store.chunks
        numbers = np.array([s.number for s in self._spaces])
        end = min(self._at + _SCAN, chunks.used)
        left = VISIT
        while self._at < end:
            begin = self._at
            upto = min(begin + 1024, end)
            for row in self._filter(begin, upto, numbers).tolist():
                if left <= 0:
                    return
                left -= 1
                self._at = row + 1
                if self._select.matches(row, self._selector):
                    self._ended = self._at >= chunks.used
                    yield row
            self._at = upto
        self._ended = self._at >= chunks.used

    def _filter(self, begin: int, upto: int, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Rows of the spaces in a range that may match."""
        chunks = self._store.chunks
        space = chunks.np_space[begin:upto]
        mine = np.isin(space, numbers) if len(numbers) > 1 else space == numbers[0]
        prefix = self._selector.key_prefix
        if prefix:
            keys = chunks.np_key[begin:upto].view(np.uint8)[:, : len(prefix)]
            mine &= (keys == np.frombuffer(prefix[:32], np.uint8)).all(axis=1)
        if self._selector.idle_ns is not None:
            mine &= self._store.now - chunks.np_last[begin:upto] >= self._selector.idle_ns
        rows: NDArray[np.int64] = np.flatnonzero(mine) + begin
        return rows

    def _trees(self) -> Iterator[int]:
        """The subtree in each space in turn; its key may be in several."""
        root = self._selector.subtree
        assert root is not None
        left = VISIT
        if self._at >= WALK:
            self._walk = self._select.recall(self._at)
            self._at = self._walk.after
        while True:
            if self._walk is None:
                if self._at >= len(self._spaces):
                    self._ended = True
                    return
                self._walk = Walk(self._spaces[self._at], root)
                self._walk.after = self._at
            for row in self._select.subtree(self._walk):
                left -= 1
                if self._select.matches(row, self._selector):
                    self._ended = self._walk.next is None and self._at + 1 >= len(self._spaces)
                    yield row
                if left <= 0 and self._walk.next is not None:
                    return
            self._walk = None
            self._at += 1

    def _next_tree(self) -> int | None:
        """The tree is done: the next space."""
        after = self._at + 1
        return after if after < len(self._spaces) else None
