"""A policy of one's own, in plain Python, under the core as it is installed: it decides, and what
it raises costs its turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from world import KIB, World, chain, spec

from kvd.chunk import Outcome
from kvd.core import Core, CoreConfig
from kvd.eviction.base import Policy
from kvd.eviction.lru import Lru

SLOTS = 128  # of 8 KiB
METHODS = ("insert", "touch", "whole_chains", "victims", "forget")


class Newest(Policy):
    """Whatever came last goes first: what no policy of ours would do."""

    name = "newest"
    broken = ""

    def __init__(self) -> None:
        self.here: dict[int, int] = {}  # chunk -> queue

    def may(self, method: str) -> None:
        if method == self.broken:
            raise ZeroDivisionError(method)

    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        self.may("insert")
        self.here[chunk] = queue

    def touch(self, chain: Sequence[int], now: int) -> None:
        self.may("touch")

    def whole_chains(self) -> bool:
        self.may("whole_chains")
        return super().whole_chains()

    def victims(self, queue: int, now: int) -> Iterator[int]:
        self.may("victims")
        return iter([c for c, q in reversed(self.here.items()) if q == queue])

    def coldness(self, queue: int, now: int) -> float | None:
        return 1.0 if queue in self.here.values() else None

    def forget(self, chunk: int, *, evicted: bool) -> None:
        self.may("forget")
        self.here.pop(chunk, None)

    def value(self, chunk: int, now: int) -> float:
        return 1.0

    def __len__(self) -> int:
        return len(self.here)


class Hottest(Lru):
    """One of ours, with another order."""

    name = "hottest"

    def victims(self, queue: int, now: int) -> Iterator[int]:
        return iter(list(super().victims(queue, now))[::-1])


def world_of(kind: type[Policy]) -> World:
    world = World()
    world.core = Core(CoreConfig("own", 5, SLOTS * 8 * KIB, 64 * KIB, ahead_share=0.0), kind)
    world.core.grow(SLOTS * 8 * KIB)
    return world


@pytest.mark.parametrize("kind", [Newest, Hottest])
def test_it_decides_who_goes(kind: type[Policy]) -> None:
    world = world_of(kind)
    client = world.open()
    wanted = client.register(spec("m", 8 * KIB))
    for n in range(SLOTS):
        assert client.store(wanted, chain(n, 1)) == [Outcome.OK]
    assert client.store(wanted, chain("x", 1)) == [Outcome.OK]
    there = [client.lookup(wanted, chain(n, 1)).leading for n in range(SLOTS)]
    assert there == [1] * (SLOTS - 1) + [0]


@pytest.mark.parametrize("method", METHODS)
def test_what_it_raises_costs_its_turn(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K39"""
    monkeypatch.setattr(Newest, "broken", method)
    world = world_of(Newest)
    client = world.open()
    wanted = client.register(spec("m", 8 * KIB))
    for n in range(2 * SLOTS):
        assert client.store(wanted, chain(n, 1)) == [Outcome.OK]
    told = world.tier["eviction"]
    assert told["turn"] == "recency" and told["error"].startswith(f"newest.{method}: ZeroDivision")
    assert world.counter("policy_errors") == 1
    assert client.lookup(wanted, chain(2 * SLOTS - 1, 1)).leading == 1
