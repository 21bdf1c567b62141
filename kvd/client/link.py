"""One session with one daemon: attach, hello, and the DEALER that carries requests.

The law of this module: nothing here blocks and nothing is retried. A link lives once, from
`Link(...)` through ATTACHING and GREETING to READY, and ends in close(); whoever owns it makes the
next one. All of it happens under the owner's lock.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
import weakref
from enum import Enum
from typing import Any, ClassVar

import zmq

from kvd.arena import ArenaMap
from kvd.client.call import Call
from kvd.client.settings import Info, Settings
from kvd.errors import (
    AuthError,
    KvdError,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    UnknownSession,
    WrongInstance,
)
from kvd.wire import (
    DEFAULT_LIMITS,
    FEATURES,
    NO_SESSION,
    NO_TRACE,
    Frame,
    FrameFlag,
    Limits,
    Op,
    attach_path,
    common_features,
    decode_frame,
    encode_frame,
    short_address,
)
from kvd.wire.attach import (
    FDS_PER_ARENA,
    MAX_ARENAS,
    AttachReply,
    AttachRequest,
    decode_attach_reply,
    encode_attach,
    this_version,
)
from kvd.wire.limits import ATTACH_BYTES, MIB
from kvd.wire.messages import Hello, HelloReply, Request, decode_error, decode_reply, encode_request

_MAX_FDS = MAX_ARENAS * FDS_PER_ARENA + 1
_HELLO_REQUEST = 1
_DONTWAIT = int(zmq.DONTWAIT)
_REPLY = int(FrameFlag.REPLY)  # plain integers: an IntFlag costs a microsecond each time
_ERROR = int(FrameFlag.ERROR)
_POLLIN = int(zmq.POLLIN)
_EVENTS = zmq.EVENTS
_RCVMORE = zmq.RCVMORE
_REPLY_LIMITS = Limits(body=16 * MIB, frames=1 << 20)  # a client's own sanity, no contract
# Answers that never came are acknowledged all the same when this many later ones have come.
_GIVE_UP = 192


class Phase(Enum):
    ATTACHING = 1
    GREETING = 2
    READY = 3


class Lost(KvdError):
    """The link is over; the requests on it may be asked again in the next one."""


class SessionLock:
    """The descriptor of a session's flock: while it is open, writes of that session may still be
    going on. Held by the link and by every unfinished reservation."""

    _open: ClassVar[weakref.WeakSet[SessionLock]] = weakref.WeakSet()

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        SessionLock._open.add(self)

    def drop(self) -> None:
        """Close this process's descriptor (a child's copy must not keep the lock alive)."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def drop_all_in_child(cls) -> None:
        for lock in list(cls._open):
            lock.drop()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self.drop()


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
        self._sock: socket.socket | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._next = _HELLO_REQUEST + 1
        self._acked = _HELLO_REQUEST
        self._answered: set[int] = set()  # answered, with an unanswered one before them
        self.hello_resend_ns = 0
        if settings.endpoint is not None:
            self._greet(settings.endpoint)
        else:
            self._attach()

    # -- opening -----------------------------------------------------------------------------

    def _attach(self) -> None:
        """Unavailable when nobody listens there."""
        settings = self.settings
        self._attach_sent_ns = time.monotonic_ns()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            major, minor = this_version()
            request = AttachRequest(
                major,
                minor,
                settings.name,
                os.getpid(),
                settings.group,
                settings.token,
                settings.expected_instance,
                settings.map_memory,
                settings.namespace,
            )
            with short_address(attach_path(settings.socket)) as address:
                sock.connect(address)
            sock.send(encode_attach(request), socket.MSG_NOSIGNAL)
        except PermissionError as error:
            sock.close()
            raise AuthError(
                f"may not connect to {settings.socket}: {error.strerror}; ask for the daemon's "
                f"group, or set --socket to a daemon of your own"
            ) from error
        except OSError as error:
            sock.close()
            raise Unavailable(
                f"no daemon answers at {settings.socket}: {error.strerror or error}"
            ) from error
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self.attach_fd = sock.fileno()

    def on_attach(self) -> None:
        """The attach socket may have something. Lost at its end; typed errors of a refusal."""
        sock = self._sock
        if sock is None:
            return
        size = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = sock.recvmsg(
                ATTACH_BYTES, size, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            raise Lost(f"the connection to the daemon broke: {error.strerror}") from error
        fds = _descriptors(ancillary)
        try:
            if not data:
                raise Lost("the daemon closed the connection (it ended, or it ended the session)")
            if self.phase is not Phase.ATTACHING:
                raise Lost("the daemon sent something after its answer to the attach")
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise ProtocolError("the daemon's answer to the attach is too long")
            self._attached(decode_attach_reply(data), fds)
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
        self._measure(reply.clock_ns, self._attach_sent_ns)
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
        request = call.request or self._next
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
            ack=self._acked,
            epoch=self.epoch,
            deadline=deadline,
            trace=NO_TRACE if trace is None else trace(),
            frames=len(call.payload),
        )
        if not self._send([frame, *call.payload] if call.payload else [frame]):
            return False
        if not call.request:
            call.request = request
            self._next = request + 1
            self.pending[request] = call
        return True

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
            rest: list[bytes] = []
            while dealer.getsockopt(_RCVMORE):
                rest.append(dealer.recv(_DONTWAIT))
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise Lost(f"the socket failed: {error}") from error
        frame = decode_frame(data, _REPLY_LIMITS)
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
        if request != self._acked + 1:
            if request > self._acked:
                self._answered.add(request)
                if len(self._answered) > _GIVE_UP:
                    self._give_up()
            return
        answered = self._answered
        while True:
            self._acked = request
            request += 1
            if request not in answered:
                return
            answered.remove(request)

    def _give_up(self) -> None:
        """An abandoned request's answer was lost for good: stop keeping the others for it."""
        stuck = self._acked + 1
        if stuck in self.pending:
            return
        self.abandoned.pop(stuck, None)
        self.answered(stuck)

    def close(self) -> None:
        """End the session from this side. Idempotent."""
        if self._dealer is not None:
            self._dealer.close(0)
            self._dealer = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.attach_fd = self.zmq_fd = -1
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.lock = None  # closed when the last unfinished reservation is gone

    def leave_in_child(self) -> None:
        """In a forked child: close our copies, touch nothing that the parent's threads own."""
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []
        self.attach_fd = self.zmq_fd = -1


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
