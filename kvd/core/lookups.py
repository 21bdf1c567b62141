"""Lookups: what of the keys asked is there, and why the rest is not.

The law of this module: a hit is a chunk that is there with all shards asked, under the same
fingerprint, in DRAM or in a tier below that can be read now; a leading run ends at the first key
that is no hit, and at a chunk whose parent is absent. A key that the own namespace does not have
may be one of the namespace `public`, if that was asked for. Each key is counted once, as a hit or
under the one reason why it is none. A lookup without a lease changes nothing but counters.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import Outcome
from kvd.core import columns as col
from kvd.core.columns import NONE
from kvd.core.events import LookupFlag
from kvd.core.leases import Lease, Leases, Rows
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store

# plain integers: an IntFlag costs a microsecond each time
_LEASE, _EVERY = int(LookupFlag.LEASE), int(LookupFlag.EVERY)
_OK: Final = bytes([Outcome.OK])
_SKIPPED: Final = bytes([Outcome.SKIPPED])
_OUTCOME: Final = {"mismatch": Outcome.MISMATCH, "partial": Outcome.PARTIAL}


class Looked(NamedTuple):
    outcomes: bytes
    leading: int
    lease: Lease | None
    tiers: bytes = b""  # by key; empty: all in DRAM


class Unknown(NamedTuple):
    """Keys of a lookup that are not known here at all, in the order asked. `run`: only a leading
    run counts, so behind the first that nobody has no other matters."""

    namespace_digest: bytes
    shards: tuple[int, ...]
    hashes: list[bytes]
    run: bool


class Lookups:
    """Says what is there, and leases what is wanted of it."""

    def __init__(self, store: Store, leases: Leases) -> None:
        self._store = store
        self._leases = leases

    def lookup(
        self,
        session: Session,
        space: Space,
        shards: tuple[int, ...],
        hashes: bytes,
        fingerprints: bytes | None,
        flags: int,
        lease_ns: int,
        public: Space | None = None,
    ) -> Looked:
        """What is there of these keys; `public`: where else to look."""
        store = self._store
        asked = len(hashes) // 32
        every = bool(flags & _EVERY)
        if asked == 1 and public is None:
            return self._one(session, space, shards, hashes, fingerprints, flags, lease_ns)
        ids = space.get_many(hashes)
        if public is not None:
            ids = self._with_public(public, shards, ids, hashes, fingerprints)
        missing = np.flatnonzero(ids < 0)
        upto = asked
        if len(missing) and not every:
            upto = int(missing[0])
        rows = ids[:upto]
        good = self._good(space, shards, rows, fingerprints)
        run = good
        if space.chained:
            above = store.chunks.np_parent[rows]
            there = store.chunks.np_ready[above] > 0
            if store.layered:
                there |= store.chunks.np_below[above] > 0
            if public is not None:
                self._bridge(public, rows, good, there, hashes)
            run = good & there
        leading = upto if run.all() else int(run.argmin())
        counts = store.counters.tenant(space.namespace)
        counts["lookups", ""] += 1
        counts["chunks_asked", ""] += asked
        if every:
            hits = np.flatnonzero(good)
            outcomes = self._every(space, shards, ids, good, fingerprints)
        else:
            hits = np.arange(leading)
            outcomes = self._run(space, shards, ids, leading, fingerprints)
        tiers = self._tiers(space, shards, ids, hits, asked) if store.layered else b""
        lease = None
        if flags & _LEASE and len(hits):
            allowed = self._leases.allowed(session, space, rows[hits])
            if allowed < len(hits):
                cut = int(hits[allowed])
                outcomes = self._cut(outcomes, cut, every)
                over = len(hits) - allowed if every else 1
                counts["chunks_missed", "over_quota"] += over
                counts["chunks_missed", "skipped"] += len(hits) - allowed - over
                hits = hits[:allowed]
                leading = min(leading, cut)
            if len(hits):
                lease = self._leases.give(session, space, shards, rows[hits], lease_ns)
        counts["chunks_hit", ""] += len(hits)
        space.hits += len(hits)
        if public is not None and len(hits):
            borrowed = int(np.count_nonzero(store.chunks.np_space[ids[hits]] == public.number))
            counts["chunks_hit_public", ""] += borrowed
            space.hits -= borrowed
            public.hits += borrowed
        return Looked(outcomes, leading, lease, tiers)

    def first(
        self,
        session: Session,
        space: Space,
        shards: tuple[int, ...],
        hashes: bytes,
        fingerprints: bytes | None,
    ) -> int:
        """The cell of the first shard of the first key, if a lookup of these keys will lease it and
        it has to be read from below; else NONE. Changes nothing."""
        store, chunks = self._store, self._store.chunks
        row = space.get(hashes[:32])
        if row == NONE or not chunks.below[row] or not self._ready(space, shards, row):
            return NONE
        cell: int = chunks.cell[row] + shards[0]
        if store.cells.state[cell] != col.ABSENT or (space.chained and store.orphan(row)):
            return NONE
        if fingerprints is not None and chunks.print[16 * row : 16 * row + 16] != fingerprints[:16]:
            return NONE
        held = session.pins is not None and session.pins[row] > 0
        left = store.config.lease_cap - session.lease_bytes
        return cell if held or left >= space.chunk_slot_bytes else NONE

    def unknown(self, space: Space, hashes: bytes) -> list[bytes]:
        """Keys that no tier has anything of, and that nobody writes now."""
        chunks = self._store.chunks
        rows = space.get_many(hashes)
        known = chunks.np_ready[rows].astype(np.int64) + chunks.np_below[rows]
        known += chunks.np_writing[rows] + chunks.np_bad[rows]
        missing = np.flatnonzero((rows < 0) | (known == 0)).tolist()
        return [hashes[32 * n : 32 * n + 32] for n in missing]

    # -- the namespace `public` -----------------------------------------------------------------

    def _with_public(
        self,
        public: Space,
        shards: tuple[int, ...],
        ids: Rows,
        hashes: bytes,
        fingerprints: bytes | None,
    ) -> Rows:
        """The rows, with those of `public` where the own namespace has no hit and that one has."""
        lacking = np.flatnonzero(~self._good(public, shards, ids, fingerprints))
        if not len(lacking):
            return ids
        theirs = np.full(len(ids), NONE, np.int64)
        words = np.frombuffer(hashes, np.uint64).reshape(-1, 4)
        theirs[lacking] = public.get_many(np.ascontiguousarray(words[lacking]).tobytes())
        theirs[~self._good(public, shards, theirs, fingerprints)] = NONE
        return np.where(theirs != NONE, theirs, ids)

    def _bridge(
        self,
        public: Space,
        rows: Rows,
        good: NDArray[np.bool_],
        there: NDArray[np.bool_],
        hashes: bytes,
    ) -> None:
        """A chunk may continue one of the other namespace: then its parent is there, too."""
        store = self._store
        for n in np.flatnonzero(good & ~there).tolist():
            above = store.chunks.parent_key_of(int(rows[n]))
            if n:
                there[n] = good[n - 1] and hashes[32 * (n - 1) : 32 * n] == above
            else:
                there[n] = store.present(public.get(above))

    # -- one key --------------------------------------------------------------------------------

    def _one(
        self,
        session: Session,
        space: Space,
        shards: tuple[int, ...],
        key: bytes,
        fingerprint: bytes | None,
        flags: int,
        lease_ns: int,
    ) -> Looked:
        """The same for a single key, without arrays: they cost more than all the rest."""
        store, chunks = self._store, self._store.chunks
        row = space.get(key)
        good = row != NONE and self._ready(space, shards, row)
        if good and fingerprint is not None:
            good = chunks.print[16 * row : 16 * row + 16] == fingerprint
        run = good and (not space.chained or not store.orphan(row))
        hit = good if flags & _EVERY else run
        counts = store.counters.tenant(space.namespace)
        counts["lookups", ""] += 1
        counts["chunks_asked", ""] += 1
        if not hit:
            missed = self._miss(space, shards, [row], 0, fingerprint)
            return Looked(bytes([missed]), 0, None)
        tiers = b""
        if store.layered and chunks.ready[row] < space.shards:
            tiers = self._tiers(space, shards, np.array([row]), np.arange(1), 1)
        lease = None
        if flags & _LEASE:
            if not self._leases.allowed(session, space, np.array([row], np.int64)):
                counts["chunks_missed", "over_quota"] += 1
                return Looked(bytes([Outcome.OVER_QUOTA]), 0, None)
            lease = self._leases.give(session, space, shards, np.array([row], np.int64), lease_ns)
        counts["chunks_hit", ""] += 1
        space.hits += 1
        return Looked(_OK, int(run), lease, tiers)

    # -- what is there --------------------------------------------------------------------------

    def _ready(self, space: Space, shards: tuple[int, ...], row: int) -> bool:
        """Whether all these shards are ready, here or below."""
        chunks = self._store.chunks
        if len(shards) == space.shards and chunks.ready[row] == space.shards:
            return True
        state, first = self._store.cells.state, chunks.cell[row]
        if chunks.below[row]:
            return all(map(self._store.ladder.reachable, (first + s for s in shards)))
        if len(shards) == space.shards:
            return False
        return chunks.ready[row] > 0 and all(state[first + s] == col.READY for s in shards)

    def _good(
        self, space: Space, shards: tuple[int, ...], rows: Rows, fingerprints: bytes | None
    ) -> NDArray[np.bool_]:
        """Which rows (NONE: no row) have all shards ready and the fingerprint asked."""
        store, chunks = self._store, self._store.chunks
        there: NDArray[np.bool_]
        if len(shards) == space.shards:
            there = chunks.np_ready[rows] == space.shards
        else:
            there = chunks.np_ready[rows] > 0
            first = chunks.np_cell[rows].astype(np.int64)
            for shard in shards:
                there &= store.cells.np_state[np.where(there, first + shard, 0)] == col.READY
        if store.layered:
            self._or_below(shards, rows, there)
        there &= rows >= 0
        if fingerprints is not None:
            asked = np.frombuffer(fingerprints, np.uint64, 2 * len(rows)).reshape(-1, 2)
            there &= (chunks.np_print[rows] == asked).all(axis=1)
        return there

    def _or_below(self, shards: tuple[int, ...], rows: Rows, there: NDArray[np.bool_]) -> None:
        """Add to `there` what can be delivered with the help of tiers below."""
        store, chunks = self._store, self._store.chunks
        whole = chunks.np_full[rows] & store.ladder.readable != 0
        whole &= (chunks.np_writing[rows] == 0) & (chunks.np_bad[rows] == 0)
        there |= whole
        reachable = store.ladder.reachable
        for n in np.flatnonzero(~there & (chunks.np_below[rows] > 0)).tolist():
            first = chunks.cell[int(rows[n])]
            there[n] = all(reachable(first + shard) for shard in shards)

    def _tiers(
        self, space: Space, shards: tuple[int, ...], ids: Rows, hits: Rows, asked: int
    ) -> bytes:
        """Where hits lie, one byte a key; empty if all are in DRAM."""
        store, chunks = self._store, self._store.chunks
        rows = ids[hits]
        if (chunks.np_ready[rows] == space.shards).all():
            return b""
        cells = chunks.np_cell[rows].astype(np.int64)[:, None] + np.array(shards, np.int64)
        numbers = store.ladder.sources(cells) + 1
        numbers[store.cells.np_state[cells] == col.READY] = 0
        lowest = numbers.max(axis=1)
        if not lowest.any():
            return b""
        tiers = np.zeros(asked, np.uint8)
        tiers[hits] = lowest
        return tiers.tobytes()

    # -- what is not ----------------------------------------------------------------------------

    def _why(
        self, space: Space, shards: tuple[int, ...], row: int, fingerprint: bytes | None
    ) -> str:
        """Why a key is no hit."""
        store, chunks = self._store, self._store.chunks
        if row == NONE or store.is_empty(row):
            return "absent"
        if fingerprint is not None and chunks.print[16 * row : 16 * row + 16] != fingerprint:
            return "mismatch"
        first = chunks.cell[row]
        states = {store.cells.state[first + shard] for shard in shards}
        if col.BAD in states:
            return "quarantined"
        if chunks.below[row]:
            reach = [store.ladder.reachable(first + shard) for shard in shards]
            if all(reach):
                return "orphan"
            if self._all_below(first, shards):
                return "away"
            if any(reach):
                return "partial"
        if states == {col.READY}:
            return "orphan"
        if col.READY in states:
            return "partial"
        return "writing" if col.WRITING in states else "absent"

    def _all_below(self, first: int, shards: tuple[int, ...]) -> bool:
        """Whether all shards would be there if every tier could be read."""
        store = self._store
        return all(
            store.cells.state[first + shard] == col.READY
            or (
                store.cells.state[first + shard] == col.ABSENT
                and any(lower.state[first + shard] for lower in store.ladder.lowers)
            )
            for shard in shards
        )

    def _miss(
        self,
        space: Space,
        shards: tuple[int, ...],
        ids: Rows | list[int],
        at: int,
        fingerprints: bytes | None,
    ) -> Outcome:
        """Outcome of a key that is no hit; counted."""
        fingerprint = None if fingerprints is None else fingerprints[16 * at : 16 * at + 16]
        why = self._why(space, shards, int(ids[at]), fingerprint)
        counts = self._store.counters.tenant(space.namespace)
        counts["chunks_missed", why] += 1
        if why == "mismatch":
            counts["key_mismatches", "lookup"] += 1
        return _OUTCOME.get(why, Outcome.MISS)

    def _run(
        self,
        space: Space,
        shards: tuple[int, ...],
        ids: Rows,
        leading: int,
        fingerprints: bytes | None,
    ) -> bytes:
        """Outcomes where only the leading run counts."""
        rest = len(ids) - leading
        if not rest:
            return _OK * leading
        first = self._miss(space, shards, ids, leading, fingerprints)
        if rest > 1:
            counts = self._store.counters.tenant(space.namespace)
            counts["chunks_missed", "skipped"] += rest - 1
        return _OK * leading + bytes([first]) + _SKIPPED * (rest - 1)

    def _every(
        self,
        space: Space,
        shards: tuple[int, ...],
        ids: Rows,
        good: NDArray[np.bool_],
        fingerprints: bytes | None,
    ) -> bytes:
        """Outcomes where every key counts."""
        outcomes = bytearray(np.where(good, Outcome.OK, Outcome.MISS).astype(np.uint8))
        absent = int(np.count_nonzero(ids < 0))
        self._store.counters.tenant(space.namespace)["chunks_missed", "absent"] += absent
        for at in np.flatnonzero(~good & (ids >= 0)).tolist():
            outcomes[at] = self._miss(space, shards, ids, at, fingerprints)
        return bytes(outcomes)

    def _cut(self, outcomes: bytes, at: int, every: bool) -> bytes:
        """Outcomes where the session's cap on leases is reached at key `at`."""
        over = bytes([Outcome.OVER_QUOTA])
        if not every:
            return outcomes[:at] + over + _SKIPPED * (len(outcomes) - at - 1)
        return outcomes[:at] + outcomes[at:].replace(_OK, over)
