"""Requests of many threads over one link at a time.

The law of this module: every call ends, at its deadline at the latest; none of it blocks but
`connect`. What needs the lock of kvd.client.waiters takes it here, and leaves the rest to
kvd.client.exchange.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from kvd.client.call import Call
from kvd.client.exchange import Exchange
from kvd.client.link import Link, Phase
from kvd.client.settings import Counters
from kvd.errors import ClientClosed, Unavailable
from kvd.wire import FrameFlag
from kvd.wire import messages as m
from kvd.wire.messages import Request

_ERROR = int(FrameFlag.ERROR)


class Channel(Exchange):
    """The asynchronous core of a client."""

    # -- for everyone ------------------------------------------------------------------------

    def submit(
        self,
        message: Request,
        payload: Iterable[bytes | memoryview] = (),
        *,
        deadline_ns: int,
        serial: int | None = None,
        tracked: bool = False,
        hold: bool = False,
    ) -> Call:
        """Send now if that is possible, else as soon as it is. Never blocks. `hold`: the caller
        submits more at once, or calls `flush`; what goes out together costs both sides less.

        `serial`: the link in which the message's handle was given; the call ends with StaleEpoch
        if that one is over. None: whichever there is (a handle of the group).
        LimitExceeded or ProtocolError if the message can't be encoded.
        """
        call = Call(self, message, tuple(payload), deadline_ns, serial, tracked=tracked)
        with self.lock:
            self.check()
            if tracked:
                self._has_finished()  # drops what was collected
            self._queue.append(call)
            self._limit(call)
            if not hold:
                self._pump(time.monotonic_ns())
        return call

    def flush(self) -> None:
        """Send what was held back. Never blocks, and raises nothing."""
        with self.lock:
            if not self._closed and os.getpid() == self.pid:
                self._pump(time.monotonic_ns())

    def abandon(self, call: Call) -> None:
        """End a call from this side. What its answer grants, late or unread, is given back."""
        with self.lock:
            if self._closed:
                return
            if not call.done:
                self._drop(call, Unavailable("the call was given up"))
                return
            if call.collected:
                return
            call.collected = True
        self.give_back(call)

    def give_back(self, call: Call) -> None:
        """Give back what the answer to `call` granted, if its session is still open."""
        with self.lock:
            link = call.link
            if self._closed or link is None or link is not self._link:
                return
            if call.error is None and not call.flags & _ERROR:
                self._give_back(link, call.message, call.raw, call.newer)
                self._pump(time.monotonic_ns())

    def forget(self, message: Request, serial: int | None, *, hold: bool = False) -> None:
        """Give back a handle of the link `serial` (None: of whichever there is) without waiting:
        said until it is heard, or the session is over and the handle with it. `hold`: as in
        `submit`."""
        with self.lock:
            self.check()
            link = self._link
            if link is None or serial not in (None, link.serial):
                return
            now = time.monotonic_ns()
            self._internal(message, link.serial, now)
            if not hold:
                self._pump(now)

    @property
    def counters(self) -> Counters:
        with self.lock:
            return Counters(**self._counts)

    @property
    def ready(self) -> Link | None:
        """The link if it is ready for requests now."""
        link = self._link
        return link if link is not None and link.phase is Phase.READY else None

    def connect(self, until_ns: int) -> Link:
        """The ready link; waits for it until `until_ns`. Unavailable, or why it was refused."""
        while True:
            call = self.submit(m.Heartbeat(), deadline_ns=until_ns)
            call.result()
            link = self.ready
            if link is not None:
                return link

    def close(self) -> None:
        """End every call with ClientClosed and the session with them. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            error = ClientClosed("the client was closed")
            link, self._link = self._link, None
            calls = list(self._queue) + (list(link.pending.values()) if link else [])
            calls += self._delays.clear()
            self._queue.clear()
            for call in calls:
                self._finish(call, error)
            if link is not None:
                link.close()
            context, self._context = self._context, None
            self._wake_all()
        if context is not None:
            context.term()  # all sockets are closed and none lingers: returns at once

    # -- fork --------------------------------------------------------------------------------

    def leave_in_child(self) -> None:
        """In a forked child, which has no other thread: only our copies of descriptors go."""
        self.lock = threading.Lock()
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.leave_in_child()
        self._close_descriptors()
        _orphans.append((self._context, link))


# Contexts of a parent process: not to be collected in the child, where they can't be closed.
_orphans: list[Any] = []
