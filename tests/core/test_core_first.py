"""The first chunk of a load from below: its answer goes out before the next reads are begun."""

from __future__ import annotations

from typing import Any

from world import KIB, LookupFlag, S, World, chain, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig

ONE = spec("one", 28 * KIB)  # two slots a slab: 32 in all
LOAD = LookupFlag.LEASE | LookupFlag.LOAD
LENGTH = 12


def below(*, tier: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A world whose chain 0 lies below, and nowhere else; its first client."""
    tiers = (TierConfig("nvme", 4096 * KIB, **(tier or {})),)
    settings = {"write_share": 0.5, "transient_share": 1.0, **settings}
    world = World(1024 * KIB, 64 * KIB, tiers=tiers, **settings)
    client = world.open(admin=True)
    client.register(ONE)
    client.store(ONE, chain(0, LENGTH))
    world.settle()
    assert world.ask(ev.TierCommand(client.number, 0, "nvme", "drain")).ok
    world.advance(S)
    client.evict(ev.Selector(tier="dram", everything=True))
    assert world.tier["chunks"] == 0 and world.stat()["tiers"][1]["chunks"] == LENGTH
    world.auto = False
    return world, client


def read_keys(actions: list[Any]) -> list[bytes]:
    return [action.chunk for action in actions if isinstance(action, ac.TierRead)]


def test_who_waits_for_a_loads_first_chunk_is_told_before_the_next_reads_begin() -> None:
    world, client = below()
    found = client.lookup(ONE, chain(0, LENGTH), LOAD)
    world.handle(ev.Wait(client.number, 77, found.load.transfer, 0, world.now + S))
    actions = world.do(world.jobs[0])
    assert [a.request for a in actions if isinstance(a, ac.Reply)] == [77]
    assert read_keys(actions) == [] and world.core.busy
    assert read_keys(world.handle(ev.Tick())) == chain(0, LENGTH)[1:5]
    assert not world.core.busy
    actions = world.do(world.jobs[0])  # from then on, one after the other
    assert read_keys(actions) == [chain(0, LENGTH)[5]]


def test_where_nobody_waits_yet_the_next_reads_begin_at_once() -> None:
    world, client = below()
    client.lookup(ONE, chain(0, LENGTH), LOAD)
    assert read_keys(world.do(world.jobs[0])) == chain(0, LENGTH)[1:5]


def test_any_event_begins_what_was_put_off_for_an_answer() -> None:
    world, client = below()
    found = client.lookup(ONE, chain(0, LENGTH), LOAD)
    world.handle(ev.Wait(client.number, 77, found.load.transfer, 0, world.now + S))
    world.do(world.jobs[0])
    event = ev.Wait(client.number, 78, found.load.transfer, 1, world.now + S)
    assert read_keys(world.handle(event)) == chain(0, LENGTH)[1:5]
