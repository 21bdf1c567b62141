"""A daemon for one benchmark: one of its own on temporary paths, or the one that --socket names.

The law of this module: what it started it ends, and leaves neither a file nor shared memory
behind, however the benchmark ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvd.client import Client
from kvd.errors import KvdError
from kvd.tools.bench.measure import process_cpu_s, threads_cpu_s
from kvd.wire.paths import attach_path, short_address

_START_S = 30.0


class BenchError(Exception):
    """The benchmark can't go on; the message says why."""


class Daemon:
    """A running daemon and its process id."""

    def __init__(self, socket_path: str | None, *options: str) -> None:
        """Start one with these command line options, or use the one at `socket_path`."""
        self._directory: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if socket_path is not None:
            self.socket = socket_path
            self.pid = _peer_pid(socket_path)
            return
        self._directory = tempfile.mkdtemp(prefix="kvd-bench-")
        self.socket = os.path.join(self._directory, "kvd.sock")
        self._instance = f"bench-{secrets.token_hex(4)}"
        self._log = Path(self._directory, "log")
        environment = {name: at for name, at in os.environ.items() if not name.startswith("KVD_")}
        self._environment = environment
        self._command = [
            sys.executable, "-P", "-m", "kvd.server.main",  # -P: not what lies in our folder
            "--socket", self.socket, "--instance", self._instance, *options,
        ]  # fmt: skip
        self.again()

    def kill(self) -> None:
        """SIGKILL; `again` starts the next life."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def instance(self) -> str:
        return self._instance

    def again(self) -> None:
        """Start, and wait until it answers."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.pid = self._process.pid
        try:
            self._await()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def own(self) -> bool:
        return self._directory is not None

    def cpu_s(self) -> float:
        """User and system seconds of the daemon's process so far."""
        return process_cpu_s(self.pid)

    def threads_cpu_s(self) -> float:
        """The same of the threads that it has now, exactly."""
        return threads_cpu_s(self.pid)

    def close(self) -> None:
        """End the daemon that was started here and remove what it leaves."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = None
            # a daemon keeps its arena for the next start; nobody starts this one again
            for left in Path("/dev/shm").glob(f"kvd-*-{self._instance}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _await(self) -> None:
        """Until it answers and its arena is reserved: a benchmark must not pay for that."""
        assert self._process is not None
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                said = self._log.read_text(errors="replace").strip().splitlines()
                raise BenchError("the daemon did not start: " + " | ".join(said[-3:]))
            if os.path.exists(attach_path(self.socket)):
                try:
                    with Client(self.socket, timeout_s=1, map_memory=False) as client:
                        if all(
                            tier["reserved_bytes"] > tier["limit_bytes"] * 15 // 16
                            for tier in client.stat()["tiers"][:1]
                        ):
                            return
                except KvdError:
                    pass
            time.sleep(0.05)
        raise BenchError(f"the daemon was not ready within {_START_S:.0f} s")


def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a state. BenchError if it does not come."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise BenchError("the daemon did not come to the state that is measured")
        time.sleep(0.05)


def _peer_pid(path: str) -> int:
    """Process id of whoever listens at the attach socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            with short_address(attach_path(path)) as address:
                peer.connect(address)
            packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        raise BenchError(f"no daemon at {path}: {error.strerror or error}") from None
    return int(struct.unpack("3i", packed)[0])
