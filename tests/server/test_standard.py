"""A daemon whose standard streams nobody reads, or that were never open."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon import DaemonProcess, run_kvd

from kvd.client import Client

KVD = [sys.executable, "-m", "kvd.server.main"]


class Loosely(DaemonProcess):
    """A daemon whose streams are made otherwise."""

    def __init__(self, prepare: Callable[[], object], **how: Any) -> None:
        self.prepare = prepare
        super().__init__(**how)

    def spawn(self, env: Any = None) -> Any:
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*KVD, *self.args], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**self.env, **(env or {})}, preexec_fn=self.prepare,
            )  # fmt: skip
        return self.process


def closed() -> None:
    for descriptor in (0, 1, 2):
        os.close(descriptor)


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def unread() -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    os.dup2(ours, 1)


@pytest.mark.parametrize("prepare", [closed, full, unread])
def test_a_start_block_that_nobody_can_read_ends_no_daemon(prepare: Callable[[], object]) -> None:
    with Loosely(prepare) as daemon:
        with Client(daemon.socket) as client:
            assert client.info().instance == daemon.instance
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


def test_no_file_of_the_daemon_gets_the_number_of_a_closed_stream() -> None:
    with Loosely(closed) as daemon:
        for descriptor in (0, 1, 2):
            assert os.readlink(f"/proc/{daemon.pid}/fd/{descriptor}") == os.devnull


def test_a_start_block_is_escaped_where_its_letters_can_not_be_shown(tmp_path: Path) -> None:
    args = ["--nvme-path", str(tmp_path / "früh"), "--nvme-limit", "64MiB", "--trace-record",
            str(tmp_path / "spät")]  # fmt: skip
    with DaemonProcess(env={"PYTHONIOENCODING": "ascii"}, args=args) as daemon:
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0
    shown = run_kvd("--check", *args, env={"PYTHONIOENCODING": "ascii"})
    assert shown.returncode == 0 and "Traceback" not in shown.stderr


@pytest.mark.parametrize(("command", "said"), [(">/dev/full", True), ("| true", False)])
def test_a_check_that_can_not_be_written_says_so_in_one_line(command: str, said: bool) -> None:
    line = f"set -o pipefail; {sys.executable} -m kvd.server.main --check {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    if said:
        assert (done.returncode, done.stderr) == (
            1, "kvd: can't write the output: No space left on device\n",
        )  # fmt: skip
    else:  # the reader may have been quicker or slower than the pipe
        assert done.returncode in (0, 1) and done.stderr == ""


def test_a_start_that_runs_into_a_limit_says_so_in_one_line() -> None:
    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with Loosely(small, start=False) as daemon:
        assert daemon.spawn().wait(20) in (1, 2)
        assert daemon.log.splitlines()[-1].startswith("kvd: ") and "File too large" in daemon.log
        assert "Traceback" not in daemon.log


NO_TEXT = "\udcff"  # how Python shows the byte 0xff of an argument


@pytest.mark.parametrize(
    "args",
    [
        ("--socket", f"/tmp/{NO_TEXT}.sock"),
        ("--nvme-path", f"/tmp/{NO_TEXT}"),
        ("--s3-bucket", "kvd", "--s3-prefix", NO_TEXT),
        ("--s3-bucket", "kvd", "--s3-endpoint", f"http://127.0.0.1:1/{NO_TEXT}"),
        ("--redis-url", "redis://127.0.0.1", "--redis-prefix", NO_TEXT),
        ("--tiers-installation", NO_TEXT),
        ("--telemetry-attributes", f"a={NO_TEXT}"),
        ("--namespaces", f"name={NO_TEXT},uids=1"),
    ],
)
def test_a_setting_that_is_not_utf8_is_refused_by_name(args: tuple[str, ...]) -> None:
    done = run_kvd("--check", *args)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert args[-2].removeprefix("--") in done.stderr and "not UTF-8" in done.stderr


def test_a_socket_in_a_folder_that_is_not_utf8_is_refused() -> None:
    done = run_kvd("--check", env={"XDG_RUNTIME_DIR": f"/tmp/{NO_TEXT}"})
    assert done.returncode == 2 and "is not UTF-8" in done.stderr, done.stderr
