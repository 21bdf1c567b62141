"""`kvd-bench death`: every figure is there, and is a figure."""

from __future__ import annotations

import json
import subprocess
import sys


def test_what_a_killed_client_held_is_told_and_becomes_free() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvd.tools.bench", "death", "--quick", "--json"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["deaths"]
    assert row["mapped_bytes"] == 256 << 20 and row["aim_s"] == 1.025
    # a quarter in leases, a quarter in unfinished writes, less a few slots
    assert 90 << 20 <= row["held_bytes"] <= 128 << 20
    assert 0 < row["free_s"] <= row["worst_s"]
