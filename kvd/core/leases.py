"""Lookups and the leases that they give.

The law of this module: a hit is a chunk that is there with all shards asked, under the same
fingerprint, in DRAM or in a tier below that can be read now; a leading run ends at the first key
that is no hit, and at a chunk whose parent is absent. A key that the own namespace does not have
may be one of the namespace `public`, if that was asked for. What a lookup promised stays until its
lease ends: by release, by its session's end, or by the clock. A lookup without a lease changes
nothing but counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import Outcome
from kvd.core import columns as col
from kvd.core.actions import LeaseHorizon
from kvd.core.columns import NONE
from kvd.core.events import LookupFlag
from kvd.core.jobs import Pause, Work, spent
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store

Rows = NDArray[np.int64]

# plain integers: an IntFlag costs a microsecond each time
_LEASE, _EVERY = int(LookupFlag.LEASE), int(LookupFlag.EVERY)
_OK: Final = bytes([Outcome.OK])
_SKIPPED: Final = bytes([Outcome.SKIPPED])
_OUTCOME: Final = {"mismatch": Outcome.MISMATCH, "partial": Outcome.PARTIAL}


class Lease:
    """Chunks that stay. `rows` by position in the lease; a chunk may stand there twice."""

    def __init__(
        self, number: int, session: Session, space: Space, shards: tuple[int, ...], rows: Rows
    ) -> None:
        self.number = number
        self.session = session
        self.namespace = session.namespace
        self.group = session.group
        self.space = space
        self.shards = shards
        self.rows = rows
        self.expiry = 0
        self.loaded: NDArray[np.bool_] | None = None  # positions counted by a first load
        self.transfers: list[int] = []


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


class Leases:
    """All leases by number."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.by_number: dict[int, Lease] = {}
        self.ended: Callable[[Lease], None] = lambda lease: None  # told before a lease ends
        self.kept: Callable[[int], None] = lambda row: None  # a transient chunk was hit again
        self.second: Callable[[int], None] = lambda row: None  # a chunk was hit twice
        # What the superblock says: no lease of this life ends later. It stands in steps, so that
        # it is not written for each lease, and `_steps` counts the leases that end in each.
        self.horizon = 0
        self._steps: dict[int, int] = {}
        self._earlier = 0  # the horizon of the life before, while its readers may be there
        self._lowering = False  # a timer is set

    # -- lookup ---------------------------------------------------------------------------------

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
            allowed = self._allowed(session, space, rows[hits])
            if allowed < len(hits):
                cut = int(hits[allowed])
                outcomes = self._cut(outcomes, cut, every)
                over = len(hits) - allowed if every else 1
                counts["chunks_missed", "over_quota"] += over
                counts["chunks_missed", "skipped"] += len(hits) - allowed - over
                hits = hits[:allowed]
                leading = min(leading, cut)
            if len(hits):
                lease = self._give(session, space, shards, rows[hits], lease_ns)
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
            above = store.parent_hash(int(rows[n]))
            if n:
                there[n] = good[n - 1] and hashes[32 * (n - 1) : 32 * n] == above
            else:
                there[n] = store.present(public.get(above))

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
            if not self._allowed(session, space, np.array([row], np.int64)):
                counts["chunks_missed", "over_quota"] += 1
                return Looked(bytes([Outcome.OVER_QUOTA]), 0, None)
            lease = self._give(session, space, shards, np.array([row], np.int64), lease_ns)
        counts["chunks_hit", ""] += 1
        space.hits += 1
        return Looked(_OK, int(run), lease, tiers)

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

    # -- leases ---------------------------------------------------------------------------------

    def _allowed(self, session: Session, space: Space, rows: Rows) -> int:
        """How many of these the session may lease. What it has under a lease already is free."""
        left = self._store.config.lease_cap - session.lease_bytes
        room = max(left, 0) // space.chunk_slot_bytes
        if room >= len(rows):
            return len(rows)
        if session.pins is None:
            return room
        fresh = np.cumsum(session.pins[rows] == 0)
        return int(np.searchsorted(fresh, room, side="right"))

    def _give(
        self, session: Session, space: Space, shards: tuple[int, ...], rows: Rows, lease_ns: int
    ) -> Lease:
        store, chunks = self._store, self._store.chunks
        lease = Lease(store.handle(), session, space, shards, rows)
        once = self._once(rows)
        before = chunks.np_leases[once]
        store.leased_chunks += len(once) - int(np.count_nonzero(before))
        chunks.np_leases[once] = before + 1
        chunks.np_hits[once] += np.uint32(1)
        chunks.np_last[once] = store.now
        if store.layered:
            self._hit(once)
        self.by_number[lease.number] = lease
        session.leases[lease.number] = lease
        if session.pins is None:
            session.pins = np.zeros(chunks.rows, np.int32)
        held = session.pins[once]
        session.pins[once] = held + 1
        session.lease_bytes += int(np.count_nonzero(held == 0)) * space.chunk_slot_bytes
        self._set_expiry(lease, lease_ns)
        store.counters.tenant(space.namespace)["leases_given", ""] += 1
        if space.chained and len(rows) > 1:
            follows = chunks.np_parent[rows[1:]] == rows[:-1]
            store.touch(rows[np.append(~follows, True)])  # the last of each chain
        else:
            store.touch(rows)
        return lease

    def _hit(self, rows: Rows) -> None:
        """Hits that decide where a chunk lies from now on."""
        store, chunks = self._store, self._store.chunks
        lonely = chunks.np_tally[rows] & col.ALONE != 0
        if store.transients:
            transients = store.transients
            lonely |= np.fromiter((row in transients for row in rows.tolist()), bool, len(rows))
        some = rows[lonely]
        if len(some):
            chunks.np_warm[some] = np.minimum(chunks.np_warm[some], 250) + 1
            for row in some[chunks.np_warm[some] > 1].tolist():
                if row in store.transients:
                    self.kept(row)
        for row in rows[chunks.np_hits[rows] == 2].tolist():
            self.second(row)

    def _once(self, rows: Rows) -> Rows:
        """The rows without repetition."""
        once = set(rows.tolist())
        return rows if len(once) == len(rows) else np.array(sorted(once), np.int64)

    def _set_expiry(self, lease: Lease, lease_ns: int) -> None:
        store, config = self._store, self._store.config
        length = min(lease_ns or config.lease_default_ns, config.lease_max_ns)
        before, lease.expiry = lease.expiry, store.now + length
        store.timers.add(lease.expiry, "lease", lease.number)
        step = -(-lease.expiry // config.horizon_step_ns)
        self._steps[step] = self._steps.get(step, 0) + 1
        if lease.expiry > self.horizon:
            self._move_horizon(step * config.horizon_step_ns)
        if before and before != lease.expiry:
            store.timers.remove(before, "lease", lease.number)
        if before:
            self._uncount(before)

    # -- the horizon ----------------------------------------------------------------------------

    def adopt(self, horizon: int) -> None:
        """The horizon of an earlier life stands as long as its readers may be there."""
        self.horizon = self._earlier = horizon
        self.lower_horizon()

    def _uncount(self, expiry: int) -> None:
        """A lease no longer ends then. A horizon that is far off is lowered at once; a near one,
        which the next lease would raise again, in a while."""
        store, config = self._store, self._store.config
        step = -(-expiry // config.horizon_step_ns)
        left = self._steps[step] - 1
        if left:
            self._steps[step] = left
            return
        del self._steps[step]
        if step * config.horizon_step_ns < self.horizon:
            return
        if self.horizon > store.now + config.lease_default_ns + 2 * config.horizon_step_ns:
            self.lower_horizon()
        elif not self._lowering and self.horizon > store.now + config.horizon_step_ns:
            self._lowering = True
            store.timers.add(store.now + config.horizon_step_ns, "horizon", 0)

    def lower_horizon(self) -> None:
        """No later than the latest lease that there is."""
        self._lowering = False
        until = max(self._steps, default=0) * self._store.config.horizon_step_ns
        if self._store.hold:
            until = max(until, self._earlier)
        if until < self.horizon:
            self._move_horizon(until)

    def _move_horizon(self, until: int) -> None:
        self.horizon = until
        self._store.out.append(LeaseHorizon(until))

    # -- use ------------------------------------------------------------------------------------

    def find(self, session: Session, number: int) -> Lease | None:
        """A lease that this session may use now."""
        lease = self.by_number.get(number)
        if lease is None or lease.session.closed or self._store.now >= lease.expiry:
            return None
        if (lease.namespace, lease.group) != (session.namespace, session.group):
            return None
        return lease

    def renew(self, lease: Lease, lease_ns: int) -> int:
        """The new expiry. It may be earlier than the old one."""
        self._set_expiry(lease, lease_ns)
        return lease.expiry

    def end(self, lease: Lease, reason: str) -> int:
        """Let the chunks go; how many positions the lease had."""
        store, chunks = self._store, self._store.chunks
        self.ended(lease)
        del self.by_number[lease.number]
        session = lease.session
        session.leases.pop(lease.number, None)
        store.timers.remove(lease.expiry, "lease", lease.number)
        self._uncount(lease.expiry)
        once = self._once(lease.rows)
        left = chunks.np_leases[once] - 1
        chunks.np_leases[once] = left
        if store.layered:
            self._let_go(once[left == 0])
        store.leased_chunks -= len(once) - int(np.count_nonzero(left))
        assert session.pins is not None
        held = session.pins[once] - 1
        session.pins[once] = held
        session.lease_bytes -= int(np.count_nonzero(held == 0)) * lease.space.chunk_slot_bytes
        store.counters.tenant(lease.namespace)["leases_ended", reason] += 1
        return len(lease.rows)

    def _let_go(self, rows: Rows) -> None:
        """Nobody holds these by a lease any more."""
        store, chunks = self._store, self._store.chunks
        if store.transients:
            store.fleeting.extend(row for row in rows.tolist() if row in store.transients)
        empty = (chunks.np_ready[rows] == 0) & (chunks.np_below[rows] == 0)
        store.husks.extend(rows[empty].tolist())

    def close(self, session: Session) -> Work[None]:
        """End all leases of a session that is over."""
        for lease in list(session.leases.values()):
            if lease.number in self.by_number:
                self.end(lease, "session")
                if spent(self._store, 2):
                    yield Pause.SLICE
