"""For whose room chunks are demoted: the tenant's whose growth needs it, not who stored last."""

from __future__ import annotations

import pytest
from world import KIB, Client, O, World, chain, spec

from kvd.core.config import CoreConfig, TierConfig
from kvd.core.shares import Shares
from kvd.core.slabs import Slabs

ONE = spec("one", 8 * KIB)  # 128 slots
TIERS = (TierConfig("nvme", 1 << 23),)


def come(world: World, name: str) -> Client:
    client = world.open(name)
    client.register(ONE)
    return client


def told(world: World, name: str, counter: str) -> int:
    return int(world.stat()["tenants"][name]["counters"][counter]["dram"])


@pytest.mark.parametrize("auto", [True, False])
def test_who_grows_most_is_to_blame_and_not_who_comes_last(auto: bool) -> None:
    """`lender` has borrowed all there is; for each chunk of `small` there are five of `large`."""
    world = World(1024 * KIB, 64 * KIB, tiers=TIERS, auto=auto)
    lender, large, small = (come(world, name) for name in ("lender", "large", "small"))

    def store(client: Client, name: str, n: int) -> None:
        assert client.store(ONE, chain((name, n), 1)) == [O.OK]
        world.work()
        world.settle()

    for n in range(130):
        store(lender, "lent", n)
    for n in range(6):
        for m in range(5):
            store(large, "large", 5 * n + m)
        store(small, "small", n)
    by_large, by_small = (told(world, name, "evictions_inflicted") for name in ("large", "small"))
    suffered = told(world, "lender", "evictions_suffered")
    assert suffered >= 30 and by_large + by_small <= suffered + 1
    assert 0 < by_small <= 7 < 24 <= by_large
    assert told(world, "lender", "evictions_inflicted") == 0


def slabs_of() -> Slabs:
    config = CoreConfig("test", 1, 1024 * KIB, 64 * KIB, tiers=TIERS)
    shares = Shares(True, [("dram", config.size), ("nvme", 1 << 23)])
    for name in ("one", "two", "three"):
        shares.number(name)
    slabs = Slabs(config, shares)
    slabs.grow(config.size)
    for slab in range(4):
        slabs.assign(slab, 8 * KIB)
    return slabs


def test_each_slot_that_is_made_room_for_is_made_up_for_once() -> None:
    slabs, size = slabs_of(), 8 * KIB
    lent = [slabs.take(size, 3) for _ in range(5)]
    slabs.ample(size)
    for tenant in (1, 1, 1, 2):
        slabs.take(size, tenant)
    blamed = []
    for record in lent:
        by = slabs.needy(size)
        slabs.made_room(size, by, 3)
        slabs.give(record)
        blamed.append(by)
    assert sorted(blamed) == [0, 1, 1, 1, 2]  # the last one is for nobody's growth


def test_what_was_given_back_needs_no_room() -> None:
    slabs = slabs_of()
    record = slabs.take(8 * KIB, 1)
    slabs.take(8 * KIB, 2)
    for _ in range(5):  # slots for a moment: loads from below
        slabs.give(record)
        record = slabs.take(8 * KIB, 1)
    slabs.give(record)
    assert slabs.needy(8 * KIB) == 2


def test_with_ample_room_nobody_is_to_blame() -> None:
    slabs = slabs_of()
    slabs.take(8 * KIB, 1)
    slabs.ample(8 * KIB)
    assert slabs.needy(8 * KIB) == 0
