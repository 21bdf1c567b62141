"""What the tiers below report, and what an operator wants of one.

The law of this module: a job is ended here once, by its answer or by its time, and whoever began it
is told; an answer that comes after that means nothing.
"""

from __future__ import annotations

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.answers import Answers
from kvd.core.checks import Checks
from kvd.core.demotions import Demotions
from kvd.core.descents import Descent, Descents
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs, Pause, Work
from kvd.core.lower import Lower
from kvd.core.recovery import Found, Recovery
from kvd.core.rooms import Rooms
from kvd.core.scrubs import Scrubs
from kvd.core.store import Store
from kvd.errors import AuthError, BadKey


class TierEvents:
    """Takes the events of tiers to those who wait for them."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        answers: Answers,
        checks: Checks,
        fetches: Fetches,
        demotions: Demotions,
        descents: Descents,
        rooms: Rooms,
        scrubs: Scrubs,
        recovery: Recovery,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._answers = answers
        self._checks = checks
        self._fetches = fetches
        self._demotions = demotions
        self._descents = descents
        self._rooms = rooms
        self._scrubs = scrubs
        self._recovery = recovery

    def state(self, event: ev.TierState) -> None:
        """Whether a tier can be read and written now."""
        ladder = self._store.ladder
        lower = ladder.lowers[event.tier]
        lower.told_readable, lower.told_writable = event.readable, event.writable
        ladder.refresh()
        self._jobs.wake(Pause.DEMOTION)

    def written(self, event: ev.TierWritten) -> None:
        """A write has ended."""
        job = self._store.ladder.end(event.job)
        if job is not None:
            down = isinstance(job.owner, Descent)
            done = self._descents.written if down else self._demotions.done
            done(job, event.answer, event.at, event.generation, event.room, event.empty)

    def read(self, event: ev.TierReadDone) -> None:
        """A read has ended."""
        job = self._store.ladder.end(event.job)
        if job is None:
            return
        if job.kind == "scrub":
            fits = event.header is not None and self._fetches.fits(job.cell, event.header)
            self._scrubs.done(job, event.answer, fits=fits)
        elif job.kind == "descent":
            self._descents.read(event.job, job, event.answer, event.header)
        else:
            self._fetches.done(job, event.answer, event.header)

    def deleted(self, event: ev.TierDeleted) -> None:
        """Something was deleted, or could not be."""
        job = self._store.ladder.end(event.job)
        if job is not None:
            self._store.counters.own["shards_deleted", event.answer.value] += 1
            self._rooms.deleted(job)

    def recovered(self, event: ev.TierRecovered) -> None:
        """Some of what lies in a tier of an earlier life."""
        lower = self._store.ladder.lowers[event.tier]
        found = Found(lower, event.records, event.at, event.generation, event.hint)
        self._jobs.start(self._recovery.slices(found))

    def late(self, number: int) -> None:
        """A job did not come back in time."""
        job = self._store.ladder.late(number)
        if job is None:
            return
        if job.kind == "read":
            self._fetches.late(job)
        elif job.kind == "write":
            self._demotions.late(job)
        elif job.kind == "delete":
            self._rooms.late(job)

    def command(self, event: ev.TierCommand) -> None:
        """What an operator wants of a tier."""
        session = self._checks.session(event.session)
        if not session.admin:
            raise AuthError("commands to tiers need the admin role")
        lower = self._store.ladder.named(event.tier)
        if event.command == "drain":
            self._answers.start(event, self._drain(lower))
            return
        if event.command == "scrub":
            self._scrubs.ask(lower.number)
            result = ac.TierResult(
                lower.readable, "" if lower.readable else "degraded", lower.chunks
            )
        else:
            raise BadKey(f"command {event.command!r} is unknown: probe, drain, scrub")
        self._answers.reply(event, result)

    def _drain(self, lower: Lower) -> Work[ac.TierResult]:
        chunks = yield from self._demotions.drains.begin(lower)
        return ac.TierResult(lower.writable, "" if lower.writable else "degraded", chunks)
