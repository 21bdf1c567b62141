"""What a session is shown, and what it may name to have it evicted.

The law of this module: an administrator sees all, anybody else what is its own namespace's. Numbers
that are shown together are of one moment.
"""

from __future__ import annotations

from typing import Any

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.answers import Answers
from kvd.core.checks import Checks
from kvd.core.demotions import Demotions
from kvd.core.fetches import Fetches
from kvd.core.jobs import Pause, Work, spent
from kvd.core.leases import Leases
from kvd.core.listing import Listing
from kvd.core.prefetches import Prefetches
from kvd.core.recovery import Recovery
from kvd.core.reuses import Reuses
from kvd.core.sessions import Session
from kvd.core.stats import Reading, read, shown, work_out
from kvd.core.store import Store
from kvd.core.writes import Writes
from kvd.errors import AuthError


class Views:
    """Carries out what operators ask, and reads what is exported."""

    def __init__(
        self,
        store: Store,
        answers: Answers,
        checks: Checks,
        listing: Listing,
        leases: Leases,
        writes: Writes,
        demotions: Demotions,
        fetches: Fetches,
        prefetches: Prefetches,
        recovery: Recovery,
        reuses: Reuses,
    ) -> None:
        self._store = store
        self._answers = answers
        self._checks = checks
        self._listing = listing
        self._leases = leases
        self._writes = writes
        self._demotions = demotions
        self._fetches = fetches
        self._prefetches = prefetches
        self._recovery = recovery
        self._reuses = reuses
        self.begun: int | None = None  # when the first event came

    def all(self, namespace: str | None) -> dict[str, Any]:
        """As `Core.stat`."""
        return {**shown(self.reading(namespace)), "reuse": self._reuses.stat(namespace)}

    def reading(self, namespace: str | None) -> Reading:
        """As `Core.reading`."""
        uptime = self._store.now - (self.begun or 0)
        return read(
            self._store,
            self._leases,
            self._writes,
            uptime,
            namespace,
            {
                "moving": self._demotions.moving,
                "fetches_queued": self._fetches.queued,
                "prefetch_bytes": self._prefetches.taken,
                "records_waiting": self._recovery.waiting,
            },
        )

    def _allowed(self, event: ev.Evict | ev.List) -> Session:
        session = self._checks.session(event.session)
        wanted = event.selector.namespace
        if not session.admin and wanted is not None and wanted != session.namespace:
            raise AuthError(f"namespace {wanted!r} is not this session's: it needs the admin role")
        return session

    def evict(self, event: ev.Evict) -> None:
        """One slice of an eviction by name."""
        session = self._allowed(event)
        result = self._listing.evict(
            session, event.selector, event.dry_run, event.cursor, event.limit
        )
        self._answers.reply(event, result)

    def page(self, event: ev.List) -> None:
        """One page of a level."""
        session = self._allowed(event)
        page = self._listing.page(session, event.level, event.selector, event.cursor, event.limit)
        self._answers.reply(event, page)

    def stat(self, event: ev.Stat) -> None:
        """What is counted and held."""
        session = self._checks.session(event.session)
        own = None if session.admin else session.namespace
        self._answers.start(event, self._told(session, own))

    def _told(self, session: Session, namespace: str | None) -> Work[ac.StatResult]:
        """All numbers are of the moment in which it was asked, whenever they are worked out."""
        store = self._store
        reading, reuse = self.reading(namespace), self._reuses.stat(namespace)
        slices = work_out(reading, store.config.apart)
        units = len(reading.counts) // 8  # the copy
        while True:
            if spent(store, units):
                yield Pause.SLICE
            try:
                units = next(slices)
            except StopIteration as done:
                stat = {**done.value, "reuse": reuse, "namespace": session.namespace}
                return ac.StatResult(stat)
