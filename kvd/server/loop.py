"""The one thread that owns the core: waits for sockets, descriptors and time, and calls back.

The law of this module: nothing here blocks but the wait itself. ZMQ sockets are waited for
together with one epoll descriptor, which stands for all plain ones (the attach socket,
connections, pidfds, eventfds, signals). A callback that raises is a fault of ours: it is logged
and counted, and the loop goes on. Requests go first, and again between all other pieces of work.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import zmq

__all__ = ["SHARE_NS", "Loop"]

log = logging.getLogger(__name__)

SHARE_NS = 500_000  # of a turn, for completions of one kind: then requests have their turn again
LOOK_S = 0.0003
IDLE_MS = 1000  # longest wait: bounds how late a timer that was forgotten can be
NS_PER_MS = 1_000_000


@dataclass(slots=True, eq=False)
class _Timer:
    period_s: float
    callback: Callable[[float], object]
    due: float


class Loop:
    """Not thread-safe; other threads wake it through an eventfd that they watch."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._epoll = select.epoll()
        self._poller.register(self._epoll.fileno(), zmq.POLLIN)
        self._sockets: dict[zmq.Socket[bytes], Callable[[], object]] = {}
        self._descriptors: dict[int, Callable[[int], object]] = {}
        self._timers: list[_Timer] = []
        self._signal_pipe: tuple[int, int] | None = None
        self._old_signals: list[tuple[int, object]] = []
        self._old_wakeup = -1
        self._looked = 0.0  # monotonic s, at the sockets
        self.faults = 0
        self.turns = 0
        self.longest_turn_s = 0.0

    # -- what is waited for ---------------------------------------------------------------------

    def add_socket(self, socket: zmq.Socket[bytes], callback: Callable[[], object]) -> None:
        """`callback()` when a ZMQ socket has something to receive. It may leave some of it."""
        self._poller.register(socket, zmq.POLLIN)
        self._sockets[socket] = callback

    def remove_socket(self, socket: zmq.Socket[bytes]) -> None:
        if self._sockets.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def watch(self, descriptor: int, callback: Callable[[int], object]) -> None:
        """`callback(events)` when the descriptor can be read or its other end is gone."""
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP)
        self._descriptors[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        """Before the descriptor is closed. An unknown one is passed over."""
        if self._descriptors.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def every(self, period_s: float, callback: Callable[[float], object]) -> None:
        """`callback(now)` about every `period_s` seconds (monotonic clock)."""
        self._timers.append(_Timer(period_s, callback, time.monotonic() + period_s))

    def on_signals(self, numbers: Iterable[int], callback: Callable[[int], object]) -> None:
        """`callback(number)` in a turn of the loop, not in the handler. Main thread only."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signal_pipe = (read, write)
        self._old_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def nothing(number: int, frame: FrameType | None) -> None:
            """The wakeup descriptor does the work."""

        for number in numbers:
            self._old_signals.append((number, signal.signal(number, nothing)))

        def drain(events: int) -> None:
            for number in os.read(read, 4096):
                callback(number)

        self.watch(read, drain)

    # -- turns ----------------------------------------------------------------------------------

    def turn(self, timeout_ms: int) -> None:
        """Wait at most that long, then call back for all that is ready and due."""
        now = time.monotonic()
        for timer in self._timers:
            timeout_ms = min(timeout_ms, max(0, int((timer.due - now) * 1000) + 1))
        ready = self._poller.poll(min(timeout_ms, IDLE_MS))
        begun = time.monotonic()
        self._looked = begun
        plain = False
        for source, _ in ready:
            if isinstance(source, int):
                plain = True
            else:
                self._call(source)
        if plain:
            self._plain()
        now = time.monotonic()
        for timer in self._timers:
            if timer.due <= now:
                timer.due = now + timer.period_s
                self._guard(timer.callback, now)
        self.turns += 1
        self.longest_turn_s = max(self.longest_turn_s, time.monotonic() - begun)

    def requests(self) -> None:
        """Call back for sockets that have something by now, if they were not looked at just before:
        between two pieces of other work, so that a request waits for one of them at most."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for socket in list(self._sockets):
            if not socket.closed and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._call(socket)

    def _call(self, socket: zmq.Socket[bytes]) -> None:
        callback = self._sockets.get(socket)
        if callback is not None:  # gone, if an earlier callback of this turn removed it
            self._guard(callback)

    def _plain(self) -> None:
        for descriptor, events in self._epoll.poll(0, 256):
            self.requests()
            callback = self._descriptors.get(descriptor)
            if callback is not None:
                self._guard(callback, events)

    def _guard(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:  # one bad event must not end the daemon
            self.faults += 1
            log.exception("fault in the loop; it goes on")

    def deafen(self) -> None:
        """What is asked for by signals is done: more of them are ignored, also after `close`, as
        long as the process has to end. Main thread only."""
        for number, _ in self._old_signals:
            signal.signal(number, signal.SIG_IGN)
        self._old_signals.clear()

    def close(self) -> None:
        """Give signals back and close what the loop made; sockets and descriptors are others'."""
        for number, handler in self._old_signals:
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._old_signals.clear()
        if self._signal_pipe is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            for end in self._signal_pipe:
                os.close(end)
            self._signal_pipe = None
        self._epoll.close()
