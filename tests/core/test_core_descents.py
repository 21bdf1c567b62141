"""What a full tier has to give up goes to the next one, if that wants it and can."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, LookupFlag, O, S, World, chain, content, refs_of, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig, WritePolicy
from kvd.core.shares import Amount, TenantRules, TierShare

ONE = spec("one", 28 * KIB)  # two slots a slab: 32 in DRAM
LOAD = LookupFlag.LEASE | LookupFlag.LOAD


def ladder(then: WritePolicy = WritePolicy.ON_DEMOTE, *, auto: bool = True) -> World:
    """DRAM holds 32 chunks, nvme 16, s3 all."""
    tiers = (TierConfig("nvme", 16 * 28 * KIB), TierConfig("s3", 1 << 24, then, first_alone=False))
    return World(1024 * KIB, 64 * KIB, tiers=tiers, auto=auto)


def stored(world: World, client: Any, first: int, last: int) -> None:
    for n in range(first, last):
        assert set(client.store(ONE, chain(n, 4))) == {O.OK}
        world.settle()


def filled(world: World, chains: int = 24) -> Any:
    client = world.open(admin=True)
    client.register(ONE)
    stored(world, client, 0, chains)
    return client


def test_three_tiers_together_lose_nothing_that_they_can_hold() -> None:
    world = ladder()
    client = filled(world)
    for n in range(24):
        assert client.lookup(ONE, chain(n, 4)).leading == 4, n
    dram, nvme, s3 = world.stat()["tiers"]
    assert dram["chunks"] + nvme["chunks"] + s3["chunks"] >= 96
    assert s3["chunks"] == len(world.shelves[1].there) == world.counter("descents", "written")
    assert world.counter("chunks_evicted_below", "demoted") == s3["chunks"]
    assert world.counter("chunks_evicted_below", "capacity") == 0
    assert not world.kept


def test_what_went_all_the_way_down_comes_back_as_it_was() -> None:
    world = ladder()
    client = filled(world)
    deep = client.lookup(ONE, chain(0, 4))
    assert set(deep.tiers) == {2}
    found = client.lookup(ONE, chain(0, 4), LOAD)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now))
    assert got.done and list(got.outcomes) == [O.OK] * 4
    for ref in refs_of(got.refs):
        assert world.payload[ref.record] == content(world.memory[ref.record])


@pytest.mark.parametrize(("writable", "readable"), [(False, True), (False, False)])
def test_while_the_next_tier_is_away_a_full_one_deletes_and_says_so(
    writable: bool, readable: bool
) -> None:
    world = ladder()
    world.handle(ev.TierState(1, readable, writable))
    filled(world)
    gone = world.counter("descents", "off")
    assert gone == world.counter("chunks_evicted_below", "capacity") >= 40
    assert not world.shelves[1].there


def test_the_next_tiers_policy_decides_what_it_gets() -> None:
    world = ladder(WritePolicy.ON_SECOND_HIT)
    filled(world)
    assert world.counter("descents", "unwanted") == world.counter(
        "chunks_evicted_below", "capacity"
    )
    assert world.counter("descents", "unwanted") >= 40 and not world.shelves[1].there


def test_a_payload_that_does_not_hold_goes_no_further() -> None:
    world = ladder()
    client = filled(world, 11)
    shelf = world.shelves[0]
    for name, (at, generation, header, _) in list(shelf.there.items()):
        shelf.there[name] = (at, generation, header, b"other bytes")
    stored(world, client, 11, 24)
    assert world.counter("descents", "corrupt") > 0
    assert all(payload != b"other bytes" for *_, payload in world.shelves[1].there.values())
    assert not world.kept


@pytest.mark.parametrize("fail", range(1, 4))
def test_whatever_the_next_tier_answers_the_full_one_gets_room(fail: int) -> None:
    world = ladder()
    world.fails = lambda job: fail if isinstance(job, ac.TierWrite) and job.kept else 0
    filled(world)
    assert world.counter("descents", "written") == 0
    lost = sum(world.counter("descents", how) for how in ("failed", "timeout", "off"))
    assert lost == world.counter("chunks_evicted_below", "capacity") > 0
    assert not world.kept and not world.core._descents.running[0]


def test_a_slow_descent_keeps_no_store_waiting() -> None:
    world = ladder(auto=False)
    world._copies = lambda: [j for j in world.jobs if getattr(j, "tier", 0) == 0]  # type: ignore[method-assign]
    client = world.open(admin=True)
    client.register(ONE)
    for n in range(40):  # what goes to the last tier is never done
        assert set(client.store(ONE, chain(n, 4))) == {O.OK}
        while jobs := world._copies():
            world.do(jobs[0])
        world.settle()
    held = [j for j in world.jobs if getattr(j, "tier", 0) == 1]
    assert 0 < len(held) <= 4 and len(world.kept) == len(held)
    assert world.counter("demotions", "written") > 60
    assert world.counter("chunks_evicted_below", "capacity") > 40
    for job in held:
        world.do(job)
    world.settle()
    assert world.counter("descents", "written") == len(held)


def test_descents_on_their_way_count_in_the_tenants_maximum() -> None:
    """Two chunks may lie in the last tier. Several are to go there before the first arrives."""
    most = TenantRules({"s3": TierShare(Amount(), 1.0, Amount(2 * 28 * KIB))})
    tiers = (TierConfig("nvme", 200 * 28 * KIB), TierConfig("s3", 1 << 24, first_alone=False))
    world = World(1024 * KIB, 64 * KIB, tiers=tiers, auto=False, tenants=(("mine", most),))
    world._copies = lambda: [j for j in world.jobs if getattr(j, "tier", 0) == 0]  # type: ignore[method-assign]
    client = world.open("mine")
    client.register(ONE)
    for n in range(70):
        assert set(client.store(ONE, chain(n, 4))) == {O.OK}
        while jobs := world._copies():
            world.do(jobs[0])
        world.settle()
    held = [j for j in world.jobs if getattr(j, "tier", 0) == 1]
    assert len(held) == 2
    world.work()
    world.settle()
    assert world.stat()["tenants"]["mine"]["tiers"]["s3"]["used_bytes"] == 2 * 28 * KIB
    assert world.core._store.shares.tiers[2].coming == [0, 0]
    assert world.stat()["tenants"]["mine"]["counters"]["descents"]["over_quota"] > 0


def test_a_descent_that_hangs_leaves_the_tier_aside_until_it_answers() -> None:
    world = ladder(auto=False)
    client = world.open(admin=True)
    client.register(ONE)
    n = 0
    while not (held := [j for j in world.jobs if getattr(j, "tier", 0) == 1]):
        client.store(ONE, chain(n, 4))
        n += 1
        while jobs := [j for j in world.jobs if getattr(j, "tier", 0) == 0]:
            world.do(jobs[0])
        world.settle()
    world.advance(30 * S)
    assert not world.core._store.ladder.lowers[1].writable
    assert client.lookup(ONE, chain(n - 1, 4)).leading == 4
    for job in held:
        world.do(job)
    assert world.core._store.ladder.lowers[1].writable
