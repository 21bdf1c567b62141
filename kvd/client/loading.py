"""The loading half of a client.

The law of this module: a miss, an error and a hit are three different answers; nothing counts as
delivered before the check after its last byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.chunk import Kind, Outcome
from kvd.client.base import ClientBase, SpecLike
from kvd.client.durations import span_ns
from kvd.client.inline import InlineLoad, get_message
from kvd.client.keys import Hashes, outcomes, pack_fingerprints, whole
from kvd.client.lease import Lease
from kvd.client.load import Load
from kvd.client.lookup import Lookup
from kvd.client.settings import SharedLease
from kvd.client.stream import Copier
from kvd.errors import ProtocolError
from kvd.wire import LookupFlag
from kvd.wire import messages as m


class Loading(ClientBase):
    """lookup, prefetch, load_chunks, get."""

    def lookup(
        self,
        spec: SpecLike,
        hashes: Hashes,
        fingerprints: Hashes | None = None,
        *,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        lease: bool = True,
        every: bool = False,
        lease_s: float | None = None,
        load: bool = False,
        reserve_misses: bool = False,
        parent: bytes | None = None,
        index0: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Lookup:
        """Which chunks are there with all of `shards`; leases the leading run.

        `every`: look behind the first miss too (and lease all hits). `load`: also start their
        transfer. `reserve_misses`: also reserve what follows the leading run. Without `lease`
        nothing is touched. `lease_s`, `ttl_s`: None is as long as the daemon says. ConfigError if
        this client maps no memory, for `load` and `reserve_misses`.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, parent, index0, timeout_s)
        flags = LookupFlag.NONE
        if lease or load:
            flags |= LookupFlag.LEASE
        if load:
            flags |= LookupFlag.LOAD
        if every:
            flags |= LookupFlag.EVERY
        if self.public:
            flags |= LookupFlag.PUBLIC
        prints = keys.fingerprints
        if reserve_misses:
            flags |= LookupFlag.RESERVE_MISSES
            prints = prints or pack_fingerprints(None, keys.keys)
        message = m.Lookup(
            keys.spec,
            keys.kind,
            keys.shards,
            keys.hashes,
            prints,
            int(flags),
            self._lease_ns(lease_s, timeout_s) if lease or load else 0,
            keys.parent,
            keys.index0,
            self._ttl_ns(ttl_s, timeout_s) if reserve_misses else 0,
        )
        if not keys.keys:
            return Lookup.empty(self._channel, self.timeout_s)
        if load or reserve_misses:
            what = "lookup with load" if load else "lookup with reserve_misses"
            self.info(timeout_s).check_memory(what)
        return self.lookup_of(self.submit_at(message, self.deadline_ns(timeout_s)))

    def prefetch(
        self,
        spec: SpecLike,
        hashes: Hashes,
        *,
        within_s: float,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Say that these chunks will be asked for within `within_s` seconds: what lies below DRAM
        is read up meanwhile, if that takes nothing from anybody. A hint: nothing is leased, and
        what nobody came for in time is let go.

        One outcome a key: OK, it is in DRAM or may come; MISS; NO_SPACE, no room for more hints;
        SKIPPED, behind the first that is not to be had, or the daemon knows no such hints.
        """
        keys = self._keys(spec, hashes, None, shards, kind, None, 0, timeout_s)
        if not keys.keys:
            return []
        if "prefetch" not in self.info(timeout_s).features:
            return [Outcome.SKIPPED] * keys.keys
        message = m.Prefetch(
            keys.spec, keys.kind, keys.shards, keys.hashes, span_ns(within_s, "within_s")
        )
        return list(outcomes(self._ask(message, m.OutcomesReply, timeout_s).outcomes))

    def join(self, shared: SharedLease, *, timeout_s: float | None = None) -> Lease:
        """A lease that another session of this client's group took: load from it, renew it, or
        release it for all. StaleEpoch if the daemon restarted since."""
        self._channel.check()
        link = self._channel.ready or self._channel.connect(self.deadline_ns(timeout_s))
        return Lease.join(self._channel, link, shared, self.timeout_s)

    def load_chunks(
        self,
        spec: SpecLike,
        hashes: Hashes,
        take: Copier,
        *,
        fingerprints: Hashes | None = None,
        batch: int = 16,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        every: bool = False,
        verify: bool = False,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Load many chunks: the leading run, or `every` hit. `take(result, view)` reads a slot, or
        `take` is one buffer a result.

        Returns one outcome a result. Only OK was delivered: checked after its last byte (with
        `verify` also against the record's digest). What `take` was shown of any other result must
        be thrown away. `timeout_s` is for the whole call: what a tier has not delivered by then is
        DEADLINE.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, None, 0, timeout_s)
        if not keys.keys:
            return []
        deadline_ns = self.deadline_ns(timeout_s)
        if not self.info(timeout_s).maps_memory:
            return InlineLoad(self, keys, take, every=bool(every)).run(deadline_ns)
        lease_ns = self._lease_ns(lease_s, timeout_s)
        stream = Load(
            self,
            keys,
            take,
            whole(batch, "batch"),
            every=bool(every),
            lease_ns=lease_ns,
            verify=bool(verify),
        )
        return stream.run(deadline_ns)

    def get(
        self,
        spec: SpecLike,
        key: bytes,
        fingerprint: bytes | None = None,
        *,
        shard: int = 0,
        kind: Kind = Kind.PREFIX,
        timeout_s: float | None = None,
    ) -> bytes | None:
        """The bytes of one shard of one chunk, a copy; None if it is not there.

        LeaseLost if the copy took so long that it can't be trusted.
        """
        deadline_ns = self.deadline_ns(timeout_s)
        prints = None if fingerprint is None else [fingerprint]
        if self.info(timeout_s).maps_memory:
            with self.lookup(
                spec,
                [key],
                prints,
                shards=(shard,),
                kind=kind,
                load=True,
                every=True,
                timeout_s=self.left_s(deadline_ns),
            ) as found:
                if found.transfer is None:
                    return None
                for index in found.transfer:
                    data = bytes(found.transfer.view(index))
                    found.transfer.check()
                    return data
                return None
        keys = self._keys(spec, [key], prints, (shard,), kind, None, 0, timeout_s)
        message = get_message(keys, 0, 1, every=True, public=self.public)
        call = self.submit_at(message, deadline_ns)
        reply = self._reply(call, m.OutcomesReply)
        if outcomes(reply.outcomes) != (Outcome.OK,):
            return None
        if len(call.frames) != 1:
            raise ProtocolError(f"{len(call.frames)} payload frames for one chunk")
        return call.frames[0]
