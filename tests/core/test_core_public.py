"""The namespace `public`: read by all who ask for it, and no hint about anybody."""

from __future__ import annotations

from world import KIB, Client, LookupFlag, O, World, chain, content, refs_of, spec

from kvd.chunk import namespace_digest
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig
from kvd.core.shares import Amount, TenantRules, TierShare
from kvd.errors import ErrorCode

ONE = spec("one", 8 * KIB)
PUBLIC = LookupFlag.PUBLIC
SYSTEM = chain("system prompt", 4)


def come(world: World, name: str) -> Client:
    client = world.open(name)
    client.register(ONE)
    return client


def test_missing_keys_may_be_public_only_if_the_client_asks_so() -> None:
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    assert reader.lookup(ONE, SYSTEM).leading == 0
    found = reader.lookup(ONE, SYSTEM, PUBLIC)
    assert found.leading == 4 and list(found.outcomes) == [O.OK] * 4
    assert writer.lookup(ONE, SYSTEM, PUBLIC).leading == 4
    told = world.stat()["tenants"]["reader"]["counters"]
    assert (told["chunks_asked"], told["chunks_hit"], told["chunks_hit_public"]) == (8, 4, 4)
    assert told["chunks_missed"]["absent"] == 1 and told["chunks_missed"]["skipped"] == 3


def test_or_if_its_tenant_is_configured_so() -> None:
    world = World(tenants=(("reader", TenantRules(public=True)),))
    come(world, "public").store(ONE, SYSTEM)
    assert come(world, "reader").lookup(ONE, SYSTEM).leading == 4
    assert come(world, "other").lookup(ONE, SYSTEM).leading == 0


def test_a_prompt_may_go_from_public_to_ones_own() -> None:
    """The continuation hangs under a chunk that the own namespace does not have."""
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    mine = chain("mine", 3)
    assert reader.store(ONE, mine, parent=SYSTEM[-1], index0=4) == [O.OK] * 3
    assert reader.lookup(ONE, SYSTEM + mine, PUBLIC).leading == 7
    assert reader.lookup(ONE, mine, PUBLIC).leading == 3  # a stream asks batch by batch
    assert reader.lookup(ONE, SYSTEM + mine).leading == 0
    assert writer.lookup(ONE, SYSTEM + mine).leading == 4


def test_public_chunks_are_leased_and_loaded_like_ones_own() -> None:
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    reader.store(ONE, chain("mine", 1), parent=SYSTEM[-1], index0=4)
    found = reader.lookup(
        ONE, SYSTEM + chain("mine", 1), PUBLIC | LookupFlag.LEASE | LookupFlag.LOAD
    )
    refs = refs_of(found.load.refs)
    assert len(refs) == 5 and found.load.done
    for ref in refs:
        assert world.payload[ref.record] == content(world.memory[ref.record])
    for n in range(40):
        writer.store(ONE, chain(("flood", n), 8))
    assert reader.lookup(ONE, SYSTEM, PUBLIC).leading == 4  # it is held
    reader.release(found.lease)
    assert world.tier["leased_chunks"] == 0


def test_what_continues_a_public_chunk_is_no_orphan() -> None:
    world = World(tenants=(("reader", TenantRules({"dram": TierShare(Amount(0, 0.5))})),))
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    mine = chain("mine", 30)
    reader.store(ONE, mine, parent=SYSTEM[-1], index0=4)
    reader.store(ONE, chain("old", 20))
    found = reader.lookup(ONE, SYSTEM + mine, PUBLIC | LookupFlag.LEASE)
    assert found.leading == 34
    reader.release(found.lease)  # it is the younger one now
    world.settle()
    other = come(world, "other")
    for n in range(100):
        other.store(ONE, chain(("scan", n), 2))
    for n in range(28):
        reader.store(ONE, chain(("more", n), 2))
    assert reader.lookup(ONE, SYSTEM + mine, PUBLIC).leading == 34
    assert reader.lookup(ONE, chain("old", 20)).leading < 20


def test_without_the_public_chunk_its_continuation_is_an_orphan_like_any() -> None:
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    reader.store(ONE, chain("mine", 3), parent=SYSTEM[-1], index0=4)
    admin = world.open("default", admin=True)
    admin.evict(ev.Selector(namespace="public", everything=True))
    assert reader.lookup(ONE, SYSTEM + chain("mine", 3), PUBLIC).leading == 0
    assert reader.lookup(ONE, chain("mine", 3), PUBLIC).leading == 0


def test_ones_own_chunk_comes_before_the_public_one() -> None:
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    reader.store(ONE, SYSTEM[:2])
    found = reader.lookup(ONE, SYSTEM, PUBLIC)
    assert found.leading == 4
    told = world.stat()["tenants"]["reader"]["counters"]
    assert told["chunks_hit_public"] == 2


def test_every_key_is_looked_for_in_both() -> None:
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    mine = chain("mine", 2)
    reader.store(ONE, mine)
    keys = [SYSTEM[0], mine[0], chain("nobody's", 1)[0]]
    found = reader.lookup(ONE, keys, PUBLIC | LookupFlag.EVERY)
    assert list(found.outcomes) == [O.OK, O.OK, O.MISS]


def test_public_tells_nothing_about_other_tenants() -> None:
    """K47: what another tenant stored is a miss, with the flag and without."""
    world = World()
    come(world, "public")
    other, reader = come(world, "other"), come(world, "reader")
    other.store(ONE, SYSTEM)
    nothing = chain("never stored", 4)
    for flags in (0, PUBLIC, PUBLIC | LookupFlag.EVERY, PUBLIC | LookupFlag.LEASE):
        theirs = reader.lookup(ONE, SYSTEM, flags)
        nobodys = reader.lookup(ONE, nothing, flags)
        assert theirs._replace() == nobodys
    asked = reader.reserve(ONE, SYSTEM)
    assert set(asked.outcomes) == {O.GRANTED}  # as if nobody had it


def test_only_members_of_public_change_it() -> None:
    world = World()
    writer, reader = come(world, "public"), come(world, "reader")
    writer.store(ONE, SYSTEM)
    assert reader.store(ONE, SYSTEM) == [O.OK] * 4  # its own copies
    for selector in (ev.Selector(keys=tuple(SYSTEM)), ev.Selector(everything=True)):
        reader.evict(selector)
    refused = world.ask(ev.Evict(reader.number, 0, ev.Selector(namespace="public"), False, 0, 1000))
    assert isinstance(refused, ac.Fail) and refused.code is ErrorCode.AUTH
    assert writer.lookup(ONE, SYSTEM).leading == 4


def test_public_has_a_share_like_any_tenant() -> None:
    rules = TenantRules({"dram": TierShare(Amount(0, 0.25))})
    world = World(tenants=(("public", rules),))
    writer, other = come(world, "public"), come(world, "other")
    writer.store(ONE, chain("prompts", 32))
    for n in range(300):
        other.store(ONE, chain(("scan", n), 1))
    assert writer.lookup(ONE, chain("prompts", 32)).leading == 32


# -- bytes in flight ------------------------------------------------------------------------------


def test_unfinished_writes_of_a_tenant_are_bounded_over_all_its_sessions() -> None:
    world = World(tenants=(("small", TenantRules(inflight=24 * KIB)),))
    one, two = come(world, "small"), come(world, "small")
    first = one.reserve(ONE, chain("a", 5))
    assert list(first.outcomes) == [O.GRANTED] * 3 + [O.OVER_QUOTA] * 2
    refused = two.reserve(ONE, chain("b", 1))
    assert isinstance(refused, ac.Fail)
    assert refused.code is ErrorCode.BUSY and refused.retry_ns > 0
    one.fill(first.refs)
    one.commit(first.write)
    assert two.store(ONE, chain("b", 1)) == [O.OK]
    other = come(world, "other")
    assert list(other.reserve(ONE, chain("c", 5)).outcomes) == [O.GRANTED] * 5


def test_one_chunk_is_always_allowed_in_flight() -> None:
    world = World(tenants=(("tiny", TenantRules(inflight=1)),))
    tiny = come(world, "tiny")
    for n in range(3):
        assert tiny.store(ONE, chain(n, 1)) == [O.OK]
    assert list(tiny.reserve(ONE, chain("two", 2)).outcomes) == [O.GRANTED, O.OVER_QUOTA]


def test_a_lookup_that_reserves_is_answered_although_the_tenant_is_busy() -> None:
    world = World(tenants=(("small", TenantRules(inflight=8 * KIB)),))
    client = come(world, "small")
    client.store(ONE, chain("a", 1))
    client.reserve(ONE, chain("open", 1))
    flags = LookupFlag.LEASE | LookupFlag.RESERVE_MISSES
    found = client.lookup(ONE, chain("a", 3), flags)
    assert found.leading == 1 and list(found.reserved.outcomes) == [O.OVER_QUOTA] * 2


def test_who_loads_a_public_chunk_from_below_pays_its_bandwidth_and_public_its_room() -> None:
    """In the core's queue and in the tier's alike."""
    world = World(1024 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 1 << 22),), auto=False)
    writer, reader, admin = come(world, "public"), come(world, "reader"), world.open(admin=True)
    mine = chain("mine", 1)
    writer.store(ONE, SYSTEM)
    reader.store(ONE, mine)
    world.ask(ev.TierCommand(admin.number, 0, "nvme", "drain"))
    world.work()
    admin.evict(ev.Selector(tier="dram", everything=True))
    for number, keys in enumerate((SYSTEM[:1], mine), 1000):
        event = reader.lookup_event(ONE, keys, LookupFlag.LEASE | LookupFlag.LOAD | PUBLIC)
        world.handle(event._replace(request=number))
    public, own = (job for job in world.jobs if isinstance(job, ac.TierRead))
    assert public.namespace == namespace_digest("public")
    assert public.tenant == namespace_digest("reader")
    assert own.tenant in (b"", own.namespace)
    world.work()
    tenants = world.stat()["tenants"]
    size = 8 * KIB
    assert [tenants[name]["tiers"]["dram"]["used_bytes"] for name in ("public", "reader")] == [
        size,
        size,
    ]
