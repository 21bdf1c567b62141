"""kvd-bench in a process of its own, which leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SHM = Path("/dev/shm")
GONE_S = 5.0  # another run's arena has no lock for a moment, when its daemon is killed or starts


class Room(NamedTuple):
    """Where a benchmark's temporary files go."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.folder)}


@contextmanager
def room() -> Iterator[Room]:
    """A folder for one benchmark. In the end nothing is left there, and no arena in shared memory
    but those that somebody else has locked."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-room-", dir="/tmp"))
    before = _arenas()
    try:
        yield Room(folder)
        assert [path.name for path in folder.iterdir()] == []
        end = time.monotonic() + GONE_S
        left = _arenas() - before
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left &= _arenas()  # what is there all the time
        assert not left
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _arenas() -> set[str]:
    """Those of benchmarks that no daemon holds."""
    names = {re.sub(r"\..*$", "", path.name) for path in SHM.glob("kvd-*-bench-*")}
    return {name for name in names if not _held(SHM / f"{name}.lock")}


def _held(lock: Path) -> bool:
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def bench(*words: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    with room() as own:
        return subprocess.run(
            [sys.executable, "-m", "kvd.tools.bench", *words],
            env=own.env, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip


def told(*words: str, timeout_s: float = 100) -> dict[str, Any]:
    done = bench(*words, "--json", timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stderr and "kernel" in done.stderr  # the machine's facts
    result: dict[str, Any] = json.loads(done.stdout)
    return result
