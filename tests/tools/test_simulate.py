"""Replay of traces: what a capacity and a policy would have done, and how that is told."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.eviction.lru import Lru
from kvd.eviction.registry import POLICIES, factory
from kvd.tools.simulate.agree import agreement
from kvd.tools.simulate.command import simulate, simulate_cells
from kvd.tools.simulate.cost import measure
from kvd.tools.simulate.replay import digest, replay
from kvd.tools.simulate.trace import Trace, TraceError, read_trace

DATA = Path(__file__).resolve().parent.parent / "data"
CONVERSATION = DATA / "conversation_excerpt.jsonl"
SYNTHETIC = DATA / "synthetic_excerpt.jsonl"
POLICIES_OF_A_DAEMON = ("lru", "default")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(ms: int, tokens: int, *blocks: int) -> dict[str, object]:
    return {"timestamp": ms, "input_length": tokens, "output_length": 1, "hash_ids": blocks}


def naive_lru_hits(trace: Trace, capacity: int) -> int:
    """Leaf-first LRU as an ordered dict: leaf to root is the order of a use."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        found = 0
        while found < len(request.blocks) and request.blocks[found] in order:
            found += 1
        hits += found
        for block in request.blocks[:found]:
            order.move_to_end(block)
        for block in request.blocks[found:]:
            if len(order) >= capacity:
                victim = next((b for b in order if b not in request.blocks), None)
                if victim is None:
                    break
                del order[victim]
            order[block] = None
        for block in reversed(request.blocks):
            if block in order:
                order.move_to_end(block)
    return hits


# -- traces -------------------------------------------------------------------------------------


def test_a_trace_is_read_in_its_order() -> None:
    trace = read_trace(CONVERSATION)
    assert trace.name == "conversation_excerpt"
    assert len(trace.requests) == 400
    first = trace.requests[0]
    assert (first.time_ns, first.tokens, len(first.blocks)) == (0, 6758, 14)
    assert trace.accesses == sum(len(r.blocks) for r in trace.requests)
    assert trace.unique_blocks == len({b for r in trace.requests for b in r.blocks})


def test_ids_may_be_text(tmp_path: Path) -> None:
    rows = [{**row(n, 600), "hash_ids": ["a3f0", f"{n:04x}"]} for n in range(3)]
    trace = read_trace(write(tmp_path / "hex.jsonl", *rows))
    assert [r.blocks for r in trace.requests] == [(0, 1), (0, 2), (0, 3)]
    assert trace.parents == [-1, 0, 0, 0]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "no requests"),
        ("{\n", ":1: "),
        ('{"timestamp": 1, "input_length": 5}\n', "'hash_ids' is missing"),
        ('{"timestamp": 1, "input_length": -5, "hash_ids": []}\n', "out of range"),
        ('{"timestamp": 1e300, "input_length": 5, "hash_ids": []}\n', "out of range"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [1.5]}\n', "neither a number"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": 7}\n', ":1: "),
        ("[]\n", ":1: "),
        ('{"timestamp": 1, "input_length": 1e999, "hash_ids": []}\n', ":1: "),
        (
            '{"timestamp": 1, "input_length": 5, "hash_ids": [1, 2]}\n'
            '{"timestamp": 1, "input_length": 5, "hash_ids": [3, 2]}\n',
            ":2: a block stands behind two different prefixes",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "hash_ids": [1, 1]}\n',
            ":1: a block stands behind two different prefixes",
        ),
    ],
)
def test_a_line_that_does_not_hold_is_named(tmp_path: Path, lines: str, says: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(lines)
    with pytest.raises(TraceError, match=r"broken\.jsonl") as caught:
        read_trace(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("lines", ["root:x:0:0::/root:\n", "[1, 2]\n", "{}\n", "[\n {}\n]\n", "x"])
def test_what_is_no_recording_says_how_one_is_made(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "passwd"
    path.write_text(lines)
    with pytest.raises(TraceError, match=r"a daemon with trace\.record = PATH writes") as caught:
        read_trace(path)
    assert "one JSON object a line with timestamp, input_length and hash_ids" in str(caught.value)


def test_a_last_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    """As a daemon leaves it that was killed while it wrote."""
    file = write(tmp_path / "cut.jsonl", row(0, 600, 1, 2), row(1, 600, 1, 3))
    whole = file.read_bytes()
    for end in range(len(whole) // 2, len(whole)):
        file.write_bytes(whole[:end])
        assert len(read_trace(file).requests) == 1 + (end == len(whole) - 1)


@pytest.mark.parametrize(("file", "says"), [("/dev/zero", "bytes: no trace"), (None, "recursion")])
def test_what_has_no_end_is_no_trace(tmp_path: Path, file: str | None, says: str) -> None:
    path = Path(file) if file is not None else tmp_path / "deep.jsonl"
    if file is None:
        path.write_text("[" * 100_000 + "\n")
    with pytest.raises(TraceError, match=f"{path}:1: .*{says}"):
        read_trace(path)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nowhere.jsonl")


# -- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC], ids=["conversation", "synthetic"])
@pytest.mark.parametrize("percent", [1, 5, 20, 50, 100])
def test_lru_hits_what_an_ordered_dict_hits(path: Path, percent: int) -> None:
    trace = read_trace(path)
    capacity = max(1, trace.unique_blocks * percent // 100)
    assert replay(trace, Lru, [capacity]).hits == naive_lru_hits(trace, capacity)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_with_room_for_all_every_policy_hits_what_was_there(name: str) -> None:
    trace = read_trace(SYNTHETIC)
    seen: set[int] = set()
    expected = 0
    for request in trace.requests:
        expected += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    count = replay(trace, factory(name), [trace.unique_blocks])
    assert count.hits == expected
    assert count.stored == trace.unique_blocks


def test_a_request_larger_than_the_cache_keeps_its_beginning(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path / "t.jsonl", row(0, 5120, *range(10)), row(9, 5120, *range(10)))
    )
    count = replay(trace, Lru, [4])
    assert (count.blocks, count.hits, count.stored) == (20, 4, 4)


def test_tokens_of_a_partial_block_count_once(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", row(0, 700, 0, 1), row(9, 700, 0, 1)))
    count = replay(trace, Lru, [4])
    assert count.token_hits == 700 and count.tokens == 1400
    assert count.token_hit_pct == 50.0


def test_a_victim_moves_down_and_comes_back_up(tmp_path: Path) -> None:
    rows = [row(n * 1000, 512, n % 3) for n in range(6)]
    trace = read_trace(write(tmp_path / "t.jsonl", *rows))
    one = replay(trace, Lru, [2])
    two = replay(trace, Lru, [2, 3])
    assert (one.hits, two.hits, two.lower_hits) == (0, 0, 3)
    assert two.written_down == 3  # a promoted block's copy below stays: nothing is written twice


def test_a_second_tier_never_hurts() -> None:
    trace = read_trace(SYNTHETIC)
    size = trace.unique_blocks // 20
    one = replay(trace, Lru, [size])
    two = replay(trace, Lru, [size, 4 * size])
    assert two.hits == one.hits  # the upper tier behaves as if alone
    assert two.block_hit_pct > one.block_hit_pct
    large = replay(trace, Lru, [4 * size])
    assert abs(two.block_hit_pct - large.block_hit_pct) < 6


def test_progress_comes_to_the_number_of_requests() -> None:
    trace = read_trace(SYNTHETIC)
    told: list[int] = []
    replay(trace, Lru, [50], every=64, progress=told.append)
    assert sum(told) == len(trace.requests) and max(told) <= 64


def test_digests_are_spread() -> None:
    assert len({digest(n) for n in range(10_000)}) == 10_000
    assert len({digest(n) >> 52 for n in range(10_000)}) > 3_500


def test_the_default_is_no_worse_than_lru_on_the_excerpts() -> None:
    traces = [read_trace(path) for path in (CONVERSATION, SYNTHETIC)]
    makers = {"lru": factory("lru"), "default": factory("default")}
    cells = simulate_cells(traces, makers, [5.0, 20.0, 50.0])
    found = {(c.trace, c.policy, c.capacity_pct): c.block_hit_pct for c in cells}
    for (trace, policy, percent), hit in found.items():
        assert hit >= found[trace, "lru", percent] - 0.7, (trace, policy, percent)


# -- command ------------------------------------------------------------------------------------


def test_json_holds_a_cell_for_every_trace_policy_and_capacity() -> None:
    result = CliRunner().invoke(
        simulate,
        f"{CONVERSATION} {SYNTHETIC} -p lru -p crf:half_life_s=300 --capacity 5,50 --json".split(),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["seconds"] >= 0
    assert [tuple(c.values())[:4] for c in document["cells"]] == [
        (trace, policy, percent, 1)
        for trace in ("conversation_excerpt", "synthetic_excerpt")
        for policy in ("lru", "crf:half_life_s=300")
        for percent in (5.0, 50.0)
    ]
    for cell in document["cells"]:
        assert 0 <= cell["block_hit_pct"] <= cell["token_hit_pct"] + 5 <= 105


def test_without_policies_lru_and_the_default_are_compared() -> None:
    result = CliRunner().invoke(simulate, [str(SYNTHETIC), "-c", "10", "--tiers", "2"])
    assert result.exit_code == 0, result.output
    assert "lru" in result.stdout and "default" in result.stdout
    assert "400 requests" in result.stdout and "10 %" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "lur"], "did you mean 'lru'"),
        (["-c", "0"], "above 0"),
        (["-c", "many"], "list of percents"),
        (["-c", "200"], "at most 100"),
        (["--tiers", "3"], "1<=x<=2"),
    ],
)
def test_usage_is_explained(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(simulate, [str(SYNTHETIC), *arguments])
    assert result.exit_code == 2
    assert says in result.output


def test_a_broken_trace_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("{}\n")
    result = CliRunner().invoke(simulate, [str(path)])
    assert result.exit_code == 1
    assert "t.jsonl:1" in result.output and "Traceback" not in result.output


def test_a_plot_is_drawn_or_refused_before_the_work(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    result = CliRunner().invoke(simulate, [str(SYNTHETIC), "-c", "5,50", "--plot", str(picture)])
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert result.exit_code == 1
        assert "kvd[plot]" in result.output and "requests replayed" not in result.output
    else:
        assert result.exit_code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_cost_of_a_policy_is_told_in_figures() -> None:
    """Bounds that only a wrong order of growth would break; the figures are in the documents."""
    figures = measure("default", 20_000)
    assert (figures["policy"], figures["chunks"]) == ("default", 20_000)
    assert 0 < figures["touch_us"] < 100
    assert 0 < figures["evict_us"] < 1_000
    assert 0 <= figures["bytes_per_chunk"] < 2_000


def test_the_sample_of_a_daemon_can_be_held_against_the_replay() -> None:
    result = CliRunner().invoke(
        simulate, f"{CONVERSATION} -p lru --sampled --capacity 20,50 --json".split()
    )
    assert result.exit_code == 0, result.output
    found = {(c["policy"], c["capacity_pct"]): c for c in json.loads(result.stdout)["cells"]}
    assert set(found) == {(p, c) for p in ("lru", "lru, sampled") for c in (20.0, 50.0)}
    for percent in (20.0, 50.0):
        exact = found["lru", percent]["block_hit_pct"]
        assert found["lru, sampled", percent]["block_hit_pct"] == pytest.approx(exact, abs=3)


@pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC], ids=["conversation", "synthetic"])
def test_a_daemon_hits_what_the_replay_hits(path: Path) -> None:
    """The same requests, the same policy, the same capacity: within half a point."""
    trace = read_trace(path)
    for name in POLICIES_OF_A_DAEMON:
        found = agreement(trace, name, factory(name), 20.0)
        assert found.blocks == 1952 and found.replay_hit_pct > 3
        assert abs(found.difference) <= 0.5, found


def test_the_check_against_a_daemon_is_told(tmp_path: Path) -> None:
    rows = [row(n * 10, 1024, n % 7, 100 + n % 7) for n in range(60)]
    path = write(tmp_path / "ring.jsonl", *rows)
    words = f"{path} -p lru -c 100 --check-daemon --speed 100".split()
    result = CliRunner().invoke(simulate, words)
    assert result.exit_code == 0, result.output
    assert "ring" in result.stdout and "+0.00" in result.stdout
    told = json.loads(CliRunner().invoke(simulate, [*words, "--json"]).stdout)["agreement"]
    assert told[0]["daemon_hit_pct"] == told[0]["replay_hit_pct"] == pytest.approx(88.33, abs=0.01)


@pytest.mark.parametrize("option", ["--speed", "--lower"])
def test_what_is_no_number_is_no_option(option: str) -> None:
    result = CliRunner().invoke(simulate, [str(SYNTHETIC), option, "nan"])
    assert result.exit_code == 2 and "nan is not a number" in result.output
