"""Lookups, leases, loads and prefetches, as they are asked for.

The law of this module: a request is checked whole before it has any effect; what a session may see
is decided here, what there is in the modules behind.
"""

from __future__ import annotations

from typing import Final

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.answers import Answers
from kvd.core.checks import Checks
from kvd.core.fetches import Fetches
from kvd.core.jobs import Work
from kvd.core.leases import Lease, Leases
from kvd.core.lookups import Lookups, Unknown
from kvd.core.prefetches import Prefetches
from kvd.core.reserves import Request, Reserves
from kvd.core.reuses import Reuses
from kvd.core.sessions import Session
from kvd.core.shares import PUBLIC
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.transfers import Transfer, Transfers, Waiter
from kvd.errors import BadKey, KvdError, ProtocolError, UnknownHandle

# plain integers: arithmetic with enum members costs a microsecond on the hot path
_LEASE, _LOAD = int(ev.LookupFlag.LEASE), int(ev.LookupFlag.LOAD)
_EVERY: Final = int(ev.LookupFlag.EVERY)
_RESERVE_MISSES: Final = int(ev.LookupFlag.RESERVE_MISSES)
_PUBLIC: Final = int(ev.LookupFlag.PUBLIC)
_LOADS: Final = int(ev.LookupFlag.LEASE | ev.LookupFlag.LOAD)


class Loads:
    """Carries out what clients ask in order to load."""

    def __init__(
        self,
        store: Store,
        answers: Answers,
        checks: Checks,
        lookups: Lookups,
        leases: Leases,
        transfers: Transfers,
        reserves: Reserves,
        prefetches: Prefetches,
        reuses: Reuses,
        fetches: Fetches,
    ) -> None:
        self._store = store
        self._answers = answers
        self._checks = checks
        self._lookups = lookups
        self._leases = leases
        self._transfers = transfers
        self._reserves = reserves
        self._prefetches = prefetches
        self._reuses = reuses
        self._fetches = fetches

    def unknown(self, event: ev.Lookup, tier: int) -> Unknown | None:
        """Which keys of a lookup nobody here knows anything of, so that somebody else can be asked
        whether they lie in a tier before the lookup is carried out. Changes nothing. None if the
        tier can't be read now, or if the lookup will be refused."""
        if not self._store.ladder.lowers[tier].readable:
            return None
        try:
            session = self._checks.session(event.session)
            space = self._checks.space(session, event.spec, event.kind)
            shards = self._checks.shards(space, event.shards, self._checks.keys(event.hashes))
        except KvdError:
            return None
        hashes = self._lookups.unknown(space, event.hashes)
        run = space.chained and not event.flags & _EVERY
        return Unknown(space.namespace_digest, shards, hashes, run)

    def forerun(self, event: ev.Lookup) -> None:
        """Begin to read what a lookup will load first, if that lies below and nothing is in its
        way. What the lookup will refuse has no effect here either."""
        if event.flags & _LOADS != _LOADS:
            return
        try:
            session = self._checks.session(event.session)
            space = self._checks.space(session, event.spec, event.kind)
            count = self._checks.keys(event.hashes)
            shards = self._checks.shards(space, event.shards, count)
        except KvdError:  # the lookup says so
            return
        cell = self._lookups.first(session, space, shards, event.hashes, event.fingerprints)
        if cell >= 0 and cell not in self._fetches.by_cell:
            self._fetches.want_early(cell, space.namespace)

    def lookup(self, event: ev.Lookup) -> None:
        """What of a chain is there, if wanted with a lease, a transfer, and slots for the rest."""
        session = self._checks.session(event.session)
        space = self._checks.space(session, event.spec, event.kind)
        count = self._checks.keys(event.hashes)
        shards = self._checks.shards(space, event.shards, count)
        if event.fingerprints is not None:
            self._checks.column("fingerprints", event.fingerprints, ev.FINGERPRINT_BYTES, count)
        flags = event.flags
        if flags & _LOAD and not flags & _LEASE:
            raise ProtocolError("a lookup that loads must lease: set both flags")
        ask = None
        if flags & _RESERVE_MISSES:
            if event.fingerprints is None:
                raise BadKey("a lookup that reserves its misses needs fingerprints")
            ask = self._checks.request(
                space,
                shards,
                event.hashes,
                event.parent,
                event.index0,
                event.fingerprints,
                None,
                None,
                0,
                event.ttl,
            )
        if event.lease_ns < 0:
            raise BadKey("lease_ns is below 0")
        looked = self._lookups.lookup(
            session,
            space,
            shards,
            event.hashes,
            event.fingerprints,
            flags,
            event.lease_ns,
            self._public(space, flags),
        )
        lease = looked.lease
        if flags & _LEASE:
            self._reuses.note(space, event.hashes, self._store.now)
        load = None
        if lease is not None and flags & _LOAD:
            load = self._transfers.load(lease, None, shards)
        number, expiry = (lease.number, lease.expiry) if lease is not None else (0, 0)
        result = ac.LookupResult(
            looked.outcomes, looked.leading, number, expiry, load, None, looked.tiers
        )
        if ask is None or looked.leading == count:
            self._answers.reply(event, result)
            return
        rest = self._rest(ask, event, looked.leading)
        self._answers.start(event, self._and_reserve(session, rest, result))

    def _public(self, space: Space, flags: int) -> Space | None:
        """Where a lookup goes on for keys that the own namespace does not have."""
        asked = flags & _PUBLIC or self._store.shares.rules(space.namespace).public
        if not asked or space.namespace == PUBLIC:
            return None
        return self._store.spaces.find(PUBLIC, space.digest, space.kind)

    def _rest(self, ask: Request, event: ev.Lookup, leading: int) -> Request:
        """The request for the keys behind the leading run."""
        parent = event.parent
        if leading and ask.space.chained:
            parent = event.hashes[32 * (leading - 1) : 32 * leading]
        return Request(
            ask.space,
            ask.shards,
            event.hashes[32 * leading :],
            parent,
            event.index0 + leading,
            ask.fingerprints[16 * leading :],
            None,
            None,
            0,
            ask.ttl,
        )

    def _and_reserve(
        self, session: Session, ask: Request, result: ac.LookupResult
    ) -> Work[ac.LookupResult]:
        reserved = yield from self._reserves.reserve(session, ask)
        return result._replace(reserved=reserved)

    def _lease(self, event: ev.Load | ev.Renew | ev.Release) -> Lease:
        lease = self._leases.find(self._checks.session(event.session), event.lease)
        if lease is None:
            raise UnknownHandle(f"lease {event.lease} is not valid now, or not this group's")
        return lease

    def load(self, event: ev.Load) -> None:
        """Start a transfer of what a lease holds."""
        lease = self._lease(event)
        items = None if event.items is None else self._checks.items(event.items, len(lease.rows))
        count = len(lease.rows) if items is None else len(items)
        shards = self._checks.shards(lease.space, event.shards or lease.shards, count)
        self._answers.reply(event, self._transfers.load(lease, items, shards))

    def prefetch(self, event: ev.Prefetch) -> None:
        """Read up what lies below, if that takes nothing from anybody."""
        session = self._checks.session(event.session)
        space = self._checks.space(session, event.spec, event.kind)
        shards = self._checks.shards(space, event.shards, self._checks.keys(event.hashes))
        if event.within <= 0:
            raise BadKey("within is not above 0")
        self._answers.start(event, self._prefetched(session, space, shards, event))

    def _prefetched(
        self, session: Session, space: Space, shards: tuple[int, ...], event: ev.Prefetch
    ) -> Work[ac.OutcomesResult]:
        asked = self._prefetches.ask(session, space, shards, event.hashes, event.within)
        outcomes = yield from asked
        return ac.OutcomesResult(outcomes)

    def _transfer(self, event: ev.Wait | ev.Cancel) -> Transfer:
        session = self._checks.session(event.session)
        transfer = self._transfers.by_number.get(event.transfer)
        if transfer is None or self._leases.find(session, transfer.lease.number) is None:
            raise UnknownHandle(f"transfer {event.transfer} is not under way for this group")
        return transfer

    def wait(self, event: ev.Wait) -> None:
        """Answer when a transfer has got further."""
        transfer = self._transfer(event)
        after = max(0, min(event.after, len(transfer.outcomes)))
        waiter = Waiter(event.session, event.request, after, event.deadline)
        self._transfers.wait(transfer, waiter)

    def cancel(self, event: ev.Cancel) -> None:
        """What has not been read yet of a transfer is not wanted any more."""
        self._transfers.cancel(self._transfer(event))
        self._answers.reply(event, ac.DoneResult())

    def renew(self, event: ev.Renew) -> None:
        """A lease lasts longer."""
        expiry = self._leases.renew(self._lease(event), max(event.lease_ns, 0))
        self._answers.reply(event, ac.LeaseResult(expiry, 0))

    def release(self, event: ev.Release) -> None:
        """A lease ends."""
        chunks = self._leases.end(self._lease(event), "released")
        self._answers.reply(event, ac.LeaseResult(0, chunks))
