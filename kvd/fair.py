"""FairQueue: whose request is next, when several tenants share one medium.

The law of this module: start-time fair queuing by bytes (Goyal, Vin, Cheng 1996). Each tenant's
requests stay in their order. A request starts, in virtual time, when its tenant's one before it is
through, but not before it came; it is through after its bytes, divided by its tenant's weight. The
earliest start is served next. So the medium is never idle while something waits (idle shares are
lent), what was lent is not owed, and while two tenants both wait, what they get, divided by their
weights, differs by no more than one largest request of each, divided likewise.

Pure and deterministic: no clock, no threads, no chance; equal starts go in the order in which they
came to the head. Each operation is O(log tenants). Memory: what waits, and a few words for each
tenant that waits or was served a moment ago.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["MIN_BYTES", "FairQueue", "Ticket"]

T = TypeVar("T")

MIN_BYTES = 4096  # what a request costs at least: a small one takes a turn, too
_UNIT = 1 << 16  # of virtual time a byte, at weight 1: integers, so nothing is rounded away
_DEAD = 64  # withdrawn or stale entries that are carried along before they are swept out


class Ticket(Generic[T]):
    """A place in the queue."""

    __slots__ = ("flow", "item", "nbytes", "queued")

    def __init__(self, flow: _Flow[T], nbytes: int, item: T) -> None:
        self.flow = flow
        self.nbytes = nbytes
        self.item = item
        self.queued = True


class _Flow(Generic[T]):
    """One tenant's line. `number` tells which of its entries in a heap is the true one."""

    __slots__ = ("finish", "line", "live", "number", "start", "tenant")

    def __init__(self, tenant: Hashable) -> None:
        self.tenant = tenant
        self.line: deque[Ticket[T]] = deque()
        self.live = 0  # of them, not withdrawn
        self.start = 0  # of its first
        self.finish = 0  # of the last one served
        self.number = 0


class FairQueue(Generic[T]):
    """Requests of many tenants. Not thread-safe."""

    def __init__(self) -> None:
        self._flows: dict[Hashable, _Flow[T]] = {}
        self._weights: dict[Hashable, float] = {}
        self._waiting: list[tuple[int, int, _Flow[T]]] = []  # heap by the start of its first
        self._idle: list[tuple[int, int, _Flow[T]]] = []  # heap by finish: forgotten after it
        self._time = 0  # virtual: the start of what was served last
        self._number = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def tenants(self) -> int:
        """Tenants that are remembered, for the bound on memory."""
        return len(self._flows)

    def set_weight(self, tenant: Hashable, weight: float) -> None:
        """A tenant's weight, from its next request on; 1 for who has none. Pre: weight > 0."""
        if not weight > 0:
            raise ValueError(f"the weight of {tenant!r} is {weight}; it must be above 0")
        if weight == 1:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = float(weight)

    def push(self, tenant: Hashable, nbytes: int, item: T) -> Ticket[T]:
        """Queue a request that takes `nbytes` of the medium."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow(tenant)
        ticket = Ticket(flow, max(nbytes, MIN_BYTES), item)
        flow.line.append(ticket)
        flow.live += 1
        self._live += 1
        if flow.live == 1:
            flow.start = max(self._time, flow.finish)
            self._enter(flow)
        return ticket

    def peek(self) -> Ticket[T] | None:
        """What would be served next."""
        flow = self._first()
        return None if flow is None else self._head(flow)

    def pop(self) -> T:
        """Serve the next one. IndexError if nothing waits."""
        flow = self._first()
        if flow is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._waiting)
        ticket = self._head(flow)
        flow.line.popleft()
        ticket.queued = False
        flow.live -= 1
        self._live -= 1
        self._time = flow.start
        weight = self._weights.get(flow.tenant, 1.0)
        flow.finish = flow.start + max(1, round(ticket.nbytes * _UNIT / weight))
        if flow.live:
            flow.start = flow.finish
            self._enter(flow)
        else:
            self._leave(flow)
        self._settle()
        return ticket.item

    def remove(self, ticket: Ticket[T]) -> bool:
        """Withdraw a request; it costs its tenant nothing. False if it waits no more. ValueError
        for a ticket of another queue."""
        if not ticket.queued:
            return False
        flow = ticket.flow
        if self._flows.get(flow.tenant) is not flow:
            raise ValueError("the ticket is of another queue")
        ticket.queued = False
        flow.live -= 1
        self._live -= 1
        if not flow.live:
            self._leave(flow)
            self._settle()
        elif len(flow.line) > 2 * flow.live + _DEAD:
            flow.line = deque(t for t in flow.line if t.queued)
        return True

    # -- tenants that come and go ---------------------------------------------------------------

    def _enter(self, flow: _Flow[T]) -> None:
        self._number += 1
        flow.number = self._number
        heapq.heappush(self._waiting, (flow.start, flow.number, flow))
        if len(self._waiting) > 2 * len(self._flows) + _DEAD:
            self._waiting = [entry for entry in self._waiting if entry[1] == entry[2].number]
            heapq.heapify(self._waiting)

    def _leave(self, flow: _Flow[T]) -> None:
        """It has nothing that waits: what it was served is remembered until that is past."""
        flow.line.clear()
        self._number += 1
        flow.number = self._number
        heapq.heappush(self._idle, (flow.finish, flow.number, flow))
        if len(self._idle) > 2 * len(self._flows) + _DEAD:
            self._idle = [entry for entry in self._idle if entry[1] == entry[2].number]
            heapq.heapify(self._idle)

    def _settle(self) -> None:
        """Forget who has nothing to come, and nothing ahead of the others."""
        if not self._live:  # nobody waits: all begin anew, as equals
            self._flows.clear()
            self._waiting.clear()
            self._idle.clear()
            self._time = 0
            return
        while self._idle and self._idle[0][0] <= self._time:
            _, number, flow = heapq.heappop(self._idle)
            if flow.number == number:
                del self._flows[flow.tenant]

    def _first(self) -> _Flow[T] | None:
        """Who is next, above whom nothing stale stands."""
        while self._waiting:
            _, number, flow = self._waiting[0]
            if flow.number == number:
                return flow
            heapq.heappop(self._waiting)
        return None

    @staticmethod
    def _head(flow: _Flow[T]) -> Ticket[T]:
        while not flow.line[0].queued:
            flow.line.popleft()
        return flow.line[0]
