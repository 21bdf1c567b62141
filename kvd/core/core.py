"""The front of the core: one event in, a list of actions out.

The law of this module: state changes only in `handle`, `forerun`, `grow` and `adopt`; the same
events at the same times give the same actions. Every request is answered exactly once, at once or
later; one that can't be carried out is answered with a typed error and has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from kvd.core.jobs import Jobs, Pause, Work
from kvd.core.leases import Leases
from kvd.core.listing import Listing
from kvd.core.loads import Loads
from kvd.core.lookups import Lookups, Unknown
from kvd.core.lower import Lower
from kvd.core.members import Members
from kvd.core.policies import Policies
from kvd.core.prefetches import Prefetches
from kvd.core.recollection import Part, Recollection
from kvd.core.records import Records
from kvd.core.recovery import Found, Recovery
from kvd.core.reserves import Reserves
from kvd.core.reuses import Reuses
from kvd.core.rooms import Rooms
from kvd.core.scrubs import Scrubs
from kvd.core.sealing import Seals
from kvd.core.stats import Reading, known, rows
from kvd.core.store import Store
from kvd.core.stores import Stores
from kvd.core.tierevents import TierEvents
from kvd.core.transfers import Transfers
from kvd.core.views import Views
from kvd.core.writes import Writes
from kvd.errors import KvdError
from kvd.eviction.base import Policy

_EXPIRE_SLICE: Final = 64  # things that fall due looked at in one event
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
        self._store = store = Store(config, policy(), [policy() for _ in config.tiers])
        self._jobs = jobs = Jobs(store)
        self._checks = checks = Checks(store)
        self._answers = answers = Answers(store, jobs)
        self._evictions = evictions = Evictions(store, jobs)
        self._fetches = fetches = Fetches(store, jobs, evictions)
        self._descents = Descents(store, fetches)
        rooms = Rooms(store, jobs, fetches, self._descents)
        self._scrubs = Scrubs(store, jobs, fetches)
        self._prefetches = prefetches = Prefetches(store, jobs, fetches)
        self._seals = Seals(store)
        self._demotions = demotions = Demotions(store, jobs, evictions, rooms, self._seals.urge)
        self._writes = writes = Writes(store)
        reserves = Reserves(store, writes, evictions, Ahead(store, jobs, evictions))
        self._leases = leases = Leases(store)
        self._transfers = transfers = Transfers(store, jobs, fetches)
        leases.ended = transfers.lease_ended
        leases.kept = fetches.keep
        leases.second = demotions.hit
        self._hints = Hints(store)
        told = Records(store)
        self._adoption = adoption = Adoption(store, writes, jobs, told)
        self._recovery = recovery = Recovery(store, jobs, told)
        rooms.unnamed = recovery.give_up
        self._reuses = reuses = Reuses(config)
        self._policies = Policies(store, jobs, policy)
        self._begun: int | None = None
        lookups, listing = Lookups(store, leases), Listing(store, writes, rooms)
        self._loads = Loads(
            store, answers, checks, lookups, leases, transfers, reserves, prefetches, reuses,
            fetches,
        )  # fmt: skip
        stores = Stores(store, answers, checks, reserves, writes, reuses)
        members = Members(
            store, jobs, answers, checks, leases, writes, fetches, demotions, adoption, recovery
        )
        self._views = Views(
            store, answers, checks, listing, leases, writes, demotions, fetches, prefetches,
            recovery, reuses,
        )  # fmt: skip
        self._tiers = TierEvents(
            store, jobs, answers, checks, fetches, demotions, self._descents, rooms, self._scrubs,
            recovery,
        )  # fmt: skip
        for name, _ in config.tenants:
            members.weigh(name)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.OpenSession: members.open_session,
            ev.CloseSession: members.close_session,
            ev.LockFreed: members.lock_freed,
            ev.SetTenant: members.set_tenant,
            ev.RegisterSpec: members.register,
            ev.Reserve: stores.reserve,
            ev.Commit: stores.commit,
            ev.Abort: stores.abort,
            ev.Lookup: self._loads.lookup,
            ev.Load: self._loads.load,
            ev.Prefetch: self._loads.prefetch,
            ev.Wait: self._loads.wait,
            ev.Cancel: self._loads.cancel,
            ev.Renew: self._loads.renew,
            ev.Release: self._loads.release,
            ev.Evict: self._views.evict,
            ev.List: self._views.page,
            ev.Stat: self._views.stat,
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
            ev.Remember: self._policies.remember,
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
                store.touches.apply()
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
        return self._policies.recall(known, now)

    def chunk_tokens(self, spec: bytes) -> int:
        """Tokens of a full chunk, 0 if the spec is unknown."""
        known = self._store.spaces.specs.get(spec)
        return 0 if known is None else known.chunk_tokens

    def remember(self) -> Iterator[Part]:
        """All that policies know, for a daemon that ends. While it serves: Remember."""
        return self._policies.all()

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
        if self._jobs.busy or store.touches.waiting or store.husks or self._seals.waiting:
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
        return self._views.all(namespace)

    def reading(self, namespace: str | None = None) -> Reading:
        """What `stat` shows, copied in a moment and not worked out yet."""
        return self._views.reading(namespace)

    # -- time -----------------------------------------------------------------------------------

    def _begin(self, now: int) -> Store:
        store = self._store
        if self._begun is None:
            self._begun = self._views.begun = now
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
        left = store.touches.apply()
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

    def _draining(self, lower: Lower) -> Work[None]:
        yield from self._demotions.drains.begin(lower)

    def _hint(self, event: ev.Hint) -> None:
        session = self._checks.session(event.session)
        space = self._checks.space(session, event.spec, event.kind)
        self._checks.keys(event.hashes)
        check(event)
        self._answers.start(event, self._hints.take(session, space, event))
