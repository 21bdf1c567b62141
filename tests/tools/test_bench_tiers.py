"""`kvd-bench tiers`: every figure is there, and is a figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(180)
def test_all_figures_are_there_and_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "kvd.tools.bench", "tiers", "--quick", "--json",
            "--dir", str(tmp_path),
        ],
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {
        "nvme", "s3", "first_chunk_ratio", "first_chunk_huge_ratio", "warm_start",
        "lookup_p99_ratio_under_demotion", "slow_tier_control_ratio",
        "slow_tier_p99_ratio", "storm",
    }  # fmt: skip
    assert told["lookup_p99_ratio_under_demotion"] == told["storm"]["p99_ratio"]
    assert all(value > 0 for value in told["storm"].values())
    assert told["slow_tier_p99_ratio"] > 0 and told["slow_tier_control_ratio"] > 0
    row = told["nvme"][0]
    assert row["chunk_bytes"] == 4 << 20 and row["engine"]
    assert all(row[name] > 0 for name in ("limit_write_gbps", "write_ratio", "read_ratio"))
    assert told["warm_start"]["chunks"] == 20_000 and told["warm_start"]["seconds"] < 30
    assert not list(tmp_path.iterdir())
