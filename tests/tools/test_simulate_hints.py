"""What hints are worth, by replay."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from kvd.eviction.registry import factory
from kvd.tools.simulate.hints import endings, main, replay
from kvd.tools.simulate.trace import read_trace

DATA = Path(__file__).resolve().parents[1] / "data"
TRACE = DATA / "conversation_excerpt.jsonl"


def written(path: Path, *chains: list[int]) -> Path:
    rows = [
        {"timestamp": 1000 * n, "input_length": 512 * len(c), "output_length": 0, "hash_ids": c}
        for n, c in enumerate(chains)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_session_ends_with_the_request_whose_last_full_block_nobody_asks_for(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "t.jsonl", [1, 2, 3], [1, 2, 4, 5], [1, 6, 7], [1, 2, 4, 8])
    assert endings(read_trace(path)) == [False, False, True, True]


def test_right_hints_help_and_none_change_nothing(tmp_path: Path) -> None:
    """Room for five blocks: a session that is over makes room for one that goes on."""
    chains = [[1, 2, 3], [11, 12, 13], [21, 22, 23], [1, 2, 3, 4], [31, 32, 33], [1, 2, 3, 4]]
    trace = read_trace(written(tmp_path / "t.jsonl", *chains))
    lru = factory("lru")
    bare = replay(trace, lru, 7, 0.0, 0.0)
    assert replay(trace, lru, 7, 1.0, 0.0) > bare


def test_hints_on_a_real_excerpt() -> None:
    trace = read_trace(TRACE)
    capacity = trace.unique_blocks // 10
    lru = factory("lru")
    none, half, all_, wrong = (
        replay(trace, lru, capacity, *case)
        for case in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.0, 0.1))
    )
    assert none <= half <= all_ and all_ > none
    assert wrong > none - 2.0


def test_the_table_is_one_line_a_cell() -> None:
    done = CliRunner().invoke(main, [str(TRACE), "-p", "fifo", "-c", "5"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert (rows[0]["told"], rows[0]["false"]) == (0.0, 0.0)
    assert {row["policy"] for row in rows} == {"fifo"} and len(rows) == 6
