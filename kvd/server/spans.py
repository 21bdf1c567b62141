"""Spans of requests: kept by the loop for a moment, sent by a thread of its own.

The law of this module: only what the client's trace context calls sampled becomes a span, one a
request. The queue is bounded: what finds it full is dropped and counted, as is what the collector
does not take. Nothing is sent twice, and nobody waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvd.errors import ErrorCode
from kvd.server.requests import Request
from kvd.telemetry.spans import SPANS
from kvd.wire import Op

__all__ = ["Ended", "SpanSink", "Spans"]

log = logging.getLogger(__name__)

MOST = 4096  # that wait
BATCH = 512  # in one call
GATHER_S = 1.0  # after the first one, for others to come along
CLOSE_S = 1.0
SAMPLED = 1
_NAMES = {int(op): SPANS[op.name.lower()].name for op in Op}


class Ended(NamedTuple):
    """A request that was answered. Times in ns of the monotonic clock."""

    name: str
    trace_id: bytes
    parent: bytes
    begun_ns: int
    ended_ns: int
    tenant: str
    session: int
    error: str  # empty if it was none


class SpanSink(Protocol):
    """Where spans go."""

    def send_spans(self, spans: Sequence[Ended], timeout_s: float) -> str:
        """Why not all of them were taken; empty if they were. Returns within the timeout, about."""

    def cancel(self) -> None:
        """From any thread: let what is under way end now, and all that comes."""

    def close(self) -> None: ...


class Spans:
    def __init__(self, sink: SpanSink, timeout_s: float) -> None:
        self._sink = sink
        self._timeout_s = timeout_s
        self._waiting: deque[Ended] = deque()
        self._some = threading.Event()
        self._many = threading.Event()
        self._closing = False
        self._dropped = 0  # by the loop
        self._sent = 0  # by the thread
        self._failed = 0
        self._well = True
        self._thread = threading.Thread(target=self._work, name="kvd-spans", daemon=True)
        self._thread.start()

    # -- from the loop --------------------------------------------------------------------------

    def add(self, request: Request, code: ErrorCode | None) -> None:
        """It has been answered. Only those that are sampled."""
        trace = request.trace
        if not trace.flags & SAMPLED:
            return
        if len(self._waiting) >= MOST:
            self._dropped += 1
            return
        session = request.session
        self._waiting.append(
            Ended(
                _NAMES[request.op],
                trace.trace_id,
                trace.span_id,
                request.arrived,
                time.monotonic_ns(),
                session.grant.namespace,
                session.number,
                "" if code is None else code.name.lower(),
            )
        )
        self._some.set()
        if len(self._waiting) >= BATCH:
            self._many.set()

    def counted(self) -> dict[str, int]:
        return {"ok": self._sent, "failed": self._failed, "dropped": self._dropped}

    def close(self) -> None:
        """End it, within CLOSE_S; what waits is sent if that is quick."""
        end = time.monotonic() + CLOSE_S
        self._closing = True
        self._some.set()
        self._many.set()
        if not self._well:
            self._sink.cancel()
        self._thread.join(CLOSE_S / 2)
        if self._thread.is_alive():
            self._sink.cancel()
            self._thread.join(max(0.0, end - time.monotonic()))

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._some.wait()
            if not self._closing:
                self._many.wait(GATHER_S)
                self._many.clear()
            self._some.clear()
            while batch := self._take():
                self._send(batch)
            if self._closing:
                break
        self._sink.close()

    def _take(self) -> list[Ended]:
        return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _send(self, batch: list[Ended]) -> None:
        try:
            error = self._sink.send_spans(batch, self._timeout_s)
        except Exception as fault:  # the boundary of a thread: telemetry ends nothing
            log.exception("spans went wrong")
            error = f"{type(fault).__name__}: {fault}"
        if error:
            self._failed += len(batch)
            if self._well:
                log.warning("spans are not taken: %s", error)
        else:
            self._sent += len(batch)
        self._well = not error
