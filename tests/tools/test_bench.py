"""kvd-bench runs, and its JSON has the documented shape. Its figures are for quiet machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess


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


def test_data_measures_every_case_beside_its_limit() -> None:
    before = left_behind()
    result = told("data", "--quick", "--rounds", "1")
    assert set(result) == {"cases", "daemon_cpu_pct_at_1gbps", "daemon_cpu_pct_sealing"}
    assert result["daemon_cpu_pct_at_1gbps"] >= 0
    assert result["daemon_cpu_pct_sealing"] >= 0
    seen = set()
    for case in result["cases"]:
        assert set(case) == {
            "chunk_bytes", "chunks", "layout", "mode", "limit_gbps", "store_gbps", "load_gbps",
            "store_ratio", "load_ratio", "cpu_s_per_gb",
        }  # fmt: skip
        assert all(
            case[name] > 0
            for name in ("limit_gbps", "store_gbps", "load_gbps", "store_ratio", "load_ratio",
                         "cpu_s_per_gb")
        )  # fmt: skip
        seen.add((case["chunk_bytes"], case["chunks"], case["layout"], case["mode"]))
    assert seen == {
        (size, count, layout, mode)
        for size, count in ((2 << 20, 16), (32 << 20, 4))
        for layout, mode in (
            ("contiguous", "streamed"), ("contiguous", "awaited"), ("contiguous", "verified"),
            ("paged", "streamed"),
        )
    }  # fmt: skip
    assert left_behind() == before


def test_control_measures_lookups_beside_bare_zmq() -> None:
    before = left_behind()
    result = told("control", "--quick")
    assert set(result) == {
        "lookup", "pipelined_lookups_per_s", "zmq_rtt_p50_ms", "zmq_rtt_p99_ms",
        "zmq_pipelined_per_s",
    }  # fmt: skip
    rows = result.pop("lookup")
    assert {(row["keys"], row["hit"]) for row in rows} == {
        (keys, hit) for keys in (1, 32, 512) for hit in (True, False)
    }
    for row in rows:
        assert set(row) == {"keys", "hit", "p50_ms", "p99_ms"}
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert all(value > 0 for value in result.values())
    assert left_behind() == before


def test_index_measures_the_core_in_a_process_of_its_own() -> None:
    result = told("index", "--quick")
    assert set(result) >= {
        "chunks", "rss_bytes_per_chunk", "lookups_per_s", "lookups_per_s_at_10k", "adopt_s",
    }  # fmt: skip
    assert all(value > 0 for value in result.values())


def test_a_running_daemon_can_be_measured_and_is_left_as_it_was() -> None:
    with DaemonProcess(arena_size="256MiB") as daemon:
        result = told("control", "--quick", "--socket", daemon.socket)
        assert result["pipelined_lookups_per_s"] > 0
        assert daemon.poll() is None


def test_the_table_names_what_the_json_has(tmp_path: Path) -> None:
    done = bench("control", "--quick")
    assert done.returncode == 0, done.stderr
    for word in ("lookups", "512", "bare ZMQ", "single-key lookups"):
        assert word in done.stdout


@pytest.mark.parametrize("part", ["data", "control"])
def test_a_daemon_that_is_not_there_is_one_line(part: str) -> None:
    done = bench(part, "--quick", "--socket", "/nonexistent/kvd.sock")
    assert done.returncode == 1
    assert "no daemon at /nonexistent/kvd.sock" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_usage_is_exit_2() -> None:
    done = bench("data", "--fast")
    assert done.returncode == 2
    assert "--help" in done.stderr


@pytest.mark.parametrize("part", ["", "data", "control", "index"])
def test_help_says_what_is_measured(part: str) -> None:
    done = bench(*([part] if part else []), "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout or "Examples:" in done.stdout
