"""Telling a service manager how we are: sd_notify, without a library.

The law of this module: it never fails and never blocks. Without NOTIFY_SOCKET it does nothing.
Protocol: sd_notify(3), one datagram of `KEY=VALUE` lines.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

__all__ = ["Notifier"]


class Notifier:
    """Speaks to the manager named in `environ`, if any."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s: float | None = None  # say `alive` at least this often
        pid = environ.get("WATCHDOG_PID", "")
        timeout = environ.get("WATCHDOG_USEC", "")
        if timeout.isdecimal() and int(timeout) > 0 and pid in ("", str(os.getpid())):
            self.watchdog_s = int(timeout) / 1e6 / 3

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(), address)
