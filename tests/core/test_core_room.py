"""Room is made by what is legal, in the right order, and no more than is needed."""

from __future__ import annotations

import random

import pytest
from world import KIB, O, S, World, chain, key, refs_of, spec

from kvd.chunk import Kind
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag

ONE = spec()
SMALL, MIDDLE, BIG = spec("s", 8 * KIB), spec("m", 24 * KIB), spec("b", 60 * KIB)


def test_a_prefix_goes_from_its_leaves() -> None:
    """K38: a prompt stored in six calls, its head used twice, then others until 30 evictions: what
    is left of it is a contiguous prefix, usable as a whole."""
    world = World(100 * 8 * KIB, 40 * KIB, write_share=1.0)
    client = world.open(admin=True)
    client.register(ONE)
    keys = chain("long", 60)
    for part in range(6):
        parent = {"parent": keys[10 * part - 1], "index0": 10 * part} if part else {}
        client.store(ONE, keys[10 * part : 10 * part + 10], **parent)
        world.advance(S)
    for _ in range(2):
        client.release(client.lease(ONE, keys[:10]).lease)
    n = 0
    while world.counter("chunks_evicted", "capacity") < 30:
        assert set(client.store(ONE, chain(("other", n), 7))) == {O.OK}
        n += 1
    resident = {row["hash"] for row in client.list("chunks")} & {k.hex() for k in keys}
    assert client.lookup(ONE, keys).leading == len(resident)


def test_a_touch_of_a_leaf_refreshes_its_ancestors() -> None:
    """K38"""
    world = World(40 * 8 * KIB, 40 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    old, new = chain("old", 10), chain("new", 10)
    client.store(ONE, old)
    world.advance(S)
    client.store(ONE, new)
    world.advance(S)
    client.release(client.lease(ONE, old).lease)
    client.store(ONE, chain("x", 25))
    assert client.lookup(ONE, old).leading == 10
    assert client.lookup(ONE, new).leading == 5


def test_what_cannot_fit_is_refused_before_anything_goes() -> None:
    """K43: larger than the largest slot, to the byte."""
    world = World(1024 * KIB, 64 * KIB)
    client = world.open()
    client.register(ONE)
    fits, over = spec("fits", 64 * KIB), spec("over", 64 * KIB + 1)
    client.register(fits)
    client.register(over)
    for n in range(16):
        client.store(ONE, chain(n, 8))
    before = world.tier["chunks"]
    assert client.store(over, chain("x", 2)) == [O.TOO_LARGE] * 2
    assert world.tier["chunks"] == before
    assert world.counter("chunks_evicted", "capacity") == 0
    assert client.store(fits, chain("x", 1)) == [O.OK]


def test_a_fresh_insert_is_not_the_first_victim() -> None:
    """K44: full of what was read 50 times; new prompts, each asked again after 10 others, hit;
    the old set is gone in the end."""
    world = World(100 * 8 * KIB, 40 * KIB)
    client = world.open(admin=True)
    client.register(ONE)
    old = [key("old", n) for n in range(100)]
    for k in old:
        client.store(ONE, [k])
    for _ in range(50):
        lease = client.lookup(ONE, old[:50], 1 | 8).lease
        client.release(lease)
        world.advance(S)
    hits = 0
    for n in range(400):
        assert client.store(ONE, [key("new", n)]) == [O.OK]
        if n >= 10:
            got = client.lease(ONE, [key("new", n - 10)])
            hits += got.leading
            client.release(got.lease)
        world.advance(S // 10)
    assert hits == 390
    assert client.lookup(ONE, old, 8).outcomes.count(O.OK) == 0


def test_what_is_in_no_leading_run_goes_first() -> None:
    """Chunks whose parent is absent, from their leaves, before anything that can be used."""
    world = World(40 * 8 * KIB, 40 * KIB, write_share=1.0)
    client = world.open(admin=True)
    client.register(ONE)
    good = chain("good", 20)
    client.store(ONE, good)
    world.advance(S)
    orphans = chain("orphan", 20)
    client.store(ONE, orphans)
    client.evict(ev.Selector(keys=(orphans[5],)))
    world.advance(S)
    for n in range(14):
        assert client.store(ONE, [key("x", n)]) == [O.OK]
        assert client.lookup(ONE, good).leading == 20
        left = client.lookup(ONE, orphans, 8).outcomes
        assert list(left[6:]) == sorted(left[6:])  # contiguous from the hole on
        assert left[:5].count(O.OK) == 5
    assert client.lookup(ONE, orphans, 8).outcomes.count(O.OK) <= 6


def test_room_is_made_on_demand_only() -> None:
    """With no tier below there are no watermarks: as many are evicted as slots are needed."""
    world = World(40 * 8 * KIB, 40 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("a", 40))
    assert world.counter("chunks_evicted", "capacity") == 0
    client.store(ONE, chain("b", 7))
    assert world.counter("chunks_evicted", "capacity") == 7
    assert world.tier["used_bytes"] == world.tier["limit_bytes"]


def test_a_request_does_not_evict_what_it_relies_on() -> None:
    world = World(16 * 8 * KIB, 16 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    keys = chain("p", 16)
    client.store(ONE, keys[:8])
    client.store(ONE, chain("q", 8))
    assert client.store(ONE, keys) == [O.EXISTS] * 8 + [O.OK] * 8
    more = chain("p", 24)
    got = client.store(ONE, more[16:], parent=keys[-1], index0=16)
    assert got == [O.NO_SPACE] * 8
    assert client.lookup(ONE, keys).leading == 16


def test_no_space_is_said_only_when_nothing_can_go() -> None:
    """Behind hundreds of leased chunks at the cold end, the one that can go is found."""
    world = World(512 * 8 * KIB, 256 * KIB, write_share=1.0, lease_share=1.0)
    client = world.open()
    client.register(ONE)
    for n in range(64):
        client.store(ONE, chain(n, 8))
        world.advance(S)
    leases = [client.lease(ONE, chain(n, 8), lease=600 * S).lease for n in range(63)]
    world.advance(S)
    client.release(client.lease(ONE, chain(63, 8)).lease)
    assert client.store(ONE, chain("x", 8)) == [O.OK] * 8
    assert client.store(ONE, chain("y", 9)) == [O.OK] * 8 + [O.NO_SPACE]
    for lease in leases:
        client.release(lease)
    assert client.store(ONE, chain("z", 9)) == [O.OK] * 9


# -- slabs --------------------------------------------------------------------------------------


def test_a_slab_changes_class_when_another_needs_it_more() -> None:
    world = World(1024 * KIB, 64 * KIB)
    client = world.open()
    for wanted in (SMALL, BIG):
        client.register(wanted)
    for n in range(20):
        client.store(SMALL, chain(n, 8))
        world.advance(S)
    assert world.tier["slabs_free"] == 0
    for n in range(12):
        assert client.store(BIG, [key("big", n)]) == [O.OK]
        world.advance(S)
    assert world.counter("slab_changes", "done") >= 10
    assert client.lookup(BIG, [key("big", n) for n in range(12)], 8).outcomes.count(O.OK) >= 10
    assert client.lookup(SMALL, chain(19, 8)).leading == 8  # the hottest of the others stayed


def test_three_classes_alternating_keep_the_arena_usable() -> None:
    """At least 0.85 of the arena holds chunks, whichever class is stored just now."""
    world = World(4096 * KIB, 128 * KIB)
    client = world.open()
    rng = random.Random(4)
    for wanted in (SMALL, MIDDLE, BIG):
        client.register(wanted)
    for n in range(40):  # phases of one class each
        wanted = (SMALL, MIDDLE, BIG)[n % 3]
        count = 8 if wanted is SMALL else 4
        for m in range(12):
            assert set(client.store(wanted, chain((n, m), count))) == {O.OK}
            world.advance(S // 10)
        if n > 9:
            assert world.tier["used_bytes"] >= 0.85 * world.tier["limit_bytes"]
    for n in range(400):  # and all at once
        wanted = rng.choice((SMALL, MIDDLE, BIG))
        assert set(client.store(wanted, chain(("mixed", n), 4))) == {O.OK}
        world.advance(S // 10)
    assert world.tier["used_bytes"] >= 0.85 * world.tier["limit_bytes"]


def test_hot_slots_move_and_keep_their_bytes() -> None:
    """A slab that changes class gives its hot chunks to other slabs of their class."""
    world = World(512 * KIB, 64 * KIB)
    client = world.open(admin=True)
    client.register(SMALL)
    client.register(BIG)
    for n in range(8):
        client.store(SMALL, chain(n, 8))
        world.advance(S)
    hot = [chain(n, 8)[0] for n in range(8)]  # one in each slab
    for _ in range(3):
        world.advance(10 * S)
        for k in hot:
            client.release(client.lease(SMALL, [k]).lease)
    assert client.store(BIG, [key("big")]) == [O.OK]
    world.settle()
    assert world.counter("slots_moved", "done") >= 1
    assert client.lookup(SMALL, hot, 8).outcomes.count(O.OK) == 8
    for n in range(8):
        got = client.lookup(SMALL, chain(n, 8), LookupFlag.LEASE | LookupFlag.LOAD)
        for k, ref in zip(chain(n, 8), refs_of(got.load.refs), strict=False):
            assert world.memory[ref.record].chunk == k
            assert k in world.payload[ref.record]
        client.release(got.lease)


def test_a_leased_slot_does_not_move_and_delays_its_slab() -> None:
    world = World(256 * KIB, 64 * KIB, lease_share=1.0)
    client = world.open()
    client.register(SMALL)
    client.register(BIG)
    for n in range(4):
        client.store(SMALL, chain(n, 8))
    leases = [client.lease(SMALL, chain(n, 1), lease=600 * S).lease for n in range(4)]
    assert client.store(BIG, [key("big")]) == [O.NO_SPACE]
    assert client.lookup(SMALL, chain(0, 8)).leading >= 1
    client.release(leases[2])
    assert client.store(BIG, [key("big")]) == [O.OK]
    for n in (0, 1, 3):
        assert list(client.load(leases[n]).outcomes) == [O.OK]


def test_a_lease_that_comes_while_a_slot_moves_keeps_the_old_place() -> None:
    world = World(256 * KIB, 64 * KIB, auto=False)
    client, other = world.open(), world.open()
    client.register(SMALL)
    client.register(BIG)
    for n in range(4):
        client.store(SMALL, chain(n, 8))
        world.work()
        world.advance(S)
    for n in range(4):
        client.release(client.lease(SMALL, chain(n, 8)[:1]).lease)
    event = other.reserve_event(BIG, [key("big")])
    world.handle(event._replace(request=77))
    world.settle()
    copies = [job for job in world.jobs if isinstance(job, ac.Copy)]
    assert copies and 77 not in world.replies
    moving = world.record_at(copies[0].source)
    hash_ = world.memory[moving].chunk
    n = next(n for n in range(4) if hash_ in chain(n, 8))
    at = chain(n, 8).index(hash_)
    lease = client.lease(SMALL, chain(n, 8)[: at + 1])
    ref = client.load(lease.lease).refs[32 * at : 32 * at + 32]
    assert int.from_bytes(ref[4:8], "little") == moving
    generation = world.memory[moving].generation
    while world.jobs:
        world.work()
        world.settle()
    assert world.memory[moving].generation == generation
    assert world.counter("slots_moved", "given_up") >= 1
    assert 77 in world.replies


def test_a_large_slab_is_emptied_in_slices() -> None:
    """No event does much: others are served while hundreds of small chunks make way."""
    world = World(4096 * KIB, 1024 * KIB, write_share=1.0)
    tiny, huge = spec("t", 4 * KIB), spec("h", 1024 * KIB)
    client = world.open()
    client.register(tiny)
    client.register(huge)
    for n in range(16):
        client.store(tiny, chain(n, 64))
    event = client.reserve_event(huge, [key("h")])
    actions = world.handle(event._replace(request=99))
    longest = len(actions)
    while 99 not in world.replies:
        assert world.core.busy
        longest = max(longest, len(world.handle(ev.Tick())))
    assert world.replies[99].result.outcomes == bytes([O.GRANTED])  # type: ignore[union-attr]
    assert longest < 300


@pytest.mark.parametrize("kind", [Kind.PREFIX, Kind.CONTENT])
def test_a_long_reserve_goes_in_slices(kind: Kind) -> None:
    world = World(8192 * KIB, 512 * KIB, write_share=1.0)
    wanted = spec("t", 4 * KIB)
    client, other = world.open(), world.open()
    client.register(wanted)
    other.store(wanted, [key("x")])
    event = client.reserve_event(wanted, chain("p", 2000), kind=kind)
    longest = len(world.handle(event._replace(request=98)))
    assert other.lookup(wanted, [key("x")]).leading == 1
    while 98 not in world.replies:
        longest = max(longest, len(world.handle(ev.Tick())))
    got = world.replies.pop(98).result  # type: ignore[union-attr]
    assert got.outcomes == bytes([O.GRANTED]) * 2000
    assert longest < 300
    client.fill(got.refs)
    assert set(client.commit(got.write).outcomes) == {O.OK}


def test_the_memory_grows_into_use() -> None:
    """Serving as soon as the first part is there; only reserved slabs are used."""
    from kvd.core import Core, CoreConfig
    from kvd.eviction.lru import Lru

    world = World(256 * KIB, 64 * KIB, write_share=1.0)
    world.core = Core(CoreConfig("test", 5, 256 * KIB, 64 * KIB, write_share=1.0), Lru)
    world.core.grow(100 * KIB)
    client = world.open()
    client.register(SMALL)
    assert client.store(SMALL, chain("a", 12)) == [O.OK] * 8 + [O.NO_SPACE] * 4
    assert world.tier["reserved_bytes"] == 64 * KIB
    world.core.grow(256 * KIB)
    assert client.store(SMALL, chain("a", 12)) == [O.EXISTS] * 8 + [O.OK] * 4


def test_the_same_events_give_the_same_actions() -> None:
    logs = []
    for _ in range(2):
        world = World(256 * KIB, 32 * KIB)
        rng = random.Random(8)
        client = world.open(admin=True)
        for wanted in (SMALL, MIDDLE):
            client.register(wanted)
        for _ in range(150):
            wanted = rng.choice((SMALL, MIDDLE))
            keys = chain(rng.randrange(9), rng.randrange(1, 6))
            if rng.random() < 0.6:
                client.store(wanted, keys)
            else:
                client.release(client.lease(wanted, keys).lease)
            world.advance(rng.randrange(S))
        logs.append(world.log)
    assert logs[0] == logs[1]


def test_a_store_of_what_is_there_is_a_use() -> None:
    world = World(32 * 8 * KIB, 32 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("a", 16))
    world.advance(S)
    client.store(ONE, chain("b", 16))
    world.advance(S)
    assert client.store(ONE, chain("a", 16)) == [O.EXISTS] * 16
    client.store(ONE, chain("c", 16))
    assert client.lookup(ONE, chain("a", 16)).leading == 16
    assert client.lookup(ONE, chain("b", 16)).leading == 0


def test_what_the_policy_does_not_know_can_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """K39: it refused to take chunks in; they must not fill the cache for ever."""
    from kvd.eviction.lru import Lru

    def broken(*arguments: object, **named: object) -> None:
        raise RuntimeError("no")

    world = World(32 * 8 * KIB, 32 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(Lru, "insert", broken)
        client.store(ONE, chain("lost", 32))
    for n in range(20):
        assert set(client.store(ONE, chain(n, 8))) == {O.OK}
    assert client.lookup(ONE, chain("lost", 32)).leading == 0


def test_a_chunk_that_is_moved_makes_no_place_for_itself() -> None:
    """Both shards are of the class whose slab is emptied, one lies in it and one elsewhere; what
    is colder is leased."""
    world = World(192 * KIB, 64 * KIB, write_share=1.0, lease_share=1.0)
    one, pair = spec("one", 10 * KIB), spec("pair", 10 * KIB, 10 * KIB)
    big = spec("big", 60 * KIB)
    client = world.open(admin=True)
    for wanted in (one, pair, big):
        client.register(wanted)
    for n in range(9):  # of the ten slots of two slabs
        client.store(one, chain(n, 1))
        client.lease(one, chain(n, 1), lease=600 * S)
        world.advance(S)
    assert client.store(pair, chain("pair", 1)) == [O.OK] * 2
    assert client.store(big, chain("big", 1)) == [O.OK]
    assert world.counter("slab_changes", "done") == 1
    assert world.counter("policy_errors") == 0
    assert all(client.lookup(one, chain(n, 1)).leading for n in range(9))
    assert client.lookup(pair, chain("pair", 1)).leading == 0
