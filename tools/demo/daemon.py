"""A daemon of the demo's own, in folders of its own.

The law of this module: nothing of it is left behind when its context ends, by an error too: not the
process, not its socket, not its arena. It takes no settings from the caller's environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvd.client import Client, Selector
from kvd.errors import KvdError

__all__ = ["Daemon", "DaemonFailed"]

_START_S = 30.0
_STOP_S = 15.0
_WRITE_S = 120.0


class DaemonFailed(Exception):
    """The daemon ended, or did not answer in time; holds what it said."""


class Daemon:
    """`kvd` on a socket in a temporary folder; a context manager."""

    def __init__(
        self,
        arena_size: str,
        tiers: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`tiers`: below memory, in their order: nvme (in a folder of its own), redis, s3 (as
        `environ` says, which is all that the daemon gets of one; None: ours, without settings)."""
        self._arena_size = arena_size
        if environ is None:
            environ = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
        self._environ = dict(environ)
        self.tiers = tuple(tiers)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="kvd-demo-", dir="/tmp"))
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._arena = Path(tempfile.mkdtemp(prefix="kvd-demo-", dir=shm))
        self._log = self._folder / "daemon.log"

    @property
    def socket(self) -> str:
        return str(self._folder / "kvd.sock")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._arena, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it and wait until it answers. DaemonFailed, with its words, if it doesn't."""
        command = [sys.executable, "-P", "-m", "kvd.server.main", "--socket", self.socket]
        command += ["--arena-path", str(self._arena), "--arena-size", self._arena_size]
        if "nvme" in self.tiers:
            command += ["--nvme-path", str(self._folder / "nvme"), "--nvme-limit", "2GiB"]
            command += ["--nvme-reserve", "0"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ
            )
        end = time.monotonic() + _START_S
        while True:
            try:
                with Client(self.socket, timeout_s=1.0, name="demo") as client:
                    client.ping()
                return
            except (KvdError, OSError) as error:
                if self._process.poll() is not None or time.monotonic() > end:
                    said = self._log.read_text(errors="replace")[-2000:]
                    self.stop()
                    raise DaemonFailed(f"the daemon did not start ({error}):\n{said}") from error
                time.sleep(0.05)

    def write_down(self) -> None:
        """Write everything that memory holds to all tiers. DaemonFailed if that can't be done."""
        with Client(self.socket, timeout_s=_START_S, name="demo") as client:
            for tier in self.tiers:
                if not (told := client.tier(tier, "drain")).ok:
                    raise DaemonFailed(f"tier {tier} takes nothing: {told.detail}")
            end = time.monotonic() + _WRITE_S
            while client.stat()["counters"]["moving"] and time.monotonic() < end:
                time.sleep(0.05)
            for row in client.stat()["tiers"][1:]:
                if not row["chunks"]:
                    why = row.get("last_error") or "no reason was told"
                    raise DaemonFailed(f"nothing could be written to {row['name']}: {why}")

    def leave_only(self, tier: str) -> int:
        """Forget everything in all tiers above this one; how many chunks it has. DaemonFailed if
        the daemon has no such tier."""
        with Client(self.socket, timeout_s=_START_S, name="demo") as client:
            rows = client.stat()["tiers"]
            named = [row["name"] for row in rows]
            if tier not in named:
                raise DaemonFailed(f"the daemon has no tier {tier}: {', '.join(named)}")
            for above in named[: named.index(tier)]:
                client.evict(Selector(tier=above, everything=True))
            return int(rows[named.index(tier)]["chunks"])

    def bytes_read(self, tier: str) -> int:
        """Payload bytes that came from a tier since the daemon started."""
        with Client(self.socket, timeout_s=_START_S, name="demo") as client:
            rows = client.stat()["tiers"]
        return sum(int(row["bytes_read"]) for row in rows if row["name"] == tier)

    def kill(self) -> None:
        """SIGKILL: no goodbye, nothing flushed; socket and arena are left where they lie."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
