"""Who is here: sessions, tenants, and the specs that they name.

The law of this module: whoever goes is not waited for: what it held ends in slices, and memory that
it may still write to waits for its lock. A name that is new may be what records of an earlier life
have waited for.
"""

from __future__ import annotations

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.adoption import Adoption
from kvd.core.answers import Answers
from kvd.core.checks import Checks
from kvd.core.demotions import Demotions
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs
from kvd.core.leases import Leases
from kvd.core.recovery import Recovery
from kvd.core.sessions import Session
from kvd.core.store import Store
from kvd.core.writes import Writes
from kvd.errors import InternalError, LimitExceeded


class Members:
    """Lets them in and out."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        answers: Answers,
        checks: Checks,
        leases: Leases,
        writes: Writes,
        fetches: Fetches,
        demotions: Demotions,
        adoption: Adoption,
        recovery: Recovery,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._answers = answers
        self._checks = checks
        self._leases = leases
        self._writes = writes
        self._fetches = fetches
        self._demotions = demotions
        self._adoption = adoption
        self._recovery = recovery

    def open_session(self, event: ev.OpenSession) -> None:
        """A client has come."""
        if self._store.sessions.get(event.session) is not None:
            raise InternalError(f"session {event.session} is open already")
        self._store.sessions.open(Session(*event))
        self._store.spaces.name(event.namespace)
        self._recovery.known()
        self._store.counters.own["sessions_opened", ""] += 1

    def set_tenant(self, event: ev.SetTenant) -> None:
        """A tenant has other rules from now on."""
        self._store.shares.set(event.namespace, event.rules)
        self.weigh(event.namespace)

    def weigh(self, name: str) -> None:
        """A tenant has the bandwidth of each tier below by its weight there."""
        shares = self._store.shares
        tenant = shares.find(name)
        if tenant is None:
            return
        for number, tier in enumerate(shares.tiers[1:]):
            weight = tier.told[tenant].weight
            self._fetches.set_weight(number, name, weight)
            self._demotions.outbox.set_weight(number, name, weight)

    def close_session(self, event: ev.CloseSession) -> None:
        """A client has gone; what it held ends, in slices."""
        session = self._store.sessions.close(event.session)
        if session is None:
            return
        session.stopped = event.stopped or not session.maps_memory
        self._store.counters.own["sessions_closed", ""] += 1
        self._jobs.start(self._leases.close(session))
        self._jobs.start(self._writes.close(session))

    def lock_freed(self, event: ev.LockFreed) -> None:
        """No process can hold the mapping of a session any more."""
        for session in self._store.sessions.by_number.values():
            if session.public_id == event.public_id:
                session.stopped = True
        self._jobs.start(self._writes.lock_freed(event.public_id))
        self._adoption.lock_freed(event.public_id)
        self._leases.lower_horizon()

    def register(self, event: ev.RegisterSpec) -> None:
        """A session names a spec that it will use."""
        session = self._checks.session(event.session)
        event.spec.validate()
        spaces, digest = self._store.spaces, event.spec.digest
        known = (session.namespace, digest) in spaces.known
        # what others registered counts like what nobody did, or a full list would tell them apart
        most = self._store.config.max_specs
        full = max(len(spaces.known), len(spaces.specs)) >= most
        if not known and full:
            raise LimitExceeded(f"no more than {most} specs are kept, and so many are registered")
        spaces.register(event.spec, session.namespace)
        self._recovery.known()
        self._answers.reply(event, ac.SpecResult(event.spec.digest))
