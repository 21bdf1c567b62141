"""A daemon says in which pages its memory lies, and does not start without those it requires."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DaemonProcess, run_kvd

MIB = 1 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory whose file system gives no huge pages."""
    path = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def dram(daemon: DaemonProcess) -> dict[str, Any]:
    """The first tier's row of `kvd-cli status --json`, once its pages are counted."""
    end = time.monotonic() + 20
    while True:
        done = subprocess.run(
            [sys.executable, "-m", "kvd.tools.cli", "--socket", daemon.socket, "status", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        row: dict[str, Any] = json.loads(done.stdout)["tiers"][0]
        if "huge_bytes" in row:
            return row
        assert time.monotonic() < end, row


def test_without_huge_pages_the_daemon_serves_and_warns_once(disk: Path) -> None:
    """K117: wanted, and not to be had."""
    args = ("--arena-path", str(disk), "--arena-any-file-system", "true")
    with DaemonProcess(args=args) as daemon:
        row = dram(daemon)
        assert row["huge_bytes"] == 0
        assert row["huge_problem"].startswith("this kernel can't")
        assert daemon.log.count("only 0 B of the arena's 64 MiB lie in huge pages") == 1
        assert daemon.stop() == 0


def test_a_start_that_requires_huge_pages_is_refused_in_one_line_without(disk: Path) -> None:
    """K117: required, and not to be had."""
    done = run_kvd(
        *("--socket", str(disk / "s"), "--arena-path", str(disk), "--arena-size", "64MiB"),
        *("--arena-any-file-system", "true", "--arena-huge-pages", "require"),
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert f"of the first {64 * MIB} bytes of arena {disk}/kvd-" in done.stderr
    assert "only 0 are in huge pages: this kernel can't" in done.stderr
    assert list(disk.iterdir()) == []


def test_huge_pages_can_be_left_alone() -> None:
    with DaemonProcess(args=("--arena-huge-pages", "never")) as daemon:
        row = dram(daemon)
        assert (row["huge_bytes"], row["huge_problem"]) == (0, "")
        assert "huge pages" not in daemon.log
        assert daemon.stop() == 0


def test_another_wish_is_refused() -> None:
    done = run_kvd("--arena-huge-pages", "always", "--check")
    assert done.returncode == 2
    assert "arena.huge_pages" in done.stderr and "prefer, require, never" in done.stderr
