"""The front of the core: one event in, a list of actions out.

The law of this module: state changes only in `handle`, `forerun`, `grow` and `adopt`; the same
events at the same times give the same actions. Every request is answered exactly once, at once or
later; one that can't be carried out is answered with a typed error and has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import ChunkHeader, KVSpec
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.adoption import Adoption
from kvd.core.ahead import Ahead
from kvd.core.answers import Answers
from kvd.core.checks import Checks
from kvd.core.config import CoreConfig
from kvd.core.demotions import Demotions
from kvd.core.descents import Descents
from kvd.core.evictions import Evictions
from kvd.core.fetches import Fetches
from kvd.core.hints import Hints, check
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.leases import Leases
from kvd.core.listing import Listing
from kvd.core.loads import Loads
from kvd.core.lookups import Lookups, Unknown
from kvd.core.lower import Lower
from kvd.core.prefetches import Prefetches
from kvd.core.recollection import Part, Recollection, parts
from kvd.core.recovery import Found, Recovery
from kvd.core.reserves import Reserves
from kvd.core.reuses import Reuses
from kvd.core.rooms import Rooms
from kvd.core.scrubs import Scrubs
from kvd.core.sealing import Seals
from kvd.core.sessions import Session
from kvd.core.stats import Reading, known, read, rows, shown, work_out
from kvd.core.store import TOUCH_SLICE, Store
from kvd.core.takeover import take_over
from kvd.core.tierevents import TierEvents
from kvd.core.transfers import Transfers
from kvd.core.writes import Write, Writes
from kvd.errors import (
    AuthError,
    Busy,
    InternalError,
    KvdError,
    LimitExceeded,
    UnknownHandle,
)
from kvd.eviction.base import Policy

_EXPIRE_SLICE: Final = 64  # things that fall due looked at in one event
_RETRY_S: Final = 0.02  # a write takes about so long to be committed
_LITTLE: Final = 16  # units, after which a Tick may begin something else
_TOUCH_LIMIT: Final = 64  # deferred uses beyond which an event applies some itself


class CoreFault(Exception):
    """An event met a fault of the core. `actions`: what was done until then has to be carried out
    nevertheless, or the records in shared memory are no longer what the core goes by; the answer
    to a request is among them."""

    def __init__(self, event: object, actions: list[ac.Action]) -> None:
        super().__init__(f"fault of the core in {type(event).__name__}")
        self.actions = actions


class Core:
    """`policy` makes the eviction policy. Pre: one thread; `now` never goes back."""

    def __init__(self, config: CoreConfig, policy: Callable[[], Policy]) -> None:
        self.config = config
        self._store = Store(config, policy(), [policy() for _ in config.tiers])
        self._checks = Checks(self._store)
        self._jobs = Jobs(self._store)
        self._answers = Answers(self._store, self._jobs)
        self._evictions = Evictions(self._store, self._jobs)
        self._fetches = Fetches(self._store, self._jobs, self._evictions)
        self._descents = Descents(self._store, self._fetches)
        self._rooms = Rooms(self._store, self._jobs, self._fetches, self._descents)
        self._scrubs = Scrubs(self._store, self._jobs, self._fetches)
        self._prefetches = Prefetches(self._store, self._jobs, self._fetches)
        self._seals = Seals(self._store)
        self._demotions = Demotions(
            self._store, self._jobs, self._evictions, self._rooms, self._seals.urge
        )
        self._writes = Writes(self._store)
        ahead = Ahead(self._store, self._jobs, self._evictions)
        self._reserves = Reserves(self._store, self._writes, self._evictions, ahead)
        self._leases = Leases(self._store)
        self._transfers = Transfers(self._store, self._jobs, self._fetches)
        self._leases.ended = self._transfers.lease_ended
        self._leases.kept = self._fetches.keep
        self._leases.second = self._demotions.hit
        self._listing = Listing(self._store, self._writes, self._rooms)
        self._hints = Hints(self._store)
        self._adoption = Adoption(self._store, self._writes, self._jobs)
        self._recovery = Recovery(self._store, self._jobs, self._adoption)
        self._reuses = Reuses(config)
        self._loads = Loads(
            self._store,
            self._answers,
            self._checks,
            Lookups(self._store, self._leases),
            self._leases,
            self._transfers,
            self._reserves,
            self._prefetches,
            self._reuses,
            self._fetches,
        )
        self._tiers = TierEvents(
            self._store,
            self._jobs,
            self._answers,
            self._checks,
            self._fetches,
            self._demotions,
            self._descents,
            self._rooms,
            self._scrubs,
            self._recovery,
        )
        self._store.policy.begin_load = lambda: self._take_over(None)
        for lower in self._store.ladder.lowers:
            lower.policy.begin_load = partial(self._take_over, lower)
        self._make_policy = policy
        self._remembering = False
        for name, _ in config.tenants:
            self._weigh(name)
        self._begun: int | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.OpenSession: self._open_session,
            ev.CloseSession: self._close_session,
            ev.LockFreed: self._lock_freed,
            ev.SetTenant: self._set_tenant,
            ev.RegisterSpec: self._register,
            ev.Reserve: self._reserve,
            ev.Commit: self._commit,
            ev.Abort: self._abort,
            ev.Lookup: self._loads.lookup,
            ev.Load: self._loads.load,
            ev.Prefetch: self._loads.prefetch,
            ev.Wait: self._loads.wait,
            ev.Cancel: self._loads.cancel,
            ev.Renew: self._loads.renew,
            ev.Release: self._loads.release,
            ev.Evict: self._evict,
            ev.List: self._list,
            ev.Stat: self._stat,
            ev.Hint: self._hint,
            ev.Sealed: lambda e: self._seals.sealed(e.record, e.generation, e.digest),
            ev.SealedMany: self._sealed_many,
            ev.Verified: lambda e: self._transfers.verified(e.record, e.generation, e.ok),
            ev.Copied: lambda e: self._evictions.reclass.copied(e.copy, e.ok),
            ev.TierState: self._tiers.state,
            ev.TierWritten: self._tiers.written,
            ev.TierReadDone: self._tiers.read,
            ev.TierDeleted: self._tiers.deleted,
            ev.TierRecovered: self._tiers.recovered,
            ev.TierScrubbedTo: lambda e: self._scrubs.resume(e.tier, e.part),
            ev.TierCommand: self._tiers.command,
            ev.Tick: self._tick,
            ev.Drain: self._drain,
            ev.Remember: self._remember,
        }

    # -- the way in -----------------------------------------------------------------------------

    def handle(self, event: Any, now: int) -> list[ac.Action]:
        """Take one event; what has to be done, in this order. `now`: ns, monotonic. CoreFault,
        with what has to be done all the same, if an event meets a fault of the core."""
        store = self._begin(now)
        try:
            self._expire()
            try:
                self._handlers[type(event)](event)
            except KvdError as error:
                self._answers.refuse(event, error)
            if len(store.touches) > _TOUCH_LIMIT:
                store.apply_touches(TOUCH_SLICE)
            if self._reuses.crowded():
                self._reuses.apply()
            if store.layered:
                self._demotions.pump()
                self._fetches.pump()
                self._fetches.sweep()
                self._scrubs.pump()
            self._seals.pump()
        except Exception as error:
            if hasattr(event, "request"):
                self._answers.give_up(event, error)
            raise self._fault(event, error) from error
        return store.out

    def _fault(self, event: Any, error: Exception) -> CoreFault:
        fault = CoreFault(event, self._store.out)
        fault.__cause__ = error  # a compiled `raise` forgets its `from`
        return fault

    def forerun(self, event: ev.Lookup, now: int) -> list[ac.Action]:
        """What can be begun of a lookup that loads before it is carried out: the read of its first
        chunk, if that lies below. Many keys take longer to look up than a read takes to be on its
        way. Pre: `handle` is given the lookup next. CoreFault as of `handle`."""
        store = self._begin(now)
        try:
            self._loads.forerun(event)
        except Exception as error:
            raise self._fault(event, error) from error
        return store.out

    def grow(self, reserved: int) -> None:
        """The arena's memory is there up to `reserved` bytes."""
        self._store.slabs.grow(reserved)

    def ask_room(self, room: Callable[[int, int], bool]) -> None:
        """`room(slab, slot_size)`: take memory for the slab's records before it is cut into such
        slots; False if there is none. Not asked: there always is."""
        self._store.slabs.room = room

    def recall(self, known: Mapping[str, Recollection], now: int) -> list[str]:
        """Take up what policies knew in an earlier life, by tier; of which tiers. Pre: before
        `adopt` and `recover`."""
        self._begin(now)
        advices = [self._store.policy, *(low.policy for low in self._store.ladder.lowers)]
        return [
            advice.tier
            for advice in advices
            if advice.tier in known and advice.recall(self._make_policy, known[advice.tier], now)
        ]

    def chunk_tokens(self, spec: bytes) -> int:
        """Tokens of a full chunk, 0 if the spec is unknown."""
        known = self._store.spaces.specs.get(spec)
        return 0 if known is None else known.chunk_tokens

    def remember(self) -> Iterator[Part]:
        """All that policies know, for a daemon that ends. While it serves: Remember."""
        while self._store.touches:
            self._store.apply_touches(TOUCH_SLICE)
        return filter(None, parts(self._store))

    def adopt(
        self,
        slot_sizes: Sequence[int],
        records: NDArray[np.void],
        numbers: NDArray[Any],
        namespaces: Sequence[str],
        specs: Sequence[KVSpec],
        locked: Iterable[bytes],
        lease_horizon: int,
        now: int,
        suspects: Sequence[int] | NDArray[Any] = (),
    ) -> list[ac.Action]:
        """Take over what an earlier life left. `records`: those that hold, with their `numbers`;
        `suspects`: numbers of records that were written but don't hold; `locked`: public ids of
        earlier sessions whose lock is not free. Pre: nothing was handled yet."""
        store = self._begin(now)
        self._adoption.run(
            slot_sizes, records, numbers, namespaces, specs, locked, lease_horizon, suspects
        )
        store.policy.recollection = None
        self._leases.adopt(lease_horizon)
        self._seals.pump()
        return store.out

    def recover(
        self,
        tier: int,
        records: NDArray[Any],
        at: NDArray[Any],
        generation: NDArray[Any],
        now: int,
    ) -> list[ac.Action]:
        """Take up all that lies in a tier below, at once. Pre: after `adopt`, before the first
        event of a client."""
        store = self._begin(now)
        lower = store.ladder.lowers[tier]
        self._recovery.whole(Found(lower, records, at, generation))
        return store.out

    def recovered(self) -> None:
        """All tiers that can tell at once what lies there have told."""
        for lower in self._store.ladder.lowers:
            lower.policy.recollection = None
        self._store.spaces.forget_unused()

    @property
    def writing_bytes(self) -> int:
        """Bytes of slots that clients may be copying into."""
        return self._store.writing_bytes

    @property
    def busy(self) -> bool:
        """Whether a Tick would go on with work that is under way."""
        store = self._store
        if self._jobs.busy or store.touches or store.husks or self._seals.waiting:
            return True
        if self._reuses.waiting:
            return True
        return store.layered and bool(
            store.fleeting or self._fetches.stalled or self._demotions.busy
        )

    def next_deadline(self) -> int | None:
        """When a Tick is due next, ns; None if nothing is."""
        return self._store.timers.next()

    def unknown(self, event: ev.Lookup, tier: int) -> Unknown | None:
        """As `Loads.unknown`."""
        return self._loads.unknown(event, tier)

    def record(
        self, tier: int, namespace_digest: bytes, spec: bytes, kind: int, key: bytes, shard: int
    ) -> ChunkHeader | None:
        """As `Ladder.record`, of the tier with that number."""
        store = self._store
        space = store.spaces.find_digest(namespace_digest, spec, kind)
        if space is None:
            return None
        return store.ladder.record(store.ladder.lowers[tier], space, key, shard)

    @property
    def moving(self) -> int:
        """Chunks that are on their way down, or wait for it."""
        return self._demotions.moving

    @property
    def leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases.by_number)

    @property
    def specs(self) -> list[KVSpec]:
        """Registered specs, oldest first."""
        return list(self._store.spaces.specs.values())

    @property
    def namespaces(self) -> list[str]:
        """Namespaces that had a session or a chunk."""
        return list(self._store.spaces.namespaces)

    @property
    def registry_version(self) -> int:
        """Rises whenever `specs` or `namespaces` grow."""
        return self._store.spaces.version

    @property
    def tenants(self) -> list[str]:
        """Namespaces that have rules or chunks, or asked for something, in their order."""
        return known(self._store)

    def tenant_rows(self, names: list[str], *, own: bool) -> dict[str, Any]:
        """What `stat` shows of these tenants; `own`: to one of them itself."""
        return rows(self._store, names, own=own)

    def stat(self, namespace: str | None = None) -> dict[str, Any]:
        """Sections of plain values; with a namespace, only its own tenant's."""
        return {**shown(self.reading(namespace)), "reuse": self._reuses.stat(namespace)}

    def reading(self, namespace: str | None = None) -> Reading:
        """What `stat` shows, copied in a moment and not worked out yet."""
        uptime = self._store.now - (self._begun or 0)
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

    # -- time -----------------------------------------------------------------------------------

    def _begin(self, now: int) -> Store:
        store = self._store
        if self._begun is None:
            self._begun = now
        store.out = []
        store.now = max(now, store.now)
        store.units = 0
        return store

    def _expire(self) -> None:
        for _ in range(_EXPIRE_SLICE):
            due = self._store.timers.pop(self._store.now)
            if due is None:
                return
            if due.kind == "lease":
                lease = self._leases.by_number.get(due.number)
                if lease is not None:
                    self._leases.end(lease, "expired")
            elif due.kind == "write":
                self._jobs.start(self._writes.expire(due.number))
            elif due.kind == "wait":
                self._transfers.timed_out(due.number)
            elif due.kind == "tier":
                self._tiers.late(due.number)
            elif due.kind == "scrub":
                self._scrubs.due(due.number)
            elif due.kind == "prefetch":
                self._prefetches.due(due.number)
            elif due.kind == "room":
                self._jobs.wake(Pause.DEMOTION)
            elif due.kind == "hint":
                self._hints.due(due.number)
            elif due.kind == "pin":
                self._store.keeping.drop(due.number)
            elif due.kind == "horizon":
                self._leases.lower_horizon()
            else:
                self._adoption.end_hold()

    def _sealed_many(self, event: ev.SealedMany) -> None:
        for one in event.seals:
            self._seals.sealed(one.record, one.generation, one.digest)

    def _tick(self, event: ev.Tick) -> None:
        """A slice of whatever is under way."""
        store = self._store
        left = store.apply_touches(TOUCH_SLICE)
        if left > 0:
            store.sweep(64)
            self._jobs.step()
            if store.units <= _LITTLE and self._reuses.waiting and not self._jobs.busy:
                self._reuses.apply()

    def _drain(self, event: ev.Drain) -> None:
        self._store.draining = True
        for lower in self._store.ladder.lowers:
            if lower.writable:
                self._jobs.start(self._draining(lower))
                break

    def _remember(self, event: ev.Remember) -> None:
        def job() -> Work[None]:
            for part in parts(self._store):
                if part:
                    self._store.out.append(ac.Remembered(part))
                yield Pause.SLICE
            self._store.out.append(ac.Remembered(None))
            self._remembering = False

        if not self._remembering:
            self._remembering = True
            self._jobs.later(job())

    def _take_over(self, lower: Lower | None) -> None:
        """A policy has failed."""
        advice = self._store.policy if lower is None else lower.policy
        self._jobs.later(take_over(self._store, advice, lower))

    def _draining(self, lower: Lower) -> Work[None]:
        yield from self._demotions.drains.begin(lower)

    # -- sessions -------------------------------------------------------------------------------

    def _open_session(self, event: ev.OpenSession) -> None:
        if self._store.sessions.get(event.session) is not None:
            raise InternalError(f"session {event.session} is open already")
        self._store.sessions.open(Session(*event))
        self._store.spaces.name(event.namespace)
        self._recovery.known()
        self._store.counters.own["sessions_opened", ""] += 1

    def _set_tenant(self, event: ev.SetTenant) -> None:
        self._store.shares.set(event.namespace, event.rules)
        self._weigh(event.namespace)

    def _weigh(self, name: str) -> None:
        """A tenant has the bandwidth of each tier below by its weight there."""
        shares = self._store.shares
        tenant = shares.find(name)
        if tenant is None:
            return
        for number, tier in enumerate(shares.tiers[1:]):
            weight = tier.told[tenant].weight
            self._fetches.set_weight(number, name, weight)
            self._demotions.set_weight(number, name, weight)

    def _close_session(self, event: ev.CloseSession) -> None:
        session = self._store.sessions.close(event.session)
        if session is None:
            return
        session.stopped = event.stopped or not session.maps_memory
        self._store.counters.own["sessions_closed", ""] += 1
        self._jobs.start(self._leases.close(session))
        self._jobs.start(self._writes.close(session))

    def _lock_freed(self, event: ev.LockFreed) -> None:
        for session in self._store.sessions.by_number.values():
            if session.public_id == event.public_id:
                session.stopped = True
        self._jobs.start(self._writes.lock_freed(event.public_id))
        self._adoption.lock_freed(event.public_id)
        self._leases.lower_horizon()

    # -- stores ---------------------------------------------------------------------------------

    def _reserve(self, event: ev.Reserve) -> None:
        session = self._checks.session(event.session)
        space = self._checks.space(session, event.spec, event.kind)
        ask = self._checks.request(
            space,
            event.shards,
            event.hashes,
            event.parent,
            event.index0,
            event.fingerprints,
            event.tokens,
            event.pos0,
            event.flags,
            event.ttl,
        )
        if self._store.shares.room_in_flight(space.tenant) == 0:
            most = self._store.shares.rules(space.namespace).inflight
            raise Busy(
                f"bytes in flight: unfinished writes of the tenant hold all {most} bytes that they "
                "may; commit some, and ask again",
                _RETRY_S,
            )
        self._reuses.note(space, event.hashes, self._store.now, stored=True)
        self._answers.start(event, self._reserves.reserve(session, ask))

    def _write(self, event: ev.Commit | ev.Abort) -> tuple[Write, list[int]]:
        session = self._checks.session(event.session)
        write = session.writes.get(event.write)
        if write is None:
            raise UnknownHandle(f"write {event.write} is not an unfinished one of this session")
        if event.items is None:
            return write, write.granted()
        return write, self._checks.items(event.items, len(write.items))

    def _commit(self, event: ev.Commit) -> None:
        write, items = self._write(event)
        if event.digests is not None:
            self._checks.column("digests", event.digests, ev.DIGEST_BYTES, len(items))
        self._answers.start(event, self._writes.commit(write, items, event.digests))

    def _abort(self, event: ev.Abort) -> None:
        write, items = self._write(event)
        self._answers.start(event, self._writes.abort(write, items))

    # -- looking in -----------------------------------------------------------------------------

    def _allowed(self, event: ev.Evict | ev.List) -> Session:
        session = self._checks.session(event.session)
        wanted = event.selector.namespace
        if not session.admin and wanted is not None and wanted != session.namespace:
            raise AuthError(f"namespace {wanted!r} is not this session's: it needs the admin role")
        return session

    def _evict(self, event: ev.Evict) -> None:
        session = self._allowed(event)
        result = self._listing.evict(
            session, event.selector, event.dry_run, event.cursor, event.limit
        )
        self._answers.reply(event, result)

    def _list(self, event: ev.List) -> None:
        session = self._allowed(event)
        page = self._listing.page(session, event.level, event.selector, event.cursor, event.limit)
        self._answers.reply(event, page)

    def _stat(self, event: ev.Stat) -> None:
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

    def _hint(self, event: ev.Hint) -> None:
        session = self._checks.session(event.session)
        space = self._checks.space(session, event.spec, event.kind)
        self._checks.keys(event.hashes)
        check(event)
        self._answers.start(event, self._hints.take(session, space, event))

    # -- specs ----------------------------------------------------------------------------------

    def _register(self, event: ev.RegisterSpec) -> None:
        session = self._checks.session(event.session)
        event.spec.validate()
        spaces, digest = self._store.spaces, event.spec.digest
        known = (session.namespace, digest) in spaces.known
        # what others registered counts like what nobody did, or a full list would tell them apart
        full = max(len(spaces.known), len(spaces.specs)) >= self.config.max_specs
        if not known and full:
            raise LimitExceeded(
                f"no more than {self.config.max_specs} specs are kept, and so many are registered"
            )
        spaces.register(event.spec, session.namespace)
        self._recovery.known()
        self._answers.reply(event, ac.SpecResult(event.spec.digest))
