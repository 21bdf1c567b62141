"""Tenants: what each may have of each tier, and whose chunks go when there is no room."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from world import KIB, Client, LookupFlag, O, World, chain, spec

from kvd.chunk import State, namespace_digest
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig
from kvd.core.shares import Amount, TenantRules, TierShare, TierUse

ONE = spec("one", 8 * KIB)  # eight slots a slab: 128 in all
WIDE = spec("wide", 16 * KIB)
ODD = spec("odd", 12 * KIB)  # five slots a slab, and 4 KiB that nobody can use


def half(part: float = 0.5, **more: object) -> TenantRules:
    return TenantRules({"dram": TierShare(Amount(0, part), **more)})  # type: ignore[arg-type]


def most(nbytes: int, tier: str = "dram") -> TenantRules:
    return TenantRules({tier: TierShare(Amount(), 1.0, Amount(nbytes))})


def world_of(isolate: bool = True, **rules: TenantRules) -> World:
    # to the last slot: what is freed ahead of need is tested by itself
    return World(isolate=isolate, tenants=tuple(rules.items()), ahead_share=0.0)


def come(world: World, name: str, *specs: object) -> Client:
    client = world.open(name)
    for wanted in specs or (ONE,):
        client.register(wanted)  # type: ignore[arg-type]
    return client


def scan(client: Client, name: object, count: int, wanted: object = ONE) -> None:
    """Chunks that nobody asks for again, each its own chain."""
    for n in range(count):
        assert client.store(wanted, chain((name, n), 1)) == [O.OK]  # type: ignore[arg-type]


def used(world: World, name: str, tier: str = "dram") -> int:
    return int(world.stat()["tenants"][name]["tiers"][tier]["used_bytes"])


def count(world: World, name: str, counter: str, label: str = "dram") -> int:
    return int(world.stat()["tenants"][name]["counters"][counter][label])


# -- the arithmetic -------------------------------------------------------------------------------


def tier_of(*shares: TierShare, total: int = 1000) -> TierUse:
    tier = TierUse("dram", total)
    tier.add()  # nobody
    for share in shares:
        tier.add()
        tier.told[-1] = share
    tier.settle()
    return tier


def test_shares_are_the_minimum_and_the_weighted_part_of_the_rest() -> None:
    tier = tier_of(TierShare(Amount(200)), TierShare(Amount(), 3.0))
    assert tier.minimum == [0, 200, 0]
    assert [round(s) for s in tier.share[1:]] == [400, 600]


def test_minima_that_do_not_fit_are_scaled_down_together() -> None:
    tier = tier_of(TierShare(Amount(0, 0.5)), TierShare(Amount(0, 0.5)))
    tier.resize(800)
    assert tier.minimum == [0, 400, 400] and sum(tier.share[1:]) == 800


def test_a_minimum_beyond_its_maximum_or_the_tier_claims_no_more_of_the_others() -> None:
    quarter = TierShare(Amount(0, 0.25))
    capped = tier_of(quarter, TierShare(Amount(0, 0.9), 1.0, Amount(100)))
    assert capped.minimum == [0, 250, 100]
    larger = tier_of(quarter, TierShare(Amount(1_000_000)))
    assert larger.minimum == [0, 200, 800]


def test_the_largest_use_over_its_share_gives_and_never_one_at_its_minimum() -> None:
    tier = tier_of(TierShare(Amount(500)), TierShare(), TierShare())
    tier.use = [0, 500, 260, 240]
    assert tier.victim([1, 2, 3], 1, 10) == 2  # the asker would be above its minimum, but not most
    assert tier.victim([1, 3], 3, 10) == 3
    assert tier.victim([1], 3, 10) == -1
    tier.leaving[2] = 100  # on its way out already
    assert tier.victim([1, 2, 3], 1, 10) == 3


def test_who_is_below_its_minimum_gives_only_if_nobody_else_can() -> None:
    tier = tier_of(TierShare(Amount(900)), TierShare())
    tier.use = [0, 890, 110]
    assert tier.victim([1, 2], 1, 10) == 2
    tier.use = [0, 1000, 0]
    assert tier.victim([1, 2], 1, 10) == 1


def test_a_tie_is_the_askers() -> None:
    tier = tier_of(TierShare(), TierShare())
    tier.use = [0, 510, 500]
    assert tier.victim([1, 2], 2, 10) == 2


# -- lent, and given back -------------------------------------------------------------------------


def test_idle_room_is_lent_and_comes_back_on_demand() -> None:
    world = world_of(a=half(), b=half())
    a, b = come(world, "a"), come(world, "b")
    scan(a, "a", 200)
    assert used(world, "a") == 1024 * KIB  # nobody else needed it
    scan(b, "b", 100)
    assert used(world, "a") == used(world, "b") == 512 * KIB
    assert count(world, "a", "evictions_suffered") == 64
    assert count(world, "b", "evictions_inflicted") == 64
    assert count(world, "a", "evictions_below_minimum") == 0


def test_a_scan_takes_nothing_from_a_tenant_at_its_minimum() -> None:
    world = world_of(a=half(), b=half())
    a, b = come(world, "a"), come(world, "b")
    mine = [chain(("mine", n), 1) for n in range(64)]
    for keys in mine:
        assert a.store(ONE, keys) == [O.OK]
    scan(b, "scan", 500)
    assert all(a.lookup(ONE, keys).leading == 1 for keys in mine)
    assert count(world, "a", "evictions_suffered") == 0
    assert count(world, "b", "evictions_suffered") == 0  # it made room among its own


def test_one_pool_has_no_such_scruples() -> None:
    world = world_of(isolate=False, a=half(), b=half())
    a, b = come(world, "a"), come(world, "b")
    scan(a, "a", 64)
    scan(b, "scan", 500)
    assert used(world, "a") == 0
    assert count(world, "a", "evictions_below_minimum") == 64


def test_tenants_without_rules_share_by_weight() -> None:
    world = World(ahead_share=0.0)
    a, b, c = (come(world, name) for name in "abc")
    scan(a, "a", 200)
    scan(b, "b", 200)
    scan(c, "c", 200)
    sizes = [used(world, name) for name in "abc"]
    assert sum(sizes) == 1024 * KIB and max(sizes) - min(sizes) <= 8 * KIB


def test_rules_change_while_the_daemon_runs() -> None:
    world = World(ahead_share=0.0)
    a, b = come(world, "a"), come(world, "b")
    scan(a, "a", 200)
    world.handle(ev.SetTenant("a", half(0.75)))
    scan(b, "b", 200)
    assert used(world, "b") == 128 * KIB and used(world, "a") == 896 * KIB  # half of the rest
    world.handle(ev.SetTenant("a", None))
    scan(b, "more", 200)
    assert used(world, "a") == used(world, "b") == 512 * KIB


def test_what_is_leased_stays_although_its_tenant_has_too_much() -> None:
    world = world_of(b=half(1.0))
    a, b = come(world, "a"), come(world, "b")
    names = [("a", n) for n in range(60)]
    for name in names:
        assert a.store(ONE, chain(name, 1)) == [O.OK]
        a.lookup(ONE, chain(name, 1), LookupFlag.LEASE)
    scan(b, "b", 200)
    assert used(world, "a") == 60 * 8 * KIB
    assert all(a.lookup(ONE, chain(name, 1)).leading == 1 for name in names)


def test_unfinished_and_condemned_writes_count() -> None:
    world = world_of(a=half(0.25))
    a, b = come(world, "a"), come(world, "b")
    reserved = a.reserve(ONE, chain("open", 30))
    assert used(world, "a") == 240 * KIB and reserved.write
    scan(b, "b", 200)
    a.close(stopped=False)
    assert used(world, "a") == 240 * KIB  # somebody may still be copying there
    a.free_lock()
    assert used(world, "a") == 0


# -- maxima ---------------------------------------------------------------------------------------


def test_a_maximum_holds_with_room_all_around() -> None:
    """K50: what was stored last is there, what made room for it was the tenant's own, coldest
    first, and both are counted."""
    world = world_of(a=most(80 * KIB))
    a = come(world, "a")
    for n in range(30):
        assert a.store(ONE, chain(("a", n), 1)) == [O.OK]
        assert used(world, "a") <= 80 * KIB
    there = [a.lookup(ONE, chain(("a", n), 1)).leading for n in range(30)]
    assert there == [0] * 20 + [1] * 10
    counted = world.stat()["tenants"]["a"]["counters"]
    assert counted["chunks_evicted"]["capacity"] == 20
    assert counted["evictions_suffered"]["dram"] == 0


def test_beyond_its_maximum_a_store_is_told_over_quota() -> None:
    """K50: nothing of its own can go, so the store is refused by name, and what is there stays."""
    world = world_of(a=most(80 * KIB), b=most(0))
    a, b = come(world, "a"), come(world, "b")
    for n in range(10):
        assert a.store(ONE, chain(("a", n), 1)) == [O.OK]
        a.lookup(ONE, chain(("a", n), 1), LookupFlag.LEASE)
    assert a.store(ONE, chain("more", 1)) == [O.OVER_QUOTA]
    assert b.store(ONE, chain("b", 1)) == [O.OVER_QUOTA]
    refused = world.stat()["tenants"]["a"]["counters"]["shards_reserved"]["over_quota"]
    assert refused == 1 and used(world, "a") == 80 * KIB and used(world, "b") == 0


def test_a_maximum_is_kept_across_classes() -> None:
    world = world_of(a=most(80 * KIB))
    a = come(world, "a", ONE, WIDE)
    scan(a, "small", 10)
    scan(a, "wide", 4, WIDE)
    assert used(world, "a") == 80 * KIB
    assert [a.lookup(WIDE, chain(("wide", n), 1)).leading for n in range(4)] == [1] * 4


def test_what_is_shown_is_what_is_enforced() -> None:
    """K52: a tenant with none, with an explicit maximum, with one that was taken away, with 0."""
    world = world_of(some=most(160 * KIB), zero=most(0), gone=most(80 * KIB))
    world.handle(ev.SetTenant("gone", None))
    for name in ("none", "some", "zero", "gone"):
        client = come(world, name)
        world.settle()
        for n in range(200):
            if client.store(ONE, chain((name, n), 1)) != [O.OK]:
                break
        shown = world.stat()["tenants"][name]["tiers"]["dram"]["maximum_bytes"]
        most_there = 1024 * KIB if shown is None else shown
        assert used(world, name) == most_there
        client.evict(ev.Selector(everything=True))
        world.settle()


# -- size classes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "crf"])
def test_a_tenant_gets_slabs_out_of_anothers_class(policy: str) -> None:
    world = World(policy=policy, tenants=(("a", half()), ("b", half())))
    a, b = come(world, "a", WIDE), come(world, "b")
    scan(b, "b", 200)
    for n in range(32):
        assert a.store(WIDE, chain(("a", n), 1)) == [O.OK]
        assert a.lookup(WIDE, chain(("a", n), 1), LookupFlag.LEASE).leading == 1
        world.advance(1)
        scan(b, ("hot", n), 3)  # it is always the younger one
    assert used(world, "a") == used(world, "b") == 512 * KIB
    assert count(world, "b", "evictions_below_minimum") == 0


def test_a_slab_of_one_below_its_minimum_is_not_taken() -> None:
    world = world_of(a=half(0.9))
    a, b = come(world, "a", WIDE), come(world, "b")
    scan(a, "a", 56, WIDE)
    scan(b, "b", 400)
    assert all(a.lookup(WIDE, chain(("a", n), 1)).leading == 1 for n in range(56))
    assert used(world, "a") == 896 * KIB


# -- below DRAM -----------------------------------------------------------------------------------


def ladder_of(limit: int = 512 * KIB, **rules: TenantRules) -> World:
    return World(256 * KIB, 64 * KIB, tiers=(TierConfig("nvme", limit),), tenants=(*rules.items(),))


def test_a_minimum_holds_in_the_tier_below() -> None:
    keeps = TenantRules({"nvme": TierShare(Amount(0, 0.5))})
    world = ladder_of(a=keeps, b=keeps)
    a, b = come(world, "a"), come(world, "b")
    scan(a, "a", 96)
    scan(b, "b", 400)
    world.settle()
    assert used(world, "a", "nvme") >= 248 * KIB
    assert used(world, "a", "nvme") + used(world, "b", "nvme") <= 512 * KIB
    assert count(world, "a", "evictions_below_minimum", "below") == 0
    assert sum(h.length for _, _, h, _ in world.shelves[0].there.values()) == sum(
        used(world, name, "nvme") for name in "ab"
    )


def test_over_quota_below_makes_room_among_its_own_and_is_counted() -> None:
    """What does not fit a tenant's maximum in a tier costs its own coldest chunks there."""
    world = ladder_of(a=most(80 * KIB, "nvme"))
    a = come(world, "a")
    scan(a, "a", 100)
    world.settle()
    assert 0 < used(world, "a", "nvme") <= 80 * KIB
    assert world.counter("chunks_evicted_below", "quota") > 0


def test_with_no_quota_below_chunks_are_dropped_there_and_counted() -> None:
    world = ladder_of(a=most(0, "nvme"), b=TenantRules())
    a, b = come(world, "a"), come(world, "b")
    scan(a, "a", 100)
    scan(b, "b", 100)
    world.settle()
    assert used(world, "a", "nvme") == 0 < used(world, "b", "nvme")
    assert world.stat()["tenants"]["a"]["counters"]["demotions"]["over_quota"] > 0


def test_a_tenant_at_its_maximum_is_demoted_not_dropped() -> None:
    world = ladder_of(a=most(80 * KIB))
    a = come(world, "a")
    for n in range(40):
        assert a.store(ONE, chain(("a", n), 1)) == [O.OK]
        assert used(world, "a") <= 80 * KIB
        world.settle()
    assert all(a.lookup(ONE, chain(("a", n), 1)).leading == 1 for n in range(40))


# -- after a restart ------------------------------------------------------------------------------


def test_a_restart_knows_whose_each_slot_is() -> None:
    """K85: use by tenant equals the bytes that are there before the first store."""
    world = world_of(a=half(), b=half())
    a, b, c = (come(world, name) for name in "abc")
    scan(a, "a", 60)
    scan(b, "b", 40)
    scan(c, "c", 20)
    before = {name: used(world, name) for name in "abc"}
    world.locks.clear()
    world.restart()
    assert {name: used(world, name) for name in "abc"} == before
    scan(come(world, "c"), "again", 200)
    assert used(world, "a") == before["a"] and used(world, "b") == before["b"]


# -- anything, in any order -----------------------------------------------------------------------

NAMES = ("a", "b", "c")
MINIMA = {"a": 160 * KIB, "b": 32 * KIB, "c": 0}
MAXIMA = {"a": None, "b": 256 * KIB, "c": None}
SPECS = (ONE, WIDE, ODD)


class SharesMachine(RuleBasedStateMachine):
    """Three tenants that store, look up, lease, leave writes open and go, against the naive sum of
    what stands in the table of records."""

    tiers: tuple[TierConfig, ...] = ()

    @initialize(policy=st.sampled_from(["lru", "crf", "s3fifo"]))
    def start(self, policy: str) -> None:
        rules = tuple(
            (
                name,
                TenantRules(
                    {
                        tier: TierShare(
                            Amount(MINIMA[name]),
                            1.0,
                            None if (top := MAXIMA[name]) is None else Amount(top),
                        )
                        for tier in ("dram", "nvme")
                    }
                ),
            )
            for name in NAMES
        )
        self.world = World(512 * KIB, policy=policy, tenants=rules, tiers=self.tiers)
        self.digests = {namespace_digest(name): name for name in NAMES}
        self.clients = {name: come(self.world, name, *SPECS) for name in NAMES}
        self.leases: dict[str, list[int]] = {name: [] for name in NAMES}
        self.next = 0

    def naive(self) -> dict[str, int]:
        """Slot bytes by tenant, as the records tell."""
        sums = dict.fromkeys(NAMES, 0)
        per = self.world.config.records_per_slab
        for record, header in self.world.memory.items():
            if header.state is not State.FREE:
                name = self.digests[header.namespace_digest]
                sums[name] += self.world.slot_sizes[record // per]
        return sums

    def watched(self, name: str, event: object) -> object:
        """A request; nobody else loses a chunk for it while at or below its minimum."""
        have = self.naive()
        owner = {r: h for r, h in self.world.memory.items()}
        sizes = list(self.world.slot_sizes)
        result, actions = self.world.request(event)
        per = self.world.config.records_per_slab
        gone: dict[str, list[int]] = {}
        for action in actions:
            if isinstance(action, ac.WriteRecord):
                owner[action.record] = action.header
            elif isinstance(action, ac.AssignSlab):
                sizes[action.slab] = action.slot_size
            elif isinstance(action, ac.PatchRecord) and action.state is State.FREE:
                header = owner[action.record]
                assert header.chunk
                # the size that the slot had when it went: its slab may change class after that
                other = self.digests[header.namespace_digest]
                gone.setdefault(other, []).append(sizes[action.record // per])
        if self.tiers:
            return result
        after = self.naive()
        for other, slots in gone.items():
            if other != name:
                # the last one that went was one too many at most
                assert after[other] + max(slots) > min(MINIMA[other], have[other])
        return result

    @rule(
        name=st.sampled_from(NAMES),
        wanted=st.sampled_from(SPECS),
        length=st.integers(1, 12),
        finish=st.sampled_from([True] * 6 + [False]),
    )
    def store(self, name: str, wanted: object, length: int, finish: bool) -> None:
        client = self.clients[name]
        self.next += 1
        keys = chain((name, self.next), length)
        result = self.watched(name, client.reserve_event(wanted, keys))  # type: ignore[arg-type]
        if result.write and finish:  # type: ignore[attr-defined]
            client.fill(result.refs)  # type: ignore[attr-defined]
            client.commit(result.write)  # type: ignore[attr-defined]
        self.world.settle()

    @rule(name=st.sampled_from(NAMES), back=st.integers(0, 40), lease=st.booleans())
    def look(self, name: str, back: int, lease: bool) -> None:
        keys = chain((name, max(1, self.next - back)), 12)
        for wanted in SPECS:
            found = self.clients[name].lookup(wanted, keys, LookupFlag.LEASE if lease else 0)
            if found.lease:
                self.leases[name].append(found.lease)

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        for lease in self.leases[name]:
            self.clients[name].release(lease)
        self.leases[name].clear()

    @rule(name=st.sampled_from(NAMES), stopped=st.booleans())
    def go(self, name: str, stopped: bool) -> None:
        client = self.clients[name]
        client.close(stopped)
        if not stopped:
            client.free_lock()
        self.leases[name].clear()
        self.clients[name] = come(self.world, name, *SPECS)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.world.advance(seconds * 1_000_000_000)

    @rule()
    def restart(self) -> None:
        self.world.locks.clear()
        self.world.restart()
        self.clients = {name: come(self.world, name, *SPECS) for name in NAMES}
        self.leases = {name: [] for name in NAMES}

    @invariant()
    def use_is_exact_and_minima_hold(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.settle()
        stat = self.world.stat()
        shown = {name: used(self.world, name) for name in NAMES}
        nobody = self.world.core._store.shares.dram.use[0]
        assert shown == self.naive()
        assert sum(shown.values()) + nobody == stat["tiers"][0]["used_bytes"]
        for name in NAMES:
            top = MAXIMA[name]
            assert top is None or shown[name] <= top
            for where in ("dram", "below"):
                assert count(self.world, name, "evictions_below_minimum", where) == 0
        for shelf in self.world.shelves:
            below = dict.fromkeys(NAMES, 0)
            for _, _, header, _ in shelf.there.values():
                below[self.digests[header.namespace_digest]] += header.length
            assert below == {name: used(self.world, name, "nvme") for name in NAMES}
            assert below["b"] <= 256 * KIB
            assert self.both() == {t: n for t, n in self.world.core._store.both.items() if n}

    def both(self) -> dict[int, int]:
        """Chunks by tenant that lie here and below, counted one by one."""
        store = self.world.core._store
        rows = [row for row in range(store.chunks.used) if store.chunks.space[row]]
        found: dict[int, int] = {}
        for row in rows:
            if store.chunks.below[row] and store.chunks.ready[row]:
                found[store.tenant(row)] = found.get(store.tenant(row), 0) + 1
        return found


SharesMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSharesAgainstTheTable = SharesMachine.TestCase


class LadderSharesMachine(SharesMachine):
    """The same with a tier below."""

    tiers = (TierConfig("nvme", 768 * KIB),)


LadderSharesMachine.TestCase.settings = settings(SharesMachine.TestCase.settings, max_examples=20)
TestLadderSharesAgainstTheTable = LadderSharesMachine.TestCase
