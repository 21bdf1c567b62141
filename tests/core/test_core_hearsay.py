"""Hearsay about a tier: what the core does not know, and what it makes of what it is told."""

from __future__ import annotations

from typing import Any

from world import KIB, LookupFlag, O, World, chain, spec

from kvd.chunk import Kind
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig, WritePolicy

ONE = spec("one", 28 * KIB)


def world(tier_bytes: int = 4096 * KIB) -> World:
    return World(1024 * KIB, 64 * KIB, tiers=(TierConfig("s3", tier_bytes),))


def unknown(it: World, client: Any, hashes: list[bytes], flags: int = 0) -> list[bytes]:
    found = it.core.unknown(client.lookup_event(ONE, hashes, flags), 0)
    return [] if found is None else found.hashes


def below() -> tuple[Any, Any, Any]:
    """The records of what another daemon has written: of chains 0 to 11, of 4."""
    other = world()
    client = other.open(admin=True)
    client.register(ONE)
    for n in range(12):
        client.store(ONE, chain(n, 4))
        other.settle()
    return other.shelves[0].records()


def test_unknown_is_what_no_tier_has_and_nobody_writes() -> None:
    it = world()
    client = it.open(admin=True)
    client.register(ONE)
    client.store(ONE, chain("a", 3))
    client.reserve(ONE, chain("b", 1))
    asked = [*chain("a", 3), *chain("b", 1), *chain("c", 2)]
    assert unknown(it, client, asked) == chain("c", 2)
    assert it.core.unknown(client.lookup_event(ONE, asked), 0).run is True
    assert it.core.unknown(client.lookup_event(ONE, asked, LookupFlag.EVERY), 0).run is False
    assert unknown(it, client, chain("a", 3)) == []
    assert unknown(it, client, [chain("c", 1)[0]]) == chain("c", 1)
    before = it.stat()
    unknown(it, client, asked)
    assert it.stat() == before, "a question changes nothing"
    it.handle(ev.TierState(0, False, True))
    assert unknown(it, client, asked) == [], "a tier that can't be read is not worth asking"
    event = client.lookup_event(ONE, asked)._replace(spec=bytes(32))
    assert it.core.unknown(event, 0) is None


def test_a_hint_makes_a_hit_and_a_wrong_one_is_a_miss_that_heals() -> None:
    records, at, generation = below()
    it = world()
    client = it.open(admin=True)
    client.register(ONE)
    mine = [r["chunk"].tobytes() in chain(0, 4) for r in records]
    some = records[mine], at[mine], generation[mine]
    it.handle(ev.TierRecovered(0, *some, hint=True))
    found = client.lookup(ONE, chain(0, 4))
    assert found.leading == sum(mine) > 0
    client.lookup(ONE, chain(0, 4), LookupFlag.LEASE | LookupFlag.LOAD)
    it.settle()  # nothing lies on this shelf
    assert client.lookup(ONE, chain(0, 4)).leading == 0
    assert unknown(it, client, chain(0, 4)) == chain(0, 4)


def test_a_hint_that_does_not_fit_is_passed_over_and_nothing_is_deleted_for_it() -> None:
    records, at, generation = below()
    it = world()
    client = it.open(admin=True)
    client.register(ONE)
    client.store(ONE, chain(0, 4))
    bent = records.copy()
    bent["fingerprint"] = b"x" * 16
    bent["length"][::2] = 7
    for hint in (True, False):
        actions = it.handle(ev.TierRecovered(0, bent, at, generation, hint=hint))
        while it.core.busy:
            actions += it.handle(ev.Tick())
        deleted = [a for a in actions if isinstance(a, ac.TierDelete)]
        assert bool(deleted) is not hint
    assert list(client.lookup(ONE, chain(0, 4)).outcomes) == [O.OK] * 4


def test_a_hint_for_a_spec_that_nobody_named_is_not_kept() -> None:
    records, at, generation = below()
    it = world()
    it.handle(ev.TierRecovered(0, records, at, generation, hint=True))
    assert it.stat()["counters"]["records_waiting"] == 0


def test_the_record_of_what_lies_in_the_tier_is_what_was_written_there() -> None:
    it = World(
        1024 * KIB, 64 * KIB, tiers=(TierConfig("s3", 4096 * KIB, policy=WritePolicy.THROUGH),)
    )
    client = it.open(admin=True)
    client.register(ONE)
    client.store(ONE, chain("a", 3))
    it.settle()
    written = {header.chunk: header for _, _, header, _ in it.shelves[0].there.values()}
    assert written.keys() == set(chain("a", 3))
    where = written[chain("a", 1)[0]].namespace_digest

    def record(key: bytes) -> Any:
        return it.core.record(0, where, ONE.digest, int(Kind.PREFIX), key, 0)

    before = it.stat()
    for key, header in written.items():
        assert record(key) == header._replace(generation=0)
    assert record(chain("b", 1)[0]) is None
    assert it.core.record(0, bytes(32), ONE.digest, int(Kind.PREFIX), chain("a", 1)[0], 0) is None
    assert it.stat() == before, "a question changes nothing"
    last = chain("a", 3)[-1]
    client.evict(ev.Selector(tier="s3", keys=(last,)))
    it.settle()
    assert record(last) is None and client.lookup(ONE, chain("a", 3)).leading == 3
