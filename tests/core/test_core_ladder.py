"""Chunks that lie below DRAM: how they get there, how they come back, and what may go wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from world import KIB, LookupFlag, O, S, World, chain, content, key, refs_of, spec

from kvd.chunk import State
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig, WritePolicy
from kvd.core.shares import TenantRules, TierShare

ONE = spec("one", 28 * KIB)  # two slots a slab: 32 in all
LOAD = LookupFlag.LEASE | LookupFlag.LOAD
A = ev.TierAnswer


def ladder(limit: int = 4096 * KIB, **settings: Any) -> World:
    tier = TierConfig("nvme", limit, **settings.pop("tier", {}))
    tiers = settings.pop("tiers", (tier,))
    return World(1024 * KIB, 64 * KIB, tiers=tiers, **settings)


def filled(world: World, chains: int = 12, length: int = 4) -> Any:
    """More than DRAM holds, chain by chain."""
    client = world.open(admin=True)
    client.register(ONE)
    for n in range(chains):
        assert set(client.store(ONE, chain(n, length))) == {O.OK}
        world.settle()
    return client


def drained(world: World, client: Any, *names: object, length: int = 4) -> None:
    """These chains are below, and nowhere else."""
    hashes = [h for name in names for h in chain(name, length)]
    rows = client.list("chunks", ev.Selector(keys=tuple(hashes)))
    assert {tuple(r["tiers"]) for r in rows} == {("nvme",)} and len(rows) == len(hashes)


def reads(world: World) -> list[ac.TierRead]:
    """Reads under way, when everything else is done that they may wait for."""
    while others := [j for j in world.jobs if not isinstance(j, ac.TierRead)]:
        world.do(others[0])
    return [j for j in world.jobs if isinstance(j, ac.TierRead)]


def test_what_dram_can_not_hold_is_below_and_nothing_is_lost() -> None:
    world = ladder()
    client = filled(world)
    assert world.tier["used_bytes"] <= world.tier["limit_bytes"]
    for n in range(12):
        found = client.lookup(ONE, chain(n, 4))
        assert found.leading == 4 and list(found.outcomes) == [O.OK] * 4
    below = world.stat()["tiers"][1]
    assert below["name"] == "nvme" and below["chunks"] >= 48 - 32
    assert below["chunks"] == len(world.shelves[0].there)
    assert world.counter("demotions", "written") == below["chunks"]
    assert world.counter("chunks_evicted", "demoted") == below["chunks"]
    assert world.counter("chunks_evicted", "capacity") == 0


def test_demotion_begins_at_the_high_mark_and_ends_at_the_low_one() -> None:
    world = World(
        6400 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 1 << 24),), high=0.97, low=0.95, auto=False
    )
    client = filled(world, 48)  # 192 of 200 slots
    assert not [j for j in world.jobs if isinstance(j, ac.TierWrite)]
    most = 0
    for n in range(48, 60):
        client.store(ONE, chain(n, 4))
        world.work()
        world.settle()
        most = max(most, world.tier["used_bytes"])
    slots = 200 * 28 * KIB
    assert 0.95 * slots <= most <= slots
    assert world.tier["used_bytes"] <= 0.98 * slots


def test_a_batch_of_demotions_is_at_most_a_fiftieth_of_the_arena() -> None:
    world = ladder(auto=False, batch_share=0.06)
    filled(world, 8)
    writes = [j for j in world.jobs if isinstance(j, ac.TierWrite | ac.Seal)]
    assert len(world.core._demotions.by_row) <= int(1024 * 0.06 / 28)
    assert writes


def test_a_lookup_says_in_which_tier_a_hit_lies() -> None:
    world = ladder()
    client = filled(world)
    drained(world, client, 0)
    both = [*chain(11, 1), *chain(0, 2)]
    found = client.lookup(ONE, both, LookupFlag.EVERY)
    assert list(found.outcomes) == [O.OK] * 3 and found.tiers == b"\0\1\1"
    assert client.lookup(ONE, chain(11, 4)).tiers == b""
    assert client.lookup(ONE, chain(0, 1)).tiers == b"\1"


def test_a_load_from_below_streams_chunk_by_chunk_in_order() -> None:
    world = ladder(auto=False)
    client = filled(world)
    world.work()
    drained(world, client, 0)
    found = client.lookup(ONE, chain(0, 4), LOAD)
    assert not found.load.done and set(found.load.outcomes) == {O.FAILED}
    transfer, known = found.load.transfer, 0
    for n in range(4):
        running = reads(world)
        assert [r.chunk for r in running] == chain(0, 4)[n : n + len(running)]
        if n == 0:
            assert len(running) == 1, "the first read has the medium for itself"
        world.do(running[0])
        got = world.ask(ev.Wait(client.number, 0, transfer, known, world.now + S))
        assert (got.items, list(got.outcomes)) == (n.to_bytes(4, "little"), [O.OK])
        ref = refs_of(got.refs)[0]
        header = world.memory[ref.record]
        assert header.chunk == chain(0, 4)[n] and header.generation == ref.generation
        assert world.payload[ref.record] == content(header)
        known = got.known
    assert got.done


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_long_load_asks_for_most_of_its_chunks_behind_its_first_read(cancelled: bool) -> None:
    """Who ends it before has the rest not asked for at all."""
    world = ladder(write_share=0.5)
    client = filled(world, chains=6, length=12)
    drained(world, client, 0, length=12)
    world.auto = False
    found, actions = world.request(client.lookup_event(ONE, chain(0, 12), LOAD))
    assert found.leading == 12
    assert [a.chunk for a in actions if isinstance(a, ac.TierRead)] == [chain(0, 12)[0]]
    assert [job.chunk for job in reads(world)] == [chain(0, 12)[0]]
    assert world.core._fetches.queued == 7
    if cancelled:
        world.handle(ev.Release(client.number, 0, found.lease))
    actions = world.settle()
    world.auto = True
    actions += world.work() + world.advance(S)
    asked = [job.chunk for job in actions if isinstance(job, ac.TierRead)]
    if cancelled:
        assert asked == []
        return
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert got.done and set(got.outcomes) == {O.OK}
    assert asked == chain(0, 12)[1:]


@pytest.mark.parametrize("weight", [1, 3])
def test_a_flood_of_one_tenant_leaves_the_loads_of_another_their_turns(weight: int) -> None:
    """The flood was there first; the other's chunks come up beside as many of it, by weight."""
    world = ladder(
        auto=False, tier={"reads": 1, "first_alone": False}, transient_share=1.0, isolate=False
    )
    loud, calm, pusher = (world.open(name) for name in ("loud", "calm", "pusher"))
    mine: dict[bytes, str] = {}
    for client, name, count in ((loud, "loud", 8), (calm, "calm", 4), (pusher, "pusher", 16)):
        client.register(ONE)
        for n in range(count):
            hashes = chain((name, n), 2)
            assert set(client.store(ONE, hashes)) == {O.OK}
            mine |= dict.fromkeys(hashes, name)
            world.work()
    world.handle(ev.SetTenant("calm", TenantRules({"nvme": TierShare(weight=weight)})))
    for n in range(8):
        loud.lookup(ONE, chain(("loud", n), 2), LOAD)
    for n in range(4):
        calm.lookup(ONE, chain(("calm", n), 2), LOAD)
    order = []
    while running := reads(world) or (world.advance(S // 10) and reads(world)):
        assert len(running) == 1
        order.append(mine[running[0].chunk])
        world.do(running[0])
    assert order.count("loud") == 16 and order.count("calm") == 8
    first = order[: order.index("calm") + 8 * (weight + 1) // weight]
    assert first.count("calm") == 8, order
    assert order.index("calm") <= 1


def test_a_load_whose_first_chunk_finds_no_room_does_not_hold_up_the_rest() -> None:
    """All of DRAM is leased: each chunk of the load is answered, and later loads are served."""
    world = ladder(lease_share=1.0)
    client = filled(world)
    drained(world, client, 0, 1, 2)
    world.handle(ev.TierState(0, True, False))  # nothing is demoted any more
    client.lookup(ONE, chain(2, 4), LOAD)  # takes what is free
    world.advance(S)
    rows = client.list("chunks", ev.Selector(tier="dram"))
    here = [bytes.fromhex(row["hash"]) for row in rows]
    held = client.lookup(ONE, here, LookupFlag.LEASE | LookupFlag.EVERY)
    found = client.lookup(ONE, chain(0, 3), LOAD)
    world.advance(S)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert got.done and set(got.outcomes) == {O.NO_SPACE}
    client.release(held.lease)
    client.release(found.lease)
    world.settle()
    again = client.lookup(ONE, chain(1, 3), LOAD)
    world.advance(S)
    got = world.ask(ev.Wait(client.number, 0, again.load.transfer, 0, world.now + S))
    assert got.done and set(got.outcomes) == {O.OK}


def test_a_first_hit_goes_with_its_lease_and_a_second_one_stays() -> None:
    world = ladder()
    client = filled(world)
    drained(world, client, 0)
    for hit in (1, 2):
        found = client.lookup(ONE, chain(0, 1), LOAD)
        assert world.stat()["tiers"][0]["transient_bytes"] == (28 * KIB if hit == 1 else 0)
        client.release(found.lease)
        world.settle()
        row = client.list("chunks", ev.Selector(keys=(chain(0, 1)[0],)))[0]
        assert row["tiers"] == (["nvme"] if hit == 1 else ["dram", "nvme"])
    assert client.lookup(ONE, chain(0, 1)).tiers == b""


def test_a_second_lease_while_the_first_holds_makes_it_stay() -> None:
    world = ladder()
    client = filled(world)
    first = client.lookup(ONE, chain(0, 1), LOAD)
    second = client.lookup(ONE, chain(0, 1), LOAD)
    assert second.load.done
    assert world.counter("chunks_kept") == 1
    client.release(first.lease)
    client.release(second.lease)
    world.settle()
    assert client.list("chunks", ev.Selector(keys=(chain(0, 1)[0],)))[0]["tiers"][0] == "dram"


def test_first_hits_hold_a_tenth_of_dram_at_most_and_the_rest_stays() -> None:
    world = ladder()
    client = filled(world)
    drained(world, client, 0, 1)
    one = client.lookup(ONE, chain(0, 4), LOAD)
    two = client.lookup(ONE, chain(1, 4), LOAD)
    assert world.stat()["tiers"][0]["transient_bytes"] <= 1024 * KIB // 10
    assert world.counter("shards_promoted", "stays") > 0
    for found in (one, two):
        for ref in refs_of(client.load(found.lease).refs):
            assert world.payload[ref.record] == content(world.memory[ref.record])
        client.release(found.lease)


def test_one_read_serves_all_who_wait_for_it() -> None:
    world = ladder(auto=False)
    client = filled(world)
    world.work()
    other = world.open()
    other.register(ONE)
    one = client.lookup(ONE, chain(0, 1), LOAD)
    two = other.lookup(ONE, chain(0, 1), LOAD)
    running = reads(world)
    assert len(running) == 1
    world.do(running[0])
    for who, found in ((client, one), (other, two)):
        got = world.ask(ev.Wait(who.number, 0, found.load.transfer, 0, world.now + S))
        assert list(got.outcomes) == [O.OK]


def test_fifty_loads_of_one_prefix_are_one_read_a_chunk_and_all_end_with_it() -> None:
    """K155: who asks while a chunk is being read shares that read, and is served in that moment."""
    world = World(8192 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 1 << 24),), lease_share=1.0)
    owner = world.open(admin=True)
    owner.register(ONE)
    hashes = chain("system prompt", 40)
    assert set(owner.store(ONE, hashes)) == {O.OK}
    world.ask(ev.TierCommand(owner.number, 0, "nvme", "drain"))
    world.settle()
    owner.evict(ev.Selector(tier="dram", everything=True))
    world.auto = False
    clients = [world.open() for _ in range(50)]
    transfers = [(c, c.lookup(ONE, hashes, LOAD).load.transfer) for c in clients]
    done = 0
    while running := reads(world):
        world.do(running[0])
        done += 1
        for client, transfer in transfers:
            got = world.ask(ev.Wait(client.number, 0, transfer, 0, world.now))
            assert list(got.outcomes).count(O.OK) == done
    assert done == len(hashes)


@pytest.mark.parametrize("fail", [3, 4, 5])
def test_a_tier_that_refuses_is_a_miss_and_its_chunk_stays_there(fail: int) -> None:
    world = ladder(auto=False)
    client = filled(world)
    world.work()
    found = client.lookup(ONE, chain(0, 1), LOAD)
    used = world.tier["used_bytes"]
    world.do(reads(world)[0], fail=fail)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert list(got.outcomes) == [O.DEADLINE if fail == 4 else O.MISS]
    assert world.tier["used_bytes"] < used and world.tier["transient_bytes"] == 0
    client.release(found.lease)
    world.auto = True
    assert client.lookup(ONE, chain(0, 1), LOAD).load.transfer
    assert client.list("chunks", ev.Selector(keys=(chain(0, 1)[0],)))[0]["tiers"] == [
        "dram",
        "nvme",
    ]


def test_bytes_that_do_not_hold_are_a_counted_miss_and_never_shown_again() -> None:
    world = ladder()
    client = filled(world)
    shelf = world.shelves[0]
    name = next(n for n in shelf.there if n[3] == chain(0, 1)[0])
    shelf.there[name] = (*shelf.there[name][:3], b"other bytes")
    found = client.lookup(ONE, chain(0, 1), LOAD)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert list(got.outcomes) == [O.CORRUPT]
    assert world.counter("shards_fetched", "corrupt") == 1
    client.release(found.lease)
    assert list(client.lookup(ONE, chain(0, 1)).outcomes) == [O.MISS]
    assert client.lookup(ONE, chain(0, 4), LookupFlag.EVERY).leading == 0


def test_another_chunks_record_under_the_key_is_not_delivered() -> None:
    world = ladder()
    client = filled(world)
    shelf = world.shelves[0]
    name = next(n for n in shelf.there if n[3] == chain(0, 1)[0])
    at, generation, header, payload = shelf.there[name]
    shelf.there[name] = (at, generation, header._replace(fingerprint=b"x" * 16), payload)
    found = client.lookup(ONE, chain(0, 1), LOAD)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert list(got.outcomes) == [O.CORRUPT] and not got.refs
    assert world.counter("shards_fetched", "foreign") == 1 and name not in shelf.there


def test_a_read_that_hangs_is_a_miss_in_time_and_its_slot_waits_for_it() -> None:
    world = ladder(auto=False, tier={"read_ns": S})
    client = filled(world)
    world.work()
    found = client.lookup(ONE, chain(0, 2), LOAD)
    read = reads(world)[0]
    world.jobs.remove(read)
    record = world.record_at(read.offset)
    world.advance(2 * S)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert got.outcomes[0] == O.DEADLINE
    assert world.stat()["tiers"][1]["overdue"] == 1
    # DRAM goes on, and so does what needs no tier
    assert client.lookup(ONE, chain(11, 4)).leading == 4
    assert list(client.lookup(ONE, chain(1, 1)).outcomes) == [O.MISS]
    assert world.counter("chunks_missed", "away") == 1
    assert set(client.store(ONE, chain("new", 4))) == {O.OK}
    taken = {r for r, h in world.memory.items() if h.state in (State.READY, State.WRITING)}
    assert record not in taken
    world.jobs.append(read)
    world.work()
    world.settle()
    assert world.stat()["tiers"][1]["overdue"] == 0
    assert list(client.lookup(ONE, chain(1, 1)).outcomes) == [O.OK]


def test_a_tier_that_takes_no_writes_drops_chunks_with_a_reason() -> None:
    world = ladder()
    world.handle(ev.TierState(0, True, False))
    client = filled(world)
    assert world.counter("demotions", "off") > 0
    assert world.counter("chunks_evicted", "capacity") == world.counter("demotions", "off")
    assert set(client.store(ONE, chain("more", 4))) == {O.OK}
    assert not world.shelves[0].there


def test_failed_demotions_drop_and_never_wedge() -> None:
    world = ladder()
    world.fails = lambda job: 3 if isinstance(job, ac.TierWrite) else 0
    filled(world, 40)
    assert world.counter("demotions", "failed") > 20
    assert world.counter("chunks_evicted", "undemoted") > 20
    assert not world.shelves[0].there


def test_a_full_tier_lets_its_own_coldest_go() -> None:
    world = ladder(limit=10 * 28 * KIB)
    client = filled(world, 20)
    shelf = world.shelves[0]
    assert shelf.used <= shelf.limit
    below = world.stat()["tiers"][1]
    assert 0 < below["chunks"] == len(shelf.there) <= 10
    assert world.counter("chunks_evicted_below", "capacity") > 20
    assert client.lookup(ONE, chain(0, 4)).leading == 0
    assert client.lookup(ONE, chain(19, 4)).leading == 4
    for row in client.list("chunks"):  # no chunk without its parent
        if row["index"]:
            assert client.list("chunks", ev.Selector(keys=(bytes.fromhex(row["parent"]),)))


def test_write_through_leaves_a_copy_below_and_eviction_writes_nothing() -> None:
    world = ladder(tier={"policy": WritePolicy.THROUGH})
    client = filled(world, 3)
    assert len(world.shelves[0].there) == 12
    row = client.list("chunks", ev.Selector(keys=(chain(0, 1)[0],)))[0]
    assert row["tiers"] == ["dram", "nvme"]
    before = world.counter("shards_written", "ok")
    filled(world, 0)
    for n in range(3, 12):
        client.store(ONE, chain(n, 4))
        world.settle()
    assert world.counter("shards_written", "ok") == before + 36
    assert world.counter("demotions", "present") + world.counter("chunks_evicted", "demoted") > 0
    assert all(client.lookup(ONE, chain(n, 4)).leading == 4 for n in range(12))


def test_on_second_hit_spares_the_tier_what_was_not_hit() -> None:
    world = ladder(tier={"policy": WritePolicy.ON_SECOND_HIT})
    client = filled(world, 3)
    for _ in range(2):
        client.release(client.lease(ONE, chain(1, 4)).lease)
        world.settle()
    assert {n[3] for n in world.shelves[0].there} == set(chain(1, 4))
    for n in range(3, 14):
        client.store(ONE, chain(n, 4))
        world.settle()
    assert {n[3] for n in world.shelves[0].there} == set(chain(1, 4))
    assert world.counter("demotions", "unwanted") > 0
    assert client.lookup(ONE, chain(1, 4)).leading == 4


def test_evict_by_command_takes_a_chunk_from_all_tiers_or_from_one() -> None:
    world = ladder(tier={"policy": WritePolicy.THROUGH})
    client = filled(world, 2)
    one, two = chain(0, 4), chain(1, 4)
    assert client.evict(ev.Selector(keys=tuple(one), tier="nvme")).evicted == 4
    assert {tuple(r["tiers"]) for r in client.list("chunks", ev.Selector(keys=tuple(one)))} == {
        ("dram",)
    }
    assert client.evict(ev.Selector(keys=tuple(two), tier="dram")).evicted == 4
    assert client.lookup(ONE, two).tiers == b"\1\1\1\1"
    assert client.evict(ev.Selector(everything=True)).evicted == 8
    assert not client.list("chunks") and not world.shelves[0].there
    assert world.tier["used_bytes"] == 0


def test_a_store_of_what_is_below_exists_and_of_what_is_out_of_reach_is_granted() -> None:
    world = ladder()
    client = filled(world)
    drained(world, client, 0)
    assert client.store(ONE, chain(0, 4)) == [O.EXISTS] * 4
    world.handle(ev.TierState(0, False, False))
    assert client.lookup(ONE, chain(0, 4)).outcomes[0] == O.MISS
    assert client.store(ONE, chain(0, 4)) == [O.OK] * 4
    world.handle(ev.TierState(0, True, True))
    assert client.lookup(ONE, chain(0, 4)).tiers == b""


def test_a_lease_on_what_lies_below_keeps_it_there() -> None:
    world = ladder(limit=10 * 28 * KIB)
    client = filled(world, 10)
    row = next(r for r in client.list("chunks") if r["tiers"] == ["nvme"] and r["index"] == 0)
    hash_ = bytes.fromhex(row["hash"])
    held = client.lease(ONE, [hash_])
    for n in range(10, 30):
        client.store(ONE, chain(n, 4))
        world.settle()
    assert list(client.lookup(ONE, [hash_]).outcomes) == [O.OK]
    loaded = client.load(held.lease)
    assert loaded.transfer or loaded.outcomes == bytes([O.OK])


def test_the_next_tier_serves_what_the_first_can_not() -> None:
    tiers = (
        TierConfig("nvme", 1 << 22),
        TierConfig("s3", 1 << 24, policy=WritePolicy.THROUGH, first_alone=False),
    )
    world = ladder(tiers=tiers)
    client = filled(world)
    assert len(world.shelves[1].there) == 48
    assert client.lookup(ONE, chain(0, 1)).tiers == b"\1"
    world.handle(ev.TierState(0, False, False))
    assert client.lookup(ONE, chain(0, 1)).tiers == b"\2"
    world.handle(ev.TierState(0, True, True))
    world.auto = False
    found = client.lookup(ONE, chain(0, 1), LOAD)
    world.do(reads(world)[0], fail=3)
    read = reads(world)[0]
    assert read.tier == 1
    world.do(read)
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert list(got.outcomes) == [O.OK]


def test_a_restart_takes_up_what_lies_below_without_reading_it() -> None:
    world = ladder()
    client = filled(world)
    before = {r["hash"]: r["tiers"] for r in client.list("chunks")}
    world.locks.clear()
    world.auto = False
    world.restart()
    assert not [j for j in world.jobs if isinstance(j, ac.TierRead)]
    client = world.open(admin=True)
    assert {r["hash"]: r["tiers"] for r in client.list("chunks")} == before
    assert world.stat()["tiers"][1]["chunks"] == len(world.shelves[0].there)
    client.register(ONE)
    world.auto = True
    for n in range(12):
        found = client.lookup(ONE, chain(n, 4), LOAD)
        assert found.leading == 4
        client.release(found.lease)
    assert world.counter("shards_fetched", "ok") > 0


def dram_is_lost(world: World) -> None:
    """As after a reboot."""
    world.locks.clear()
    world.memory.clear()
    world.slot_sizes = [0] * len(world.slot_sizes)


def test_without_dram_the_tier_alone_brings_everything_back_once_its_spec_is_known() -> None:
    world = ladder(tier={"policy": WritePolicy.THROUGH})
    filled(world, 5)
    dram_is_lost(world)
    world.core._store.spaces.specs.clear()
    world.core._store.spaces.namespaces.clear()
    world.restart()
    assert world.stat()["counters"]["records_waiting"] == 20
    client = world.open(admin=True)
    assert world.stat()["counters"]["records_waiting"] == 20
    client.register(ONE)
    world.settle()
    assert world.stat()["counters"]["records_waiting"] == 0
    for n in range(5):
        found = client.lookup(ONE, chain(n, 4), LOAD)
        assert (found.leading, found.tiers) == (4, b"\1\1\1\1")
        client.release(found.lease)
    assert client.list("prefixes")[0]["depth"] == 4


def test_what_nobody_names_for_long_makes_room_for_what_is_in_use() -> None:
    """Another model after a reboot: the tier is full of the last one's chunks, which nobody asks
    for and no policy knows."""
    world = ladder(16 * 28 * KIB, tier={"policy": WritePolicy.THROUGH})
    filled(world, 5)
    shelf = world.shelves[0]
    old = set(shelf.there)
    dram_is_lost(world)
    world.core._store.spaces.specs.clear()
    world.core._store.spaces.namespaces.clear()
    world.restart()
    assert world.stat()["counters"]["records_waiting"] == len(old) >= 14
    client = world.open(admin=True)
    new = spec("the next one", 28 * KIB)
    client.register(new)
    client.store(new, chain("early", 4))
    world.settle()
    assert old <= set(shelf.there)  # its engines may still be starting
    world.advance(1000 * S)
    for n in range(8):
        client.store(new, chain(n, 4))
        world.settle()
    assert world.stat()["counters"]["records_waiting"] == 0
    assert world.counter("records_rejected", "unknown_spec") == len(old)
    below = world.stat()["tiers"][1]
    assert below["chunks"] == len(shelf.there) >= 12 and not old & set(shelf.there)


def test_what_nobody_names_on_a_server_is_left_there() -> None:
    """Most of a bucket may be other daemons', and a name is all that is known of it."""
    world = ladder(16 * 28 * KIB, tier={"policy": WritePolicy.THROUGH})
    filled(world, 5)
    shelf = world.shelves[0]
    old = set(shelf.there)
    records, _, _ = shelf.records()
    other = ladder(16 * 28 * KIB, tier={"policy": WritePolicy.THROUGH})
    other.shelves = world.shelves
    none = np.zeros(len(records), np.uint64)
    other.handle(ev.TierRecovered(0, records, none, none))
    other.settle()
    client = other.open(admin=True)
    new = spec("the next one", 28 * KIB)
    client.register(new)
    other.advance(1000 * S)
    client.store(new, chain("new", 4))
    other.settle()
    assert old <= set(shelf.there)
    assert other.stat()["counters"]["records_waiting"] == len(old)


def test_records_that_fit_nothing_are_deleted_there() -> None:
    world = ladder(tier={"policy": WritePolicy.THROUGH})
    filled(world, 3)
    shelf = world.shelves[0]
    names = [n for n in shelf.there if n[3] in chain(0, 4)]
    at, generation, header, payload = shelf.there[names[1]]
    shelf.there[names[1]] = (at, generation, header._replace(length=5), payload)
    at, generation, header, payload = shelf.there[names[2]]
    shelf.there[names[2]] = (at, generation, header._replace(index=7), payload)
    dram_is_lost(world)
    world.restart()
    world.work()
    assert world.counter("records_rejected", "geometry") == 1
    assert names[1] not in shelf.there
    client = world.open(admin=True)
    client.register(ONE)
    assert client.lookup(ONE, chain(0, 4)).leading == 1
    assert client.lookup(ONE, chain(1, 4)).leading == 4


def test_records_told_later_are_taken_up_beside_everything_else() -> None:
    world = ladder(tier={"policy": WritePolicy.THROUGH})
    filled(world, 5)
    records, at, generation = world.shelves[0].records()
    other = ladder(tier={"policy": WritePolicy.THROUGH})
    other.shelves = world.shelves
    client = other.open(admin=True)
    client.register(ONE)
    order = np.random.default_rng(3).permutation(len(at))
    for part in np.array_split(order, 7):
        other.handle(ev.TierRecovered(0, records[part], at[part], generation[part]))
        other.settle()
    for n in range(5):
        found = client.lookup(ONE, chain(n, 4), LOAD)
        assert (found.leading, found.tiers) == (4, b"\1\1\1\1")
        client.release(found.lease)
    assert other.stat()["tiers"][1]["chunks"] == 20


def test_no_memory_of_a_tier_without_one() -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("x", 4))
    assert not world.core._store.chunks.np_tally.any()
    assert not world.core._store.ladder.lowers
    assert key("x", 0) == chain("x", 1)[0]
