"""Threads that wait for answers: one leads, the others follow.

The law of this module: one lock guards everything, and nobody holds it while blocked. Of the
threads that wait, one leads: it alone sleeps on the descriptors and hands out what comes in; when
it has what it came for, it wakes a follower to lead. Whoever works while another leads wakes that
leader through an eventfd if its call is done, or if its sleep would be too long.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from _thread import LockType, allocate_lock
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from kvd.client.call import Call
from kvd.client.durations import deadline_ns
from kvd.errors import ClientClosed, Forked

NEVER_NS = 1 << 62


class Waiters(ABC):
    """The lock, the descriptors, and who sleeps on them. Subclasses do the work."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self._closed = False
        self._finished: deque[Call] = deque()  # tracked calls, for poll
        self._leading = False
        self._leader_call: Call | None = None
        self._followers: deque[LockType] = deque()
        self._poll_waiters: list[LockType] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready_set = False
        self._epoll = select.epoll()
        self._epoll.register(self._ready, select.EPOLLIN)
        self._watched: tuple[int, ...] = ()
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)

    # -- what a subclass does, with the lock held and without blocking -------------------------

    @abstractmethod
    def _pump(self, now: int) -> None:
        """Everything that can be done now."""

    @abstractmethod
    def _due_ns(self) -> int:
        """When there will be something to do even if nothing comes in."""

    @abstractmethod
    def _woken_by(self, fd: int) -> None:
        """A watched descriptor is readable, or at its end."""

    @abstractmethod
    def abandon(self, call: Call) -> None:
        """End a call from this side. Takes the lock by itself."""

    # -- for everyone --------------------------------------------------------------------------

    def wait(self, call: Call, until_ns: int) -> None:
        """Return when `call` is done or `until_ns` has passed."""
        try:
            self._wait(lambda: call.done, until_ns, call)
        except Forked:
            raise
        except BaseException:  # a signal's: nobody will ask for this answer again
            self.abandon(call)
            raise

    def arrived(self, call: Call) -> bool:
        """Whether `call` is done by now; nothing is waited for. True also where its result would
        tell of a fork."""
        if call.done or os.getpid() != self.pid:
            return True
        with self.lock:
            if not self._closed:
                self._pump(time.monotonic_ns())
            return call.done

    def poll(self, timeout_s: float) -> list[Call]:
        """Tracked calls that are done, in order of completion; waits for one if there is none."""
        until_ns = deadline_ns(timeout_s)
        self._wait(self._has_finished, until_ns, None)
        with self.lock:
            done = [call for call in self._finished if not call.collected]
            self._finished.clear()
            if self._ready_set and self._ready >= 0:  # a close from another thread took it
                self._ready_set = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._ready)
        return done

    def fileno(self) -> int:
        """Readable when poll() has something to do."""
        self.check()
        return self._epoll.fileno()

    def next_timeout_s(self) -> float | None:
        """How long until poll() should be called even if fileno() is quiet. None: no need."""
        with self.lock:
            due = self._due_ns()
        return None if due >= NEVER_NS else max(0.0, (due - time.monotonic_ns()) / 1e9)

    def check(self) -> None:
        """Forked or ClientClosed if nothing can be asked here any more."""
        if os.getpid() != self.pid:
            raise Forked(
                "this client was made before a fork and belongs to the parent process: "
                "make a new Client in the child"
            )
        if self._closed:
            raise ClientClosed("the client was closed")

    # -- waiting -------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], until_ns: int, call: Call | None) -> None:
        """Lead or follow until `ready` or `until_ns`. Takes the lock by itself."""
        waiter: LockType | None = None
        try:
            while True:
                with self.lock:
                    if waiter is not None:
                        self._unfollow(waiter, call)
                        waiter = None
                    now = time.monotonic_ns()
                    if self._settled(ready, until_ns, now, call):
                        return
                    if self._leading:
                        waiter = self._follow(call)
                        timeout_s = (until_ns - now) / 1e9
                    else:
                        self._leading = True
                        self._leader_call = call
                        poller = self._poller
                        timeout_s = max(0, min(until_ns, self._due_ns()) - now) / 1e9
                if waiter is not None:
                    waiter.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
                else:
                    self._lead(poller, timeout_s)
        finally:
            with self.lock:  # also when an exception (a signal's) ends the wait
                if waiter is not None:
                    self._unfollow(waiter, call)
                self._promote()

    def _settled(
        self, ready: Callable[[], bool], until_ns: int, now: int, call: Call | None
    ) -> bool:
        """Do what can be done now, and say whether the wait is over."""
        if ready():
            return True
        if call is None or os.getpid() != self.pid:
            self.check()
        if self._closed:
            return True
        if call is None and not self._leading:
            self._look()
        self._pump(now)
        return ready() or now >= until_ns

    def _look(self) -> None:
        """Whoever only polls may never sleep on the descriptors: see what they say now."""
        for fd, _ in self._poller.poll(0):
            if fd != self._wake:
                self._woken_by(fd)

    def _lead(self, poller: select.poll, timeout_s: float) -> None:
        """Sleep on the descriptors, without the lock."""
        events: list[tuple[int, int]] = []
        try:
            events = poller.poll(min(timeout_s * 1e3, 1e9) if timeout_s > 0 else 0)
        finally:
            with self.lock:
                self._leading = False
                self._leader_call = None
                if self._closed:
                    self._close_descriptors()
                else:
                    self._heed(events)

    def _heed(self, events: list[tuple[int, int]]) -> None:
        """What the leader's sleep ended with."""
        for fd, _ in events:
            if fd != self._wake:
                self._woken_by(fd)
                continue
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)

    def _follow(self, call: Call | None) -> LockType:
        waiter = allocate_lock()
        waiter.acquire()
        self._followers.append(waiter)
        if call is not None:
            call.waiter = waiter
        else:
            self._poll_waiters.append(waiter)
        return waiter

    def _unfollow(self, waiter: LockType, call: Call | None) -> None:
        with contextlib.suppress(ValueError):
            self._followers.remove(waiter)
        if call is not None:
            call.waiter = None
        else:
            with contextlib.suppress(ValueError):
                self._poll_waiters.remove(waiter)

    def _promote(self) -> None:
        """Nobody leads: wake one follower to do so. After close, wake all."""
        while self._followers and (self._closed or not self._leading):
            _release(self._followers.popleft())
            if not self._closed:
                return

    def _nudge(self) -> None:
        """Make the leader look at the timers and descriptors again."""
        if self._leading and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # -- what the work tells --------------------------------------------------------------------

    def _done(self, call: Call) -> None:
        """`call` is done: wake who waits for it."""
        if call.waiter is not None:
            _release(call.waiter)
        elif call is self._leader_call:
            self._nudge()
        if not call.tracked:
            return
        self._finished.append(call)
        if not self._ready_set and self._ready >= 0:
            self._ready_set = True
            os.eventfd_write(self._ready, 1)
        for waiter in self._poll_waiters:
            _release(waiter)
        if self._leader_call is None:
            self._nudge()

    def _has_finished(self) -> bool:
        """Whether poll has something to give. What result() gave already is dropped."""
        finished = self._finished
        while finished and finished[0].collected:
            finished.popleft()
        return bool(finished)

    def _watch(self, fds: tuple[int, ...]) -> None:
        """Sleep on these descriptors from now on."""
        for fd in self._watched:
            with contextlib.suppress(OSError, ValueError):  # closing it took it out already
                self._epoll.unregister(fd)
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for fd in fds:
            self._epoll.register(fd, select.EPOLLIN)
            poller.register(fd, select.POLLIN)
        self._watched = fds
        self._poller = poller
        self._nudge()

    # -- the end ---------------------------------------------------------------------------------

    def _wake_all(self) -> None:
        """After `_closed` was set: nobody sleeps on, and the last one awake closes the rest."""
        for waiter in self._poll_waiters:
            _release(waiter)
        self._promote()
        if self._leading:
            os.eventfd_write(self._wake, 1)
        else:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._wake < 0:
            return
        self._epoll.close()
        os.close(self._wake)
        os.close(self._ready)
        self._wake = self._ready = -1


def _release(waiter: LockType) -> None:
    if waiter.locked():
        waiter.release()
