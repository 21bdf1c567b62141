"""What an operator sees and names: selectors, rows, pages, and evictions by command.

The law of this module: looking changes nothing, neither recency nor counters; one call visits a
bounded number of chunks and goes on from its cursor; leased chunks are never taken. A subtree is
visited leaves first.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvd.chunk import Kind
from kvd.core import columns as col
from kvd.core.actions import EvictResult, ListResult
from kvd.core.columns import NONE
from kvd.core.events import Selector
from kvd.core.lower import READY, Lower
from kvd.core.rooms import Rooms
from kvd.core.selecting import TIER, VISIT, WALK, Selecting, Visit, Walk
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.writes import Writes
from kvd.errors import BadKey

LEVELS = ("namespaces", "specs", "prefixes", "chunks")

_ROWS: Final = 64  # rows made, or chunks removed, in one call


class Listing:
    """Pages, and evictions by command."""

    def __init__(self, store: Store, writes: Writes, rooms: Rooms) -> None:
        self._store = store
        self._writes = writes
        self._rooms = rooms
        self._select = Selecting(store)

    # -- evict ----------------------------------------------------------------------------------

    def evict(
        self, session: Session, selector: Selector, dry_run: bool, cursor: int, limit: int
    ) -> EvictResult:
        """One slice. BadKey for a selector that can't be carried out."""
        self._select.check(selector)
        limit = max(1, min(limit, _ROWS))
        matched = evicted = leased = writing = freed = 0
        named: list[dict[str, Any]] = []
        store, chunks = self._store, self._store.chunks
        visit = Visit(self._select, self._select.spaces(session, selector), selector, cursor)
        for row in visit.rows():
            held = bool(chunks.leases[row] or row in store.pinned)
            resident = self._select.there(row, selector.tier)
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
        self._select.check(selector)
        limit = max(1, min(limit, _ROWS))
        spaces = self._select.spaces(session, selector)
        if level == "namespaces":
            return self._namespaces(spaces, selector, cursor, limit)
        if level == "specs":
            return self._specs(spaces, selector, cursor, limit)
        if level == "prefixes":
            return self._prefixes(spaces, selector, cursor, limit)
        rows = []
        visit = Visit(self._select, spaces, selector, cursor)
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
        budget = VISIT
        at = cursor
        walk: Walk | None = None
        if cursor >= WALK:
            walk = self._select.recall(cursor)
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
                return ListResult(rows, self._select.remember(walk))
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
        for row in self._select.subtree(walk):
            budget -= 1
            if self._select.there(row, None):
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
            "parent": chunks.parent_key_of(row).hex(),
            "index": chunks.index[row],
            "tokens": chunks.tokens[row],
            "bytes": self._bytes(row),
            "shards": max([chunks.ready[row], *(lower.count[row] for lower in lowers)]),
            "tier": tiers[0],
            "state": self._select.state(row),
            "age_s": round(max(0, store.unix_ns() - born) / 1e9, 3),
            "idle_s": round(max(0, store.now - chunks.last[row]) / 1e9, 3),
            "hits": chunks.hits[row],
            "leases": chunks.leases[row],
        }
        kept = store.keeping.by_row.get(row)
        if kept is not None and store.now < kept.until:
            found["pinned_s" if kept.hard else "spared_s"] = (kept.until - store.now) // 10**6 / 1e3
        if store.layered:
            found["tiers"] = tiers
        return found


def _slice(rows: list[dict[str, Any]], cursor: int, limit: int) -> ListResult:
    page = rows[cursor : cursor + limit]
    after = cursor + len(page)
    return ListResult(page, after if after < len(rows) else None)
