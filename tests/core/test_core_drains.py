"""Draining many chunks: in slices, hottest first, and no sooner than they can be written."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, O, S, World, chain, key, spec

from kvd.core import actions as ac
from kvd.core import drains
from kvd.core import events as ev
from kvd.core.config import TierConfig

ONE = spec("one", 4 * KIB)


def full(count: int) -> tuple[World, Any]:
    """So many chunks in DRAM, each a root, used in the order of their numbers."""
    world = World(
        8 << 20, 256 * KIB, tiers=(TierConfig("nvme", 1 << 26, writes=4),), write_share=1.0
    )
    client = world.open(admin=True)
    client.register(ONE)
    for n in range(count):
        assert client.store(ONE, [key("drain", n)]) == [O.OK]
        world.advance(S)
    world.settle()
    world.auto = False
    return world, client


def written(world: World) -> list[bytes]:
    """Do all writes; the chunks in their order."""
    order = []
    while True:
        world.settle()
        jobs = [j for j in world.jobs if isinstance(j, ac.TierWrite)]
        if not jobs:
            return order
        for job in jobs:
            order.append(job.header.chunk)
            world.do(job)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_drain_says_how_many_and_writes_each_once(count: int) -> None:
    world, client = full(count)
    said = world.ask(ev.TierCommand(client.number, 0, "nvme", "drain"))
    assert said == ac.TierResult(True, "", count)
    order = written(world)
    already = len(world.shelves[0].there) - len(order)
    assert len(set(order)) == len(order) == count - already
    assert world.core.moving == 0 and not world.core.busy


def test_the_hottest_are_written_first_band_by_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_STRIDE", 64)
    monkeypatch.setattr(drains, "_BAND_LEAST", 16)
    world, client = full(400)
    first = world.core.handle(
        ev.TierCommand(client.number, "drain", "nvme", "drain"),
        world.now,  # type: ignore[arg-type]
    )
    world._carry(first)
    order = written(world)
    ages = [next(n for n in range(400) if key("drain", n) == chunk) for chunk in order]
    assert len(ages) == 400
    half = len(ages) // 2
    assert min(ages[: half - 40]) > max(ages[half + 40 :])


def test_no_more_are_named_than_can_be_under_way_soon() -> None:
    world, client = full(1200)
    world.handle(ev.TierCommand(client.number, "drain", "nvme", "drain"))  # type: ignore[arg-type]
    world.settle()
    demotions = world.core._demotions
    assert len(demotions._backlog) + len(demotions.by_row) <= 256 + 128 + 4 * 4
    assert world.core.moving >= 1100
    assert len(written(world)) == 1200


def test_a_drain_to_a_tier_that_goes_away_ends() -> None:
    world, client = full(600)
    world.handle(ev.TierCommand(client.number, "drain", "nvme", "drain"))  # type: ignore[arg-type]
    world.handle(ev.TierState(0, True, False))
    written(world)
    assert world.core.moving == 0 and not world.core.busy
    assert client.store(ONE, chain("after", 1)) == [O.OK]


def test_sigterm_drains_what_is_there_and_tells_when_it_is_done() -> None:
    world, _ = full(300)
    world.handle(ev.Drain())
    assert world.core.moving > 0
    assert len(written(world)) == 300 and world.core.moving == 0
