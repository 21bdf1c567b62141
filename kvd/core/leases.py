"""Leases: what a lookup promised.

The law of this module: leased chunks stay until their lease ends: by release, by its session's end,
or by the clock. No lease ends later than the horizon that stands in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvd.core import columns as col
from kvd.core.actions import LeaseHorizon
from kvd.core.jobs import Pause, Work, spent
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store

Rows = NDArray[np.int64]


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

    # -- giving ---------------------------------------------------------------------------------

    def allowed(self, session: Session, space: Space, rows: Rows) -> int:
        """How many of these the session may lease. What it has under a lease already is free."""
        left = self._store.config.lease_cap - session.lease_bytes
        room = max(left, 0) // space.chunk_slot_bytes
        if room >= len(rows):
            return len(rows)
        if session.pins is None:
            return room
        fresh = np.cumsum(session.pins[rows] == 0)
        return int(np.searchsorted(fresh, room, side="right"))

    def give(
        self, session: Session, space: Space, shards: tuple[int, ...], rows: Rows, lease_ns: int
    ) -> Lease:
        """A new lease on these. Pre: `allowed`, and there."""
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
            store.touches.touch(rows[np.append(~follows, True)])  # the last of each chain
        else:
            store.touches.touch(rows)
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
