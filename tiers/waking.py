"""Waking: which of a pool's sleeping workers is woken, and for what.

The law of this module: while a job may be taken and a worker sleeps, one worker is on its way; who
takes a job wakes the next one if there is more. Nobody is woken for nothing: each thread that wakes
takes the interpreter and the pool's lock from whoever carries a load. While all that waits is held
back for a moment (tiers/quiet.py), one worker naps until that moment is over, and the others sleep.

Pre of all methods: the lock is held.
"""

from __future__ import annotations

import threading

__all__ = ["Waking"]


class Waking:
    def __init__(self, lock: threading.Lock) -> None:
        self._work = threading.Condition(lock)
        self._over = threading.Condition(lock)
        self._asleep = 0
        self._napping = False
        self._coming = 0  # woken, and not there yet
        self._called = False  # the one that naps is one of these

    def sleep(self, left_s: float | None) -> None:
        """Until woken. `left_s`: when what waits may be taken by itself; None: never, or nothing
        waits."""
        if left_s is None or self._napping:
            self._asleep += 1
            self._work.wait()
            self._coming -= 1
            return
        self._napping = True
        self._over.wait(left_s)
        self._napping = False
        if self._called:
            self._called = False
            self._coming -= 1

    def wake(self, *, more: bool, held: bool) -> None:
        """`more`: a job may be taken now. `held`: one may be soon, and only time will tell."""
        if self._coming:
            return
        if self._asleep and (more or (held and not self._napping)):
            self._asleep -= 1
            self._coming += 1
            self._work.notify()
        elif more and self._napping:
            self._called = True
            self._coming += 1
            self._over.notify()

    def wake_all(self) -> None:
        """There will be nothing to take any more."""
        self._coming += self._asleep
        self._asleep = 0
        self._work.notify_all()
        self._over.notify_all()
