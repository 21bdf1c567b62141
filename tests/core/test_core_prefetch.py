"""Prefetching: hints that read up ahead, and harm nobody."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from world import KIB, LookupFlag, O, S, World, chain, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig

ONE = spec("one", 28 * KIB)  # two slots a slab
LOAD = LookupFlag.LEASE | LookupFlag.LOAD
# 64 slots, 4 of which are kept free; transients have 5, and one tenant 3 of them for hints
SHARES = {"transient_share": 0.07, "high": 0.95, "low": 0.92}


def filled(chains: int = 60, **more: Any) -> tuple[World, Any]:
    """Chains of four chunks, more than DRAM holds: the first ones are below, and only there."""
    tier = TierConfig("nvme", 1 << 25, **more.pop("tier", {}))
    others = more.pop("others", 0)
    world = World(2048 * KIB, 64 * KIB, tiers=(tier,), **SHARES, **more)
    client, other = world.open(admin=True), world.open("two")
    for one in (client, other):
        one.register(ONE)
    for n in range(others):
        other.store(ONE, chain(n, 4))
        world.work()
        world.settle()
    for n in range(chains):
        client.store(ONE, chain(n, 4))
        world.work()
        world.settle()
    return world, client


def ahead(client: Any, hashes: list[bytes], within: int = 10 * S) -> list[Any]:
    world = client.world
    event = ev.Prefetch(client.number, 0, ONE.digest, 1, (0,), b"".join(hashes), within)
    found = [O(byte) for byte in world.ask(event).outcomes]
    if world.auto:
        world.advance(min(within, S // 2))
    world.settle()
    return found


def reads(world: World) -> list[ac.TierRead]:
    return [job for job in world.jobs if isinstance(job, ac.TierRead)]


def tiers_of(client: Any, hashes: list[bytes]) -> list[list[str]]:
    rows = client.list("chunks", ev.Selector(keys=tuple(hashes)))
    by_hash = {row["hash"]: row["tiers"] for row in rows}
    return [by_hash.get(key.hex(), []) for key in hashes]


def settled(world: World) -> None:
    """Everything that was asked for ahead has had its time: nothing of it is left."""
    for _ in range(4):
        world.work()
        world.advance(200 * S)
    core = world.core
    assert not core._fetches.by_cell and not core._prefetches._held
    assert core._prefetches.taken == 0 and not core._prefetches._used
    assert core._fetches._reading_ahead == [0] and not core._prefetches._ending
    assert not core._store.transients and core._store.transient_bytes == 0
    assert not core._store.ladder.active and not core._store.ladder.jobs


def test_what_was_prefetched_is_a_hit_in_dram_and_goes_like_a_first_hit() -> None:
    world, client = filled()
    assert ahead(client, chain(0, 3)) == [O.OK] * 3
    assert tiers_of(client, chain(0, 4)) == [["dram", "nvme"]] * 3 + [["nvme"]]
    found = client.lookup(ONE, chain(0, 3), LOAD)
    assert found.load.done and found.tiers == b""
    client.release(found.lease)
    world.settle()
    assert tiers_of(client, chain(0, 3)) == [["nvme"]] * 3
    assert world.counter("shards_promoted", "ahead") == 3
    settled(world)


def test_a_hint_leases_nothing_and_is_let_go_when_its_time_is_over() -> None:
    world, client = filled()
    ahead(client, chain(0, 3), within=5 * S)
    assert world.core.leases == 0
    world.advance(4 * S)
    assert tiers_of(client, chain(0, 3)) == [["dram", "nvme"]] * 3
    world.advance(2 * S)
    assert tiers_of(client, chain(0, 3)) == [["nvme"]] * 3
    settled(world)


def test_a_later_hint_for_the_same_prolongs_it() -> None:
    world, client = filled()
    ahead(client, chain(0, 2), within=5 * S)
    world.advance(4 * S)
    ahead(client, chain(0, 2), within=5 * S)
    world.advance(4 * S)
    assert tiers_of(client, chain(0, 2)) == [["dram", "nvme"]] * 2
    assert world.counter("shards_fetched", "ok") == 2
    settled(world)


def test_each_key_is_told_what_becomes_of_it() -> None:
    world, client = filled()
    last = chain(59, 4)
    assert ahead(client, last) == [O.OK] * 4, "is in DRAM"
    assert ahead(client, [*chain(0, 2), *chain("nowhere", 2), *chain(1, 1)]) == [
        O.OK, O.OK, O.MISS, O.SKIPPED, O.SKIPPED,
    ]  # fmt: skip
    counts = {
        label: world.counter("chunks_prefetched", label)
        for label in ("here", "coming", "missed", "skipped", "no_space")
    }
    assert counts == {"here": 4, "coming": 2, "missed": 1, "skipped": 2, "no_space": 0}


def test_no_tenant_takes_all_the_room_for_hints() -> None:
    world, one = filled(others=1, isolate=False)
    assert ahead(one, chain(0, 4)) == [O.OK] * 3 + [O.NO_SPACE]
    two = world.open("two")
    two.register(ONE)
    assert ahead(two, chain(0, 4)) == [O.OK] + [O.NO_SPACE] + [O.SKIPPED] * 2
    assert world.core._prefetches.taken <= world.core.config.transient_cap


def test_room_for_hints_comes_back_when_somebody_came_for_the_chunks() -> None:
    world, client = filled()
    for n in range(6):
        assert ahead(client, chain(n, 3), within=600 * S) == [O.OK] * 3, n
        client.release(client.lookup(ONE, chain(n, 3), LOAD).lease)
        world.settle()
    settled(world)


def test_for_a_hint_only_goes_what_is_cold_and_lies_below_then() -> None:
    """What is leased stays, what goes is written below first, and nothing is lost."""
    world, client = filled()
    keys = [key for n in range(60) for key in chain(n, 4)]
    held = client.lookup(ONE, chain(50, 4), LookupFlag.LEASE)
    lost = world.stat()["counters"]["chunks_evicted"] | {"demoted": 0, "transient": 0}
    hot = [key for n in range(56, 60) for key in chain(n, 4)]
    for n in range(12):
        ahead(client, chain(n, 4), within=S)
        world.advance(2 * S)
    assert all("dram" in tiers for tiers in tiers_of(client, [*chain(50, 4), *hot]))
    assert all(tiers_of(client, keys))
    after = world.stat()["counters"]["chunks_evicted"] | {"demoted": 0, "transient": 0}
    assert after == lost
    assert world.counter("shards_promoted", "ahead") >= 30
    client.release(held.lease)
    settled(world)


def test_where_nothing_can_be_written_below_no_room_is_made_for_a_hint() -> None:
    world, client = filled()
    world.handle(ev.TierState(0, True, False))
    free = world.tier["limit_bytes"] - world.tier["used_bytes"]
    evicted = world.stat()["counters"]["chunks_evicted"] | {"demoted": 0, "transient": 0}
    for n in range(6):
        ahead(client, chain(n, 4), within=600 * S)
    assert world.tier["limit_bytes"] - world.tier["used_bytes"] >= min(free, 3 * 28 * KIB)
    assert world.stat()["counters"]["chunks_evicted"] | {"demoted": 0, "transient": 0} == evicted


def test_loads_go_before_what_was_prefetched_and_leave_it_no_last_place() -> None:
    world, client = filled(auto=False, tier={"reads": 2, "first_alone": False})
    ahead(client, chain(0, 3))
    running = reads(world)
    assert [(job.chunk, job.ahead) for job in running] == [(chain(0, 1)[0], True)]
    client.lookup(ONE, chain(1, 2), LOAD)
    order = []
    while running := reads(world) or (world.work() and world.advance(S // 4) and reads(world)):
        assert len(running) <= 2
        order.append((running[-1].chunk, running[-1].ahead))
        world.do(running[-1])
    assert order == [
        *((key, False) for key in chain(1, 2)),
        *((key, True) for key in chain(0, 3)),
    ]


def test_a_load_that_comes_for_it_takes_a_queued_prefetch_along() -> None:
    """One read for one shard: what was queued as a hint becomes a load, what runs is waited for."""
    world, client = filled(auto=False, tier={"reads": 2, "first_alone": False})
    ahead(client, chain(0, 3))
    found = client.lookup(ONE, chain(0, 3), LOAD)
    assert not found.load.done
    seen = []
    while running := reads(world):
        seen += [(job.chunk, job.ahead) for job in running]
        for job in running:
            world.do(job)
    assert seen == [(chain(0, 1)[0], True), *((key, False) for key in chain(0, 3)[1:])]
    got = world.ask(ev.Wait(client.number, 0, found.load.transfer, 0, world.now + S))
    assert got.done and list(got.outcomes) == [O.OK] * 3
    client.release(found.lease)
    settled(world)


def test_what_waits_is_not_read_when_its_time_is_over() -> None:
    """K111: what is set aside for it is given back."""
    world, client = filled(auto=False, tier={"reads": 2})
    ahead(client, chain(0, 3), within=S)
    (running,) = reads(world)
    world.advance(2 * S)
    assert world.counter("shards_fetched", "cancelled") == 2
    world.do(running)
    world.settle()
    assert not reads(world)
    assert tiers_of(client, chain(0, 3)) == [["nvme"]] * 3
    settled(world)


@pytest.mark.parametrize("answer", [1, 2])
def test_a_prefetch_that_fails_is_nobodys_miss(answer: int) -> None:
    """K111: and what was set aside for it is given back."""
    world, client = filled()
    world.fails = lambda job: answer if isinstance(job, ac.TierRead) and job.ahead else 0
    assert ahead(client, chain(0, 3)) == [O.OK] * 3
    world.fails = lambda job: 0
    world.advance(20 * S)
    settled(world)


def test_a_hint_without_tiers_below_is_answered_and_changes_nothing() -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain(0, 2))
    event = ev.Prefetch(client.number, 0, ONE.digest, 1, (0,), b"".join(chain(0, 3)), S)
    assert list(world.ask(event).outcomes) == [O.OK, O.OK, O.MISS]
    world.advance(5 * S)
    assert client.lookup(ONE, chain(0, 2)).leading == 2


NAMES = ["default", "two"]


class Hints(RuleBasedStateMachine):
    """K111: hints, loads, stores, time and failing reads in any order: limits hold throughout, and
    in the end nothing is left of any hint."""

    @initialize()
    def begin(self) -> None:
        self.world, first = filled(30, auto=False, others=6)
        second = self.world.open("two")
        second.register(ONE)
        self.clients = dict(zip(NAMES, (first, second), strict=True))
        self.leases: list[tuple[str, int]] = []

    @rule(
        who=st.sampled_from(NAMES),
        name=st.integers(0, 14),
        count=st.integers(1, 4),
        within=st.sampled_from([1, S // 10, S, 30 * S]),
    )
    def hint(self, who: str, name: int, count: int, within: int) -> None:
        ahead(self.clients[who], chain(name, count), within)

    @rule(who=st.sampled_from(NAMES), name=st.integers(0, 14), count=st.integers(1, 4))
    def load(self, who: str, name: int, count: int) -> None:
        found = self.clients[who].lookup(ONE, chain(name, count), LOAD)
        if found.lease:
            self.leases.append((who, found.lease))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            who, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.clients[who].release(lease)

    @rule(who=st.sampled_from(NAMES), name=st.integers(100, 110))
    def store(self, who: str, name: int) -> None:
        client = self.clients[who]
        write = client.reserve(ONE, chain(name, 4))
        if write.write:
            client.fill(write.refs)
            client.commit(write.write)

    @rule(data=st.data(), fail=st.sampled_from([0, 0, 0, 1, 2]))
    def work(self, data: st.DataObject, fail: int) -> None:
        if self.world.jobs:
            job = data.draw(st.sampled_from(self.world.jobs))
            self.world.do(job, fail=fail if isinstance(job, ac.TierRead) else 0)

    @rule(ns=st.sampled_from([S // 20, S, 12 * S]))
    def time(self, ns: int) -> None:
        self.leases = [] if ns > S else self.leases
        for client in self.clients.values() if ns > S else ():
            for lease in list(self.world.core._leases.by_number.values()):
                if lease.session.number == client.number:
                    client.release(lease.number)
        self.world.advance(ns)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "world"):
            return
        core = self.world.core
        store, hints = core._store, core._prefetches
        assert hints.taken <= core.config.transient_cap
        assert hints.taken == sum(held.nbytes for held in hints._held.values())
        assert store.transient_bytes <= core.config.transient_cap
        assert store.slabs.taken_bytes <= core.config.size
        assert core._fetches._reading_ahead[0] <= 2

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for lease in list(self.world.core._leases.by_number.values()):
            self.clients[lease.namespace].release(lease.number)
        for _ in range(20):
            self.world.work()
            self.world.advance(S)
        settled(self.world)


TestHints = Hints.TestCase
# no shrinking: each example fills a world first, and a shrink is hundreds of them
TestHints.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow,),
)
