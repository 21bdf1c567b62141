"""The circuit breaker: a medium that fails is left alone for a while, and then tried carefully.

The law of this module: while open it lets nothing through; when its pause is over it lets exactly
one attempt through, and that one decides. Pure: time comes in as an argument (ns, monotonic), and
so does chance. One instance, one lock (its owner's).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

SECOND = 1_000_000_000


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one attempt is on its way


class BreakerConfig(NamedTuple):
    """`failures` in a row, or over half of the last `window`, open it. The pause doubles from
    `pause_ns` to `max_pause_ns`, less up to a quarter by chance, so that many daemons don't come
    back together."""

    failures: int = 5
    window: int = 32
    pause_ns: int = SECOND
    max_pause_ns: int = 30 * SECOND

    @classmethod
    def up_to(cls, max_pause_ns: int) -> BreakerConfig:
        """The usual one, with no pause longer than this."""
        usual = cls()
        return usual._replace(pause_ns=min(usual.pause_ns, max_pause_ns), max_pause_ns=max_pause_ns)


DEFAULT = BreakerConfig()


class Breaker:
    def __init__(
        self, config: BreakerConfig = DEFAULT, chance: Callable[[], float] = random.random
    ) -> None:
        self._config = config
        self._chance = chance
        self._state = BreakerState.CLOSED
        self._row = 0
        self._recent: list[bool] = []  # True: failed; a ring
        self._at = 0
        self._pause = config.pause_ns
        self.until = 0  # when open: the next attempt is not before
        self.opened = 0  # how often; only grows

    @property
    def state(self) -> BreakerState:
        return self._state

    def allow(self, now: int) -> bool:
        """Whether an attempt may begin. True of an open breaker takes the one attempt: its end
        must be told by `success`, `failure` or `abandon`."""
        if self._state is BreakerState.CLOSED:
            return True
        if self._state is BreakerState.OPEN and now >= self.until:
            self._state = BreakerState.HALF_OPEN
            return True
        return False

    def due(self, now: int) -> bool:
        """Whether an attempt would be let through to find out."""
        return self._state is BreakerState.OPEN and now >= self.until

    def success(self) -> None:
        if self._state is BreakerState.OPEN:
            return  # began before it opened; says nothing about now
        if self._state is BreakerState.HALF_OPEN:
            self._state = BreakerState.CLOSED
            self._recent.clear()
            self._pause = self._config.pause_ns
        self._row = 0
        self._note(False)

    def failure(self, now: int) -> None:
        if self._state is BreakerState.OPEN:
            return
        self._row += 1
        self._note(True)
        full = len(self._recent) == self._config.window
        often = full and 2 * sum(self._recent) > self._config.window
        if self._state is BreakerState.HALF_OPEN or self._row >= self._config.failures or often:
            self.trip(now)

    def abandon(self) -> None:
        """The attempt said nothing about the medium (it was cancelled)."""
        if self._state is BreakerState.HALF_OPEN:
            self._state = BreakerState.OPEN

    def trip(self, now: int) -> None:
        """Open it now: for errors that no second attempt mends."""
        if self._state is BreakerState.OPEN:
            return
        if self._state is BreakerState.CLOSED:
            self._pause = self._config.pause_ns
        else:
            self._pause = min(2 * self._pause, self._config.max_pause_ns)
        self._state = BreakerState.OPEN
        self._row = 0
        self._recent.clear()
        self.until = now + int(self._pause * (1 - self._chance() / 4))
        self.opened += 1

    def reset(self) -> None:
        """Close it: somebody knows that the medium works."""
        self._state = BreakerState.CLOSED
        self._row = 0
        self._recent.clear()
        self._pause = self._config.pause_ns

    def _note(self, failed: bool) -> None:
        if len(self._recent) < self._config.window:
            self._recent.append(failed)
        else:
            self._recent[self._at] = failed
        self._at = (self._at + 1) % self._config.window
