"""The scheduler's way to the daemon.

The law of this module: nothing here waits. A request is sent or queued, and looked at again; a
daemon that does not answer costs the requests in flight their deadline, once. Then it is left
alone, but for one heartbeat after each pause, which nobody waits for; when that one is answered,
requests are asked again.
"""

from __future__ import annotations

import logging
import time

from kvd.client import Call, Client
from kvd.connectors.backoff import Backoff
from kvd.errors import KvdError
from kvd.wire import messages as m

__all__ = ["Daemon"]

log = logging.getLogger("vllm.kvd")  # below "vllm." so that it shows in vLLM's log

_PROBE_S = 2.0
_LATE_S = 2.0


class Daemon:
    """A client, and whether it makes sense to ask it now. `lease_s`: of leases, if it may be."""

    def __init__(self, client: Client, lease_s: float) -> None:
        self.client = client
        self._wanted_s = lease_s
        self._backoff = Backoff(first_s=0.5, most_s=5.0)
        self._probe: Call | None = None
        self._away = False
        self._late = 0  # the client's count of late answers when all of them are in
        self._late_until = 0.0
        self._lease_max_s = float("inf")  # as the daemon told when it was last heard

    @property
    def away(self) -> bool:
        return self._away

    def ask(self, message: m.Request, deadline_s: float) -> Call | None:
        """Send; None while the daemon is left alone (or the client was closed)."""
        if self._away and not self._back():
            return None
        try:
            return self.client.submit_at(message, self.client.deadline_ns(deadline_s))
        except KvdError as error:
            self.failed(error)
            return None

    @property
    def lease_s(self) -> float:
        """How long leases are: as wanted, or as the daemon allows, for its operator's limit is no
        engine's failure."""
        if self.client.connected:
            self._heed()
        return min(self._wanted_s, self._lease_max_s)

    def _heed(self) -> None:
        try:
            most_s = self.client.info(0.0).limits.lease_max_ns / 1e9
        except KvdError:  # gone just now
            return
        if most_s != self._lease_max_s:
            self._lease_max_s = most_s
            if most_s < self._wanted_s:
                log.warning("kvd: leases are of %g s, not %g s: the daemon allows no longer "
                            "ones (limits.lease_max_s)", most_s, self._wanted_s)  # fmt: skip

    def give_up(self, call: Call) -> None:
        """Nobody wants this answer any more; what it grants is given back when it comes, for which
        somebody has to `look` as long as one is `expected`."""
        if not call.done:
            self._late = max(self._late, self.client.counters.late) + 1
            self._late_until = time.monotonic() + _LATE_S
        call.cancel()

    @property
    def expected(self) -> bool:
        """Whether an answer to a call that was given up may still come."""
        if not self._late_until:
            return False
        if self.client.counters.late < self._late and time.monotonic() < self._late_until:
            return True
        self._late_until = 0.0
        self._late = 0
        return False

    def look(self) -> None:
        """Take in what has come. Never waits."""
        try:
            self.client.poll(0.0)
        except KvdError as error:
            self.failed(error)

    def failed(self, error: KvdError) -> None:
        """The daemon did not answer in time, or can't be reached. What many requests in flight
        say at once counts once."""
        if self._away:
            return
        self._away = True
        pause = self._backoff.failed(time.monotonic())
        log.warning("kvd: going on without the daemon (next try in %.1f s): %s", pause, error)

    def worked(self) -> None:
        self._backoff.worked()
        if self._away:
            self._away = False
            log.warning("kvd: the daemon is back")

    def _back(self) -> bool:
        """Whether a heartbeat came through; sends one when its time has come."""
        probe = self._probe
        if probe is None:
            if self._backoff.may_try(time.monotonic()):
                try:
                    deadline_ns = self.client.deadline_ns(_PROBE_S)
                    self._probe = self.client.submit_at(m.Heartbeat(), deadline_ns)
                except KvdError:
                    self._backoff.failed(time.monotonic())
            return False
        self.look()
        if not probe.done:
            return False
        self._probe = None
        try:
            probe.answer()
        except KvdError:
            self._backoff.failed(time.monotonic())
            return False
        self.worked()
        return True
