"""Waiting: the jobs of a tier that no worker has taken yet, and which of them is next.

The law of this module: what an engine waits for goes first, then what makes room, then what moves
down, then scrubbing, prefetches last; within each, tenants share by weight (kvd/fair.py), and a
tenant's own jobs keep their order. What is more urgent can't starve the rest for ever: a line that
waits gets one part in `PATIENCE + 1` of the bytes. Nothing is lost: a job leaves by `take`, by
`expire` or by `drop`, once.

Not thread-safe: the pool's lock is held.
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import IntEnum

from kvd.fair import MIN_BYTES, FairQueue, Ticket
from kvd.tiers.base import NEVER, Delete, Job, Probe, Read, Use, Write

__all__ = ["Line", "Waiting", "line_of", "tenant_of"]

PATIENCE = 16  # times its own bytes that more urgent ones may go before a job
_STALE = 64


class Line(IntEnum):
    """The most urgent first."""

    PROBE = 0
    LOAD = 1
    DELETE = 2
    MOVE = 3
    SCRUB = 4
    PREFETCH = 5


# What a worker may be kept from, so that others are free for what comes meanwhile.
BEHIND = frozenset({Line.MOVE, Line.SCRUB, Line.PREFETCH})
_READS = {
    Use.LOAD: Line.LOAD, Use.MOVE: Line.MOVE, Use.SCRUB: Line.SCRUB, Use.PREFETCH: Line.PREFETCH,
}  # fmt: skip


def line_of(job: Job) -> Line:
    if isinstance(job, Read):
        return _READS[job.use]
    if isinstance(job, Write):
        return Line.MOVE
    return Line.DELETE if isinstance(job, Delete) else Line.PROBE


def tenant_of(job: Job) -> bytes:
    """Whose share the job takes: who was named with it, else the namespace of its key."""
    if isinstance(job, Write):
        return job.tenant or job.header.namespace_digest
    return b"" if isinstance(job, Probe) else job.tenant or job.key.namespace


def _nbytes(job: Job) -> int:
    if isinstance(job, Write):
        return job.header.length
    return memoryview(job.into).nbytes if isinstance(job, Read) else 0


class Waiting:
    """`delete_batch`: deletes that may be taken together."""

    def __init__(self, delete_batch: int = 1) -> None:
        self._batch = delete_batch
        self._probes: deque[Job] = deque()
        self._lines: dict[Line, FairQueue[Job]] = {
            line: FairQueue() for line in Line if line is not Line.PROBE
        }
        self._due: list[tuple[int, int, Line, Ticket[Job]]] = []  # heap by deadline
        self._count = 0
        self._passed = dict.fromkeys(self._lines, 0)  # bytes that went before what waits there

    def __len__(self) -> int:
        return len(self._probes) + sum(map(len, self._lines.values()))

    @property
    def loads(self) -> int:
        return len(self._lines[Line.LOAD])

    def set_weight(self, tenant: bytes, weight: float) -> None:
        for queue in self._lines.values():
            queue.set_weight(tenant, weight)

    def put(self, job: Job) -> None:
        line = line_of(job)
        if line is Line.PROBE:
            self._probes.append(job)
            return
        ticket = self._lines[line].push(tenant_of(job), _nbytes(job), job)
        if job.deadline != NEVER:
            self._count += 1
            heapq.heappush(self._due, (job.deadline, self._count, line, ticket))
            if len(self._due) > 2 * len(self) + _STALE:
                self._due = [entry for entry in self._due if entry[3].queued]
                heapq.heapify(self._due)

    def ready(self, *, behind: bool) -> bool:
        """Whether `take` would find something."""
        return bool(self._probes) or self._next(behind) is not None

    def take(self, *, behind: bool) -> list[Job]:
        """The next job, or deletes that go together; empty if there is none. `behind`: whether a
        worker is to spare for what is behind loads."""
        if self._probes:
            return [self._probes.popleft()]
        line = self._next(behind)
        if line is None:
            return []
        queue = self._lines[line]
        count = min(self._batch, len(queue)) if line is Line.DELETE else 1
        jobs = [queue.pop() for _ in range(count)]
        went = max(MIN_BYTES, sum(map(_nbytes, jobs)))
        for other, waiting in self._lines.items():
            if other > line and waiting:
                self._passed[other] += went
        self._passed[line] = 0
        return jobs

    def _next(self, behind: bool) -> Line | None:
        lines = [
            line for line, queue in self._lines.items() if queue and (behind or line not in BEHIND)
        ]
        for line in lines[1:]:
            kept = self._lines[line].peek()
            if kept is not None and self._passed[line] >= PATIENCE * kept.nbytes:
                return line
        return lines[0] if lines else None

    def expire(self, now: int) -> list[Job]:
        """Take out what is too late."""
        late = []
        while self._due and self._due[0][0] <= now:
            *_, line, ticket = heapq.heappop(self._due)
            if self._lines[line].remove(ticket):
                late.append(ticket.item)
        for job in [job for job in self._probes if job.deadline <= now]:
            self._probes.remove(job)
            late.append(job)
        return late

    def drop(self, *kinds: type) -> list[Job]:
        """Take out all jobs of some kinds; of all kinds if none is named."""
        jobs: list[Job] = list(self._probes)
        self._probes.clear()
        for queue in self._lines.values():
            jobs += [queue.pop() for _ in range(len(queue))]
        dropped = [job for job in jobs if not kinds or type(job) in kinds]
        for job in jobs:
            if kinds and type(job) not in kinds:
                self.put(job)
        return dropped
