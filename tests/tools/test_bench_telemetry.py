"""`kvd-bench telemetry`: every figure is there, and is a figure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def test_what_a_collector_that_does_not_work_costs_is_told() -> None:
    pytest.importorskip("opentelemetry.proto.collector.metrics.v1")
    done = subprocess.run(
        [sys.executable, "-m", "kvd.tools.bench", "telemetry", "--quick", "--json"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["cases"]
    assert [row["collector"] for row in rows] == ["none", "mute", "away"]
    for row in rows:
        assert row["lookups"] > 0 and 0 < row["p50_us"] <= row["p99_us"]
        assert row["exports"]["ok"] == 0 and (row["exports"]["failed"] > 0) == (row != rows[0])
        assert row["p99_ratio"] > 0 and row["stop_s"] > 0
    assert rows[0]["p99_ratio"] == 1
