"""The way in: from the frames of a message to an event of the core.

The law of this module: whatever comes, the loop goes on. A message is taken as a request only
when its header, its session and its payload sizes hold; it is taken at most once; and a request
whose deadline has passed has no effect. Each refusal is a typed error and is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from kvd.chunk import KVSpec
from kvd.core import events as ev
from kvd.errors import (
    Busy,
    DeadlineExceeded,
    ErrorCode,
    KvdError,
    LimitExceeded,
    ProtocolError,
    StaleEpoch,
    UnknownSession,
    VersionError,
)
from kvd.native import named
from kvd.server.counters import Counters
from kvd.server.holding import recv_bytes, recv_small
from kvd.server.inline import Inline
from kvd.server.limiter import LIMITED, Limiter
from kvd.server.recording import Recorder
from kvd.server.replies import Seen, Taken
from kvd.server.requests import Request
from kvd.server.respond import REPEATABLE, Responder
from kvd.server.sessions import Route, Session, Sessions
from kvd.wire import (
    NO_SESSION,
    Frame,
    FrameFlag,
    Limits,
    Op,
    address_of,
    check_payload,
    decode_frame,
)
from kvd.wire import messages as m

__all__ = ["DispatchHost", "Dispatcher", "Message", "receive"]

log = logging.getLogger(__name__)

NS_PER_MS = 1_000_000
# plain integers: arithmetic with enum members costs microseconds on the hot path
REPLY, RELATIVE = int(FrameFlag.REPLY), int(FrameFlag.RELATIVE)
# Who gives something back means it whenever it is heard: else it would be kept for nobody.
GIVE_BACKS = frozenset({int(Op.ABORT), int(Op.RELEASE), int(Op.CANCEL), int(Op.BYE)})
# What takes some hundredths of a millisecond, if it names few keys: replies of earlier requests may
# wait for it.
QUICK = frozenset(
    {int(op) for op in (Op.LOOKUP, Op.LOAD, Op.WAIT, Op.RELEASE, Op.RENEW, Op.CANCEL, Op.HEARTBEAT)}
)
QUICK_BYTES = 512
DONTWAIT = int(zmq.DONTWAIT)
BATCH = 64  # messages of one socket in one turn of the loop; their replies go out together
BATCH_NS = 1_000_000
MAX_TRACED = 4096  # clients without shared memory whose connection is looked up
MAX_FRAMES_KEPT = 4097  # of one message; more are read and thrown away


class Message:
    """One message as it came: `first` is frame 0."""

    __slots__ = ("first", "identity", "payload", "source", "too_many", "user")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.first = b""
        self.payload: list[zmq.Frame] = []
        self.too_many = False
        self.user = ""  # tcp: who CURVE says it is
        self.source = -1  # the connection's descriptor inside libzmq, as far as it was asked for


def receive(
    socket: zmq.Socket[bytes], *, tcp: bool, traced: frozenset[bytes] | set[bytes] = frozenset()
) -> Message:
    """The next message of a ROUTER; zmq.Again if there is none. Small frames are copied out. Where
    it comes from is asked for if it came over tcp, or from one of `traced`: it costs a little."""
    message = Message(recv_small(socket))
    # A ROUTER puts the identity before what has one frame at least. Frames say by themselves
    # whether more come: to ask the socket costs as much as to receive.
    if tcp or message.identity in traced:
        frame = socket.recv(DONTWAIT, copy=False)
        if tcp:
            message.user = _property(frame, "User-Id")
        message.source = int(frame.get(zmq.SRCFD))
        message.first, more = frame.bytes, frame.more
    else:
        message.first, more = recv_bytes(socket)
    while more:
        frame = socket.recv(DONTWAIT, copy=False)
        more = frame.more
        if len(message.payload) < MAX_FRAMES_KEPT:
            message.payload.append(frame)
        else:
            message.too_many = True
    return message


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:  # not set
        return ""


class DispatchHost(Protocol):
    """What the server does for the dispatcher."""

    def feed(self, event: Any) -> None:
        """Give the core an event, and carry out what it wants."""

    def hello(self, request: Request, message: m.Hello) -> None: ...

    def hello_tcp(self, route: Route, source: int, user: str, message: m.Hello) -> Session:
        """Open (or find again) the session of a TCP peer. KvdError to refuse."""

    def register_spec(self, request: Request, spec: KVSpec) -> None: ...

    def stat(self, request: Request) -> None: ...

    def tier(self, request: Request, message: m.Tier) -> None: ...

    def tenant(self, request: Request, message: m.Tenant) -> None: ...

    def end(self, session: Session, why: str) -> None: ...


class Dispatcher:
    """Takes messages of one or more ROUTER sockets."""

    def __init__(
        self,
        host: DispatchHost,
        sessions: Sessions,
        responder: Responder,
        inline: Inline,
        counters: Counters,
        limits: Limits,
        epoch: int,
        limiter: Limiter,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._host = host
        self._limiter = limiter
        self._sessions = sessions
        self._responder = responder
        self._inlined = inline
        self._counters = counters
        self._limits = limits
        self._epoch = epoch
        self._traced: set[bytes] = set()  # identities of clients that get payload as messages
        self._make: dict[type, Callable[[Request, Any], None]] = {
            m.RegisterSpec: self._register_spec,
            m.Wait: self._wait,
            m.Evict: self._selected,
            m.List: self._selected,
            m.Heartbeat: self._heartbeat,
            m.Bye: self._bye,
            m.Get: self._get,
            m.Stat: self._stat,
            m.Tier: self._tier,
            m.Tenant: self._tenant,
            m.Hello: self._hello,
        }

    # -- from the socket ------------------------------------------------------------------------

    def drain(self, socket: zmq.Socket[bytes], *, tcp: bool = False) -> None:
        """Take what is there, in a bounded batch; the poller comes back for the rest."""
        end = time.monotonic_ns() + BATCH_NS
        self._responder.hold()
        try:
            for _ in range(BATCH):
                try:
                    message = receive(socket, tcp=tcp, traced=self._traced)
                except zmq.Again:
                    return
                self.take(Route(socket, message.identity), message, tcp=tcp)
                if time.monotonic_ns() > end:
                    return
        finally:
            self._responder.flush()

    def take(self, route: Route, message: Message, *, tcp: bool = False) -> None:
        """One message: exactly one reply, now or later."""
        try:
            self._take(route, message, tcp)
        except KvdError as refused:
            if isinstance(refused, ProtocolError | LimitExceeded | VersionError):
                self._counters.reason("malformed", refused.code.name.lower())
            else:
                self._counters.reason("refused", refused.code.name.lower())
            address = address_of(message.first)
            if address is not None and address.flags & REPLY:
                return  # answering replies could go to and fro for ever
            self._responder.error_to(route, address, refused.code, str(refused))

    def _take(self, route: Route, message: Message, tcp: bool) -> None:
        frame = decode_frame(message.first, self._limits)
        if frame.flags & REPLY:
            raise ProtocolError("a reply came where a request is due")
        if message.too_many:
            raise LimitExceeded(f"payload frames: more than {self._limits.frames}")
        if message.payload or frame.frames:
            check_payload(frame, [len(part) for part in message.payload], self._limits)
        if frame.request == 0:
            raise ProtocolError("request ids start at 1")
        session = self._session_of(route, message, frame, tcp)
        if frame.epoch not in (0, self._epoch):
            raise StaleEpoch(f"the request is of epoch {frame.epoch}, this is {self._epoch}")
        session.route = route
        session.source = message.source
        if not tcp and not session.maps_memory and route.identity not in self._traced:
            if len(self._traced) >= MAX_TRACED:  # most are gone; the others come back
                self._traced.clear()
            self._traced.add(route.identity)
        self._request(session, route, frame, message.payload)

    def _session_of(self, route: Route, message: Message, frame: Frame, tcp: bool) -> Session:
        if frame.session == NO_SESSION and frame.op == Op.HELLO and tcp:
            hello = m.decode_request(frame.op, frame.body, self._limits, newer=frame.newer)
            assert isinstance(hello, m.Hello)
            return self._host.hello_tcp(route, message.source, message.user, hello)
        session = self._sessions.by_token(frame.session)
        if session is None or (session.peer is None) != tcp:
            raise UnknownSession("no live session has this token; attach again")
        return session

    def _request(
        self, session: Session, route: Route, frame: Frame, payload: list[zmq.Frame]
    ) -> None:
        taken = session.replies.take(frame.request, frame.ack, repeatable=frame.op in REPEATABLE)
        if taken.seen is not Seen.NEW:
            self._repeated(session, route, frame, taken)
            return
        self._counters.add("requests")
        now = time.monotonic_ns()
        deadline = frame.deadline
        if deadline and frame.flags & RELATIVE:
            deadline = now + deadline * NS_PER_MS
        request = Request(session, route, frame, deadline, self._responder, now)
        try:
            if deadline and deadline <= now and frame.op not in GIVE_BACKS:
                self._counters.add("requests_expired")
                raise DeadlineExceeded("the deadline had passed before the request was read")
            if frame.op in LIMITED:
                self._responder.unread.check(session)
                self._limiter.take(session.grant.namespace, now)
            message = m.decode_request(frame.op, frame.body, self._limits, newer=frame.newer)
            if frame.op not in QUICK or len(frame.body) > QUICK_BYTES:
                self._responder.let_go(session)
            self._dispatch(request, message, payload)
        except KvdError as refused:
            if isinstance(refused, ProtocolError | LimitExceeded):
                self._counters.reason("malformed", refused.code.name.lower())
            retry_s = 0.0
            if isinstance(refused, Busy):
                retry_s = refused.retry_after_s
            request.fail(refused.code, str(refused), int(retry_s * 1e9))
        except Exception as error:  # the boundary of a request: it is answered, the loop goes on
            log.exception("fault in operation %d of session %d", frame.op, session.number)
            self._counters.reason("faults", "request")
            request.fail(ErrorCode.INTERNAL, f"unexpected {type(error).__name__} in the daemon")

    def _repeated(self, session: Session, route: Route, frame: Frame, taken: Taken) -> None:
        """A request that is not taken on (again)."""
        match taken.seen:
            case Seen.ANSWERED:
                self._counters.add("replayed")
                assert taken.reply is not None
                self._responder.send(route, taken.reply, session)
            case Seen.GONE:
                raise ProtocolError(
                    f"request {frame.request} was carried out; its reply is not kept any more"
                )
            case Seen.TOO_MANY:
                raise LimitExceeded(
                    f"requests in flight: at most {self._limits.inflight} allowed; await some"
                )
            case Seen.TOO_SPARSE:
                raise LimitExceeded("request ids must increase by one; too many were passed over")
            case _:  # in flight: its one reply will come
                self._counters.add("replayed")

    # -- one operation --------------------------------------------------------------------------

    def _dispatch(self, request: Request, message: Any, payload: list[zmq.Frame]) -> None:
        kind = type(message)
        if self._recorder is not None and (kind is m.Lookup or kind is m.Get):
            self._recorder.note(request.session.grant.namespace, message)
        if kind is m.Put:
            self._inlined.put(request, message, payload)
            return
        if payload:
            raise ProtocolError(f"operation {request.op} takes no payload frames")
        make = self._make.get(kind)
        if make is not None:
            make(request, message)
            return
        event = _SAME_FIELDS[kind]
        self._host.feed(named(event, (request.session.number, request, *message)))

    def _register_spec(self, request: Request, message: m.RegisterSpec) -> None:
        self._host.register_spec(request, KVSpec.decode(message.spec))

    def _stat(self, request: Request, message: m.Stat) -> None:
        self._host.stat(request)

    def _tier(self, request: Request, message: m.Tier) -> None:
        self._host.tier(request, message)

    def _tenant(self, request: Request, message: m.Tenant) -> None:
        self._host.tenant(request, message)

    def _wait(self, request: Request, message: m.Wait) -> None:
        deadline = time.monotonic_ns() + message.timeout_ns
        if request.deadline:
            deadline = min(deadline, request.deadline)
        self._host.feed(
            ev.Wait(request.session.number, request, message.transfer, message.after, deadline)
        )

    def _selected(self, request: Request, message: m.Evict | m.List) -> None:
        selector = ev.Selector(*message.selector)
        number = request.session.number
        if isinstance(message, m.Evict):
            self._host.feed(
                ev.Evict(number, request, selector, message.dry_run, message.cursor, message.limit)
            )
        else:
            self._host.feed(
                ev.List(number, request, message.level, selector, message.cursor, message.limit)
            )

    def _heartbeat(self, request: Request, message: m.Heartbeat) -> None:
        request.respond.result(request, m.DoneReply(), ())

    def _hello(self, request: Request, message: m.Hello) -> None:
        self._host.hello(request, message)

    def _get(self, request: Request, message: m.Get) -> None:
        self._inlined.get(request, message)

    def _bye(self, request: Request, message: m.Bye) -> None:
        request.respond.result(request, m.DoneReply(), ())
        self._host.end(request.session, "bye")


_SAME_FIELDS: dict[type, type[Any]] = {
    m.Reserve: ev.Reserve,
    m.Commit: ev.Commit,
    m.Abort: ev.Abort,
    m.Lookup: ev.Lookup,
    m.Load: ev.Load,
    m.Prefetch: ev.Prefetch,
    m.Cancel: ev.Cancel,
    m.Renew: ev.Renew,
    m.Release: ev.Release,
    m.Hint: ev.Hint,
}
