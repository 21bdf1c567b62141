"""Requests out, answers in, over one link at a time: what the channel does with its lock held.

The law of this module: a link that is lost is replaced, and what can be asked again is, in order;
what a late answer grants is given back. Whoever touches the socket drains it, because its
descriptor is edge-triggered. Nothing here blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from kvd.client.attachment import Lost
from kvd.client.call import GIVE_BACKS, Call
from kvd.client.deadlines import Deadlines
from kvd.client.delays import Delays
from kvd.client.grants import HANDLE_REQUESTS, granted_by
from kvd.client.link import Link, Phase, new_context
from kvd.client.settings import BACKOFF_S, RESEND_NS, Counters, Settings
from kvd.client.waiters import NEVER_NS, Waiters
from kvd.errors import Busy, ErrorCode, KvdError, StaleEpoch, Unavailable
from kvd.wire import Frame, FrameFlag
from kvd.wire import messages as m
from kvd.wire.messages import Request, decode_error, decode_reply

_REGISTER_S = 5.0
_ERROR = int(FrameFlag.ERROR)
_RELINK_CODES = (ErrorCode.UNKNOWN_SESSION, ErrorCode.STALE_EPOCH)


class Exchange(Waiters):
    """The queue, the link, the timers. All methods: the lock is held."""

    def __init__(
        self,
        settings: Settings,
        specs: dict[bytes, bytes],
        on_ready: Callable[[Link], None],
    ) -> None:
        """`specs`: digest -> encoding, registered first in every new session; may grow.
        `on_ready`: called once a link, under the lock, when it is ready; must not block."""
        super().__init__()
        self.settings = settings
        self._specs = specs
        self._on_ready = on_ready
        self._context: zmq.Context[Any] | None = None
        self._link: Link | None = None
        self._serial = 0
        self._queue: deque[Call] = deque()
        self._counts = dict.fromkeys(Counters._fields, 0)
        # Timers: nothing is due before these.
        self._connect_ns = 0
        self._backoff_s = BACKOFF_S[0]
        self._deadlines = Deadlines()
        self._delays = Delays()
        self._resend_ns = NEVER_NS
        self._why = "not connected yet"

    def _due_ns(self) -> int:
        due = self._resend_ns
        if self._delays:
            due = min(due, self._delays.nearest)
        if self._deadlines:
            due = min(due, self._deadlines.nearest)
        link = self._link
        if self._queue and link is None:
            return min(due, self._connect_ns)
        if self._queue and link is not None and link.phase is Phase.GREETING:
            return min(due, link.hello_resend_ns)
        return due

    def _woken_by(self, fd: int) -> None:
        """The ZMQ socket is drained in any case; the attach socket may have come to its end."""
        if self._link is not None and fd == self._link.attach_fd:
            self._attach_event()

    def _pump(self, now: int) -> None:
        """Everything that can be done without blocking: connect, send, receive, expire."""
        link = self._link
        if link is not None and link.phase is Phase.ATTACHING:
            self._attach_event()
        elif link is not None and not (self._queue and link.room and self._flush(now)):
            self._drain(link)  # a flush that sent something has drained
        if self._deadlines and now >= self._deadlines.nearest:
            self._expire(now)
        if now >= self._resend_ns:
            self._resend(now)
        if self._delays:
            self._queue.extend(self._delays.due(now))
        if self._queue:
            self._flush(now)

    def _flush(self, now: int) -> bool:
        """Send what may be sent now. True if something was, and the socket was drained then."""
        while self._queue and self._queue[0].done:  # given up while they waited here
            self._queue.popleft()
        if not self._queue:
            return False
        if self._link is None:
            if now < self._connect_ns:
                return False
            self._connect(now)
        link = self._link
        if link is None:
            return False
        if link.phase is Phase.GREETING and now >= link.hello_resend_ns:
            try:
                if link.hello_resend_ns:
                    link.send_hello()
            except KvdError as error:
                self._failed(link, error)
                return True
            link.hello_resend_ns = now + RESEND_NS
        sent = False
        while self._queue and link.room:
            call = self._queue[0]
            if call.done:  # given up while it waited here
                self._queue.popleft()
                continue
            if call.serial is not None and call.serial != link.serial:
                self._queue.popleft()
                self._finish(call, _stale())
                continue
            if call.payload and (refused := link.too_large(call)) is not None:
                self._queue.popleft()
                self._finish(call, refused)
                continue
            try:
                if not link.send(call, now):
                    break
            except KvdError as error:
                self._failed(link, error)
                return True
            sent = True
            self._queue.popleft()
            call.sent(now)
            self._resend_ns = min(self._resend_ns, call.resend_ns)
        if sent:
            self._drain(link)  # sending may have consumed the descriptor's edge
        return sent

    def _connect(self, now: int) -> None:
        """Begin a new link. Nothing is waited for."""
        if self._context is None:
            self._context = new_context()
        self._serial += 1
        try:
            self._link = Link(self.settings, self._context, self._serial)
        except Unavailable as error:
            self._why = str(error)
            self._pause(now)
        except KvdError as error:
            self._refuse(error)
        else:
            self._watch_link()

    def _pause(self, now: int) -> None:
        self._connect_ns = now + int(self._backoff_s * 1e9)
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S[1])
        self._nudge()  # the leader's sleep may be longer than the pause

    def _refuse(self, error: KvdError) -> None:
        """A daemon is there and does not want us: that is everyone's answer, at once."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._watch_link()
        calls = list(self._queue)
        self._queue.clear()
        for call in calls:
            self._finish(call, error)

    def _attach_event(self) -> None:
        link = self._link
        if link is None:
            return
        before = link.phase
        try:
            link.on_attach()
        except KvdError as error:
            self._failed(link, error)
            return
        if link.phase is not before:
            link.hello_resend_ns = time.monotonic_ns() + RESEND_NS
            self._watch_link()
            self._drain(link)

    def _failed(self, link: Link, error: KvdError) -> None:
        """What ended a link: Lost and Unavailable are tried again, the rest is a refusal, unless
        it comes from a daemon that had let us in."""
        if link is not self._link:
            return
        if link.phase is Phase.READY or isinstance(error, (Lost, Unavailable)):
            self._lose(str(error))
        else:
            self._refuse(error)

    def _lose(self, why: str) -> None:
        """The link is over. What may be asked again goes to the front of the queue, in order."""
        link = self._link
        if link is None:
            return
        self._link = None
        self._counts["lost"] += 1
        self._why = why
        link.close()
        self._watch_link()
        self._pause(time.monotonic_ns())
        again: list[Call] = []
        for call in list(link.pending.values()):
            call.request = 0
            if call.internal or isinstance(call.message, HANDLE_REQUESTS):
                self._finish(call, Unavailable(f"the session ended before the answer: {why}"))
            else:
                again.append(call)
        link.pending.clear()
        for call in [c for c in self._queue if c.internal]:  # they speak of this session only
            self._queue.remove(call)
            self._finish(call, _stale())
        self._queue.extendleft(reversed(again))

    def _watch_link(self) -> None:
        """Sleep on the descriptors of the link that there is now."""
        link = self._link
        fds = () if link is None else tuple(fd for fd in (link.zmq_fd, link.attach_fd) if fd >= 0)
        self._watch(fds)

    def _drain(self, link: Link) -> None:
        """Hand out every answer that is there."""
        while link is self._link:
            greeting = link.phase is Phase.GREETING
            try:
                got = link.receive()
            except KvdError as error:
                self._failed(link, error)
                return
            if got is None:
                return
            if greeting:
                if link.phase is Phase.READY:
                    self._greeted(link)
                continue
            self._answer(link, *got)

    def _greeted(self, link: Link) -> None:
        self._counts["links"] += 1
        self._backoff_s = BACKOFF_S[0]
        self._connect_ns = 0
        try:
            self._on_ready(link)
        except KvdError as error:
            self._refuse(error)
            return
        now = time.monotonic_ns()
        for encoding in list(self._specs.values()):
            self._internal(m.RegisterSpec(encoding), None, now, first=True)
        self._flush(now)
        self._nudge()

    def _internal(
        self, message: Request, serial: int | None, now: int, *, first: bool = False
    ) -> None:
        ends = not isinstance(message, GIVE_BACKS)
        deadline_ns = now + int(_REGISTER_S * 1e9) if ends else NEVER_NS
        call = Call(self, message, (), deadline_ns, serial, internal=True)
        if first:
            self._queue.appendleft(call)
        else:
            self._queue.append(call)
        if ends:
            self._limit(call)

    def _answer(self, link: Link, frame: Frame, payload: list[bytes]) -> None:
        call = link.pending.pop(frame.request, None)
        if call is None:
            message = link.abandoned.pop(frame.request, None)
            if message is None:
                self._counts["stray"] += 1
                return
            link.answered(frame.request)
            self._counts["late"] += 1
            if not frame.flags & _ERROR:
                self._give_back(link, message, frame.body, frame.newer)
            return
        link.answered(frame.request)
        if frame.flags & _ERROR and self._refused(link, call, frame):
            return
        call.link = link
        call.raw = frame.body
        call.flags = frame.flags
        call.newer = frame.newer
        call.frames = payload
        self._finish(call, None)

    def _refused(self, link: Link, call: Call, frame: Frame) -> bool:
        """Whether an error is not this call's answer, or was told it here."""
        try:
            error = decode_error(frame.body)
        except KvdError as found:  # no daemon of ours says that
            self._lose(str(found))
            self._finish(call, found)
            return True
        return self._relinks(link, call, frame, error) or self._later(call, error)

    def _relinks(self, link: Link, call: Call, frame: Frame, error: KvdError) -> bool:
        """The daemon does not know this session any more: a new one, and the call again."""
        handle = isinstance(call.message, HANDLE_REQUESTS)
        if error.code not in _RELINK_CODES or (handle and error.code == ErrorCode.STALE_EPOCH):
            return False
        if not handle and not call.internal:
            call.request = 0
            link.pending[frame.request] = call  # _lose takes it from there
        self._lose(str(error))
        return not handle and not call.internal

    def _later(self, call: Call, error: KvdError) -> bool:
        """The daemon is busy for this tenant: the call again when it says so, if in time."""
        if not isinstance(error, Busy) or not error.retry_after_s:
            return False
        again = time.monotonic_ns() + int(error.retry_after_s * 1e9)
        if again >= call.deadline_ns:
            return False
        call.request = 0
        self._delays.add(call, again)
        self._counts["delayed"] += 1
        return True

    def _give_back(self, link: Link, message: Request, body: bytes, newer: bool) -> None:
        """Nobody will use what this answer grants."""
        try:
            reply = decode_reply(int(m.OP_OF[type(message)]), body, newer=newer)
        except KvdError as error:
            self._failed(link, error)
            return
        now = time.monotonic_ns()
        for handle in granted_by(reply, message):
            self._counts["given_back"] += 1
            self._internal(handle, link.serial, now)

    def _finish(self, call: Call, error: KvdError | None) -> None:
        if call.done:
            return
        if error is not None:
            call.fail(error)
        call.done = True
        call.payload = ()
        self._done(call)

    def _drop(self, call: Call, error: KvdError) -> None:
        """End `call` before its answer; the answer, if one comes, is given back."""
        link = self._link
        if link is not None and link.pending.get(call.request) is call:
            del link.pending[call.request]
            link.abandoned[call.request] = call.message
        unsaid = call.gives_back and not call.request and not call.done
        self._finish(call, error)
        if unsaid and link is not None and call.serial in (None, link.serial):
            self._internal(call.message, link.serial, time.monotonic_ns())

    def _limit(self, call: Call) -> None:
        """See to it that `call` ends at its deadline."""
        if self._deadlines.add(call):
            self._nudge()  # the leader's sleep may be longer than that

    def _expire(self, now: int) -> None:
        while (call := self._deadlines.pop(now)) is not None:
            self._drop(call, Unavailable(self._why_not(call)))

    def _why_not(self, call: Call) -> str:
        link, where = self._link, self.settings.where
        if call.request:
            return f"no answer from the daemon at {where} within the call's deadline"
        if link is None:
            return f"not connected to {where} within the call's deadline: {self._why}"
        if link.phase is not Phase.READY:
            return f"the daemon at {where} did not let us in within the call's deadline"
        return f"{len(link.pending)} requests to {where} are in flight, none was answered in time"

    def _resend(self, now: int) -> None:
        """Ask again for answers that are overdue: a request id is carried out once."""
        link = self._link
        nearest = NEVER_NS
        for call in list(link.pending.values()) if link is not None else ():
            if call.resend_ns <= now and link is not None:
                try:
                    link.send(call, now)
                except KvdError as error:
                    self._failed(link, error)
                    break
                self._counts["resends"] += 1
                call.resent(now)
            nearest = min(nearest, call.resend_ns)
        self._resend_ns = nearest
        if link is not None and link is self._link:
            self._drain(link)


def _stale() -> StaleEpoch:
    return StaleEpoch(
        "the session in which this handle was given is over, and its leases and writes with it"
    )
