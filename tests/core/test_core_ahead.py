"""Slots for the next store are freed in the pauses: as few as will do, and as a store would."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, Client, O, S, World, chain, spec

from kvd.core import events as ev
from kvd.core.shares import Amount, TenantRules, TierShare

ONE, WIDE = spec(), spec("wide", 16 * KIB)
SLOT = 8 * KIB
SLOTS = 640
SHARE = SLOTS // 64  # of them, at most


def full(name: str = "default", **settings: Any) -> tuple[World, Client]:
    """An arena that one tenant has filled to its last slot, and then had 8 slots evicted in: so
    many more were freed."""
    world = World(SLOTS * SLOT, 64 * SLOT, write_share=1.0, **settings)
    client = come(world, name)
    for n in range(SLOTS // 8):
        assert client.store(ONE, chain(n, 8)) == [O.OK] * 8
        world.advance(S)
    assert (free(world), evicted(world)) == (0, 0)  # what fits stays
    assert client.store(ONE, chain("first", 8)) == [O.OK] * 8
    assert (free(world), evicted(world)) == (8, 16)
    return world, client


def come(world: World, name: str = "default") -> Client:
    client = world.open(name, admin=True)
    for wanted in (ONE, WIDE):
        client.register(wanted)
    return client


def free(world: World) -> int:
    return int(world.tier["limit_bytes"] - world.tier["used_bytes"]) // SLOT


def evicted(world: World) -> int:
    return world.counter("chunks_evicted", "capacity")


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_a_steady_writer_finds_its_slots_free(policy: str) -> None:
    world, client = full(policy=policy)
    for n in range(5):
        before = evicted(world)
        write, _ = world.request(client.reserve_event(ONE, chain(("new", n), 6)))
        assert evicted(world) == before  # nothing has to go inside the request
        world.settle()
        assert (free(world), evicted(world)) == (6, before + (6 if n else 4))
        client.fill(write.refs)
        client.commit(write.write)
        assert free(world) == 6  # a commit wants nothing


def test_no_more_is_freed_than_the_last_store_took() -> None:
    world, client = full()
    client.store(ONE, chain("much", 9))
    assert (free(world), evicted(world)) == (9, 26)
    client.store(ONE, chain("less", 2))  # 7 are left, more than it will want again
    assert (free(world), evicted(world)) == (7, 26)


def test_no_more_is_freed_than_a_small_share_of_the_class() -> None:
    world, client = full()
    client.store(ONE, chain("huge", 100))
    assert free(world) == SHARE


def test_a_class_of_few_slots_is_used_to_the_last() -> None:
    world = World(63 * SLOT, 63 * SLOT, write_share=1.0)
    client = come(world)
    for n in range(20):
        client.store(ONE, chain(n, 9))
    assert free(world) == 0


def test_what_is_there_already_frees_nothing() -> None:
    world, client = full()
    assert client.store(ONE, chain(3, 8)) == [O.EXISTS] * 8
    assert (free(world), evicted(world)) == (8, 16)


def test_nothing_goes_while_the_arena_has_other_room() -> None:
    """A slab with nothing in it is room enough."""
    world = World(SLOTS * SLOT, 64 * SLOT, write_share=1.0)
    client = come(world)
    for n in range(64):
        assert client.store(ONE, chain(n, 9)) == [O.OK] * 9
    assert evicted(world) == 0


def test_what_may_not_go_is_left_alone() -> None:
    """All is leased: a store has what is free, and no more can be freed for the next."""
    world, client = full(lease_share=1.0)
    for name in ("first", *range(2, SLOTS // 8)):
        client.lease(ONE, chain(name, 8), lease=600 * S)
    assert client.store(ONE, chain("a", 9)) == [O.OK] * 8 + [O.NO_SPACE]
    assert (free(world), evicted(world)) == (0, 16)
    assert client.lookup(ONE, chain(5, 8)).leading == 8


def test_room_that_came_otherwise_ends_it() -> None:
    """An operator evicted much: nothing goes ahead until a store has to evict again."""
    world, client = full()
    client.evict(ev.Selector(keys=tuple(chain(7, 8))))
    client.store(ONE, chain("a", 8))
    client.store(ONE, chain("b", 8))
    assert (free(world), evicted(world)) == (0, 16)
    client.store(ONE, chain("c", 8))
    assert (free(world), evicted(world)) == (8, 32)


def test_a_draining_core_frees_nothing() -> None:
    world, client = full()
    world.request(client.reserve_event(ONE, chain("x", 8)))
    world.handle(ev.Drain())
    world.settle()
    assert free(world) == 0


def test_only_who_would_give_to_the_next_store_gives() -> None:
    """Two tenants with a half each: who has more than that loses its own, and nobody at its
    minimum loses anything."""
    rules = TenantRules({"dram": TierShare(Amount(0, 0.5))})
    world, greedy = full("greedy", tenants=(("greedy", rules), ("modest", rules)))
    modest = come(world, "modest")
    for n in range(20):
        assert modest.store(ONE, chain(("modest", n), 8)) == [O.OK] * 8
    assert modest.lookup(ONE, chain(("modest", 0), 8)).leading == 8
    for n in range(60):
        assert greedy.store(ONE, chain(("more", n), 8)) == [O.OK] * 8
    assert all(modest.lookup(ONE, chain(("modest", n), 8)).leading == 8 for n in range(20))
    counts = world.stat()["tenants"]
    assert counts["modest"]["counters"]["evictions_suffered"]["dram"] == 0
    for name in ("greedy", "modest"):
        assert counts[name]["counters"]["evictions_below_minimum"]["dram"] == 0


def test_who_is_at_its_maximum_is_given_nothing_of_others() -> None:
    most = TenantRules({"dram": TierShare(Amount(), 1.0, Amount(16 * SLOT))})
    world, _ = full("other", tenants=(("small", most),))
    small = come(world, "small")
    for n in range(10):
        assert small.store(ONE, chain(("small", n), 8)) == [O.OK] * 8
    suffered = world.stat()["tenants"]["other"]["counters"]["evictions_suffered"]["dram"]
    assert suffered == 8  # with the 8 that were free, what the small one holds, and no more
    assert free(world) == 0
