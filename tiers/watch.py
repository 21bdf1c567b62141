"""The watch of a pool: one thread that touches no medium.

The law of this module: here happens what must happen although all workers hang. What is queued
expires at its deadline, spare workers are put beside stuck ones, and a probe is sent when an open
breaker's pause is over, so that a tier heals without traffic. While nothing is queued or runs it
sleeps until the next of these pauses is over, or until it is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvd.tiers.base import Job
from kvd.tiers.crew import SECOND, Crew
from kvd.tiers.healing import Healing
from kvd.tiers.waiting import Waiting

__all__ = ["Watch"]

_LOOK_S = 0.05


class Watch:
    """`wake`: called with the lock held when a probe waits for a worker. `late`: called without it
    with each job whose deadline has passed in the queue."""

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        clock: Callable[[], int],
        waiting: Waiting,
        crew: Crew,
        healing: Healing,
        *,
        wake: Callable[[], None],
        late: Callable[[Job], None],
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._waiting = waiting
        self._crew = crew
        self._healing = healing
        self._wake = wake
        self._late = late
        self._told = threading.Condition(lock)
        self._stirred = self._unwatched = False  # jobs came since it looked; it sleeps on
        self._over = False
        self._name = name
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Pre: the lock is held."""
        self.thread = threading.Thread(
            target=self._run, name=f"kvd-tier-{self._name}-watch", daemon=True
        )
        self.thread.start()

    def stir(self) -> None:
        """Jobs were queued. While the watch looks again anyway it need not be woken for that. Pre:
        the lock is held."""
        if self._unwatched:
            self._unwatched = False
            self._told.notify()
        self._stirred = True

    def tell(self) -> None:
        """There may be a pause that it does not know of. Pre: the lock is held."""
        self._told.notify()

    def stop(self) -> None:
        """Pre: the lock is held."""
        self._over = True
        self._told.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._over:
                    return
                self._unwatched = False
                now = self._clock()
                expired = self._waiting.expire(now)
                self._crew.hire_spares(now)
                if self._healing.send(now):
                    self._wake()
                if not expired:
                    self._told.wait(self._pause(now))
            for job in expired:
                self._late(job)

    def _pause(self, now: int) -> float | None:
        """Seconds until there is something to watch; None: until told. Pre: the lock is held."""
        if self._crew.running or self._waiting or self._stirred:
            self._stirred = False
            return _LOOK_S
        self._unwatched = True
        due = self._healing.next()
        return None if due is None else max(0.01, (due - now) / SECOND)
