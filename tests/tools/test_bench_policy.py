"""`kvd-bench policy`: a row for each policy asked for, each from a process of its own."""

from __future__ import annotations

import json

import pytest
from bench import bench

from kvd.tools.bench import policy


def test_a_row_names_its_policy_and_what_a_touch_and_a_chunk_cost() -> None:
    done = bench("policy", "--quick", "--json", "-p", "lru", "-p", "default")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["policy"] for row in rows] == ["lru", "default"]
    for row in rows:
        assert row["chunks"] == 50_000
        assert row["touch_us"] > 0 and row["evict_us"] > 0
        assert 10 < row["bytes_per_chunk"] < 1_000


def test_the_table_has_a_line_for_each() -> None:
    done = bench("policy", "--quick", "-p", "fifo")
    assert done.returncode == 0, done.stderr
    assert "fifo" in done.stdout and "50,000" in done.stdout


def test_an_unknown_policy_is_one_line() -> None:
    done = bench("policy", "--quick", "-p", "lur")
    assert done.returncode == 1
    assert "did you mean 'lru'" in done.stderr and "Traceback" not in done.stderr


def test_without_names_every_policy_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(name: str, chunks: int) -> dict[str, object]:
        asked.append(name)
        return {}

    monkeypatch.setattr(policy, "measure", measure)
    policy.run_policy(quick=True)
    assert asked[:4] == ["lru", "crf", "adaptive", "default"]
    assert len(asked) == len(set(asked)) and {"arc", "s3fifo", "lfuda", "fifo"} <= set(asked)
