"""Quiet: how much of what nobody waits for a medium is given while engines ask for something.

The law of this module: for a while after a load began, one job that is behind loads runs at a
time, for the next load comes soon and its bytes share the medium with whatever is under way. After
a job of a tenant other than the one that loads, the medium rests for twice as long as the job took:
two thirds of the time are the loads' own. For a while after an engine looked anything up, a third
as many such jobs run at a time as otherwise: each worker takes the interpreter from the loop that
is to answer. When nobody asks nothing is held back, and nothing for ever.

Pure: times are ns of any one clock. Not thread-safe: the pool's lock is held.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.tiers.base import Job
from kvd.tiers.waiting import Line, line_of, tenant_of

__all__ = ["Quiet"]

_REST = 2  # times what a job took
_LOOK_NS = 100_000  # a rest that is over in this moment is looked at again


class Quiet:
    """`lasts_ns`: after a load; 0: never, for a medium whose requests don't slow each other.
    `most`: jobs behind loads that run at a time otherwise."""

    def __init__(self, lasts_ns: int, most: int) -> None:
        self._lasting = lasts_ns
        self._most = most
        self._until = 0
        self._asked_until = 0
        self._loader = b""  # whose load was the last
        self._rest_until = 0

    def most(self, now: int) -> int:
        """Jobs behind loads that may run at a time now."""
        if now >= self._until:
            return max(1, self._most // 3) if now < self._asked_until else self._most
        return 1 if now >= self._rest_until else 0

    def asked(self, now: int) -> None:
        """An engine looks something up, and waits. Without the lock, too."""
        self._asked_until = now + self._lasting

    def lasts(self, now: int) -> bool:
        """Whether loads come."""
        return now < self._until

    def begun(self, jobs: Sequence[Job], now: int) -> None:
        """Jobs of one line were handed to a worker."""
        if self._lasting and jobs and line_of(jobs[0]) is Line.LOAD:
            self._until = now + self._lasting
            self._loader = tenant_of(jobs[0])

    def ended(self, jobs: Sequence[Job], since: int, now: int) -> None:
        """Jobs that are behind loads are through."""
        if now < self._until and any(tenant_of(job) != self._loader for job in jobs):
            self._rest_until = now + min(_REST * (now - since), self._lasting)

    def left_ns(self, now: int) -> int | None:
        """When to look again for who waits while none of these jobs runs: their end will tell of
        itself, that of a rest does not. None: nothing will change by itself."""
        return max(self._rest_until - now, _LOOK_NS) if self._lasting else None
