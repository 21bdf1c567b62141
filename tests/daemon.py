"""A real daemon for tests: a process of its own, with its own directory, instance and arena.

    with DaemonProcess(arena_size="64MiB") as daemon:
        client = Client(daemon.socket)
        daemon.kill()          # SIGKILL
        daemon.start()         # again, over the same arena
        assert daemon.stop() == 0

Leaving the context kills what is left and removes all files, in /dev/shm too.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

READY_S = 30.0
SHM = Path("/dev/shm")
# Limits far below the defaults: nobody's own numbers may be over them.
LOW_LIMITS = (
    "--limits-lease-s=1",
    "--limits-lease-max-s=2",
    "--limits-write-s=1",
    "--limits-write-max-s=1",
    "--limits-inflight=1",
)


class DaemonProcess:
    """One kvd. `args` are further flags; `config` is the text of a kvd.toml; `env` is added to the
    environment, which has no KVD_ variables otherwise."""

    def __init__(
        self,
        *,
        arena_size: str = "64MiB",
        args: Sequence[str] = (),
        config: str | None = None,
        env: Mapping[str, str] | None = None,
        instance: str | None = None,
        directory: str | None = None,
        start: bool = True,
    ) -> None:
        # the run's tag, so that leaks are told from other runs' files (conftest.py)
        tag = os.environ.get("PYTEST_LEAK_MARK", "")[:8]
        self.instance = instance or f"t{tag}-{secrets.token_hex(5)}"
        self.directory = directory or tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
        self._owns_directory = directory is None
        self.socket = os.path.join(self.directory, "kvd.sock")
        self.log_path = Path(self.directory, f"{self.instance}.log")
        self.out_path = Path(self.directory, f"{self.instance}.out")
        self.process: subprocess.Popen[bytes] | None = None
        self.args = [
            "--socket",
            self.socket,
            "--instance",
            self.instance,
            "--arena-size",
            arena_size,
            *args,
        ]
        if config is not None:
            file = Path(self.directory, f"{self.instance}.toml")
            file.write_text(config)
            self.args += ["--config", str(file)]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
        self.env.update(env or {})
        if start:
            try:
                self.start()
            except BaseException:
                self.close()
                raise

    # -- its life -------------------------------------------------------------------------------

    def start(self, *, timeout_s: float = READY_S) -> DaemonProcess:
        """Start (again) and wait until it says that it is ready. AssertionError with its log if it
        ends instead."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        notify = Path(self.directory, f"{self.instance}.notify")
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind(str(notify))
            told.settimeout(0.05)
            self.spawn({"NOTIFY_SOCKET": str(notify)})
            end = time.monotonic() + timeout_s
            while True:
                try:
                    if b"READY=1" in told.recv(4096):
                        break
                except TimeoutError:
                    pass
                code = self.poll()
                assert code is None, f"kvd ended with {code} before it was ready:\n{self.log}"
                assert time.monotonic() < end, f"kvd is not ready:\n{self.log}"
        notify.unlink(missing_ok=True)
        return self

    def spawn(self, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start it and wait for nothing: for starts that are to be refused."""
        with open(self.log_path, "ab") as log, open(self.out_path, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvd.server.main", *self.args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**self.env, **(env or {})},
                cwd=self.directory,
            )
        return self.process

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return None if self.process is None else self.process.poll()

    def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit code, as soon as it has ended."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(20)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; its exit code."""
        if self.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def restart(self, *, hard: bool = True) -> DaemonProcess:
        """Kill (or stop) it and start it over the same arena."""
        if hard:
            self.kill()
        else:
            assert self.stop() == 0, self.log
        return self.start()

    def close(self) -> None:
        """Kill it and remove everything that it leaves behind on purpose."""
        self.kill()
        for path in SHM.glob(f"kvd-{os.getuid()}-{self.instance}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what it shows --------------------------------------------------------------------------

    @property
    def log(self) -> str:
        """Its stderr, over all its lives."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def out(self) -> str:
        """Its stdout, over all its lives."""
        return self.out_path.read_text(errors="replace") if self.out_path.exists() else ""

    @property
    def arena_base(self) -> Path:
        return SHM / f"kvd-{os.getuid()}-{self.instance}"

    @property
    def descriptors(self) -> int:
        """Open descriptors of the process."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def rss(self) -> int:
        """Anonymous resident bytes: without the arena."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon in /proc")


def run_kvd(
    *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    """Run `kvd` to its end: for --check, --help and starts that are refused at once."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
    return subprocess.run(
        [sys.executable, "-m", "kvd.server.main", *args],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def show(value: object) -> str:
    """For messages of failed asserts."""
    return json.dumps(value, indent=1, default=str)
