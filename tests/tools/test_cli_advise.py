"""`kvd-cli advise` and `simulate --from-daemon`: what a daemon's own requests say of its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd.client import Client
from kvd.tools.cli.advise import advise_on
from kvd.tools.simulate.live import Curve, curves
from tests.daemon import DaemonProcess
from tests.tools.cli import a_spec, kvd_cli

GIB = 1 << 30
# An LRU of 10 GiB hits 31 %, of 30 GiB 38 %, of 100 GiB 40 %; nothing below 1 GiB.
POINTS = [[GIB, 0.0], [10 * GIB, 31.0], [30 * GIB, 38.0], [100 * GIB, 40.0]]


def curve(**changed: Any) -> dict[str, Any]:
    shown = {"uses": 10**6, "sampled": 50_000, "followed": 8192, "rate": 1.0, "curve": POINTS}
    return {**shown, **changed}


def stat(**changed: Any) -> dict[str, Any]:
    return {
        "tiers": [
            {"name": "dram", "limit_bytes": 10 * GIB},
            {"name": "nvme", "limit_bytes": 40 * GIB},
        ],
        "counters": {"chunks_asked": 200, "chunks_hit": 60},
        "tenants": {
            "a": {
                "tiers": {
                    "dram": {"used_bytes": 5 * GIB},
                    "nvme": {"used_bytes": 20 * GIB},
                },
                "counters": {"chunks_asked": 100, "chunks_hit": 40},
            }
        },
        "reuse": {"all": curve(), "tenants": {"a": curve()}},
        **changed,
    }


def says(told: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(one.tier, one.tenant): one.says for one in advise_on(told)}


def test_more_memory_is_worth_what_the_curve_says() -> None:
    told = says(stat())
    assert told["dram", ""].startswith("2.5 GiB more would lift the hit ratio from 31 % to 32 %")
    assert "40 GiB more to 39 %" in told["dram", ""]
    assert set(told) == {("dram", ""), ("nvme", ""), ("dram", "a"), ("nvme", "a")}


def test_a_tier_below_reaches_at_least_its_own_size() -> None:
    found = {one.tier: one for one in advise_on(stat()) if not one.tenant}
    assert found["nvme"].reach_bytes == 40 * GIB
    assert found["nvme"].hit_pct == pytest.approx(38.5, abs=0.1)
    small = stat(
        tiers=[{"name": "dram", "limit_bytes": 10 * GIB}, {"name": "nvme", "limit_bytes": GIB}]
    )
    found = {one.tier: one for one in advise_on(small) if not one.tenant}
    assert found["nvme"].reach_bytes == 10 * GIB
    assert found["nvme"].hit_pct == found["dram"].hit_pct


def held(dram: int, nvme: int, below: int) -> dict[str, Any]:
    """A daemon with 10 GiB and 40 GiB, and chunks in each tier; `below`: in no other than nvme."""
    told = stat()
    told["tenants"]["a"] |= {"chunks": dram, "chunks_below": below}
    for name, chunks in (("dram", dram), ("nvme", nvme)):
        told["tenants"]["a"]["tiers"][name]["chunks"] = chunks
    return told


def test_tiers_reach_together_as_far_as_they_hold_different_chunks() -> None:
    """Apart: 50 GiB. A copy below of each chunk in DRAM: 40 GiB."""
    reaches = []
    for told in (held(100, 400, 400), held(100, 400, 350), held(100, 400, 300)):
        found = {one.tier: one for one in advise_on(told) if not one.tenant}
        assert found["dram"].reach_bytes == 10 * GIB
        reaches.append(found["nvme"].reach_bytes / GIB)
        more = [step for step in found["nvme"].steps if step.more_bytes > 0]
        assert all(step.hit_pct >= found["nvme"].hit_pct for step in more)
    assert reaches == [50, 45, 40]
    mine = {one.tier: one for one in advise_on(held(100, 400, 400)) if one.tenant}
    assert mine["nvme"].reach_bytes == 25 * GIB


def test_where_more_brings_nothing_it_says_so_and_what_would_do() -> None:
    told = says(stat(tiers=[{"name": "dram", "limit_bytes": 400 * GIB}]))
    assert told["dram", ""] == (
        "up to 1.6 TiB more would not lift the hit ratio of 40 %; 200 GiB would do as well"
    )


def test_what_the_sample_cannot_tell_is_not_told() -> None:
    few = stat(reuse={"all": curve(sampled=900), "tenants": {"a": curve(followed=50)}})
    for one in advise_on(few):
        assert not one.enough and one.says.startswith("too little was seen")
        assert one.row()["hit_pct"] is None
    once = stat(reuse={"all": curve(curve=[]), "tenants": {}})  # plenty seen, nothing twice
    for one in advise_on(once):
        assert not one.enough and one.says.startswith("nothing of what was seen was used a second")
    # a gain within the error of the sample is none
    rough = stat(reuse={"all": curve(rate=0.01, followed=250), "tenants": {}})
    first = next(iter(advise_on(rough)))
    assert first.margin_pct == pytest.approx(5.8, abs=0.1)
    assert "give or take 5.8 points" in first.says and "12 GiB more" not in first.says


def test_a_daemon_that_tells_no_distances_gets_no_advice() -> None:
    assert not list(advise_on(stat(reuse=None)))
    assert not curves({})


def test_between_points_a_curve_is_a_line_over_the_logarithm() -> None:
    one = Curve("", 1, 1, 1, 1.0, ((GIB, 0.0), (4 * GIB, 20.0)))
    assert one.hit_pct(2 * GIB) == pytest.approx(10.0)
    assert (one.hit_pct(GIB // 2), one.hit_pct(9 * GIB)) == (0.0, 20.0)
    assert one.margin_pct(2 * GIB) == 0.0


@pytest.fixture(scope="module")
def asked() -> Any:
    """A daemon of 2 MiB that was asked over and over for prompts of 6 MiB."""
    with DaemonProcess(arena_size="2MiB") as daemon, Client(daemon.socket) as client:
        handle = client.register(a_spec(nbytes=4096))
        prompts = [
            [bytes([prompt, at % 256, at // 256]) + bytes(29) for at in range(256)]
            for prompt in range(6)
        ]
        for _ in range(5):
            for hashes in prompts:
                found = client.lookup(handle, hashes)
                if found.lease is not None:
                    found.lease.release()
                client.store_chunks(handle, hashes, None, [bytes(4096)] * 256)
        yield daemon


def test_a_daemon_says_what_more_memory_would_bring(asked: DaemonProcess) -> None:
    done = kvd_cli("advise", "--socket", asked.socket)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert (
        lines[0].startswith("dram, all tenants: ")
        and "more would lift the hit ratio from 0 %" in lines[0]
    )
    assert any(line.startswith("dram, uid-") or ", default:" in line for line in lines[1:]), lines
    advice = kvd_cli("advise", "--json", "--socket", asked.socket).json["advice"]
    assert advice[0]["tier"] == "dram" and advice[0]["tenant"] is None and advice[0]["enough"]
    assert advice[0]["measured_pct"] == 0.0 and advice[0]["hit_pct"] < 5
    most = max(advice[0]["steps"], key=lambda step: step["more_bytes"])
    assert most["hit_pct"] == pytest.approx(80, abs=5)  # four of five rounds, with room for all


def test_the_daemons_curve_is_shown_and_drawn(asked: DaemonProcess, tmp_path: Path) -> None:
    done = kvd_cli("simulate", "--from-daemon", "--socket", asked.socket)
    assert done.code == 0, done.err
    assert "all tenants: 7,680 chunks asked for" in done.out and "would hit %" in done.out
    shown = kvd_cli("simulate", "--from-daemon", "--json", "--socket", asked.socket).json["curves"]
    assert shown[0]["tenant"] is None and shown[0]["uses"] == 7680
    assert shown[0]["points"][-1]["hit_pct"] == pytest.approx(80, abs=5)
    pytest.importorskip("matplotlib")
    picture = tmp_path / "live.png"
    done = kvd_cli("simulate", "--from-daemon", "--plot", str(picture), "--socket", asked.socket)
    assert done.code == 0, done.err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_daemon_that_was_asked_nothing_says_so() -> None:
    with DaemonProcess() as daemon:
        for words in (("advise",), ("simulate", "--from-daemon")):
            done = kvd_cli(*words, "--socket", daemon.socket)
            assert done.code == 0 and "was seen yet" in done.out


def test_usage_of_from_daemon_is_explained() -> None:
    for words in (["simulate"], ["simulate", __file__, "--from-daemon"]):
        done = kvd_cli(*words)
        assert done.code == 2 and "name a trace, or --from-daemon and none" in done.err
    done = kvd_cli("simulate", "--from-daemon", "--socket", "/nowhere/kvd.sock")
    assert done.code == 3
