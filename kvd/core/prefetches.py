"""Prefetching: chunks that somebody says he will ask for are read up ahead.

The law of this module: a hint promises nothing and harms nobody. What is read ahead comes after all
that somebody waits for, takes only room that is free or holds what is cold and lies below already,
and never more than transient chunks may have of DRAM, of which one tenant gets three quarters of
what the others leave. It is let go when its time is over, or with the lease of who came for it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvd.chunk import Outcome
from kvd.core import columns as col
from kvd.core.columns import NONE
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store

_RECLAIM: Final = 32  # chunks looked at for one that needs room

_LABEL: Final = {
    Outcome.NO_SPACE: "no_space",
    Outcome.MISS: "missed",
    Outcome.SKIPPED: "skipped",
}


class Held(NamedTuple):
    """A chunk that was asked for, and what is set aside for it."""

    key: bytes
    tenant: str
    nbytes: int
    until: int


class Prefetches:
    """All chunks that are on their way ahead, or here for who may come."""

    def __init__(self, store: Store, jobs: Jobs, fetches: Fetches) -> None:
        self._store = store
        self._jobs = jobs
        self._fetches = fetches
        self._held: dict[int, Held] = {}  # by row, the oldest first
        self._total = 0
        self._used: dict[str, int] = {}  # by tenant
        self._ending: dict[int, list[tuple[int, bytes]]] = {}  # timer -> its chunks

    @property
    def taken(self) -> int:
        """Slot bytes set aside."""
        return self._total

    def ask(
        self, session: Session, space: Space, shards: tuple[int, ...], hashes: bytes, within: int
    ) -> Work[bytes]:
        """One outcome a key: OK if it is here or may come."""
        store = self._store
        until = store.now + min(within, store.config.lease_max_ns)
        counts = store.counters.tenant(session.namespace)
        outcomes = bytearray()
        rows: list[tuple[int, bytes]] = []
        ended = False
        for begin in range(0, len(hashes), 32):
            outcome, coming = Outcome.SKIPPED, False
            if not ended:
                key = hashes[begin : begin + 32]
                outcome, coming = self._one(session.namespace, space, shards, key, until)
                ended = outcome is not Outcome.OK and (space.chained or outcome is Outcome.NO_SPACE)
                if coming:
                    rows.append((space.get(key), key))
            here = "coming" if coming else "here"
            counts["chunks_prefetched", _LABEL.get(outcome, here)] += 1
            outcomes.append(outcome)
            if spent(store, 2):
                yield Pause.SLICE
        if rows:
            number = store.handle()
            self._ending[number] = rows
            store.timers.add(until, "prefetch", number)
        return bytes(outcomes)

    def _one(
        self, tenant: str, space: Space, shards: tuple[int, ...], key: bytes, until: int
    ) -> tuple[Outcome, bool]:
        """What becomes of one key, and whether it is here or on its way for a hint."""
        store = self._store
        row = space.get(key)
        if row == NONE or store.chunks.cell[row] == NONE:
            return Outcome.MISS, False
        first = store.chunks.cell[row]
        cells = [first + shard for shard in shards]
        if not all(map(store.ladder.reachable, cells)):
            return Outcome.MISS, False
        below = [cell for cell in cells if store.cells.state[cell] == col.ABSENT]
        held = self._held.get(row)
        if held is not None and held.key != key:
            self._drop(row)
            held = None
        if held is not None and held.until < until:
            self._held[row] = held._replace(until=until)
        if not below:
            return Outcome.OK, held is not None
        if held is None:
            nbytes = sum(space.slot_sizes[cell - first] for cell in below)
            if not self._room(tenant, nbytes):
                return Outcome.NO_SPACE, False
            self._hold(row, Held(key, tenant, nbytes, until))
        for cell in below:
            self._fetches.want_ahead(cell, tenant, until)
        return Outcome.OK, True

    # -- what is set aside ----------------------------------------------------------------------

    def _room(self, tenant: str, nbytes: int) -> bool:
        """Whether so much more may be set aside for a tenant."""
        if not self._fits(tenant, nbytes):
            self._reclaim()
        return self._fits(tenant, nbytes)

    def _fits(self, tenant: str, nbytes: int) -> bool:
        mine = self._used.get(tenant, 0)
        others = self._total - mine
        return 4 * (mine + nbytes) <= 3 * (self._store.config.transient_cap - others)

    def _reclaim(self) -> None:
        """Look whether the oldest are still here for nobody; each is looked at in its turn."""
        for _ in range(min(_RECLAIM, len(self._held))):
            row = next(iter(self._held))
            held = self._held[row]
            if self._waits(row, held):
                self._held[row] = self._held.pop(row)  # behind the others
            else:
                self._drop(row)

    def _waits(self, row: int, held: Held) -> bool:
        """Whether the chunk is on its way, or here and not asked for yet."""
        store, chunks = self._store, self._store.chunks
        if held.until <= store.now or not chunks.space[row] or chunks.key_of(row) != held.key:
            return False
        if row in store.transients:
            return not chunks.leases[row]
        first = chunks.cell[row]
        shards = store.spaces.of(chunks.space[row]).shards
        return first != NONE and any(
            cell in self._fetches.by_cell for cell in range(first, first + shards)
        )

    def _hold(self, row: int, held: Held) -> None:
        self._held[row] = held
        self._total += held.nbytes
        self._used[held.tenant] = self._used.get(held.tenant, 0) + held.nbytes

    def _drop(self, row: int) -> None:
        held = self._held.pop(row)
        self._total -= held.nbytes
        left = self._used[held.tenant] - held.nbytes
        if left:
            self._used[held.tenant] = left
        else:
            del self._used[held.tenant]

    # -- time -----------------------------------------------------------------------------------

    def due(self, number: int) -> None:
        """The time of a prefetch is over."""
        self._jobs.start(self._end(self._ending.pop(number)))

    def _end(self, rows: list[tuple[int, bytes]]) -> Work[None]:
        store, chunks = self._store, self._store.chunks
        for row, key in rows:
            held = self._held.get(row)
            if held is not None and held.key == key and held.until <= store.now:
                self._drop(row)
            if chunks.space[row] and chunks.key_of(row) == key and row not in self._held:
                first = chunks.cell[row]
                if first != NONE:
                    shards = store.spaces.of(chunks.space[row]).shards
                    for cell in range(first, first + shards):
                        self._fetches.too_late(cell)
                if row in store.transients and not chunks.leases[row]:
                    store.fleeting.append(row)
            if spent(store):
                yield Pause.SLICE
