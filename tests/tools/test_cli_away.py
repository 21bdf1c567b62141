"""kvd-cli without a daemon, on odd terminals, with broken pipes: an answer or one line, never a
traceback, and the documented exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.wire.paths import attach_path

COMMANDS = ("status", "inspect", "ping", "config", "evict --all --yes", "evict 3fa9c2")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as directory:
        yield Path(directory)


def cli(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run kvd-cli in a process of its own."""
    environment = {**os.environ, **options.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run(
        [sys.executable, "-m", "kvd.tools.cli", *words],
        env=environment, capture_output=options.get("stdout") is None, text=True, timeout=60,
        errors="replace", stdin=subprocess.DEVNULL, **options,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_daemon_every_command_says_so_in_one_line(command: str, place: Path) -> None:
    done = cli(*command.split(), "--socket", str(place / "none.sock"))
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no daemon at" in done.stderr and "none.sock" in done.stderr


def test_without_a_daemon_json_is_still_json(place: Path) -> None:
    done = cli("status", "--json", "--socket", str(place / "none.sock"))
    told = json.loads(done.stdout)
    assert done.returncode == 3
    assert told["schema"] == 1 and told["command"] == "status"
    assert told["error"]["code"] == "unavailable"


def test_a_stale_socket_is_a_daemon_away_at_once(place: Path) -> None:
    path = str(place / "kvd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as old:
        old.bind(attach_path(path))
    done = cli("ping", "--socket", path, "--timeout", "30")
    assert done.returncode == 3
    assert "refused" in done.stderr


def test_a_daemon_that_never_answers_is_away_at_the_timeout(place: Path) -> None:
    path = str(place / "kvd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(attach_path(path))
        mute.listen(8)
        done = cli("status", "--socket", path, "--timeout", "300ms")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_the_version_is_told_without_a_daemon(place: Path) -> None:
    done = cli("version", "--json", "--socket", str(place / "none.sock"))
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["daemon"] is None and told["version"] and told["protocol"].startswith("1.")


@pytest.mark.parametrize(
    "words",
    [
        "bogus",
        "status --bogus",
        "inspect rooms",
        "inspect --idle 5x",
        "inspect --limit -1",
        "inspect chunks --state lost",
        "inspect namespaces --key 3fa9",
        "evict",
        "evict zz",
        "evict 3f --prefix 3fa9c2",
        "evict --dry-run",
        "ping --count 0",
        "status --timeout never",
        "status --timeout 1e99",
        "status --timeout 31d",
        "inspect --idle 99999999999999d",
        "inspect chunks --age inf",
        "evict --older-than 1e99 --dry-run",
        "inspect --cursor 99999999999999999999",
    ],
)
def test_wrong_usage_is_told_with_the_way_to_help(words: str) -> None:
    done = cli(*words.split(), "--socket", "/nonexistent/kvd.sock")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "--help" in done.stderr
    assert done.stderr.count("\n") == 1


def test_wrong_usage_is_json_too_when_asked_for() -> None:
    done = cli("inspect", "--idle", "5x", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "usage"


def test_no_command_shows_the_help() -> None:
    done = cli()
    assert done.returncode == 2
    assert "Usage:" in done.stderr


@pytest.mark.parametrize("command", ["", "status", "inspect", "evict", "config", "ping", "version"])
def test_every_help_has_examples(command: str) -> None:
    done = cli(*command.split(), "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert f"kvd-cli {command}".strip() in done.stdout


def test_a_full_disk_behind_standard_output_is_one_line(place: Path) -> None:
    with open("/dev/full", "w") as full:
        done = cli("version", "--socket", str(place / "x"), stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "can't write the output" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_closed_standard_output_is_one_line() -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m kvd.tools.cli version >&-"],
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "standard output is closed" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_standard_streams_are_no_crash() -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m kvd.tools.cli version >&- 2>&- <&-"],
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1


def test_a_reader_that_left_is_no_error_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = cli("--help", stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert done.stderr.strip() == ""


def test_ctrl_c_ends_quietly(place: Path) -> None:
    path = str(place / "kvd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(attach_path(path))
        mute.listen(8)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvd.tools.cli", "status", "--socket", path, "--timeout", "50"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # a shell's background job ignores it, and so would what it starts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        mute.settimeout(30)
        peers = [mute.accept()[0], mute.accept()[0]]  # the knock, then the client: it waits now
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=30)
        for peer in peers:
            peer.close()
    assert process.returncode == 130
    assert said == ""
    assert complained.strip() == "kvd-cli: interrupted"


@pytest.mark.parametrize(
    "env",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"},
     {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)  # fmt: skip
def test_an_error_with_any_name_in_it_fits_any_terminal(env: dict[str, str]) -> None:
    done = cli("ping", "--socket", "/tmp/日本-\x1b[31m/kvd.sock", env=env)
    assert done.returncode == 3
    assert "\x1b" not in done.stderr
    assert "\\x1b[31m" in done.stderr
    assert "Traceback" not in done.stderr
