"""What `kvd-cli status` makes of a daemon's answer: nothing is lost, nothing raises."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from kvd.telemetry import METRICS, MetricKind
from kvd.telemetry.server import SERVER_METRICS
from kvd.tools.cli.book import reasons, total
from kvd.tools.cli.console import Output, make_console
from kvd.tools.cli.status import render

GIB = 1 << 30


def stat(**more: Any) -> dict[str, Any]:
    return {
        "instance": "default",
        "epoch": 1_700_000_000_000_000_001,
        "version": "0.1.0",
        "uptime_s": 7384.2,
        "namespace": "default",
        "sessions": 3,
        "tiers": [
            {
                "name": "dram", "limit_bytes": 4 * GIB, "used_bytes": GIB, "slot_bytes": GIB,
                "chunks": 512, "slabs_free": 24, "reserved_bytes": 4 * GIB,
                "condemned_bytes": 0, "writing_bytes": 2 << 20, "leased_chunks": 7, "state": "ok",
            }
        ],
        "counters": {},
        "tenants": {},
        "loop": {"turns": 100, "longest_turn_ms": 1.5},
        **more,
    }  # fmt: skip


def shown(told: dict[str, Any], encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    output = Output("status", as_json=False)
    output.console = make_console(stream)
    output.show(*render(output, told, "/run/kvd/kvd.sock", True))
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_an_operator_reads_who_it_is_and_how_full() -> None:
    text = shown(stat())
    for word in ("0.1.0", "default", "(admin)", "/run/kvd/kvd.sock", "2h 3m", "dram", "1 GiB",
                 "4 GiB", "512", "3 open", "1.5 ms", "1700000000000000001"):  # fmt: skip
        assert word in text, word


def test_hits_are_a_ratio_and_misses_have_their_reasons() -> None:
    counters = {
        "lookups": 4,
        "chunks_asked": 1000,
        "chunks_hit": 750,
        "chunks_missed": {"absent": 200, "skipped": 50, "orphan": 0},
    }
    text = shown(stat(counters=counters))
    assert "75.0 %" in text
    assert "200 absent, 50 skipped" in text
    assert "orphan" not in text


@pytest.mark.parametrize(
    ("huge", "problem", "said"),
    [
        (4 * GIB, "", "4 GiB in huge pages"),
        (GIB, "no memory", "1 GiB of 4 GiB in huge pages (no memory)"),
        (0, "", "0 B of 4 GiB in huge pages"),
    ],
)
def test_the_pages_that_memory_lies_in_are_told(huge: int, problem: str, said: str) -> None:
    told = stat()
    assert "huge pages" not in shown(told)  # not counted yet, or an older daemon
    told["tiers"][0] |= {"huge_bytes": huge, "huge_problem": problem}
    assert said in " ".join(shown(told).split())


def test_an_arena_that_was_replaced_is_told_with_the_reason() -> None:
    for arena in ({"origin": "new", "replaced": ""}, {"origin": "adopted", "replaced": ""}, None):
        assert "restart" not in shown(stat(arena=arena))
    text = shown(stat(arena={"origin": "replaced", "replaced": "had 64 MiB, not 65 MiB"}))
    assert "restart  " in text and "the arena that was there had 64 MiB, not 65 MiB" in text


def test_trouble_is_named() -> None:
    counters = {
        "chunks_evicted": {"capacity": 9, "command": 1},
        "bytes_evicted": 20 << 20,
        "slots_condemned": {"expired": 2},
        "condemned_bytes": 3 << 20,
        "requests_refused": {"unknown_handle": 4},
        "malformed": {"magic": 5},
        "faults": {"KeyError": 1},
    }
    text = shown(stat(counters=counters))
    for words in ("9 capacity, 1 command", "20 MiB", "2 expired", "3 MiB", "4 unknown_handle",
                  "5 magic", "1 KeyError"):  # fmt: skip
        assert words in text, words


def test_sessions_say_how_they_ended() -> None:
    counters = {
        "sessions_opened": 9,
        "sessions_closed": 6,
        "sessions_ended": {"bye": 1, "process": 4, "connection": 1, "full": 0},
    }
    text = " ".join(shown(stat(counters=counters)).split())
    assert "3 open; 9 opened so far; 6 ended: 4 process, 1 connection, 1 bye" in text


def test_no_declared_counter_is_left_out() -> None:
    counters: dict[str, Any] = {}
    declared = {**METRICS, **SERVER_METRICS}
    for number, metric in enumerate(declared.values()):
        count = 1_000_003 + number
        counters[metric.name] = dict.fromkeys(metric.values, count) if metric.values else count
        if metric.kind is MetricKind.COUNTER and metric.values:
            counters[metric.name] = {value: count for value in metric.values}
    text = shown(stat(counters=counters))
    also = text.partition("also counted:")[2]
    for name in ("chunks_asked", "chunks_missed", "leases_ended", "slots_reclaimed"):
        assert name not in also
    # a declared counter has a line; only gauges of passing interest may stand in the rest
    assert set(also.replace(",", " ").split()) & set(declared) <= {"pending_touches"}


def test_a_counter_of_a_newer_daemon_is_shown_by_its_name() -> None:
    text = shown(stat(counters={"quantum_flips": 12, "silent": 0, "by_why": {"a": 1, "b": 2}}))
    assert "quantum_flips 12" in text
    assert "by_why 3" in text
    assert "silent" not in text


def test_a_growing_arena_says_how_far_it_is() -> None:
    told = stat()
    told["tiers"][0]["reserved_bytes"] = GIB
    assert "growing (1 GiB)" in shown(told)
    told["tiers"][0]["reserved_bytes"] = 4 * GIB - 4096  # there is nothing that can't be had
    assert "growing (4 GiB)" in shown(told)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_terminal_gets_it(encoding: str) -> None:
    text = shown(stat(namespace="日本\x1b[2J", instance="ü"), encoding)
    assert "\x1b[2J" not in text
    assert "\\x1b[2J" in text
    if encoding != "utf-8":
        assert "│" not in text and "█" not in text


def test_an_empty_answer_of_an_older_daemon_still_renders() -> None:
    assert "instance ?" in shown({})


def test_reasons_come_with_the_most_frequent_first() -> None:
    assert reasons({"a": 1, "b": 2000, "c": 0}) == "2,000 b, 1 a"
    assert reasons(7) == ""
    assert total({"a": 1, "b": 2}) == 3


def test_an_operator_reads_whether_metrics_are_exported_and_how_that_goes() -> None:
    assert "not exported" in shown(stat(telemetry={"state": "off"}))
    counts = {"exports": {"ok": 7, "failed": 2, "skipped": 0}}
    well = {
        "state": "ok",
        "endpoint": "http://c:4317",
        "failing_since_unix_ns": 0,
        "last_error": "x",
    }
    text = " ".join(shown(stat(telemetry=well, counters=counts)).split())
    assert "exported to http://c:4317: ok; exports: 7 ok, 2 failed" in text
    since = time.time_ns() - 125_000_000_000
    ill = {**well, "state": "failing", "failing_since_unix_ns": since, "last_error": "UNAVAILABLE"}
    text = " ".join(shown(stat(telemetry=ill, counters=counts)).split())
    assert "failing for 2m 5s; UNAVAILABLE" in text
    read = {"state": "off", "prometheus": "[::1]:9464"}
    counts = {"scrapes": {"ok": 3, "failed": 0, "refused": 1}}
    text = " ".join(shown(stat(telemetry=read, counters=counts)).split())
    assert "at http://[::1]:9464/metrics; read: 3 ok, 1 refused" in text
