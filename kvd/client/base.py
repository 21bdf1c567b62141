"""What the parts of a client share: asking, and turning answers into handles.

The law of this module: a deadline is fixed once, when a call begins, and everything that the call
does is held to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvd.chunk import NO_PARENT, Kind, KVSpec
from kvd.client.call import Call
from kvd.client.channel import Channel
from kvd.client.durations import deadline_ns, span_ns
from kvd.client.keys import Hashes, pack_fingerprints, pack_hashes, whole, whole_numbers
from kvd.client.link import Link
from kvd.client.lookup import Lookup
from kvd.client.reservation import Reservation
from kvd.client.settings import Info
from kvd.client.stream import Keys
from kvd.errors import BadKey, ClientClosed, KvdError, ProtocolError, Unavailable
from kvd.wire import messages as m

_R = TypeVar("_R")


class SpecHandle(NamedTuple):
    """A registered spec."""

    digest: bytes
    spec: KVSpec


SpecLike = SpecHandle | KVSpec | bytes


class ClientBase:
    """The channel, the specs, and the deadline of calls that name none."""

    timeout_s: float
    _channel: Channel
    public: bool  # lookups go on in the namespace `public`
    _specs: dict[bytes, bytes]  # digest -> encoding; told in every new session
    _registered: set[bytes]

    def info(self, timeout_s: float | None = None) -> Info:
        """Who answers: instance, epoch, version, limits, namespace, admin. Connects if need be."""
        self._channel.check()
        link = self._channel.ready
        if link is None or link.info is None:
            link = self._channel.connect(self.deadline_ns(timeout_s))
        if link.info is None:
            raise Unavailable("the session ended at once")
        return link.info

    def register(self, spec: KVSpec, *, timeout_s: float | None = None) -> SpecHandle:
        """Tell the daemon about a layout; remembered, and told again in every new session.
        SpecError if it is not valid."""
        encoding, digest = spec.encode(), spec.digest
        self._channel.check()
        self._specs[digest] = encoding
        if digest not in self._registered:
            reply = self._ask(m.RegisterSpec(encoding), m.SpecReply, timeout_s)
            if reply.digest != digest:
                raise ProtocolError("the daemon computes another digest for this spec")
            self._registered.add(digest)
        return SpecHandle(digest, spec)

    def _lease_ns(self, lease_s: float | None, timeout_s: float | None) -> int:
        """How long a lease lives: what the daemon told at hello if the caller names nothing, for a
        number of our own could be over the limit that its operator set."""
        if lease_s is not None:
            return span_ns(lease_s, "lease_s")
        return self.info(timeout_s).lease_default_ns

    def _ttl_ns(self, ttl_s: float | None, timeout_s: float | None) -> int:
        """Likewise, how long a write may stay unfinished."""
        if ttl_s is not None:
            return span_ns(ttl_s, "ttl_s")
        return self.info(timeout_s).limits.ttl_default_ns

    def _digest(self, spec: SpecLike, timeout_s: float | None) -> bytes:
        if isinstance(spec, SpecHandle):
            if spec.digest not in self._registered:
                self.register(spec.spec, timeout_s=timeout_s)
            return spec.digest
        if isinstance(spec, KVSpec):
            if spec.digest not in self._registered:
                self.register(spec, timeout_s=timeout_s)
            return spec.digest
        raw: Any = spec  # a slice of something packed will do
        return bytes(raw) if isinstance(raw, (bytearray, memoryview)) else spec

    # -- for streams and handles ---------------------------------------------------------------

    def deadline_ns(self, timeout_s: float | None) -> int:
        """CLOCK_MONOTONIC of this process, so many seconds (default `timeout_s`) from now; a
        negative number is now. LimitExceeded if it is nan, or more than TIMEOUT_MAX_S."""
        return deadline_ns(self.timeout_s if timeout_s is None else timeout_s)

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

    def arrived(self, call: Call) -> bool:
        """Whether a call has come to its end; nothing is waited for."""
        return self._channel.arrived(call)

    def flush(self) -> None:
        """Send what was held back."""
        self._channel.flush()

    def reservation_of(self, call: Call) -> Reservation:
        """The handle that a reserve's answer is (waits for it)."""
        reply = self._reply(call, m.ReserveReply)
        try:
            return Reservation(self._channel, self._link_of(call), reply, self.timeout_s)
        except KvdError:
            self._channel.give_back(call)
            raise

    def lookup_of(self, call: Call) -> Lookup:
        """The handle that a lookup's answer is (waits for it)."""
        reply = self._reply(call, m.LookupReply)
        try:
            return Lookup(self._channel, self._link_of(call), reply, self.timeout_s)
        except KvdError:
            self._channel.give_back(call)
            raise

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
        before = NO_PARENT if parent is None else pack_hashes(parent)
        if len(before) != 32:
            raise BadKey(f"parent: 32 bytes are due, {len(before)} came")
        return Keys(
            self._digest(spec, timeout_s),
            whole(kind, "kind"),
            tuple(whole_numbers(shards, "shards")),
            packed,
            None if fingerprints is None else pack_fingerprints(fingerprints, count),
            before,
            whole(index0, "index0"),
            None,
            None,
        )
