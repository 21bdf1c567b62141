"""A policy advises; whatever it does, the limit holds and stores go on."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, S, World, chain, spec

from kvd.chunk import Outcome
from kvd.core import TierConfig
from kvd.core import actions as ac
from kvd.eviction import POLICIES
from kvd.eviction.recency import Recency

SLOTS = 128  # of 8 KiB in the world's 1 MiB


def fill(world: World, times: int, name: str = "") -> None:
    """Two tenants store several times what fits, and both succeed with all of it."""
    wanted = spec("m", 8 * KIB)
    clients = [world.open("a"), world.open("b")]
    for client in clients:
        client.register(wanted)
    for number in range(times * SLOTS // 8):
        client = clients[number % 2]
        assert client.store(wanted, chain((name, number), 8)) == [Outcome.OK] * 8
        assert world.tier["used_bytes"] <= world.tier["limit_bytes"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_works_at_the_limit(policy: str) -> None:
    """K39"""
    world = World(policy=policy)
    fill(world, 3)
    assert world.counter("policy_errors") == 0
    assert sum(world.stat()["counters"]["chunks_evicted"].values()) >= 2 * SLOTS
    assert world.tier["chunks"] > SLOTS * 0.8


METHODS = ["insert", "touch", "victims", "coldness", "value", "forget", "defer"]


def break_for_good(
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    after: int,
    fault: type[BaseException] = RuntimeError,
) -> None:
    """A method works `after` times, and raises from then on."""
    right = getattr(kind, method)
    works = iter(range(after))

    def broken(*arguments: Any, **named: Any) -> Any:
        for _ in works:
            return right(*arguments, **named)
        raise fault("a fault in the policy")

    monkeypatch.setattr(kind, method, broken)


@pytest.mark.inside
@pytest.mark.parametrize("after", [0, 30])
@pytest.mark.parametrize("method", METHODS)
def test_a_policy_that_raises_costs_its_turn_only(
    method: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K39: stores go on, by LRU; the fault is counted and shown."""
    break_for_good(monkeypatch, POLICIES["crf"], method, after)
    one_pool = method in ("coldness", "value")  # a tenant's candidates alone are not compared
    world = World(policy="crf", isolate=not one_pool)
    fill(world, 4)
    assert world.tier["chunks"] > SLOTS * 0.8
    if world.counter("policy_errors"):  # some methods are asked for seldom
        assert world.counter("policy_errors") == 1
        shown = world.tier["eviction"]
        assert shown["policy"] == "crf" and shown["turn"] == "recency"
        where = "coldness" if method == "value" else method  # it asks for the value
        assert shown["error"] == f"crf.{where}: RuntimeError: a fault in the policy"
        assert world.tier["state"] == "degraded"
        told = [action for action in world.log if isinstance(action, ac.PolicyFailed)]
        assert [action.tier for action in told] == ["dram"]
        assert isinstance(told[0].fault, RuntimeError)
    else:
        assert method == "defer"
        assert world.tier["eviction"] == {"policy": "crf", "turn": "crf", "error": ""}
        assert world.tier["state"] == "ok"


@pytest.mark.inside
def test_one_that_raises_where_its_first_candidate_may_not_go_costs_its_turn_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K39: others are asked for when the first is leased."""
    break_for_good(monkeypatch, POLICIES["crf"], "leaves", 0)
    world = World(policy="crf")
    wanted, client = spec("m", 8 * KIB), world.open("a")
    client.register(wanted)
    held = chain("held", 4)
    assert client.store(wanted, held) == [Outcome.OK] * 4
    assert client.lease(wanted, held).leading == 4
    fill(world, 2)
    assert world.counter("policy_errors") == 1
    shown = world.tier["eviction"]
    assert shown["turn"] == "recency"
    assert shown["error"] == "crf.leaves: RuntimeError: a fault in the policy"
    assert client.lookup(wanted, held).leading == 4


class Stop(BaseException):
    """As libraries have them, to pass all that catches an Exception."""


@pytest.mark.inside
@pytest.mark.parametrize("fault", [SystemExit, GeneratorExit, Stop])
@pytest.mark.parametrize("method", ["insert", "touch", "victims", "coldness", "forget"])
def test_a_policy_that_wants_to_exit_costs_its_turn_only(
    method: str, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K39: a policy of one's own that calls sys.exit() ends its turn, not the daemon."""
    break_for_good(monkeypatch, POLICIES["crf"], method, 20, fault)
    world = World(policy="crf", isolate=method != "coldness")
    fill(world, 4)
    assert world.counter("policy_errors") == 1
    assert world.tier["eviction"]["turn"] == "recency"
    assert world.tier["eviction"]["error"].startswith(f"crf.{method}: {fault.__name__}: ")


@pytest.mark.inside
@pytest.mark.parametrize("method", ["snapshot", "memory", "ghosts"])
def test_what_it_raises_when_it_is_to_tell_what_it_knows_keeps_no_daemon_from_ending(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(policy="crf")
    fill(world, 2)
    break_for_good(monkeypatch, POLICIES["crf"], method, 0, SystemExit)
    list(world.core.remember())
    assert world.tier["eviction"]["error"].startswith("crf.snapshot: SystemExit: ")


@pytest.mark.inside
def test_the_terminals_interrupt_is_no_fault_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(policy="crf")
    break_for_good(monkeypatch, POLICIES["crf"], "insert", 0, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fill(world, 1)
    assert world.tier["eviction"]["error"] == ""


@pytest.mark.inside
@pytest.mark.parametrize("method", METHODS)
def test_without_any_policy_stores_go_on(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K39: what takes over fails as well."""
    break_for_good(monkeypatch, POLICIES["crf"], "touch", 20)
    break_for_good(monkeypatch, Recency, method, 0)
    world = World(policy="crf")
    fill(world, 4)
    fill(world, 1, "afterwards")
    assert world.tier["chunks"] > SLOTS * 0.8
    assert world.tier["eviction"]["turn"] in ("none", "recency")
    assert world.counter("policy_errors") == 1 + (world.tier["eviction"]["turn"] == "none")


@pytest.mark.inside
def test_what_takes_over_goes_by_the_last_use_of_all_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K39: also of what was stored and used before the fault."""
    world = World(policy="s3fifo", write_share=1.0, ahead_share=0.0)
    wanted = spec("m", 8 * KIB)
    client = world.open()
    client.register(wanted)
    for number in range(SLOTS // 8):
        assert client.store(wanted, chain(number, 8)) == [Outcome.OK] * 8
        world.advance(S)
    used = [3, 0, 7]
    for number in used:
        client.release(client.lease(wanted, chain(number, 8)).lease)
        world.advance(S)
    break_for_good(monkeypatch, POLICIES["s3fifo"], "touch", 0)
    client.release(client.lease(wanted, chain(5, 8)).lease)
    assert not world.core._store.policy.partial
    left = [n for n in range(SLOTS // 8) if n not in (*used, 5)]
    for n, gone in enumerate([*left, *used]):
        assert client.lookup(wanted, chain(gone, 8)).leading == 8
        assert client.store(wanted, chain(("new", n), 8)) == [Outcome.OK] * 8
        assert client.lookup(wanted, chain(gone, 8)).leading == 0
    assert client.lookup(wanted, chain(5, 8)).leading == 8


@pytest.mark.inside
def test_a_tier_below_goes_on_without_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """K39: it makes room by LRU, and then by rows; DRAM's policy keeps its turn."""
    tier = TierConfig("nvme", 64 * 8 * KIB)
    world = World(policy="crf", tiers=(tier,))
    fill(world, 3)
    below = world.core._store.ladder.lowers[0].policy
    monkeypatch.setattr(below.policy, "victims", None)
    fill(world, 3, "by LRU")
    shown = {row["name"]: row for row in world.stat()["tiers"]}
    assert shown["nvme"]["eviction"]["turn"] == "recency"
    assert shown["nvme"]["state"] == "degraded" and shown["dram"]["state"] == "ok"
    written = world.counter("shards_written", "ok")
    monkeypatch.setattr(below.policy, "coldness", None)
    fill(world, 3, "by rows")
    assert world.stat()["tiers"][1]["eviction"]["turn"] == "none"
    assert world.counter("shards_written", "ok") > written + SLOTS
    assert world.shelves[0].used <= tier.limit
