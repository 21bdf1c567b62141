"""A policy advises; whatever it does, the limit holds and stores go on."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, World, chain, spec

from kvd.chunk import Outcome
from kvd.eviction import POLICIES

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


@pytest.mark.parametrize("method", ["insert", "touch", "victims", "coldness", "value"])
def test_a_policy_that_raises_costs_its_advice_only(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K39: it fails twenty times; stores go on meanwhile and afterwards."""
    right = getattr(POLICIES["lru"], method)
    faults = iter(range(20))

    def broken(*arguments: Any, **named: Any) -> Any:
        for _ in faults:
            raise RuntimeError("a fault in the policy")
        return right(*arguments, **named)

    monkeypatch.setattr(POLICIES["lru"], method, broken)
    world = World(policy="lru")
    fill(world, 3)
    assert world.tier["chunks"] > SLOTS * 0.8
    if method != "value":  # asked only when slabs change their class
        assert world.counter("policy_errors") > 0
    fill(world, 1, "afterwards")
