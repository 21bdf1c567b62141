"""What an operator sees and names: selectors, rows, pages, and evictions by command.

The law of this module: looking changes nothing, neither recency nor counters; one call visits a
bounded number of chunks and goes on from its cursor; leased chunks are never taken. A subtree is
visited leaves first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import Kind
from kvd.core import columns as col
from kvd.core.actions import EvictResult, ListResult
from kvd.core.columns import NONE
from kvd.core.events import Selector
from kvd.core.lower import READY, Lower
from kvd.core.rooms import Rooms
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.writes import Writes
from kvd.errors import BadKey, LimitExceeded

TIER = "dram"
LEVELS = ("namespaces", "specs", "prefixes", "chunks")
STATES = ("writing", "unsealed", "sealed", "quarantined")

_VISIT = 4096  # rows looked at in one call
_ROWS = 128  # rows made, or chunks removed, in one call
_KEYS = 4096
_WALK = 1 << 62  # cursors of walks begin here, others are row numbers
_WALKS = 256  # walks that are remembered


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


class Listing:
    """Pages, and evictions by command."""

    def __init__(self, store: Store, writes: Writes, rooms: Rooms) -> None:
        self._store = store
        self._writes = writes
        self._rooms = rooms
        self._walks: OrderedDict[int, Walk] = OrderedDict()
        self._walk_number = _WALK

    # -- evict ----------------------------------------------------------------------------------

    def evict(
        self, session: Session, selector: Selector, dry_run: bool, cursor: int, limit: int
    ) -> EvictResult:
        """One slice. BadKey for a selector that can't be carried out."""
        self._check(selector)
        limit = max(1, min(limit, _ROWS))
        matched = evicted = leased = writing = freed = 0
        named: list[dict[str, Any]] = []
        store, chunks = self._store, self._store.chunks
        visit = Visit(self, self._spaces(session, selector), selector, cursor)
        for row in visit.rows():
            held = bool(chunks.leases[row] or row in store.pinned)
            resident = self._there(row, selector.tier)
            matched += 1
            if chunks.writing[row] and selector.tier in (None, TIER):
                writing += 1
            if resident and held:
                leased += 1
            if dry_run:
                if not (resident and held):
                    named.append(self.chunk_row(row))
                    if resident:
                        evicted += 1
                        freed += self._bytes(row)
            else:
                if chunks.writing[row] and selector.tier in (None, TIER):
                    self._writes.evict_writing(row)
                if resident and not held:
                    freed += self._drop(row, selector.tier)
                    evicted += 1
            if matched >= limit:
                break
        after = visit.cursor()
        return EvictResult(matched, evicted, leased, writing, freed, named, after)

    def _there(self, row: int, tier: str | None) -> bool:
        """Whether the chunk lies in the tier, or (None) in any."""
        store = self._store
        if tier == TIER or not store.layered:
            return store.resident(row)
        lower = None if tier is None else store.ladder.find(tier)
        if lower is None:
            return store.resident(row) or bool(store.chunks.below[row])
        return bool(lower.count[row])

    def _drop(self, row: int, tier: str | None) -> int:
        """Remove a chunk from a tier, or from all; payload bytes freed."""
        store = self._store
        below: list[Lower] = [
            lower
            for lower in store.ladder.lowers
            if lower.count[row] and tier in (None, lower.name)
        ]
        if not below:
            return store.drop(row, "command", evicted=False)
        freed = 0
        store.pin(row)
        if tier is None and store.resident(row):
            freed += store.drop(row, "command", evicted=False)
        for lower in below:
            freed += self._rooms.drop(lower, row, "command")
        store.unpin(row)
        return freed

    # -- list -----------------------------------------------------------------------------------

    def page(
        self, session: Session, level: str, selector: Selector, cursor: int, limit: int
    ) -> ListResult:
        """One page of a level. BadKey for an unknown level or an impossible selector."""
        if level not in LEVELS:
            raise BadKey(f"level {level!r} is unknown: {', '.join(LEVELS)}")
        if selector == Selector():
            selector = Selector(everything=True)
        self._check(selector)
        limit = max(1, min(limit, _ROWS))
        spaces = self._spaces(session, selector)
        if level == "namespaces":
            return self._namespaces(spaces, selector, cursor, limit)
        if level == "specs":
            return self._specs(spaces, selector, cursor, limit)
        if level == "prefixes":
            return self._prefixes(spaces, selector, cursor, limit)
        rows = []
        visit = Visit(self, spaces, selector, cursor)
        for row in visit.rows():
            rows.append(self.chunk_row(row))
            if len(rows) >= limit:
                break
        return ListResult(rows, visit.cursor())

    def _namespaces(
        self, spaces: list[Space], selector: Selector, cursor: int, limit: int
    ) -> ListResult:
        by_name: dict[str, dict[str, Any]] = {}
        for space in spaces:
            row = by_name.setdefault(
                space.namespace,
                {
                    "namespace": space.namespace,
                    "specs": set(),
                    "chunks": 0,
                    "bytes": 0,
                    "hits": 0,
                    "leases": 0,
                },
            )
            row["specs"].add(space.digest)
            row["chunks"] += space.chunks + space.alone
            row["bytes"] += space.bytes + space.below_bytes
            row["hits"] += space.hits
        for session in self._store.sessions.by_number.values():
            if session.namespace in by_name:
                by_name[session.namespace]["leases"] += len(session.leases)
        rows = [{**by_name[n], "specs": len(by_name[n]["specs"])} for n in sorted(by_name)]
        return _slice(rows, cursor, limit)

    def _specs(
        self, spaces: list[Space], selector: Selector, cursor: int, limit: int
    ) -> ListResult:
        found: dict[tuple[str, bytes], dict[str, Any]] = {}
        for space in spaces:
            spec = space.spec
            row = found.setdefault(
                (space.namespace, space.digest),
                {
                    "namespace": space.namespace,
                    "spec": space.digest.hex(),
                    "model": spec.model,
                    "revision": spec.revision,
                    "dtype": spec.dtype,
                    "engine": spec.engine,
                    "codec": spec.codec,
                    "chunk_tokens": spec.chunk_tokens,
                    "shards": len(spec.shards),
                    "chunks": 0,
                    "bytes": 0,
                },
            )
            row["chunks"] += space.chunks + space.alone
            row["bytes"] += space.bytes + space.below_bytes
        return _slice([found[k] for k in sorted(found)], cursor, limit)

    def _prefixes(
        self, spaces: list[Space], selector: Selector, cursor: int, limit: int
    ) -> ListResult:
        """Chains by their roots: chunks without a parent, and holes without one."""
        store, chunks = self._store, self._store.chunks
        rows: list[dict[str, Any]] = []
        budget = _VISIT
        at = cursor
        walk: Walk | None = None
        if cursor >= _WALK:
            walk = self._walks.pop(cursor, None)
            if walk is None:
                raise BadKey("the cursor is too old: begin again")
            at = walk.after
        numbers = {space.number for space in spaces}
        while True:
            if walk is None:
                root, budget = self._next_root(numbers, selector, at, budget)
                if root == NONE:
                    done = budget > 0
                    return ListResult(rows, None if done else -budget)
                walk = Walk(store.spaces.of(chunks.space[root]), chunks.key_of(root))
                walk.after = at = root + 1
            budget = self._sum(walk, budget)
            if walk.next is not None:
                return ListResult(rows, self._remember(walk))
            if walk.chunks:
                rows.append(self._prefix_row(walk))
            walk = None
            if len(rows) >= limit or budget <= 0:
                return ListResult(rows, at if at < chunks.used else None)

    def _next_root(
        self, spaces: set[int], selector: Selector, at: int, budget: int
    ) -> tuple[int, int]:
        """(root, budget left), or (NONE, budget left > 0) at the end, or (NONE, -next row)."""
        chunks = self._store.chunks
        while at < chunks.used:
            if budget <= 0:
                return NONE, -at
            upto = min(at + 1024, chunks.used)
            rows = np.flatnonzero(chunks.np_space[at:upto]) + at
            rows = rows[chunks.np_parent[rows] == NONE]
            for row in rows.tolist():
                if chunks.space[row] in spaces and self._root_matches(row, selector):
                    return row, budget - (row - at) // 16 - 1
            budget -= (upto - at) // 16
            at = upto
        return NONE, max(budget, 1)

    def _root_matches(self, row: int, selector: Selector) -> bool:
        key = self._store.chunks.key_of(row)
        if selector.keys and key not in selector.keys:
            return False
        if selector.subtree is not None and key != selector.subtree:
            return False
        return selector.key_prefix is None or key.startswith(selector.key_prefix)

    def _sum(self, walk: Walk, budget: int) -> int:
        """Visit what is left of a walk within the budget, and add it up."""
        chunks = self._store.chunks
        for row in self.subtree(walk):
            budget -= 1
            if self._there(row, None):
                walk.chunks += 1
                walk.bytes += self._bytes(row)
                walk.hits += chunks.hits[row]
                walk.depth = max(walk.depth, chunks.index[row])
                last = chunks.last[row]
                walk.last = last if walk.last is None else max(walk.last, last)
            if budget <= 0:
                break
        return budget

    def _prefix_row(self, walk: Walk) -> dict[str, Any]:
        store = self._store
        root = walk.space.get(walk.root)
        base = store.chunks.index[root] if root != NONE else 0
        return {
            "namespace": walk.space.namespace,
            "spec": walk.space.digest.hex(),
            "kind": Kind(walk.space.kind).name.lower(),
            "root": walk.root.hex(),
            "chunks": walk.chunks,
            "bytes": walk.bytes,
            "depth": walk.depth - base + 1,
            "idle_s": round(max(0, store.now - (walk.last or 0)) / 1e9, 3),
            "hits": walk.hits,
        }

    # -- rows -----------------------------------------------------------------------------------

    def state(self, row: int) -> str:
        store, chunks = self._store, self._store.chunks
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

    def _bytes(self, row: int) -> int:
        """Payload bytes of its ready and quarantined shards, in all tiers."""
        store = self._store
        space = store.spaces.of(store.chunks.space[row])
        first = store.chunks.cell[row]
        held = (col.READY, col.BAD)
        here = sum(n for s, n in enumerate(space.nbytes) if store.cells.state[first + s] in held)
        if not store.chunks.below[row]:
            return here
        return here + sum(
            n * (lower.state[cell] == READY)
            for cell, n in enumerate(space.nbytes, first)
            for lower in store.ladder.lowers
        )

    def chunk_row(self, row: int) -> dict[str, Any]:
        store, chunks = self._store, self._store.chunks
        space = store.spaces.of(chunks.space[row])
        born = chunks.born[row] * 1_000_000_000
        lowers = [lower for lower in store.ladder.lowers if lower.count[row]]
        tiers = [lower.name for lower in lowers]
        if store.resident(row) or not lowers:
            tiers.insert(0, TIER)
        found = {
            "namespace": space.namespace,
            "spec": space.digest.hex(),
            "kind": Kind(space.kind).name.lower(),
            "hash": chunks.key_of(row).hex(),
            "parent": store.parent_hash(row).hex(),
            "index": chunks.index[row],
            "tokens": chunks.tokens[row],
            "bytes": self._bytes(row),
            "shards": max([chunks.ready[row], *(lower.count[row] for lower in lowers)]),
            "tier": tiers[0],
            "state": self.state(row),
            "age_s": round(max(0, store.unix_ns() - born) / 1e9, 3),
            "idle_s": round(max(0, store.now - chunks.last[row]) / 1e9, 3),
            "hits": chunks.hits[row],
            "leases": chunks.leases[row],
        }
        if store.layered:
            found["tiers"] = tiers
        return found

    # -- selecting ------------------------------------------------------------------------------

    def _check(self, selector: Selector) -> None:
        if selector.state is not None and selector.state not in STATES:
            raise BadKey(f"state {selector.state!r} is unknown: {', '.join(STATES)}")
        if len(selector.keys) > _KEYS:
            raise LimitExceeded(f"{len(selector.keys)} keys in a selector, at most {_KEYS}")
        if any(len(k) != 32 for k in selector.keys):
            raise BadKey("a key in a selector must have 32 bytes: use key_prefix for a shorter one")
        if selector.subtree is not None and len(selector.subtree) != 32:
            raise BadKey("the key of a subtree must have 32 bytes")

    def _spaces(self, session: Session, selector: Selector) -> list[Space]:
        """Spaces that the session may see and the selector names."""
        if selector.tier not in (None, TIER) and self._store.ladder.find(selector.tier) is None:
            return []
        if selector == Selector():
            return []
        return [
            space
            for space in self._store.spaces.all()
            if (session.admin or space.namespace == session.namespace)
            and (selector.namespace is None or space.namespace == selector.namespace)
            and (selector.spec is None or space.digest == selector.spec)
            and (selector.kind is None or space.kind == selector.kind)
        ]

    def matches(self, row: int, selector: Selector) -> bool:
        """Whether a chunk of a selected space is meant."""
        store, chunks = self._store, self._store.chunks
        if not chunks.space[row] or store.is_empty(row):
            return False
        tier = selector.tier
        if tier is not None and not self._there(row, tier):
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
        chunks, space = self._store.chunks, walk.space
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
        child = self._store.chunks.child
        while child[row] != NONE:
            row = child[row]
        return row

    def _remember(self, walk: Walk) -> int:
        self._walk_number += 1
        self._walks[self._walk_number] = walk
        if len(self._walks) > _WALKS:
            self._walks.popitem(last=False)
        return self._walk_number


class Visit:
    """The chunks that a selector means, from a cursor on, and where it got to."""

    def __init__(
        self, listing: Listing, spaces: list[Space], selector: Selector, cursor: int
    ) -> None:
        self._listing = listing
        self._store = listing._store
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
            return self._listing._remember(self._walk)
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
            if row != NONE and self._listing.matches(row, self._selector):
                self._ended = self._at >= pairs
                yield row
        self._ended = True

    def _all(self) -> Iterator[int]:
        chunks = self._store.chunks
        numbers = np.array([s.number for s in self._spaces])
        left = _VISIT
        while self._at < chunks.used and left > 0:
            begin = self._at
            upto = min(begin + min(1024, left), chunks.used)
            left -= upto - begin
            for row in self._filter(begin, upto, numbers).tolist():
                self._at = row + 1
                if self._listing.matches(row, self._selector):
                    self._ended = self._at >= chunks.used
                    yield row
            self._at = upto
        self._ended = self._at >= chunks.used

    def _filter(self, begin: int, upto: int, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Rows of the spaces in a range that may match."""
        chunks = self._store.chunks
        space = chunks.np_space[begin:upto]
        mine = np.isin(space, numbers) if len(numbers) > 1 else space == numbers[0]
        if self._selector.idle_ns is not None:
            mine &= self._store.now - chunks.np_last[begin:upto] >= self._selector.idle_ns
        rows: NDArray[np.int64] = np.flatnonzero(mine) + begin
        return rows

    def _trees(self) -> Iterator[int]:
        """The subtree in each space in turn; its key may be in several."""
        root = self._selector.subtree
        assert root is not None
        left = _VISIT
        if self._at >= _WALK:
            self._walk = self._listing._walks.pop(self._at, None)
            if self._walk is None:
                raise BadKey("the cursor is too old: begin again")
            self._at = self._walk.after
        while True:
            if self._walk is None:
                if self._at >= len(self._spaces):
                    self._ended = True
                    return
                self._walk = Walk(self._spaces[self._at], root)
                self._walk.after = self._at
            for row in self._listing.subtree(self._walk):
                left -= 1
                if self._listing.matches(row, self._selector):
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


def _slice(rows: list[dict[str, Any]], cursor: int, limit: int) -> ListResult:
    page = rows[cursor : cursor + limit]
    after = cursor + len(page)
    return ListResult(page, after if after < len(rows) else None)
