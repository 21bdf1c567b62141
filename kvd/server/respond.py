"""The way out: encodes a reply, keeps it for a retry, and sends it without ever waiting.

The law of this module: every send is DONTWAIT on a ROUTER with ROUTER_MANDATORY. A peer whose
queue is full (it is stopped, or does not read) or that is not there any more loses its session,
counted by reason; nobody else notices.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from kvd.errors import ErrorCode, KvdError
from kvd.server.counters import Counters
from kvd.server.holding import send_bytes
from kvd.server.requests import Request
from kvd.server.sessions import Route, Session
from kvd.server.unread import COUNTED, Unread
from kvd.wire import NO_SESSION, Address, FrameFlag, Op, encode_frame
from kvd.wire.messages import encode_error, encode_reply

__all__ = ["REPEATABLE", "Responder", "new_router"]

log = logging.getLogger(__name__)

# Carried out again on a retry whose reply is not kept: they change nothing.
REPEATABLE = frozenset({Op.HELLO, Op.WAIT, Op.LIST, Op.STAT, Op.HEARTBEAT, Op.GET})

# plain integers: arithmetic with enum members costs microseconds on the hot path
REPLY = int(FrameFlag.REPLY)
ERROR = int(FrameFlag.REPLY | FrameFlag.ERROR)
DONTWAIT = int(zmq.DONTWAIT)
MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
ROUTER_HWM = 1000  # replies that wait for one peer; more than a session's requests in flight


def new_router(context: zmq.Context[zmq.Socket[bytes]], max_frame: int) -> zmq.Socket[bytes]:
    """A ROUTER that never blocks and never drops in silence. Not bound yet."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, ROUTER_HWM)
    socket.setsockopt(zmq.RCVHWM, ROUTER_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.BACKLOG, 128)
    return socket


class Responder:
    """Sends replies and errors; `lost(session, why)` is told when a peer can't be sent to."""

    def __init__(
        self, epoch: int, counters: Counters, lost: Callable[[Session, str], None]
    ) -> None:
        self._epoch = epoch
        self._counters = counters
        self._lost = lost
        self.ended: Callable[[Request, ErrorCode | None], object] | None = None  # for spans
        self._held: list[tuple[Route, list[bytes], Session | None]] | None = None
        self.unread = Unread()

    # -- batches --------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep replies back until `flush`. libzmq's I/O thread falls asleep between two of our
        replies and is then woken by a system call for each; a batch wakes it once."""
        if self._held is None:
            self._held = []

    def let_go(self, session: Session) -> None:
        """Send what was kept back until now: what comes next takes its time. What is a client's own
        waits for its next request: it sent both together."""
        held = self._held
        if held and any(other is not session for _, _, other in held):
            self.flush()
            self._held = []

    def flush(self) -> None:
        """Send what was kept back, in order."""
        held, self._held = self._held, None
        for route, frames, session in held or ():
            self._send(route, frames, session)

    # -- the one reply of a request -------------------------------------------------------------

    def result(
        self, request: Request, result: tuple[Any, ...], payload: Sequence[bytes] = ()
    ) -> None:
        try:
            body = encode_reply(result)
        except KvdError as too_long:
            self.fail(request, too_long.code, str(too_long))
            return
        if self.ended is not None:
            self.ended(request, None)
        self._finish(request, REPLY, body, payload)

    def fail(self, request: Request, code: ErrorCode, message: str, retry_ns: int = 0) -> None:
        if code is ErrorCode.BUSY:
            self._counters.add("requests_delayed")
        if self.ended is not None:
            self.ended(request, code)
        self._finish(request, ERROR, encode_error(code, message, retry_ns), ())

    def _finish(self, request: Request, flags: int, body: bytes, payload: Sequence[bytes]) -> None:
        session = request.session
        if session.closed:
            return
        frame = encode_frame(
            request.op,
            body,
            flags=flags,
            session=session.token,
            request=request.id,
            epoch=self._epoch,
            trace=request.trace,
            frames=len(payload),
        )
        reply = [frame, *payload]
        session.replies.finish(request.id, reply, keep=request.op not in REPEATABLE)
        self._counters.add("replies")
        # a retry may have come by another way meanwhile: the newest one is alive
        self.send(session.route or request.route, reply, session)

    # -- frames ---------------------------------------------------------------------------------

    def error_to(self, route: Route, address: Address | None, code: ErrorCode, text: str) -> None:
        """An error for somebody whose message could not be taken as a request of a session."""
        frame = encode_frame(
            address.op if address is not None else 0,
            encode_error(code, text),
            flags=ERROR,
            session=address.session if address is not None else NO_SESSION,
            request=address.request if address is not None else 0,
            epoch=self._epoch,
        )
        self.send(route, [frame], None)

    def send(self, route: Route, frames: list[bytes], session: Session | None) -> None:
        """Send, now or with the batch. A session whose peer can't be sent to is lost."""
        if self._held is not None:
            self._held.append((route, frames, session))
        else:
            self._send(route, frames, session)

    def _send(self, route: Route, frames: list[bytes], session: Session | None) -> None:
        socket, identity = route
        try:
            send_bytes(socket, identity, MORE)
            size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
            if size < COUNTED or session is None:
                for frame in frames[:-1]:
                    send_bytes(socket, frame, MORE)
                send_bytes(socket, frames[-1], DONTWAIT)
            else:
                self._send_counted(socket, frames, size, session)
        except zmq.Again:
            self._failed(session, route, "full")
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, zmq.EHOSTUNREACH):
                raise
            self._failed(session, route, "unreachable")

    def _send_counted(
        self, socket: zmq.Socket[bytes], frames: list[bytes], size: int, session: Session
    ) -> None:
        """Without another copy; the frames are gone when the last one is."""
        for frame in frames[:-1]:
            socket.send(frame, MORE, copy=len(frame) < COUNTED)
        last = zmq.Frame(frames[-1], track=True, copy=False)
        tracker = socket.send(last, DONTWAIT, copy=False, track=True)
        self.unread.sent(session, size, tracker)

    def _failed(self, session: Session | None, route: Route, reason: str) -> None:
        self._counters.reason("sends_failed", reason)
        if session is None or session.closed:
            return
        if session.route is not None and session.route.identity != route.identity:
            return  # the client came back by another connection: only the old one is gone
        self._lost(session, reason)
