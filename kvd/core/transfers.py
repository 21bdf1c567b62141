"""Transfers: leased chunks on their way to where a client can copy them.

The law of this module: a shard is delivered only when it is ready and, if it was adopted from an
earlier life, its payload has been compared with its digest; that comparison is made once, whoever
asks. In DRAM all else is delivered at once; what lies below is read up in the order asked, and
delivered one by one. A transfer ends with its lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import REF_DTYPE, Outcome
from kvd.core import columns as col
from kvd.core.actions import LoadResult, Reply, Verify, WaitResult
from kvd.core.columns import NONE
from kvd.core.fetch import Batch
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.leases import Lease
from kvd.core.store import Store

_AT_ONCE: Final = 8  # shards asked for from below in the event that loads them
# plain integers: each look at an enum's member costs
_OK: Final = int(Outcome.OK)
_FAILED: Final = int(Outcome.FAILED)
_MISS: Final = int(Outcome.MISS)
_CORRUPT: Final = int(Outcome.CORRUPT)
_LABEL: Final[dict[int, str]] = {
    Outcome.OK: "ok",
    Outcome.MISS: "miss",
    Outcome.CORRUPT: "corrupt",
    Outcome.CANCELLED: "cancelled",
    Outcome.DEADLINE: "deadline",
    Outcome.NO_SPACE: "no_space",
}


class Waiter:
    """A long poll that has not been answered."""

    def __init__(self, session: int, request: object, after: int, deadline: int) -> None:
        self.session = session
        self.request = request
        self.after = after
        self.deadline = deadline


class Transfer:
    """Results of one load that were not all known at once. Result number = item * shards + shard
    position. `order` lists results in the order in which they became known."""

    def __init__(
        self, number: int, lease: Lease, items: NDArray[np.int64], cells: NDArray[np.int64]
    ) -> None:
        self.number = number
        self.lease = lease
        self.items = items  # positions in the lease
        self.cells = cells  # by result
        self.width = cells.size // max(len(items), 1)
        self.outcomes = bytearray(cells.size)
        self.order: list[int] = []
        self.waiters: dict[int, Waiter] = {}  # by their own handle
        self.cancelled = False

    @property
    def done(self) -> bool:
        return len(self.order) == len(self.outcomes)


class Transfers:
    """All transfers by number; and what is being verified."""

    def __init__(self, store: Store, jobs: Jobs, fetches: Fetches) -> None:
        self._store = store
        self._jobs = jobs
        self._fetches = fetches
        fetches.transfers = self
        self.by_number: dict[int, Transfer] = {}
        self._waits: dict[int, Transfer] = {}  # waiter's handle -> transfer
        # (record, generation) -> (transfer, result) that wait for it
        self._verifying: dict[tuple[int, int], list[tuple[Transfer, int]]] = {}
        self._queue: deque[Verify] = deque()
        self._in_flight = 0

    # -- load -----------------------------------------------------------------------------------

    def load(
        self, lease: Lease, items: Sequence[int] | None, shards: tuple[int, ...]
    ) -> LoadResult:
        """Deliver what can be delivered now; start to verify what can't."""
        store, chunks, cells = self._store, self._store.chunks, self._store.cells
        where = np.arange(len(lease.rows)) if items is None else np.array(items, np.int64)
        first = chunks.np_cell[lease.rows[where]].astype(np.int64)
        which = (first[:, None] + np.array(shards, np.int64)[None, :]).reshape(-1)
        state = cells.np_state[which]
        ready = state == col.READY
        blocked = ready & (cells.np_marks[which] & col.UNVERIFIED != 0)
        ok = ready & ~blocked
        outcomes = np.full(which.size, _MISS, np.uint8)
        outcomes[state == col.BAD] = _CORRUPT
        outcomes[ok] = _OK
        outcomes[blocked] = _FAILED
        below = np.zeros(0, np.int64)
        if store.layered:
            below = np.flatnonzero(state == col.ABSENT)
            below = below[store.ladder.sources(which[below]) != NONE]
            outcomes[below] = _FAILED
        refs = self.refs(which[ok])
        self._count(lease, where, outcomes.reshape(len(where), -1))
        self._count_shards(lease, outcomes, refs)
        if not blocked.any() and not len(below):
            return LoadResult(0, outcomes.tobytes(), refs.tobytes(), True)
        transfer = Transfer(store.handle(), lease, where, which)
        transfer.outcomes[:] = outcomes.tobytes()
        transfer.order = np.flatnonzero(outcomes != _FAILED).tolist()
        self.by_number[transfer.number] = transfer
        lease.transfers.append(transfer.number)
        for result in np.flatnonzero(blocked).tolist():
            self._verify(transfer, result)
        wanted = below.tolist()
        batch = self._fetches.batch_of(int(which[wanted[0]])) if wanted else Batch()
        for result in wanted[:_AT_ONCE]:
            self._fetches.want(int(which[result]), transfer, result, batch)
        if len(wanted) > _AT_ONCE:  # the first one's read goes out before all others are looked at
            self._jobs.later(self._want(transfer, wanted[_AT_ONCE:], batch))
        self.pump()
        return LoadResult(transfer.number, outcomes.tobytes(), refs.tobytes(), False)

    def _want(self, transfer: Transfer, wanted: list[int], batch: Batch) -> Work[None]:
        """Ask for shards from below, in order."""
        store = self._store
        for result in wanted:
            if transfer.cancelled:
                return
            cell = int(transfer.cells[result])
            state = store.cells.state[cell]
            if state == col.ABSENT and store.ladder.source(cell) is not None:
                self._fetches.want(cell, transfer, result, batch)
            elif state == col.READY:  # somebody else had it read up meanwhile
                self._known(transfer, result, Outcome.OK)
            else:
                self._known(transfer, result, Outcome.MISS)
            if spent(store):
                yield Pause.SLICE

    def refs(self, cells: NDArray[np.int64]) -> NDArray[np.void]:
        """Slot references (REF_DTYPE) of ready cells."""
        store = self._store
        refs = np.zeros(len(cells), REF_DTYPE)
        if not len(cells):
            return refs
        records = store.cells.np_record[cells].astype(np.int64)
        refs["arena"] = store.config.arena
        refs["record"] = records
        refs["offset"] = store.slabs.offsets(records)
        refs["generation"] = store.cells.np_generation[cells]
        rows = store.cells.np_chunk[cells]
        space = store.spaces.of(store.chunks.space[int(rows[0])])
        if space.shards == 1:
            refs["length"] = space.nbytes[0]
        else:
            refs["length"] = np.array(space.nbytes)[cells - store.chunks.np_cell[rows]]
        return refs

    def _nbytes(self, cell: int) -> int:
        """Of a shard's payload."""
        store = self._store
        row = store.cells.chunk[cell]
        space = store.spaces.of(store.chunks.space[row])
        return space.nbytes[cell - store.chunks.cell[row]]

    def _count(self, lease: Lease, items: NDArray[np.int64], outcomes: NDArray[np.uint8]) -> None:
        """Count chunks whose first load is known in full. `outcomes`: [items, shards]."""
        if lease.loaded is None:
            lease.loaded = np.zeros(len(lease.rows), bool)
        known = (outcomes != _FAILED).all(axis=1)
        if not known.any():
            return
        fresh = known & ~lease.loaded[items]
        good = fresh & (outcomes == _OK).all(axis=1)
        before = int(np.count_nonzero(lease.loaded))
        lease.loaded[items[fresh]] = True
        delivered = np.zeros(len(lease.rows), bool)
        delivered[items[good]] = True  # an item may be named twice
        ended = int(np.count_nonzero(lease.loaded)) - before
        ok = int(np.count_nonzero(delivered))
        counts = self._store.counters.tenant(lease.namespace)
        counts["chunks_delivered", ""] += ok
        counts["chunks_failed", ""] += ended - ok

    def _count_one(self, lease: Lease, item: int, outcomes: bytearray) -> None:
        """The same of one item, without arrays: each shard that comes from below is one."""
        loaded = lease.loaded
        assert loaded is not None
        if _FAILED in outcomes or loaded[item]:
            return
        loaded[item] = True
        good = outcomes.count(_OK) == len(outcomes)
        counts = self._store.counters.tenant(lease.namespace)
        counts["chunks_delivered" if good else "chunks_failed", ""] += 1

    def _count_shards(
        self, lease: Lease, outcomes: NDArray[np.uint8], refs: NDArray[np.void]
    ) -> None:
        counts = self._store.counters.tenant(lease.namespace)
        for outcome, count in enumerate(np.bincount(outcomes).tolist()):
            if count and outcome in _LABEL:
                counts["shards_loaded", _LABEL[outcome]] += count
        counts["bytes_loaded", ""] += int(refs["length"].sum())

    # -- verification ---------------------------------------------------------------------------

    def _verify(self, transfer: Transfer, result: int) -> None:
        store, cells = self._store, self._store.cells
        cell = int(transfer.cells[result])
        key = (cells.record[cell], cells.generation[cell])
        waiting = self._verifying.get(key)
        if waiting is not None:
            waiting.append((transfer, result))
            return
        self._verifying[key] = [(transfer, result)]
        offset = store.slabs.offset(key[0])
        self._queue.append(Verify(*key, offset, self._nbytes(cell), cells.digest_of(cell)))

    def pump(self) -> None:
        """Keep the workers busy with what waits to be verified."""
        while self._queue and self._in_flight < self._store.config.verifies_in_flight:
            self._in_flight += 1
            self._store.out.append(self._queue.popleft())

    def verified(self, record: int, generation: int, ok: bool) -> None:
        """A payload has been compared with its digest."""
        store, cells = self._store, self._store.cells
        waiting = self._verifying.pop((record, generation), None)
        if waiting is None:
            return
        self._in_flight -= 1
        cell = store.slabs.cell_of(record)
        same = (
            cell >= 0
            and cells.state[cell] == col.READY
            and cells.generation[cell] == generation
            and cells.record[cell] == record
        )
        if same:
            store.counters.own["shards_verified", "ok" if ok else "corrupt"] += 1
            cells.marks[cell] &= ~col.UNVERIFIED & 0xFF
            if not ok:
                store.quarantine(cell)
        outcome = Outcome.OK if ok and same else Outcome.CORRUPT if not ok else Outcome.MISS
        for transfer, result in waiting:
            if transfer.outcomes[result] == Outcome.FAILED:
                self._known(transfer, result, outcome)
        self.pump()

    def fetched(self, transfer: Transfer, result: int, outcome: Outcome) -> None:
        """A shard from below is here, or is not to be had."""
        if transfer.outcomes[result] == Outcome.FAILED:
            self._known(transfer, result, outcome)

    def _known(self, transfer: Transfer, result: int, outcome: Outcome) -> None:
        transfer.outcomes[result] = outcome
        transfer.order.append(result)
        lease, width = transfer.lease, transfer.width
        first = result // width * width
        shards = transfer.outcomes[first : first + width]
        self._count_one(lease, int(transfer.items[result // width]), shards)
        counts = self._store.counters.tenant(lease.namespace)
        if outcome in _LABEL:
            counts["shards_loaded", _LABEL[outcome]] += 1
        if outcome is Outcome.OK:
            counts["bytes_loaded", ""] += self._nbytes(int(transfer.cells[result]))
        self._answer(transfer)

    # -- wait -----------------------------------------------------------------------------------

    def wait(self, transfer: Transfer, waiter: Waiter) -> None:
        """Answer now if there is more than the asker knows, or later."""
        if self._due(transfer, waiter):
            self._reply(transfer, waiter)
            return
        number = self._store.handle()
        transfer.waiters[number] = waiter
        self._waits[number] = transfer
        self._store.timers.add(waiter.deadline, "wait", number)

    def timed_out(self, number: int) -> None:
        transfer = self._waits.pop(number, None)
        if transfer is not None:
            self._reply(transfer, transfer.waiters.pop(number))

    def cancel(self, transfer: Transfer) -> None:
        """End it: what is not known yet is CANCELLED."""
        del self.by_number[transfer.number]
        transfer.cancelled = True
        for result, outcome in enumerate(bytes(transfer.outcomes)):
            if outcome == Outcome.FAILED:
                transfer.outcomes[result] = Outcome.CANCELLED
                transfer.order.append(result)
        pending = np.frombuffer(transfer.outcomes, np.uint8)
        left = int(np.count_nonzero(pending == Outcome.CANCELLED))
        counts = self._store.counters.tenant(transfer.lease.namespace)
        counts["shards_loaded", "cancelled"] += left
        self._count(transfer.lease, transfer.items, pending.reshape(len(transfer.items), -1))
        self._answer(transfer)

    def lease_ended(self, lease: Lease) -> None:
        for number in lease.transfers:
            transfer = self.by_number.get(number)
            if transfer is not None:
                self.cancel(transfer)

    def _due(self, transfer: Transfer, waiter: Waiter) -> bool:
        known = len(transfer.order)
        return transfer.done or known > waiter.after or self._store.now >= waiter.deadline

    def _answer(self, transfer: Transfer) -> None:
        for number, waiter in list(transfer.waiters.items()):
            if self._due(transfer, waiter):
                del transfer.waiters[number], self._waits[number]
                self._store.timers.remove(waiter.deadline, "wait", number)
                self._reply(transfer, waiter)

    def _reply(self, transfer: Transfer, waiter: Waiter) -> None:
        news = transfer.order[waiter.after :]
        outcomes = bytes(transfer.outcomes[r] for r in news)
        ready = [r for r in news if transfer.outcomes[r] == Outcome.OK]
        refs = self.refs(transfer.cells[np.array(ready, np.int64)])
        items = np.array(news, "<u4").tobytes()
        result = WaitResult(items, outcomes, refs.tobytes(), len(transfer.order), transfer.done)
        self._store.out.append(Reply(waiter.session, waiter.request, result))
