"""The last free slots: who is within its share finds one while another fills what becomes free."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, Client, LookupFlag, O, World, chain, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig
from kvd.core.evictions import Evictions

ONE = spec("one", 8 * KIB)  # 128 slots: four are kept free by demotion, two of them for others
LOAD = LookupFlag.LEASE | LookupFlag.LOAD


def world_of() -> World:
    return World(1024 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 4096 * KIB),), auto=False)


def come(world: World, name: str) -> Client:
    client = world.open(name)
    client.register(ONE)
    return client


def below(world: World, client: Client, keys: list[bytes]) -> None:
    """The client's chunk lies in the tier, and nowhere else."""
    assert client.store(ONE, keys) == [O.OK]
    admin = world.open(admin=True)
    world.ask(ev.TierCommand(admin.number, 0, "nvme", "drain"))
    world.work()
    admin.evict(ev.Selector(tier="dram", everything=True))
    assert client.lookup(ONE, keys).tiers == b"\1"


def flood(world: World, client: Client) -> None:
    """It stores until it has to wait: the tier does not get on with what it was given."""
    for n in range(200):
        number = 10_000 + n
        keys = chain(("flood", n), 1)
        world.handle(client.reserve_event(ONE, keys)._replace(request=number))
        for _ in range(1000):
            seals = [job for job in world.jobs if isinstance(job, ac.Seal)]
            if seals:
                world.do(seals[0])
            elif world.core.busy:
                world.handle(ev.Tick())
            else:
                break
        reply = world.replies.pop(number, None)
        if reply is None:
            return
        assert isinstance(reply, ac.Reply)
        result: Any = reply.result
        client.fill(result.refs)
        world.handle(ev.Commit(client.number, 20_000 + n, result.write, None, None))
    raise AssertionError("nothing had to wait")


def ask_load(world: World, client: Client, keys: list[bytes]) -> int:
    """Reads that a load began at once, with the tier's other work still to do."""
    world.handle(client.lookup_event(ONE, keys, LOAD)._replace(request=30_000))
    return sum(isinstance(job, ac.TierRead) for job in world.jobs)


@pytest.mark.inside
@pytest.mark.parametrize("kept", [True, False])
def test_a_load_needs_not_wait_for_a_slot_that_a_flood_waits_for(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without slots that are kept it would."""
    if not kept:
        monkeypatch.setattr(Evictions, "kept", lambda self, size: 0)
    world = world_of()
    mine, other = come(world, "mine"), come(world, "flood")
    keys = chain("mine", 1)
    below(world, mine, keys)
    flood(world, other)
    assert ask_load(world, mine, keys) == kept


def test_its_stores_need_not_wait_either() -> None:
    world = world_of()
    mine, other = come(world, "mine"), come(world, "flood")
    assert mine.store(ONE, chain("first", 1)) == [O.OK]
    flood(world, other)
    world.handle(mine.reserve_event(ONE, chain("mine", 1))._replace(request=30_000))
    assert 30_000 in world.replies


def test_a_tenant_alone_has_every_slot() -> None:
    world = world_of()
    flood(world, come(world, "alone"))
    assert world.core.stat()["tiers"][0]["used_bytes"] == 1024 * KIB


def test_rather_than_none_at_all_a_kept_slot_is_given() -> None:
    """Nothing can go, for all of it is leased: then the last ones are there for whoever asks."""
    world = World(1024 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 4096 * KIB),), lease_share=1.0)
    mine, other = come(world, "mine"), come(world, "flood")
    assert mine.store(ONE, chain("mine", 1)) == [O.OK]
    mine.evict(ev.Selector(everything=True))
    for n in range(128):
        keys = chain(("flood", n), 1)
        assert other.store(ONE, keys) == [O.OK]
        other.lease(ONE, keys)
    assert other.store(ONE, chain("more", 1)) == [O.NO_SPACE]
