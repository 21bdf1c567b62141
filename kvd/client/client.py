"""Client: what connectors and tools use to talk to a daemon.

The law of this module: every call ends, at its deadline at the latest, with an answer or a typed
error; the client connects, reconnects and registers its specs by itself; it may be used from many
threads, and after a fork it belongs to the parent alone. A connector turns every KvdError into a
miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from kvd.chunk import NO_PARENT, Kind, KVSpec, Outcome
from kvd.client import fork
from kvd.client.call import Call
from kvd.client.channel import Channel
from kvd.client.handles import Lookup, Reservation
from kvd.client.keys import (
    Hashes,
    Numbers,
    outcomes,
    pack_fingerprints,
    pack_hashes,
    pack_numbers,
)
from kvd.client.link import Link
from kvd.client.memory import Memory
from kvd.client.settings import Counters, Curve, Info, Settings
from kvd.client.stream import Copier, Keys, Load, Store, as_bytes, copy_into
from kvd.errors import BadKey, ClientClosed, KvdError, ProtocolError, Unavailable
from kvd.wire import GetFlag, LookupFlag, Trace, check_socket_path, default_socket
from kvd.wire import messages as m

_R = TypeVar("_R")


class SpecHandle(NamedTuple):
    """A registered spec."""

    digest: bytes
    spec: KVSpec


SpecLike = SpecHandle | KVSpec | bytes


class Client:
    """One client of one daemon.

    `socket`: path of the daemon's socket; default as for the daemon itself (kvd.wire.paths).
    `endpoint`: "tcp://host:port" instead. `timeout_s`: deadline of calls that name none.
    `group`: the secret that the sessions of one engine share, so that any of them may load or
    release what another leased. `token`: a namespace's token. `expected_instance`: refuse another
    daemon. `map_memory=False`: bytes travel inline. `prefault`: fault the arena in, in the
    background. `trace`: gives the trace context for each request.

    ConfigError if the socket's path can't be one. Nothing is connected before the first call.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        endpoint: str | None = None,
        timeout_s: float = 5.0,
        name: str = "",
        group: bytes | None = None,
        token: bytes | None = None,
        expected_instance: str | None = None,
        map_memory: bool = True,
        prefault: bool = False,
        curve: Curve | None = None,
        trace: Callable[[], Trace] | None = None,
    ) -> None:
        path = ""
        if endpoint is None:
            path = check_socket_path(default_socket() if socket is None else socket)
        settings = Settings(
            path, endpoint, name, group, token, expected_instance, map_memory, curve, trace
        )
        self.timeout_s = timeout_s
        self._memory = Memory(prefault=prefault)
        self._specs: dict[bytes, bytes] = {}
        self._registering = threading.Lock()
        self._registered: set[bytes] = set()
        self._channel = Channel(settings, self._specs, self._memory.adopt)
        fork.watch(self._channel)

    # -- the asynchronous core -----------------------------------------------------------------

    def submit(
        self,
        message: m.Request,
        payload: Iterable[bytes | memoryview] = (),
        deadline_s: float | None = None,
    ) -> Call:
        """Send a request (kvd.wire.messages) without waiting; poll() gives it back when done.

        Never blocks: what can't be sent yet is queued. `payload`: inline frames, copied on
        sending. The call ends within `deadline_s` seconds (default `timeout_s`).
        """
        timeout_s = self.timeout_s if deadline_s is None else deadline_s
        return self._channel.submit(
            message, payload, deadline_ns=self.deadline_ns(timeout_s), tracked=True
        )

    def poll(self, timeout_s: float = 0.0) -> list[Call]:
        """Submitted calls that are done and were not given back before; waits at most
        `timeout_s` seconds for the first. Also what makes progress when nobody waits: call it
        when fileno() is readable, and after next_timeout_s()."""
        return self._channel.poll(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable when poll() has something to do; only to be waited on."""
        return self._channel.fileno()

    def next_timeout_s(self) -> float | None:
        """When poll() has something to do though fileno() is quiet (deadlines, reconnecting)."""
        return self._channel.next_timeout_s()

    # -- the session ---------------------------------------------------------------------------

    def info(self, timeout_s: float | None = None) -> Info:
        """Who answers: instance, epoch, version, limits, namespace, admin. Connects if need be."""
        link = self._channel.ready
        if link is None or link.info is None:
            link = self._channel.connect(self.deadline_ns(timeout_s))
        if link.info is None:
            raise Unavailable("the session ended at once")
        return link.info

    @property
    def connected(self) -> bool:
        """Whether a session is open now, as far as this side knows. Never blocks."""
        return self._channel.ready is not None

    @property
    def counters(self) -> Counters:
        """What the client did besides what it was asked for."""
        return self._channel.counters

    @property
    def prefaulted(self) -> int:
        """Bytes of the arena that the prefault thread has gone through."""
        return self._memory.prefaulted

    def close(self) -> None:
        """End the session and every call with it (ClientClosed). Views stay valid memory, but
        nobody keeps their content any more. Idempotent; safe from any thread."""
        channel = self._channel
        if channel.settings.endpoint is not None and channel.ready is not None:
            try:  # over tcp there is no end-of-file that would tell the daemon
                channel.submit(m.Bye(), deadline_ns=self.deadline_ns(0.2)).result()
            except (KvdError, TimeoutError):
                pass
        channel.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None and fork.is_ours(channel):
            channel.close()

    # -- specs ---------------------------------------------------------------------------------

    def register(self, spec: KVSpec, *, timeout_s: float | None = None) -> SpecHandle:
        """Tell the daemon about a layout; remembered, and told again in every new session.
        SpecError if it is not valid."""
        encoding, digest = spec.encode(), spec.digest
        with self._registering:
            known = digest in self._registered
            self._specs[digest] = encoding
        if not known:
            reply = self._ask(m.RegisterSpec(encoding), m.SpecReply, timeout_s)
            if reply.digest != digest:
                raise ProtocolError("the daemon computes another digest for this spec")
            self._registered.add(digest)
        return SpecHandle(digest, spec)

    def _digest(self, spec: SpecLike, timeout_s: float | None) -> bytes:
        if isinstance(spec, SpecHandle):
            if spec.digest not in self._registered:
                self.register(spec.spec, timeout_s=timeout_s)
            return spec.digest
        if isinstance(spec, KVSpec):
            if spec.digest not in self._registered:
                self.register(spec, timeout_s=timeout_s)
            return spec.digest
        return spec

    # -- storing -------------------------------------------------------------------------------

    def reserve(
        self,
        spec: SpecLike,
        hashes: Hashes,
        fingerprints: Hashes | None = None,
        *,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        parent: bytes | None = None,
        index0: int = 0,
        tokens: Numbers | None = None,
        pos0: Numbers | None = None,
        flags: int = 0,
        ttl_s: float = 30.0,
        timeout_s: float | None = None,
    ) -> Reservation:
        """Slots to fill, a leading run; results are chunk-major over `shards`.

        `parent`: hash of the chunk before the first one (None: a root). `tokens`, `pos0`: for
        chunks that are not full or not at (index0 + i) * chunk_tokens. `ttl_s`: until unfinished
        slots are taken back.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, parent, index0, timeout_s)
        message = m.Reserve(
            keys.spec,
            keys.kind,
            keys.shards,
            keys.hashes,
            keys.parent,
            keys.index0,
            keys.fingerprints or pack_fingerprints(None, keys.keys),
            pack_numbers(tokens, "<u4", keys.keys, "tokens"),
            pack_numbers(pos0, "<u8", keys.keys, "pos0"),
            flags,
            int(ttl_s * 1e9),
        )
        return self.reservation_of(self.submit_at(message, self.deadline_ns(timeout_s)))

    def store_chunks(
        self,
        spec: SpecLike,
        hashes: Hashes,
        fingerprints: Hashes | None,
        fill: Copier,
        *,
        batch: int = 16,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        parent: bytes | None = None,
        index0: int = 0,
        tokens: Numbers | None = None,
        pos0: Numbers | None = None,
        flags: int = 0,
        ttl_s: float = 30.0,
        seal: bool = False,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Store many chunks, reserving one batch of `batch` keys ahead of the one being copied.

        `fill(result, view)` writes a slot, or `fill` is one buffer a result. Returns one outcome a
        result: OK was acknowledged as stored; EXISTS was there. `seal`: compute the digests here.
        `timeout_s` is for the whole call. Without shared memory this is a put a key.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, parent, index0, timeout_s)
        keys = keys._replace(
            fingerprints=keys.fingerprints or pack_fingerprints(None, keys.keys),
            tokens=pack_numbers(tokens, "<u4", keys.keys, "tokens"),
            pos0=pack_numbers(pos0, "<u8", keys.keys, "pos0"),
        )
        if not keys.keys:
            return []
        stream = Store(self, keys, fill, batch, flags=flags, ttl_ns=int(ttl_s * 1e9), seal=seal)
        return stream.run(self.deadline_ns(timeout_s))

    def put(
        self,
        spec: SpecLike,
        key: bytes,
        fingerprint: bytes | None,
        data: Any,
        *,
        shard: int = 0,
        kind: Kind = Kind.PREFIX,
        parent: bytes | None = None,
        index: int = 0,
        tokens: int | None = None,
        pos0: int | None = None,
        flags: int = 0,
        ttl_s: float = 30.0,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Store one shard of one chunk in one call: OK, EXISTS, BUSY, NO_SPACE, ...

        Through shared memory where it is mapped, else inline. ValueError if `data` (any
        contiguous buffer) has not the chunk's size.
        """
        deadline_ns = self.deadline_ns(timeout_s)
        raw = as_bytes(data)
        numbers = {
            "tokens": None if tokens is None else [tokens],
            "pos0": None if pos0 is None else [pos0],
        }
        if self.info(timeout_s).maps_memory:
            with self.reserve(
                spec,
                [key],
                None if fingerprint is None else [fingerprint],
                shards=(shard,),
                kind=kind,
                parent=parent,
                index0=index,
                flags=flags,
                ttl_s=ttl_s,
                timeout_s=self.left_s(deadline_ns),
                **numbers,
            ) as reservation:
                if not reservation.granted:
                    return reservation.outcomes[0]
                copy_into(reservation.view(0), raw)
                return reservation.commit(timeout_s=self.left_s(deadline_ns))[0]
        keys = self._keys(
            spec,
            [key],
            None if fingerprint is None else [fingerprint],
            (shard,),
            kind,
            parent,
            index,
            timeout_s,
        )
        message = m.Put(
            keys.spec,
            keys.kind,
            keys.shards,
            keys.hashes,
            keys.parent,
            keys.index0,
            keys.fingerprints or pack_fingerprints(None, 1),
            pack_numbers(numbers["tokens"], "<u4", 1, "tokens"),
            pack_numbers(numbers["pos0"], "<u8", 1, "pos0"),
            flags,
            int(ttl_s * 1e9),
        )
        call = self.submit_at(message, deadline_ns, [raw.data])
        return outcomes(self._reply(call, m.OutcomesReply).outcomes)[0]

    # -- loading -------------------------------------------------------------------------------

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
        lease_s: float = 30.0,
        load: bool = False,
        reserve_misses: bool = False,
        parent: bytes | None = None,
        index0: int = 0,
        ttl_s: float = 30.0,
        timeout_s: float | None = None,
    ) -> Lookup:
        """Which chunks are there with all of `shards`; leases the leading run.

        `every`: look behind the first miss too (and lease all hits). `load`: also start their
        transfer. `reserve_misses`: also reserve what follows the leading run. Without `lease`
        nothing is touched.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, parent, index0, timeout_s)
        flags = LookupFlag.NONE
        if lease or load:
            flags |= LookupFlag.LEASE
        if load:
            flags |= LookupFlag.LOAD
        if every:
            flags |= LookupFlag.EVERY
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
            int(lease_s * 1e9),
            keys.parent,
            keys.index0,
            int(ttl_s * 1e9),
        )
        return self.lookup_of(self.submit_at(message, self.deadline_ns(timeout_s)))

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
        lease_s: float = 30.0,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Load many chunks: the leading run, or `every` hit. `take(result, view)` reads a slot, or
        `take` is one buffer a result.

        Returns one outcome a result. Only OK was delivered: checked after its last byte (with
        `verify` also against the record's digest). What `take` was shown of any other result must
        be thrown away. `timeout_s` is for the whole call.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, None, 0, timeout_s)
        if not keys.keys:
            return []
        stream = Load(
            self, keys, take, batch, every=every, lease_ns=int(lease_s * 1e9), verify=verify
        )
        return stream.run(self.deadline_ns(timeout_s))

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
        message = m.Get(
            keys.spec, keys.kind, keys.shards, keys.hashes, keys.fingerprints, int(GetFlag.EVERY)
        )
        call = self.submit_at(message, deadline_ns)
        reply = self._reply(call, m.OutcomesReply)
        if outcomes(reply.outcomes) != (Outcome.OK,):
            return None
        if len(call.frames) != 1:
            raise ProtocolError(f"{len(call.frames)} payload frames for one chunk")
        return call.frames[0]

    # -- looking in ----------------------------------------------------------------------------

    def evict(
        self,
        selector: m.Selector,
        *,
        dry_run: bool = False,
        step: int = 1000,
        timeout_s: float | None = None,
    ) -> m.EvictReply:
        """Evict (or, dry, name) all that the selector matches, in slices of `step` chunks; the
        sums over all slices. AuthError for other namespaces without the admin role."""
        deadline_ns = self.deadline_ns(timeout_s)
        total = m.EvictReply(0, 0, 0, 0, 0, [], None)
        cursor: int | None = 0
        while cursor is not None:
            message = m.Evict(selector, dry_run, cursor, step)
            reply = self._reply(self.submit_at(message, deadline_ns), m.EvictReply)
            total = m.EvictReply(
                total.matched + reply.matched,
                total.evicted + reply.evicted,
                total.leased + reply.leased,
                total.writing + reply.writing,
                total.bytes + reply.bytes,
                total.named + reply.named,
                None,
            )
            cursor = reply.cursor
        return total

    def list(
        self,
        level: str,
        selector: m.Selector | None = None,
        *,
        limit: int = 100,
        cursor: int = 0,
        timeout_s: float | None = None,
    ) -> m.ListReply:
        """One page of namespaces, specs, prefixes or chunks; goes on from `cursor`."""
        message = m.List(level, selector or m.Selector(everything=True), cursor, limit)
        return self._ask(message, m.ListReply, timeout_s)

    def rows(
        self, level: str, selector: m.Selector | None = None, *, page: int = 500
    ) -> Iterator[dict[str, Any]]:
        """All rows of list(), page by page."""
        cursor: int | None = 0
        while cursor is not None:
            reply = self.list(level, selector, limit=page, cursor=cursor)
            yield from reply.rows
            cursor = reply.cursor

    def stat(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the daemon counts and holds."""
        return self._ask(m.Stat(), m.StatReply, timeout_s).stat

    def heartbeat(self, *, timeout_s: float | None = None) -> None:
        """Say that this session lives (needed over tcp only, where there is no end-of-file)."""
        self._ask(m.Heartbeat(), m.DoneReply, timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Seconds of one round trip over an open session."""
        self.info(timeout_s)
        begin = time.perf_counter()
        self.heartbeat(timeout_s=timeout_s)
        return time.perf_counter() - begin

    # -- for streams and handles ---------------------------------------------------------------

    def deadline_ns(self, timeout_s: float | None) -> int:
        """CLOCK_MONOTONIC of this process, so many seconds (default `timeout_s`) from now."""
        return time.monotonic_ns() + int((self.timeout_s if timeout_s is None else timeout_s) * 1e9)

    @staticmethod
    def left_s(deadline_ns: int) -> float:
        """Seconds until then, not below 0."""
        return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)

    def submit_at(
        self,
        message: m.Request,
        deadline_ns: int,
        payload: Iterable[bytes | memoryview] = (),
    ) -> Call:
        """Like submit, but poll() does not give it back: wait for its result()."""
        return self._channel.submit(message, payload, deadline_ns=deadline_ns)

    def reservation_of(self, call: Call) -> Reservation:
        """The handle that a reserve's answer is (waits for it)."""
        reply = self._reply(call, m.ReserveReply)
        return Reservation(self._channel, self._link_of(call), reply, self.timeout_s)

    def lookup_of(self, call: Call) -> Lookup:
        """The handle that a lookup's answer is (waits for it)."""
        reply = self._reply(call, m.LookupReply)
        return Lookup(self._channel, self._link_of(call), reply, self.timeout_s)

    def _ask(self, message: m.Request, shape: type[_R], timeout_s: float | None) -> _R:
        return self._reply(self.submit_at(message, self.deadline_ns(timeout_s)), shape)

    @staticmethod
    def _reply(call: Call, shape: type[_R]) -> _R:
        reply = call.result()
        if not isinstance(reply, shape):
            raise ProtocolError(f"not an answer to {type(call.message).__name__.lower()}")
        return reply

    @staticmethod
    def _link_of(call: Call) -> Link:
        if call.link is None:
            raise ClientClosed("the call has no session")
        return call.link

    def _keys(
        self,
        spec: SpecLike,
        hashes: Hashes,
        fingerprints: Hashes | None,
        shards: Sequence[int],
        kind: Kind,
        parent: bytes | None,
        index0: int,
        timeout_s: float | None,
    ) -> Keys:
        packed = pack_hashes(hashes)
        count = len(packed) // 32
        if parent is not None and len(parent) != 32:
            raise BadKey(f"parent: 32 bytes are due, {len(parent)} came")
        return Keys(
            self._digest(spec, timeout_s),
            int(kind),
            tuple(shards),
            packed,
            None if fingerprints is None else pack_fingerprints(fingerprints, count),
            NO_PARENT if parent is None else parent,
            index0,
            None,
            None,
        )
