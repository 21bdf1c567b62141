"""`kvd-bench isolation`: every figure is there, and the trace that it goes by is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import told

from kvd.tools.bench.requests import read, shipped


def test_the_shipped_requests_are_those_of_the_trace() -> None:
    requests = shipped()
    assert len(requests) == 4000 and requests[0].blocks == tuple(range(14))
    assert requests[1].blocks == (0, *range(14, 28))
    assert requests == sorted(requests, key=lambda request: request.at_ms)
    assert len({block for request in requests for block in request.blocks}) == 71_424
    assert shipped(10) == requests[:10]


def test_a_trace_file_is_read_as_it_is_shipped() -> None:
    file = Path(__file__).parents[1] / "data" / "conversation_excerpt.jsonl"
    excerpt = read(str(file), 50)
    assert excerpt == shipped(50)


@pytest.mark.timeout(180)
def test_a_neighbour_takes_nothing_and_all_figures_are_there() -> None:
    result = told("isolation", "--quick")
    assert [row["name"] for row in result["scenarios"]] == ["scan4x", "burst", "loop", "waker"]
    for row in result["scenarios"]:
        assert row["below_min_evictions"] == 0 < row["control_below_min_evictions"]
        assert row["index"] >= 0.99 and row["worst_window"] >= 0.95
        assert row["control_index"] > 0
    assert result["work_conserving"] >= 0.98
    flood = result["flood"]
    assert result["scenarios"][0]["p99_load_ratio"] == flood["p99_ratio"] > 0
    assert all(value > 0 for value in flood.values())
    assert {f"{of}p99_ratio" for of in ("", "same_cpu_", "same_pace_", "bare_")} <= flood.keys()
    same_cpu = result["scenarios"][0]["p99_load_ratio_same_cpu"]
    assert same_cpu == flood["p99_ratio_over_same_cpu"]
