"""kvd-bench in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvd.tools.bench", *words],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def told(*words: str) -> dict[str, Any]:
    done = bench(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stderr and "kernel" in done.stderr  # the machine's facts
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "-bench-" in name} | {
        path.name for path in Path("/tmp").glob("kvd-bench-*")
    }
