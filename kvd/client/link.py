"""One session with one daemon: attach, hello, and the DEALER that carries requests.

The law of this module: nothing here blocks and nothing is retried. A link lives once, from
`Link(...)` through ATTACHING and GREETING to READY, and ends in close(); whoever owns it makes the
next one. All of it happens under the owner's lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from enum import Enum
from typing import Any

import zmq

from kvd.arena import ArenaMap
from kvd.client.acks import Acks
from kvd.client.attachment import Attachment, Lost
from kvd.client.call import Call
from kvd.client.lock import SessionLock
from kvd.client.settings import Info, Settings
from kvd.errors import (
    LimitExceeded,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    UnknownSession,
    WrongInstance,
)
from kvd.slices import short
from kvd.wire import (
    DEFAULT_LIMITS,
    FEATURES,
    NO_SESSION,
    NO_TRACE,
    Frame,
    FrameFlag,
    Limits,
    Op,
    common_features,
    decode_frame,
    encode_frame,
)
from kvd.wire.attach import FDS_PER_ARENA, AttachReply
from kvd.wire.limits import MIB, over
from kvd.wire.messages import Hello, HelloReply, Request, decode_error, decode_reply, encode_request

_HELLO_REQUEST = 1
_DONTWAIT = int(zmq.DONTWAIT)
_REPLY = int(FrameFlag.REPLY)  # plain integers: an IntFlag costs a microsecond each time
_ERROR = int(FrameFlag.ERROR)
_POLLIN = int(zmq.POLLIN)
_EVENTS = zmq.EVENTS
_RCVMORE = zmq.RCVMORE
_REPLY_LIMITS = Limits(body=16 * MIB, frames=1 << 20)  # a client's own sanity, no contract


class Phase(Enum):
    ATTACHING = 1
    GREETING = 2
    READY = 3


def new_context() -> zmq.Context[Any]:
    """A context whose own threads are let in at once: what they do takes microseconds."""
    context: zmq.Context[Any] = zmq.Context()
    with short():
        context.socket(zmq.PAIR).close(0)  # the first one starts them
    return context


class Link:
    """A session being opened or open. `serial` numbers the links of one client."""

    def __init__(self, settings: Settings, context: zmq.Context[Any], serial: int) -> None:
        self.settings = settings
        self.serial = serial
        self.phase = Phase.ATTACHING
        self.session = NO_SESSION
        self.epoch = 0
        self.offset_ns = 0  # the daemon's clock less ours
        self.attached: AttachReply | None = None
        self.fds: list[int] = []  # arena descriptors, until the memory takes them
        self.maps: dict[int, ArenaMap] = {}  # what the references of this session point into
        self.lock: SessionLock | None = None
        self.info: Info | None = None
        self.limits = DEFAULT_LIMITS
        self.pending: dict[int, Call] = {}
        self.abandoned: dict[int, Request] = {}
        self.attach_fd = -1
        self.zmq_fd = -1
        self._context = context
        self._door: Attachment | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._acks = Acks(_HELLO_REQUEST)
        self.hello_resend_ns = 0
        if settings.endpoint is not None:
            self._greet(settings.endpoint)
        else:
            self._door = Attachment(settings)
            self.attach_fd = self._door.fd

    # -- opening -----------------------------------------------------------------------------

    def on_attach(self) -> None:
        """The attach socket may have something. Lost at its end; typed errors of a refusal."""
        door = self._door
        got = None if door is None else door.receive(self.phase is Phase.ATTACHING)
        if got is None:
            return
        reply, fds = got
        try:
            self._attached(reply, fds)
        except BaseException:
            if self.fds is not fds:
                for fd in fds:
                    os.close(fd)
            raise

    def _attached(self, reply: AttachReply, fds: list[int]) -> None:
        due = FDS_PER_ARENA * len(reply.arenas) + 1 if self.settings.map_memory else 0
        if len(fds) != due:
            raise ProtocolError(f"the daemon passed {len(fds)} descriptors, {due} are due")
        expected = self.settings.expected_instance
        if expected is not None and reply.instance != expected:
            raise WrongInstance(
                f"{self.settings.socket} is instance {reply.instance!r}, not {expected!r}"
            )
        self.attached = reply
        self.session = reply.session
        self.epoch = reply.epoch
        if self._door is not None:
            self._measure(reply.clock_ns, self._door.sent_ns)
        if fds:
            self.lock = SessionLock(fds.pop())
        self.fds = fds
        self._greet("ipc://" + self.settings.socket)

    def _measure(self, clock_ns: int, sent_ns: int) -> None:
        """The two clocks are one on one machine; only another time namespace or host differs."""
        now = time.monotonic_ns()
        if sent_ns <= clock_ns <= now:
            self.offset_ns = 0
        else:
            self.offset_ns = clock_ns - (sent_ns + now) // 2

    def _greet(self, endpoint: str) -> None:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, 20)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            dealer.setsockopt(zmq.MAXMSGSIZE, DEFAULT_LIMITS.inline + MIB)
            if self.settings.endpoint is not None:  # a peer that is gone without a word
                dealer.setsockopt(zmq.HEARTBEAT_IVL, 2000)
                dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
            if self.settings.curve is not None:
                dealer.curve_serverkey = self.settings.curve.server_key
                dealer.curve_publickey = self.settings.curve.public_key
                dealer.curve_secretkey = self.settings.curve.secret_key
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise Unavailable(f"can't connect to {endpoint}: {error}") from error
        self._dealer = dealer
        self.zmq_fd = int(dealer.getsockopt(zmq.FD))
        self.phase = Phase.GREETING
        self.send_hello()

    def send_hello(self) -> None:
        """Also again, when no answer comes: the same request id is carried out once."""
        settings = self.settings
        remote = settings.endpoint is not None
        self._hello_sent_ns = time.monotonic_ns()
        hello = Hello(
            settings.name,
            FEATURES,
            self._hello_sent_ns,
            settings.expected_instance,
            settings.group if remote else None,
            settings.token if remote else None,
            settings.namespace if remote else None,
        )
        frame = encode_frame(
            Op.HELLO,
            encode_request(hello),
            session=self.session,
            request=_HELLO_REQUEST,
            epoch=self.epoch,
        )
        self._send([frame])

    def _greeted(self, frame: Frame) -> None:
        if frame.flags & _ERROR:
            error = decode_error(frame.body)
            if isinstance(error, (UnknownSession, StaleEpoch)):
                raise Lost(str(error))
            raise error
        reply = decode_reply(Op.HELLO, frame.body, newer=frame.newer)
        if not isinstance(reply, HelloReply):
            raise ProtocolError("not an answer to a hello")
        expected = self.settings.expected_instance
        if self.attached is not None:
            expected = self.attached.instance
        if expected is not None and reply.instance != expected:
            raise WrongInstance(
                f"{self.settings.where} is instance {reply.instance!r}, not {expected!r}"
            )
        if self.attached is None:
            self.session = reply.session
            self.epoch = frame.epoch
            self._measure(reply.clock_ns, self._hello_sent_ns)
        elif frame.epoch != self.epoch:
            raise Lost("the daemon restarted between attach and hello")
        self.limits = reply.limits
        self.info = Info(
            reply.instance,
            self.epoch,
            reply.version,
            common_features(reply.features),
            reply.limits,
            reply.namespace,
            reply.admin,
            reply.lease_default_ns,
            self.settings.map_memory and self.attached is not None,
            self.attached.public_id if self.attached is not None else None,
        )
        self.phase = Phase.READY

    # -- requests ----------------------------------------------------------------------------

    @property
    def room(self) -> bool:
        """Whether one more request may be in flight."""
        return self.phase is Phase.READY and len(self.pending) < self.limits.inflight

    def send(self, call: Call, now_ns: int) -> bool:
        """Send `call`, for the first time in this link or again. False: not now."""
        request = call.request or self._acks.next
        if call.gives_back:  # holds whenever it is heard
            flags, deadline = 0, 0
        elif self.settings.endpoint is None:
            flags, deadline = 0, call.deadline_ns + self.offset_ns
        else:
            flags = int(FrameFlag.RELATIVE)
            deadline = max(1, (call.deadline_ns - now_ns) // 1_000_000)
        trace = self.settings.trace
        frame = encode_frame(
            call.op,
            call.body,
            flags=flags,
            session=self.session,
            request=request,
            ack=self._acks.upto,
            epoch=self.epoch,
            deadline=deadline,
            trace=NO_TRACE if trace is None else trace(),
            frames=len(call.payload),
        )
        if not self._send([frame, *call.payload] if call.payload else [frame]):
            return False
        if not call.request:
            call.request = request
            self._acks.next = request + 1
            self.pending[request] = call
        return True

    def too_large(self, call: Call) -> LimitExceeded | None:
        """Why not to send it: the daemon's libzmq would end the connection, and say nothing."""
        size, most = sum(memoryview(part).nbytes for part in call.payload), self.limits.inline
        if size <= most:
            return None
        return over("inline payload bytes", size, most, "send fewer or smaller chunks a request")

    def _send(self, parts: list[Any]) -> bool:
        dealer = self._dealer
        if dealer is None:
            return False
        try:
            if len(parts) == 1:
                dealer.send(parts[0], _DONTWAIT)
            else:
                dealer.send_multipart(parts, _DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise Lost(f"the socket failed: {error}") from error
        return True

    def receive(self) -> tuple[Frame, list[bytes]] | None:
        """The next answer, None if there is none now. Lost if it can't be ours."""
        dealer = self._dealer
        if dealer is None:
            return None
        try:
            if not int(dealer.getsockopt(_EVENTS)) & _POLLIN:
                return None
            data = dealer.recv(_DONTWAIT)
            frame = decode_frame(data, _REPLY_LIMITS)
            # What the header does not announce is not asked for: it would be read as a next
            # answer, and is none.
            rest: list[bytes] = []
            while frame.frames and dealer.getsockopt(_RCVMORE):
                rest.append(dealer.recv(_DONTWAIT))
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise Lost(f"the socket failed: {error}") from error
        if not frame.flags & _REPLY or len(rest) != frame.frames:
            raise ProtocolError("the daemon sent what is no answer")
        if self.phase is Phase.GREETING:
            if frame.request == _HELLO_REQUEST:
                self._greeted(frame)
            return frame, rest
        if frame.epoch != self.epoch and self.phase is Phase.READY:
            raise Lost(f"the daemon restarted: epoch {frame.epoch}, not {self.epoch}")
        return frame, rest

    def answered(self, request: int) -> None:
        """Acknowledge this answer from the next request on."""
        stuck = self._acks.answered(request)
        if stuck and stuck not in self.pending:  # an abandoned one's, lost for good
            self.abandoned.pop(stuck, None)
            self._acks.answered(stuck)

    def close(self) -> None:
        """End the session from this side. Idempotent."""
        if self._dealer is not None:
            self._dealer.close(0)
            self._dealer = None
        if self._door is not None:
            self._door.close()
            self._door = None
        self.attach_fd = self.zmq_fd = -1
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.lock = None  # closed when the last unfinished reservation is gone

    def leave_in_child(self) -> None:
        """In a forked child: close our copies, touch nothing that the parent's threads own."""
        door, self._door = self._door, None
        if door is not None:
            with contextlib.suppress(OSError):
                door.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []
        self.attach_fd = self.zmq_fd = -1
