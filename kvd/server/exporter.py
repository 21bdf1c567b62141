"""The exporter: a thread that tells a collector, now and then, what `stat` shows.

The law of this module: it is best effort, and nobody waits for it. The loop hands it a copy of its
numbers at the interval; while one is under way, the next is skipped and counted, so there is never
more than one in memory or on the wire. What fails is counted, shown, and logged when it begins and
when it ends; nothing is kept for later. A stop waits for it at most `CLOSE_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from kvd.server.figures import Figures
from kvd.telemetry.exported import Series, series

__all__ = ["CLOSE_S", "Exporter", "Sink"]

log = logging.getLogger(__name__)

CLOSE_S = 2.0


class Sink(Protocol):
    """Where metrics go."""

    def send(
        self, series: Iterable[Series], begun_unix_ns: int, now_unix_ns: int, timeout_s: float
    ) -> str:
        """Why not all of it was taken; empty if it was. Returns within the timeout, about."""

    def cancel(self) -> None:
        """From any thread: let what is under way end now, and all that comes."""

    def close(self) -> None: ...


class Exporter:
    """`where`: the endpoint, as it is shown."""

    def __init__(self, sink: Sink, where: str, timeout_s: float) -> None:
        self._sink = sink
        self._where = where
        self._timeout_s = timeout_s
        self._due: Figures | None = None
        self._busy = False
        self._closing = False
        self._lock = threading.Condition()
        self._counts = {"ok": 0, "failed": 0, "skipped": 0}
        self._state = "starting"
        self._failing_since_ns = 0
        self._last_ok_ns = 0
        self._last_error = ""
        self._thread = threading.Thread(target=self._work, name="kvd-export", daemon=True)
        self._thread.start()

    # -- from the loop --------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether it would take figures now."""
        return not self._busy

    def skip(self) -> None:
        """An export was due, and it is not idle."""
        self._counts["skipped"] += 1

    def take(self, figures: Figures) -> None:
        """Export these. Pre: idle."""
        with self._lock:
            self._due, self._busy = figures, True
            self._lock.notify()

    def counted(self) -> dict[str, int]:
        return dict(self._counts)

    def stat(self) -> dict[str, Any]:
        """How it is, for an administrator."""
        return {
            "state": self._state,
            "endpoint": self._where,
            "last_ok_unix_ns": self._last_ok_ns,
            "failing_since_unix_ns": self._failing_since_ns,
            "last_error": self._last_error,
        }

    def close(self, last: Figures | None = None) -> None:
        """End it, within CLOSE_S. `last` is still exported if all has been well."""
        end = time.monotonic() + CLOSE_S
        with self._lock:
            if last is not None and self._state == "ok" and not self._busy:
                self._due, self._busy = last, True
                self._timeout_s = min(self._timeout_s, CLOSE_S)
            self._closing = True
            self._lock.notify()
        if self._state != "ok":
            self._sink.cancel()
        self._thread.join(CLOSE_S / 2)
        if self._thread.is_alive():
            self._sink.cancel()
            self._thread.join(max(0.0, end - time.monotonic()))

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._due is None and not self._closing:
                    self._lock.wait()
                figures, self._due = self._due, None
            if figures is None:
                break
            self._export(figures)
            del figures
            self._busy = False
        self._sink.close()

    def _export(self, figures: Figures) -> None:
        now = time.time_ns()
        try:
            stat = figures.stat()
            begun = stat["started_unix_ns"]
            now = max(now, begun)  # the clock may have been set back
            error = self._sink.send(series(stat), begun, now, self._timeout_s)
        except Exception as fault:  # the boundary of a thread: telemetry ends nothing
            log.exception("the exporter went wrong")
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self._failed(error, now)
        else:
            self._worked(now)

    def _failed(self, error: str, now: int) -> None:
        self._counts["failed"] += 1
        self._last_error = error
        if self._state != "failing" and not self._closing:
            log.warning("metrics are not taken by %s: %s", self._where, error)
            self._failing_since_ns = now
        self._state = "failing"

    def _worked(self, now: int) -> None:
        self._counts["ok"] += 1
        self._last_ok_ns = now
        if self._state != "ok":
            log.info("metrics go to %s", self._where)
            self._failing_since_ns = 0
        self._state = "ok"
