"""kvd-bench control and index run, and their JSON has the documented shape."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.daemon import DaemonProcess
from tests.tools.bench import bench, room, told


def test_control_measures_lookups_beside_bare_zmq() -> None:
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


def test_the_table_names_what_the_json_has() -> None:
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


def test_a_benchmark_that_is_told_to_end_takes_its_daemon_with_it(
    eventually: Callable[..., None],
) -> None:
    with room() as own:
        with subprocess.Popen(
            [sys.executable, "-m", "kvd.tools.bench", "control"],
            env=own.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as running:  # fmt: skip
            eventually(lambda: list(own.folder.glob("kvd-bench-*/kvd.sock.a")), 30)
            running.send_signal(signal.SIGTERM)
            assert running.wait(30) == 143
