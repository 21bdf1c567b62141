"""The first chunk of a load from below: its read begins before the lookup is carried out, and its
answer goes out before the next reads are begun."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, LookupFlag, O, S, World, chain, key, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig

ONE = spec("one", 28 * KIB)  # two slots a slab: 32 in all
TWO = spec("two", 28 * KIB, 12 * KIB)
LOAD = LookupFlag.LEASE | LookupFlag.LOAD
LENGTH = 12


def below(wanted: Any = ONE, *, tier: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A world whose chain 0 lies below, and nowhere else; its first client."""
    tiers = (TierConfig("nvme", 4096 * KIB, **(tier or {})),)
    settings = {"write_share": 0.5, "transient_share": 1.0, **settings}
    world = World(1024 * KIB, 64 * KIB, tiers=tiers, **settings)
    client = world.open(admin=True)
    for one in (ONE, TWO):
        client.register(one)
    client.store(wanted, chain(0, LENGTH))
    world.settle()
    assert world.ask(ev.TierCommand(client.number, 0, "nvme", "drain")).ok
    world.advance(S)
    client.evict(ev.Selector(tier="dram", everything=True))
    assert world.tier["chunks"] == 0 and world.stat()["tiers"][1]["chunks"] == LENGTH
    world.auto = False
    return world, client


def read_keys(actions: list[Any]) -> list[bytes]:
    return [action.chunk for action in actions if isinstance(action, ac.TierRead)]


def in_hand(world: World) -> list[bytes]:
    return read_keys(list(world.in_hand.values()))


def finish(world: World, transfer: int, client: Any) -> list[int]:
    """Outcomes, when all is read."""
    world.auto = True
    world.work()
    world.advance(S)
    got = world.ask(ev.Wait(client.number, 0, transfer, 0, world.now))
    assert got.done
    return list(got.outcomes)


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


@pytest.mark.parametrize("wanted", [ONE, TWO])
def test_the_first_read_begins_before_its_lookup_and_is_the_only_one_until_it_lands(
    wanted: Any,
) -> None:
    world, client = below(wanted)
    event = client.lookup_event(wanted, chain(0, LENGTH), LOAD)
    assert read_keys(world.forerun(event)) == chain(0, 1)
    found, actions = world.request(event)
    assert found.leading == LENGTH and read_keys(actions) == []
    world.settle()
    assert in_hand(world) == chain(0, 1), "it has the medium for itself, as without"
    assert read_keys(world.do(world.jobs[0])) != []
    assert set(finish(world, found.load.transfer, client)) == {O.OK}
    assert world.counter("shards_fetched", "ok") == LENGTH * len(wanted.shards)
    client.release(found.lease)
    world.settle()
    assert world.tier["chunks"] == 0, "a first hit goes with its lease"


def test_what_came_before_its_lookup_was_held_by_nobody_and_is_read_again() -> None:
    """The server lets nothing come between the two; if it did, no harm is done."""
    world, client = below()
    event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
    world.forerun(event)
    world.do(world.jobs[0])
    found = world.ask(event)
    assert set(finish(world, found.load.transfer, client)) == {O.OK}
    assert world.counter("shards_fetched", "ok") == LENGTH + 1


def test_a_second_hit_stays_although_its_read_began_before_the_hit_was_counted() -> None:
    world, client = below()
    for _ in (1, 2):
        event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
        world.forerun(event)
        found = world.ask(event)
        finish(world, found.load.transfer, client)
        client.release(found.lease)
        world.settle()
        world.auto = False
    assert world.tier["chunks"] == LENGTH
    assert world.stat()["tiers"][0]["transient_bytes"] == 0
    assert world.counter("shards_promoted", "stays") == LENGTH


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_read_whose_lookup_is_refused_is_held_by_nobody(when: str) -> None:
    world, client = below()
    other = world.open(admin=True)
    event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
    assert len(world.forerun(event)) == 1
    if when == "before":
        world.do(world.jobs[0])
    refused, _ = world.request(event._replace(lease_ns=-1))
    assert isinstance(refused, ac.Fail)
    world.auto = True
    world.work()
    world.advance(S)
    assert world.tier["chunks"] == 0 and world.stat()["tiers"][0]["transient_bytes"] == 0
    assert world.tier["used_bytes"] == 0 and not world.core._fetches.by_cell
    assert other.lookup(ONE, chain(0, LENGTH)).leading == LENGTH


def test_a_read_that_has_to_wait_is_not_begun_when_its_lookup_was_refused() -> None:
    world, client = below(tier={"reads": 1})
    client.lookup(ONE, chain(0, LENGTH)[1:2], LOAD | LookupFlag.EVERY)
    event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
    assert world.forerun(event) == []
    world.now += 1
    world.ask(event._replace(lease_ns=-1))
    assert in_hand(world) == chain(0, LENGTH)[1:2]
    world.do(world.jobs[0])
    world.settle()
    assert in_hand(world) == [] and not world.core._fetches.by_cell


def test_a_read_that_has_to_wait_is_begun_for_its_lookup() -> None:
    world, client = below(tier={"reads": 1})
    client.lookup(ONE, chain(0, LENGTH)[1:2], LOAD | LookupFlag.EVERY)
    event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
    assert world.forerun(event) == []
    world.now += 1
    found = world.ask(event)
    assert in_hand(world) == chain(0, LENGTH)[1:2]
    world.do(world.jobs[0])
    assert in_hand(world) == chain(0, 1)
    assert set(finish(world, found.load.transfer, client)) == {O.OK}


def test_two_loads_of_one_chunk_read_it_once_whichever_was_begun_early() -> None:
    world, client = below()
    event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
    found = [client.lookup(ONE, chain(0, LENGTH), LOAD)]
    assert world.forerun(event) == []
    found.append(world.ask(event))
    assert in_hand(world) == chain(0, 1)
    for one in found:
        assert set(finish(world, one.load.transfer, client)) == {O.OK}
    assert world.counter("shards_fetched", "ok") == LENGTH


def _same(world: World, client: Any, event: ev.Lookup) -> ev.Lookup:
    return event


def _in_dram(world: World, client: Any, event: ev.Lookup) -> ev.Lookup:
    world.auto = True
    assert client.lookup(ONE, chain(0, 1), LOAD | LookupFlag.EVERY).leading
    world.advance(S)
    return event


def _away(world: World, client: Any, event: ev.Lookup) -> ev.Lookup:
    world.handle(ev.TierState(0, False, False))
    return event


def _at_its_cap(world: World, client: Any, event: ev.Lookup) -> ev.Lookup:
    client.lookup(ONE, chain(0, LENGTH)[1:], LookupFlag.LEASE | LookupFlag.EVERY)
    return event


NOTHING = {
    "it is in DRAM": (_in_dram, {}),
    "its tier is away": (_away, {}),
    "the session may lease no more": (_at_its_cap, {"lease_share": 0.3}),
    "nothing is loaded": (lambda w, c, e: e._replace(flags=int(LookupFlag.LEASE)), {}),
    "it is absent": (lambda w, c, e: e._replace(hashes=key("no") + e.hashes[32:]), {}),
    "its fingerprint is another": (
        lambda w, c, e: e._replace(fingerprints=b"?" * 16 + e.fingerprints[16:]),
        {},
    ),
    "the spec is unknown": (lambda w, c, e: e._replace(spec=bytes(32)), {}),
    "the session is unknown": (lambda w, c, e: e._replace(session=99), {}),
    "a shard is unknown": (lambda w, c, e: e._replace(shards=(7,)), {}),
    "no key is named": (lambda w, c, e: e._replace(hashes=b"", fingerprints=b""), {}),
}


@pytest.mark.parametrize("why", NOTHING)
def test_nothing_is_read_before_a_lookup_that_will_not_load_its_first_chunk_from_below(
    why: str,
) -> None:
    change, settings = NOTHING[why]
    world, client = below(**settings)
    event = client.lookup_event(ONE, chain(0, LENGTH), LOAD)
    assert read_keys(world.forerun(change(world, client, event))) == []
    assert world.core._fetches.queued == 0


def test_a_chunk_that_leads_no_run_is_not_read_before_its_lookup() -> None:
    world, client = below()
    world.auto = True
    client.evict(ev.Selector(keys=tuple(chain(0, 1))))
    world.advance(S)
    world.auto = False
    event = client.lookup_event(ONE, chain(0, LENGTH)[1:], LOAD)
    assert client.lookup(ONE, chain(0, LENGTH)[1:]).leading == 0
    assert world.forerun(event) == []
