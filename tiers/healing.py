"""Healing: how a medium that was away, or that failed, is found to work again.

The law of this module: a medium is opened before all else is asked of it, by one thread at a time,
and again until that was done once. When an open breaker's pause is over one probe is sent, though
nobody uses the tier, and its end decides; a probe that somebody asked for and that is well closes
both breakers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Refused, failed
from kvd.tiers.base import Answer, Completion, Probe, ProbeReport, Reason
from kvd.tiers.health import Health
from kvd.tiers.meter import Meter

__all__ = ["Heal", "Healing"]

log = logging.getLogger(__name__)


class Heal(NamedTuple):
    """A probe that nobody waits for."""

    write: bool


class Healing:
    """`lock`: that of `health` and of what waits here. `again`: called with it held when a probe
    has failed, so that there is a next time. `probe_ns`: a probe's own deadline."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        health: Health,
        meter: Meter,
        lock: threading.Lock,
        clock: Callable[[], int],
        again: Callable[[], None],
        probe_ns: int,
    ) -> None:
        self._name = name
        self._backend = backend
        self._health = health
        self._meter = meter
        self._lock = lock
        self._clock = clock
        self._again = again
        self._probe_ns = probe_ns
        self._opening = threading.Lock()
        self._heals: deque[Heal] = deque()
        self.open = False  # the backend is; if not, a probe opens it
        self.report = ProbeReport("?", "not started")

    # -- opening --------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the medium; one that is away is opened by a probe. ConfigError."""
        try:
            self.report = self._backend.open()
            self.open = True
        except Refused as refused:
            self.report = ProbeReport("?", f"not available yet: {refused.detail}")
            self._failed(refused)
            log.warning("tier %s is not available yet: %s", self._name, refused.detail)

    def _reopen(self) -> None:
        with self._opening:
            if not self.open:
                self.report = self._backend.open()
                self.open = True

    # -- what waits -----------------------------------------------------------------------------

    def send(self, now: int) -> bool:
        """Whether a breaker's pause is over: a probe waits to be carried out, then. Pre: the lock
        is held."""
        sent = False
        for breaker, write in ((self._health.reads, False), (self._health.writes, True)):
            if breaker.due(now) and breaker.allow(now):
                self._heals.append(Heal(write))
                sent = True
        return sent

    def next(self) -> int | None:
        """When a pause is over, ns; None if no breaker is open. Pre: the lock is held."""
        return self._health.next()

    @property
    def waits(self) -> bool:
        """Pre: the lock is held."""
        return bool(self._heals)

    def take(self) -> Heal | None:
        """Pre: the lock is held."""
        return self._heals.popleft() if self._heals else None

    def drop(self) -> None:
        """Pre: the lock is held."""
        self._heals.clear()

    # -- probes ---------------------------------------------------------------------------------

    def carry_out(self, heal: Heal) -> None:
        breaker = self._health.writes if heal.write else self._health.reads
        try:
            if not self.open:
                self._reopen()
            self._backend.probe(self._clock() + self._probe_ns, write=heal.write)
        except (Refused, ConfigError) as error:
            self._failed(_as_refused(error))
            with self._lock:
                breaker.failure(self._clock())
                self._again()
            return
        except Exception as error:
            log.exception("tier %s: a probe went wrong", self._name)
            self._failed(failed(Reason.OTHER, f"{type(error).__name__}: {error}"))
            with self._lock:
                breaker.failure(self._clock())
                self._again()
            return
        with self._lock:
            breaker.success()
        log.info("tier %s: %s again", self._name, "writes" if heal.write else "reads")

    def probe(self, job: Probe) -> Completion:
        """Somebody asks, and waits for the answer."""
        now = self._clock()
        try:
            if not self.open:
                self._reopen()
            self.report = self._backend.probe(min(job.deadline, now + self._probe_ns), write=True)
        except (Refused, ConfigError) as error:
            refused = _as_refused(error)
            self._failed(refused)
            answer = Answer.TIMEOUT if refused.answer is Answer.TIMEOUT else Answer.FAILED
            return Completion(job, answer, reason=refused.reason, detail=refused.detail)
        except Exception as error:
            log.exception("tier %s: a probe went wrong", self._name)
            refused = failed(Reason.OTHER, f"{type(error).__name__}: {error}")
            self._failed(refused)
            return Completion(job, Answer.FAILED, reason=refused.reason, detail=refused.detail)
        if job.heals:
            with self._lock:
                self._health.reset()
        return Completion(job, Answer.OK, detail=self.report.detail)

    def _failed(self, refused: Refused) -> None:
        self._meter.error(refused.reason, refused.detail)


def _as_refused(error: Refused | ConfigError) -> Refused:
    return error if isinstance(error, Refused) else failed(Reason.OTHER, str(error))
