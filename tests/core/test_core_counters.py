"""One event, one count: what is counted is what happened."""

from __future__ import annotations

import random
from typing import Any

import pytest
from world import KIB, Client, O, S, World, chain, key, spec

from kvd.chunk import State
from kvd.core import CoreFault
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.counters import Counters
from kvd.core.events import LookupFlag
from kvd.core.stats import shown
from kvd.telemetry import METRICS, MetricKind

ONE = spec()
FOUR = spec("four", *[4 * KIB] * 4)


def total(value: Any) -> int:
    return sum(value.values()) if isinstance(value, dict) else int(value)


def test_asked_hit_delivered_and_failed_are_counters_of_their_own() -> None:
    """K131: 100 lookups of 10 chunks of which 4 lead; 20 loads fail."""
    world = World(lease_share=1.0, auto=False)
    client = world.open("a", admin=True)
    client.register(ONE)
    keys = chain("p", 10)
    client.store(ONE, keys[:4])
    client.store(ONE, keys[6:], parent=keys[5], index0=6)
    leases = []
    for _ in range(100):
        got = client.lease(ONE, keys)
        assert got.leading == 4
        leases.append(got.lease)
    assert world.counter("lookups") == 100
    assert world.counter("chunks_asked") == 1000
    assert world.counter("chunks_hit") == 400
    assert world.counter("chunks_missed", "absent") == 100
    assert world.counter("chunks_missed", "skipped") == 500
    for lease in leases[:60]:
        client.load(lease)
    assert world.counter("chunks_delivered") == 240
    # a lease that was never loaded delivers nothing and fails nothing
    for lease in leases[60:]:
        client.release(lease)
    assert world.counter("chunks_delivered") == 240
    assert world.counter("chunks_failed") == 0


def test_failed_loads_are_counted_as_failed() -> None:
    """K131: delivered and failed add up to the loads."""
    world = World()
    client = world.open()
    client.register(ONE)
    keys = chain("p", 10)
    client.store(ONE, keys)
    world.restart()
    for record in list(world.memory)[:3]:
        world.payload[record] = b"bad"
    client = world.open()
    lease = client.lease(ONE, keys).lease
    client.load(lease)
    world.settle()
    assert world.counter("chunks_delivered") == 7
    assert world.counter("chunks_failed") == 3
    assert world.counter("shards_loaded", "corrupt") == 3
    assert world.counter("shards_verified", "corrupt") == 3


def test_one_logical_event_is_counted_once() -> None:
    """K134: the same chunk by four ranks is one hit and one delivered chunk, and four shards."""
    world = World()
    scheduler = world.open(group=b"e")
    ranks = [world.open(group=b"e") for _ in range(4)]
    scheduler.register(FOUR)
    scheduler.store(FOUR, [key("k")])
    lease = scheduler.lease(FOUR, [key("k")]).lease
    for rank, client in enumerate(ranks):
        client.load(lease, shards=(rank,))
    assert world.counter("chunks_asked") == world.counter("chunks_hit") == 1
    assert world.counter("chunks_delivered") == 1
    assert world.counter("shards_loaded", "ok") == 4
    assert world.counter("bytes_loaded") == 16 * KIB
    ranks[0].load(lease, shards=(0,))
    assert world.counter("chunks_delivered") == 1
    assert world.counter("shards_loaded", "ok") == 5


def test_a_slot_that_moves_is_no_hit_and_no_store() -> None:
    """K134: what the daemon does on its own is counted apart."""
    world = World(256 * KIB, 64 * KIB)
    client = world.open()
    small, big = spec("s", 8 * KIB), spec("b", 60 * KIB)
    client.register(small)
    client.register(big)
    for n in range(4):
        client.store(small, chain(n, 8))
        world.advance(S)
    for n in range(4):
        client.release(client.lease(small, chain(n, 1)).lease)
    before = world.stat()["counters"]
    client.store(big, [key("b")])
    after = world.stat()["counters"]
    assert after["slots_moved"]["done"] > 0
    assert after["chunks_hit"] == before["chunks_hit"]
    assert after["chunks_stored"] == before["chunks_stored"] + 1


def test_totals_are_the_sums_over_tenants() -> None:
    """K131"""
    world = World()
    clients = [world.open(name) for name in ("a", "b", "c")]
    for client in clients:
        client.register(ONE)
    rng = random.Random(1)
    for _ in range(60):
        client = rng.choice(clients)
        keys = chain(rng.randrange(5), rng.randrange(1, 5))
        client.store(ONE, keys)
        lease = client.lease(ONE, chain(rng.randrange(5), 5)).lease
        if lease:
            client.load(lease)
            client.release(lease)
    stat = world.stat()
    for name, metric in METRICS.items():
        if metric.tenant:
            each = [total(t["counters"][name]) for t in stat["tenants"].values()]
            assert sum(each) == total(stat["counters"][name])
    assert sum(t["chunks"] for t in stat["tenants"].values()) == stat["tiers"][0]["chunks"]


def test_a_tenants_stat_is_its_own() -> None:
    """What it has, leases and writes; how full the tiers are, for that is what it is refused by."""
    world = World()
    admin, mine, theirs = world.open(admin=True), world.open("mine"), world.open("theirs")
    for client in (mine, theirs):
        client.register(ONE)

    def seen(client: Client) -> Any:
        stat = world.ask(ev.Stat(client.number, 0)).stat
        for part in (stat, *stat["tiers"]):
            for name in ("uptime_s", "used_bytes", "slot_bytes", "slabs_free"):
                part.pop(name, None)
        return stat

    mine.store(ONE, chain("p", 2))
    mine.lease(ONE, chain("p", 2))
    mine.reserve(ONE, chain("w", 1))
    mine.reserve(ONE, chain("late", 1), ttl=S // 2)
    world.advance(S)
    before = seen(mine)
    assert before["counters"]["chunks_stored"] == before["tiers"][0]["chunks"] == 2
    assert before["counters"]["leased_chunks"] == before["tiers"][0]["leased_chunks"] == 2
    assert before["counters"]["active_leases"] == before["sessions"] == 1
    assert before["counters"]["active_writes"] == 2
    assert before["counters"]["writing_bytes"] == before["tiers"][0]["writing_bytes"] == 8 * KIB
    assert before["counters"]["condemned_bytes"] == 8 * KIB
    theirs.store(ONE, chain("q", 5))
    theirs.lease(ONE, chain("q", 3))
    theirs.reserve(ONE, chain("x", 4))
    world.open("theirs")
    assert isinstance(theirs.lookup(spec("unknown"), chain("q", 1)), ac.Fail)
    assert seen(mine) == before
    assert set(before["tenants"]) == {"mine"}
    assert seen(admin)["counters"]["chunks_stored"] == 7


def test_counters_only_rise_and_add_up() -> None:
    """K132 (in the core): between two looks nothing falls; hit <= asked, delivered <= hit."""
    world = World(256 * KIB, 64 * KIB)
    client = world.open(admin=True)
    client.register(ONE)
    rng = random.Random(6)
    before = world.stat()["counters"]
    for n in range(120):
        keys = chain(rng.randrange(12), rng.randrange(1, 6))
        client.store(ONE, keys)
        got = client.lookup(ONE, chain(rng.randrange(12), 5), LookupFlag.LEASE)
        if got.lease:
            client.load(got.lease)
            client.release(got.lease)
        if n % 10 == 0:
            client.evict(ev.Selector(keys=tuple(keys)))
        after = world.stat()["counters"]
        for name, metric in METRICS.items():
            if metric.kind is MetricKind.COUNTER:
                old, new = before[name], after[name]
                if isinstance(new, dict):
                    assert all(new[label] >= old[label] for label in new)
                else:
                    assert new >= old
        missed = total(after["chunks_missed"])
        assert after["chunks_hit"] + missed == after["chunks_asked"]
        assert after["chunks_delivered"] <= after["chunks_hit"]
        before = after


def test_stat_has_every_declared_metric_and_no_other() -> None:
    world = World()
    counters = world.stat()["counters"]
    assert set(counters) == set(METRICS)
    for name, metric in METRICS.items():
        if metric.values:
            assert set(counters[name]) == set(metric.values)
        assert metric.help and metric.unit


def test_a_reading_is_of_its_moment_whatever_comes_after() -> None:
    """K132: it can be worked out later, by another thread, and nothing in it moves meanwhile."""
    world = World()
    clients = [world.open(name) for name in ("a", "b")]
    for client in clients:
        client.register(ONE)
        client.store(ONE, chain(client.number, 3))
    reading, told = world.core.reading(), world.core.stat()
    for client in [*clients, world.open("c")]:
        client.register(ONE)
        client.store(ONE, chain("later", 5))
        client.lease(ONE, chain(client.number, 3))
    del told["reuse"]
    assert shown(reading) == told
    assert shown(world.core.reading()) != told


def test_a_commit_is_counted_slice_by_slice() -> None:
    """K134: at every pause of a long one the counts are those of what can be read by then."""
    world = World(write_share=1.0)
    client = world.open()
    client.register(ONE)
    write = client.reserve(ONE, chain("p", 80))
    client.fill(write.refs)
    client.commit(write.write, [7])
    digests = bytes(16 * 80)
    world.handle(ev.Commit(client.number, 900, write.write, None, digests))
    seen = []
    while True:
        done = len(world.in_state(State.READY))
        assert world.tier["chunks"] == world.counter("chunks_stored") == done
        assert world.counter("bytes_stored") == done * ONE.shards[0].nbytes
        assert world.counter("shards_sealed", "client") == done - 1
        seen.append(done)
        if 900 in world.replies:
            break
        world.handle(ev.Tick())
    assert len(seen) > 2 and seen[0] < seen[1] < seen[-1] == 80
    assert world.counter("shards_committed", "ok") == 80
    assert world.counter("shards_committed", "failed") == 1  # the one that was there already


@pytest.mark.inside
def test_a_commit_that_meets_a_fault_counts_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    write = client.reserve(ONE, chain("p", 5))
    client.fill(write.refs)
    store = world.core._store
    enter, left = store.enter, [3]

    def failing(row: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("as a test wants it")
        enter(row)

    monkeypatch.setattr(store, "enter", failing)
    with pytest.raises(CoreFault):
        world.core.handle(ev.Commit(client.number, 900, write.write, None, None), world.now)
    assert world.counter("shards_committed", "ok") == 3
    assert world.counter("chunks_stored") == world.tier["chunks"]


def test_what_is_not_declared_cannot_be_counted() -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        counters.own["chunks_imagined", ""] += 1
    with pytest.raises(KeyError):
        counters.tenant("a")["chunks_missed", "no such reason"] += 1


def test_a_tenant_sees_its_own_numbers_only() -> None:
    world = World()
    one, two = world.open("a"), world.open("b")
    one.register(ONE)
    one.store(ONE, chain("p", 3))
    seen = world.ask(ev.Stat(two.number, 0)).stat
    assert set(seen["tenants"]) == {"b"}
    assert seen["namespace"] == "b"
    assert set(world.stat()["tenants"]) >= {"a"}
    assert world.tier["chunks"] == 3 and O.OK
