"""The endpoint that Prometheus reads: `GET /metrics` on one address.

The law of this module: who reads costs the loop one copy of its numbers, at most twenty times a
second, however many ask; the text is made by the reader's own thread, one at a time. Few
connections at a time, each for a bounded time; what is beyond that is closed and counted. An
address that can't be bound refuses the start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from kvd import __version__
from kvd.errors import ConfigError
from kvd.server.figures import Figures, pause
from kvd.telemetry.exported import series
from kvd.telemetry.text import CONTENT_TYPE, exposition

__all__ = ["Scrapes"]

log = logging.getLogger(__name__)

MOST = 8  # connections at a time
LIFE_S = 10.0  # of a connection
SILENT_S = 2.0  # a peer that says or takes nothing for so long is gone
PERIOD_S = 0.05  # between copies
ANSWER_S = 3.0  # for the loop to make one
YIELD = 128  # lines between which other threads may run
JOIN_S = 2.0


class Scrapes:
    """Bound when it is made, serving from `start` to `close`. `address`: ADDRESS:PORT."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._turn = threading.Lock()  # whose it is to ask the loop
        self._counting = threading.Lock()
        self._closing = False
        self._answered = threading.Event()
        self._given: Figures | None = None
        self._last = 0.0
        self._counts = {"ok": 0, "failed": 0, "refused": 0}
        self._thread: threading.Thread | None = None
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), self._text, self._count)
        except OSError as error:
            os.close(self.asked)
            raise ConfigError(
                f"telemetry.prometheus: can't bind {address}: {error.strerror}; stop who has it "
                "or choose another address"
            ) from None

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="kvd-scrape", daemon=True
        )
        self._thread.start()

    # -- from the loop --------------------------------------------------------------------------

    def hear(self, figures: Callable[[], Figures]) -> None:
        """Somebody reads. Called when `asked` is readable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.asked)
        self._given = figures()
        self._answered.set()

    def counted(self) -> dict[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(JOIN_S)
        self._server.end()
        self._closing = True
        self._answered.set()  # whoever waits for the loop is told that it does not answer
        with self._turn:  # nobody writes into a descriptor that may be another's by then
            os.close(self.asked)
            self.asked = -1

    # -- from a reader's thread -----------------------------------------------------------------

    def _text(self) -> bytes | None:
        """What is so now; None if the loop does not answer."""
        with self._turn:
            time.sleep(max(0.0, self._last + PERIOD_S - time.monotonic()))
            self._answered.clear()
            if self._closing:
                return None
            os.eventfd_write(self.asked, 1)
            if not self._answered.wait(ANSWER_S):
                return None
            self._last = time.monotonic()
            figures, self._given = self._given, None
            return _text_of(figures) if figures is not None else None

    def _count(self, result: str) -> None:
        with self._counting:
            self._counts[result] += 1


def _text_of(figures: Figures) -> bytes:
    lines = []
    for line in exposition(series(figures.stat())):
        lines.append(line)
        if len(lines) % YIELD == 0:
            pause()
    return "".join(lines).encode()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(
        self,
        host: str,
        port: int,
        text: Callable[[], bytes | None],
        count: Callable[[str], None],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text = text
        self.count = count
        self._open: dict[Any, float] = {}  # connection -> when it has to be over
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MOST:
            self.count("refused")
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic() + LIFE_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        now = time.monotonic()
        for request, due in list(self._open.items()):
            if due < now:
                _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a reader of metrics went away", exc_info=True)

    def end(self) -> None:
        for request in list(self._open):
            _hang_up(request)
        self.server_close()


def _hang_up(request: Any) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENT_S
    server_version = f"kvd/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "look at /metrics")
            return
        text = self.server.text()
        if text is None:
            self.server.count("failed")
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the daemon's loop does not answer")
            return
        self.server.count("ok")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are counted, not logged."""
