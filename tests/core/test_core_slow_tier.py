"""A tier that takes writes and does not answer costs a little room and time, once: not service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from world import KIB, O, S, World, chain, key, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig, WritePolicy
from kvd.core.shares import Amount, TenantRules, TierShare

ONE = spec("one", 28 * KIB)  # two slots a slab: 64 in all
MS = 1_000_000
THROUGH = WritePolicy.THROUGH


class Hung(World):
    """Writes to the last tier hang from `hangs` on."""

    def __init__(self, *tiers: TierConfig, **settings: Any) -> None:
        self.hangs = False
        self.hung: list[Any] = []
        super().__init__(2048 * KIB, 64 * KIB, tiers=tiers, write_share=1.0, **settings)

    def _carry(self, actions: Sequence[ac.Action]) -> None:
        super()._carry(actions)
        last = len(self.shelves) - 1
        if self.hangs:
            self.hung += [j for j in self.jobs if isinstance(j, ac.TierWrite) and j.tier == last]
            self.jobs = [j for j in self.jobs if j not in self.hung]

    def heals(self) -> None:
        """All that hung is done now."""
        self.hangs = False
        jobs, self.hung = self.hung, []
        self.jobs += jobs
        self.work()
        self.settle()

    def here(self) -> int:
        """Slots of DRAM that are taken."""
        return int(self.tier["used_bytes"]) // (28 * KIB)


def stored(world: Hung, client: Any, hashes: Sequence[bytes]) -> tuple[list[int], int]:
    """Outcomes of a store, and how long it was waited for slots: ns."""
    begun = world.now
    got, _ = world.request(client.reserve_event(ONE, hashes))
    number = world._request
    while got is None:
        world.advance(MS)
        assert world.now - begun < 10 * S, "a store hangs"
        if number in world.replies:
            got = world.replies.pop(number).result  # type: ignore[union-attr]
    waited = world.now - begun
    outcomes = list(got.outcomes)
    if got.write:
        client.fill(got.refs)
        done = iter(client.commit(got.write).outcomes)
        outcomes = [next(done) if one == O.GRANTED else one for one in outcomes]
    world.settle()
    return outcomes, waited


def test_what_waits_for_a_tier_that_hangs_holds_no_room() -> None:
    """Written through: an eighth of the slots is on its way, the rest can go."""
    world = Hung(TierConfig("s3", 1 << 26, policy=THROUGH, writes=16))
    client = world.open(admin=True)
    client.register(ONE)
    world.hangs = True
    waited = 0
    for n in range(60):
        outcomes, ns = stored(world, client, chain(n, 4))
        assert outcomes == [O.OK] * 4, n
        waited += ns
        assert client.lookup(ONE, chain(n, 4)).leading == 4
        assert len(world.core._demotions.by_row) <= 64 // 8 + 1
    # and one that goes because room is needed
    assert len(world.hung) == world.stat()["tiers"][1]["writing"] == 64 // 8 + 1
    assert world.here() == 64 and waited <= 60 * MS
    world.heals()
    assert world.core.moving == 0 and not world.core.busy
    below = {name[3] for name in world.shelves[0].there}
    assert set(chain(59, 4)) <= below


def test_of_a_chunk_with_slots_of_two_classes_the_scarcer_one_counts() -> None:
    two = spec("two", 4 * KIB, 28 * KIB)
    world = Hung(TierConfig("s3", 1 << 26, policy=THROUGH, writes=16))
    client = world.open(admin=True)
    client.register(two)
    world.hangs = True
    for n in range(30):
        assert set(client.store(two, [key("two", n)])) == {O.OK}
        world.settle()
    # 30 slots of 28 KiB in 15 slabs, one of 4 KiB slots in two more, and the other 16 blank
    assert len(world.core._demotions.by_row) <= 64 // 8
    world.heals()
    assert world.core.moving == 0 and len(world.shelves[0].there) == 60


def test_a_healthy_tier_is_written_to_beside_one_that_hangs() -> None:
    world = Hung(
        TierConfig("nvme", 1 << 26), TierConfig("s3", 1 << 26, policy=THROUGH, writes=16)
    )
    client = world.open(admin=True)
    client.register(ONE)
    world.hangs = True
    for n in range(60):
        outcomes, _ = stored(world, client, chain(n, 4))
        assert outcomes == [O.OK] * 4, n
    found = [client.lookup(ONE, chain(n, 4)).leading for n in range(60)]
    assert found.count(4) >= 58, "what left DRAM lies on nvme"
    world.heals()
    assert world.core.moving == 0
    assert len(world.shelves[1].there) >= 60


def test_through_writes_of_one_tier_go_on_beside_those_of_another_that_hangs() -> None:
    world = Hung(
        TierConfig("nvme", 1 << 26, policy=THROUGH, writes=2),
        TierConfig("s3", 1 << 26, policy=THROUGH, writes=2),
    )
    client = world.open(admin=True)
    client.register(ONE)
    world.hangs = True
    for n in range(12):
        assert stored(world, client, [key("one", n)]) == ([O.OK], 0)
    assert len(world.shelves[0].there) == 12 and len(world.hung) == 2
    world.heals()
    assert len(world.shelves[1].there) == 12


def test_what_a_drain_named_may_have_gone_since() -> None:
    world = Hung(TierConfig("nvme", 1 << 26, writes=2))
    client = world.open(admin=True)
    client.register(ONE)
    stored(world, client, [key("one", 1)])
    demotions = world.core._demotions
    lower = world.core._store.ladder.lowers[0]
    row = world.core._store.spaces.of(1).get(key("one", 1))
    demotions._backlog.add(row, lower)
    assert demotions.moving == 1 and demotions._backlog.ready
    client.evict(ev.Selector(keys=(key("one", 1),)))
    world.settle()
    demotions._backlog.add(row, lower)
    assert demotions.moving == 0 and not world.core.busy
    assert not world.shelves[0].there


def test_a_wait_for_room_that_was_in_vain_is_not_repeated_until_a_demotion_is_done() -> None:
    world = Hung(TierConfig("s3", 1 << 26), room_wait_ns=50 * MS)
    client = world.open(admin=True)
    client.register(ONE)
    for n in range(15):
        stored(world, client, chain(n, 4))
    world.hangs = True
    waits = []
    for n in range(100, 140):
        outcomes, waited = stored(world, client, chain(n, 4))
        assert outcomes == [O.OK] * 4
        waits.append(waited)
    assert 0 < sum(waits) <= 60 * MS, waits
    assert world.counter("demotions", "no_time") > 0
    world.heals()
    world.hangs = True
    again = sum(stored(world, client, chain(n, 4))[1] for n in range(200, 240))
    assert 0 < again <= 60 * MS


def test_a_tenant_at_its_maximum_does_not_wait_again_in_vain() -> None:
    rules = ("team", TenantRules({"dram": TierShare(maximum=Amount(16 * 28 * KIB))}))
    world = Hung(TierConfig("s3", 1 << 26), room_wait_ns=50 * MS, tenants=(rules,))
    client = world.open("team")
    client.register(ONE)
    world.hangs = True
    waits = []
    for n in range(20):
        outcomes, waited = stored(world, client, chain(n, 4))
        assert outcomes == [O.OK] * 4
        waits.append(waited)
    assert 0 < sum(waits) <= 110 * MS, waits
