"""A daemon says in which pages its memory lies, and does not start without those it requires."""

from __future__ import annotations

import json
import os
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

from kvd.arena import file_system_kind

MIB = 1 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory whose file system gives no huge pages."""
    path = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    if file_system_kind(path) == "tmpfs":
        os.rmdir(path)
        pytest.skip("/tmp is in memory")
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
        assert row["huge_problem"] == (
            f"its file system, {file_system_kind(disk)}, can't (choose an arena.path on a tmpfs, "
            "such as /dev/shm)"
        )
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
    assert "only 0 are in huge pages: its file system, " in done.stderr
    assert list(disk.iterdir()) == []


def test_huge_pages_can_be_left_alone() -> None:
    with DaemonProcess(args=("--arena-huge-pages", "never")) as daemon:
        row = dram(daemon)
        assert (row["huge_bytes"], row["huge_problem"]) == (0, "arena.huge_pages is never")
        assert "huge pages" not in daemon.log
        assert daemon.stop() == 0


@pytest.mark.parametrize("wish", ["prefer", "require"])
def test_a_rest_below_a_huge_page_is_told_and_is_no_problem(wish: str) -> None:
    with DaemonProcess(arena_size="3MiB", args=("--arena-huge-pages", wish), start=False) as daemon:
        daemon.start()
        row = dram(daemon)
        if row["huge_bytes"] == 0:
            pytest.skip("no huge pages for shared memory")
        assert row["huge_bytes"] == 2 * MIB
        assert row["huge_problem"] == "the last 1 MiB are less than such a page"
        assert "WARNING" not in daemon.log
        assert daemon.stop() == 0


def test_the_limit_is_what_can_be_used() -> None:
    with DaemonProcess(arena_size=str(64 * MIB - 1)) as daemon:
        row = dram(daemon)
        assert row["limit_bytes"] == row["reserved_bytes"] == 32 * 2093056
        assert daemon.arena_base.stat().st_size == row["limit_bytes"]
        assert daemon.stop() == 0


def test_another_wish_is_refused() -> None:
    done = run_kvd("--arena-huge-pages", "always", "--check")
    assert done.returncode == 2
    assert "arena.huge_pages" in done.stderr and "prefer, require, never" in done.stderr
