"""A key has one identity, and is visible only when its bytes are there."""

from __future__ import annotations

import pytest
from world import KIB, Client, O, S, World, chain, fingerprint, key, refs_of, spec

from kvd.chunk import Kind, KVSpec, State
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.errors import ErrorCode

TWO = spec("two", 8 * KIB, 12 * KIB)


@pytest.fixture
def world() -> World:
    return World()


def test_another_fingerprint_is_a_miss_and_a_refusal(world: World) -> None:
    """K22: same digest, other tokens: no data, a refused store, both counted; the first intact."""
    client = world.open(admin=True)
    one = client.register(spec())
    keys = chain("p", 3)
    client.store(one, keys)
    other = [b"other tokens" + bytes([0, 0, 0, n]) for n in range(3)]
    looked = client.lookup(one, keys, LookupFlag.LEASE, prints=other)
    assert list(looked.outcomes) == [O.MISMATCH, O.SKIPPED, O.SKIPPED]
    assert (looked.leading, looked.lease) == (0, 0)
    assert client.store(one, keys, prints=other) == [O.MISMATCH] * 3
    assert world.counter("key_mismatches", "lookup") == 1
    assert world.counter("key_mismatches", "reserve") == 3
    assert client.lookup(one, keys).leading == 3


@pytest.mark.parametrize("what", ["parent", "index", "flags"])
def test_another_parent_place_or_shape_is_refused(world: World, what: str) -> None:
    """K22: the second identity is more than the tokens."""
    client = world.open()
    one = client.register(spec())
    a, b = key("a"), key("b")
    client.store(one, [a, b])
    more = {
        "parent": {"parent": key("x"), "index0": 1},
        "index": {"parent": a, "index0": 2},
        "flags": {"parent": a, "index0": 1, "flags": 2},
    }[what]
    assert client.store(one, [b], **more) == [O.MISMATCH]
    assert client.lookup(one, [a, b]).leading == 2


def test_a_chunk_is_invisible_until_all_its_shards_are_committed(world: World) -> None:
    """K27, K25 (in memory): a reader meets a miss or the whole value, nothing between."""
    client = world.open()
    two = client.register(TWO)
    keys = chain("p", 2)
    reserved = client.reserve(two, keys)
    assert list(reserved.outcomes) == [O.GRANTED] * 4
    assert client.lookup(two, keys).outcomes[0] == O.MISS
    client.fill(reserved.refs)
    client.commit(reserved.write, [0])
    assert client.lookup(two, keys).outcomes[0] == O.PARTIAL
    assert client.lookup(two, keys, shards=[0]).leading == 1
    client.commit(reserved.write, [1])
    assert client.lookup(two, keys).leading == 1
    client.commit(reserved.write, [2, 3])
    assert client.lookup(two, keys).leading == 2


def test_an_aborted_store_leaves_no_trace(world: World) -> None:
    """K25 (in memory): what was not stored can't be found, and can be stored again."""
    client = world.open()
    one = client.register(spec())
    keys = chain("p", 20)
    reserved = client.reserve(one, keys)
    client.fill(reserved.refs)
    client.commit(reserved.write, range(7))
    client.abort(reserved.write)
    looked = client.lease(one, keys)
    assert looked.leading == 7
    assert world.tier["writing_bytes"] == 0
    assert client.store(one, keys) == [O.EXISTS] * 7 + [O.OK] * 13
    assert client.lookup(one, keys).leading == 20


def test_presence_follows_each_chunks_own_result(world: World) -> None:
    """K30 (in memory): 16 of 40 stored is 16 of 40; the next store writes the other 24."""
    client = world.open()
    one = client.register(spec())
    keys = chain("p", 30)
    reserved = client.reserve(one, keys)
    client.fill(reserved.refs)
    assert list(client.commit(reserved.write, range(16)).outcomes) == [O.OK] * 16
    assert client.lookup(one, keys).leading == 16
    again = client.reserve(one, keys)
    assert list(again.outcomes) == [O.EXISTS] * 16 + [O.BUSY] * 14
    client.abort(reserved.write)
    assert client.store(one, keys) == [O.EXISTS] * 16 + [O.OK] * 14
    lease = client.lease(one, keys)
    assert list(client.load(lease.lease).outcomes) == [O.OK] * 30


def test_a_wrong_belief_heals_at_the_next_failed_read() -> None:
    """K30, K35 (in memory): a payload that went bad is a miss from then on, and can be replaced."""
    world = World(auto=True)
    client = world.open()
    one = client.register(spec())
    keys = chain("p", 4)
    client.store(one, keys)
    world.restart()
    world.auto = False
    (bad,) = [r for r, h in world.memory.items() if h.chunk == keys[2]]
    world.payload[bad] = b"something else"
    client = world.open(admin=True)
    lease = client.lease(one, keys)
    assert lease.leading == 4
    load = client.load(lease.lease)
    assert list(load.outcomes) == [O.FAILED] * 4 and not load.done
    world.work()
    got = world.ask(ev.Wait(client.number, 0, load.transfer, 0, world.now))
    assert got.done
    assert dict(zip(got.items[::4], got.outcomes, strict=True)) == {
        0: O.OK,
        1: O.OK,
        2: O.CORRUPT,
        3: O.OK,
    }
    assert world.memory[bad].state == State.QUARANTINED
    assert client.lookup(one, keys).leading == 2
    assert client.reserve(one, [keys[2]], parent=keys[1], index0=2).outcomes[0] == O.BUSY
    client.release(lease.lease)
    assert client.store(one, [keys[2]], parent=keys[1], index0=2) == [O.OK]
    assert client.lookup(one, keys).leading == 4
    assert world.counter("shards_verified", "corrupt") == 1
    assert world.counter("chunks_evicted", "quarantine") == 1
    hits = {row["hash"]: row["hits"] for row in client.list("chunks")}
    assert hits[keys[1].hex()] == 1
    assert hits[keys[2].hex()] == 0, "uses of what was lost are none of what came in its place"


def test_stores_of_one_key_are_idempotent() -> None:
    """K100: 32 clients, the same 100 keys in shuffled batches: one wins, others are told so, and
    bytes count once."""
    world = World(2048 * KIB, 128 * KIB)
    clients = [world.open() for _ in range(32)]
    one = clients[0].register(spec("m", 4 * KIB))
    keys = [key("k", n) for n in range(100)]
    told: dict[bytes, list[int]] = {k: [] for k in keys}
    pending: list[tuple[int, int, list[bytes]]] = []
    for n, client in enumerate(clients):
        order = keys[n * 3 :] + keys[: n * 3]
        for at in range(0, 100, 10):
            batch = order[at : at + 10]
            got = client.reserve(one, batch, kind=Kind.CONTENT)
            for k, outcome in zip(batch, got.outcomes, strict=True):
                told[k].append(outcome)
            if got.write:
                client.fill(got.refs)
                pending.append((n, got.write, batch))
        while len(pending) > n % 3:
            who, write, _ = pending.pop(0)
            assert set(clients[who].commit(write).outcomes) == {O.OK}
    for who, write, _ in pending:
        clients[who].commit(write)
    for outcomes in told.values():
        assert outcomes.count(O.GRANTED) == 1
        assert set(outcomes) <= {O.GRANTED, O.BUSY, O.EXISTS}
    assert world.tier["used_bytes"] == 100 * 4 * KIB
    assert world.counter("bytes_stored") == 100 * 4 * KIB


def test_a_lookup_over_shards_gives_one_number() -> None:
    """K102: world of 4, one shard of chunk 7 is gone: every rank is told 7, with one lease."""
    world = World(4096 * KIB, 256 * KIB)
    four = spec("four", *[4 * KIB] * 4)
    scheduler = world.open(group=b"engine", admin=True)
    ranks = [world.open(group=b"engine") for _ in range(4)]
    scheduler.register(four)
    keys = chain("p", 20)
    for rank, client in enumerate(ranks):
        wanted = keys if rank != 2 else keys[:7]
        assert set(client.store(four, wanted, shards=[rank])) == {O.OK}
        if rank == 2:
            assert set(client.store(four, keys[8:], shards=[2], parent=keys[7], index0=8)) == {O.OK}
    for client in (scheduler, *ranks):
        looked = client.lookup(four, keys)
        assert looked.leading == 7
        assert looked.outcomes[7] == O.PARTIAL
    lease = scheduler.lease(four, keys)
    assert lease.leading == 7
    for rank, client in enumerate(ranks):
        assert list(client.load(lease.lease, shards=(rank,)).outcomes) == [O.OK] * 7
    assert world.tier["leased_chunks"] == 7
    ranks[0].release(lease.lease)
    assert world.tier["leased_chunks"] == 0
    assert ranks[2].store(four, [keys[7]], shards=[2], parent=keys[6], index0=7) == [O.OK]
    assert scheduler.lookup(four, keys).leading == 20


def test_the_unit_of_eviction_is_the_chunk_with_all_its_shards(world: World) -> None:
    """K102: no rank keeps what another has lost."""
    client = world.open(admin=True)
    two = client.register(TWO)
    keys = chain("p", 5)
    client.store(two, keys)
    got = client.evict(ev.Selector(keys=(keys[3],)))
    assert (got.matched, got.evicted, got.bytes) == (1, 1, 20 * KIB)
    for shards in ([0], [1], [0, 1]):
        assert client.lookup(two, keys, shards=shards).leading == 3


def test_a_foreign_key_looks_like_a_miss(world: World) -> None:
    mine, theirs = world.open("default"), world.open("other")
    one = mine.register(spec())
    keys = chain("p", 3)
    mine.store(one, keys)
    theirs.register(one)
    looked = theirs.lookup(one, keys, LookupFlag.LEASE | LookupFlag.EVERY)
    assert list(looked.outcomes) == [O.MISS] * 3
    assert theirs.list("chunks") == []
    assert theirs.evict(ev.Selector(everything=True)).matched == 0
    refused = theirs.list("chunks", ev.Selector(namespace="default"))
    assert isinstance(refused, ac.Fail) and refused.code == ErrorCode.AUTH
    assert theirs.store(one, keys) == [O.OK] * 3
    assert mine.lookup(one, keys).leading == 3


def test_a_spec_that_another_namespace_uses_is_as_unknown_as_any(world: World) -> None:
    """Nobody learns which models others run: by use, by a full list, or after a restart."""
    mine, sibling, theirs = world.open("default"), world.open("default"), world.open("other")
    one, none = mine.register(spec()), spec("nobody")
    mine.store(one, chain("p", 3))
    assert sibling.lookup(one, chain("p", 3)).leading == 3  # what one registers is its namespace's

    def told(client: Client, wanted: KVSpec) -> list[str]:
        answers = [client.lookup(wanted, chain("p", 1)), client.reserve(wanted, chain("p", 1))]
        assert all(isinstance(a, ac.Fail) and a.code == ErrorCode.SPEC for a in answers)
        return [a.message.replace(wanted.digest.hex()[:16], "SPEC") for a in answers]

    assert told(theirs, one) == told(theirs, none)
    world.restart()
    mine, theirs = world.open("default"), world.open("other")
    assert mine.lookup(one, chain("p", 3)).leading == 3  # its chunks were adopted
    assert told(theirs, one) == told(theirs, none)
    full = World(max_specs=1)
    mine, theirs = full.open("default"), full.open("other")
    mine.register(one)
    mine.register(one)
    refused = [full.ask(ev.RegisterSpec(theirs.number, 0, s)) for s in (one, none)]
    assert refused[0].code == ErrorCode.LIMIT
    assert refused[0].message == refused[1].message


def test_specs_without_chunks_are_not_taken_over(world: World) -> None:
    client = world.open()
    one, _ = client.register(spec()), client.register(spec("two"))
    client.store(one, chain("p", 3))
    world.restart()
    assert world.core.specs == [one]


def test_kinds_do_not_meet(world: World) -> None:
    client = world.open()
    one = client.register(spec())
    keys = chain("p", 2)
    client.store(one, keys)
    assert client.lookup(one, keys, kind=Kind.CONTENT).outcomes[0] == O.MISS
    assert client.store(one, keys, kind=Kind.CONTENT) == [O.OK] * 2
    got = client.lookup(one, [keys[1], key("?"), keys[0]], LookupFlag.EVERY, kind=Kind.CONTENT)
    assert list(got.outcomes) == [O.OK, O.MISS, O.OK]


def test_a_content_chunk_is_the_same_wherever_it_stood(world: World) -> None:
    client = world.open()
    one = client.register(spec())
    client.store(one, [key("c")], kind=Kind.CONTENT, index0=3)
    assert client.store(one, [key("c")], kind=Kind.CONTENT, index0=9) == [O.EXISTS]


def test_an_orphan_is_legal_but_in_no_leading_run(world: World) -> None:
    client = world.open(admin=True)
    one = client.register(spec())
    keys = chain("p", 4)
    assert client.store(one, keys[2:], parent=keys[1], index0=2) == [O.OK] * 2
    assert client.lookup(one, keys).leading == 0
    assert client.lookup(one, keys[2:]).leading == 0
    every = client.lookup(one, keys, LookupFlag.EVERY)
    assert (list(every.outcomes), every.leading) == ([O.MISS, O.MISS, O.OK, O.OK], 0)
    assert world.counter("chunks_missed", "orphan") == 1
    assert client.store(one, keys[:2]) == [O.OK] * 2
    assert client.lookup(one, keys).leading == 4
    assert client.lookup(one, keys[2:]).leading == 2


def test_a_hole_in_the_middle_ends_the_run_and_heals(world: World) -> None:
    client = world.open(admin=True)
    one = client.register(spec())
    keys = chain("p", 6)
    client.store(one, keys)
    client.evict(ev.Selector(keys=(keys[2],)))
    assert client.lookup(one, keys).leading == 2
    assert client.lookup(one, keys[4:]).leading == 2  # their own parents are there
    assert client.lookup(one, keys[3:]).leading == 0
    assert client.store(one, keys) == [O.EXISTS] * 2 + [O.OK] + [O.EXISTS] * 3
    assert client.lookup(one, keys).leading == 6


def test_a_lookup_can_reserve_its_misses(world: World) -> None:
    client = world.open()
    one = client.register(spec())
    keys = chain("p", 6)
    client.store(one, keys[:2])
    got = client.lookup(one, keys, LookupFlag.LEASE | LookupFlag.RESERVE_MISSES)
    assert got.leading == 2 and got.lease
    assert list(got.reserved.outcomes) == [O.GRANTED] * 4
    client.fill(got.reserved.refs)
    client.commit(got.reserved.write)
    assert client.lookup(one, keys).leading == 6
    all_there = client.lookup(one, keys, LookupFlag.RESERVE_MISSES)
    assert all_there.reserved is None


def test_a_record_says_who_and_what_it_is(world: World) -> None:
    client = world.open()
    one = client.register(spec("m", 6000))
    keys = chain("p", 2)
    reserved = client.reserve(one, keys, flags=2)
    ref = refs_of(reserved.refs)[1]
    header = world.memory[ref.record]
    assert (header.chunk, header.parent, header.index) == (keys[1], keys[0], 1)
    assert (header.session, header.state) == (client.public_id, State.WRITING)
    assert (header.fingerprint, header.tokens, header.pos0) == (fingerprint(keys[1]), 16, 16)
    assert (header.length, header.flags, header.epoch) == (6000, 2, world.epoch)
    assert ref.generation == header.generation and ref.offset % 4096 == 0
    client.fill(reserved.refs)
    client.commit(reserved.write)
    world.advance(S)
    header = world.memory[ref.record]
    assert header.state == State.READY
    assert header.flags == 3 and header.digest == world.digest(ref.record)


def test_a_digest_from_the_client_seals_at_once() -> None:
    world = World(auto=False)
    client = world.open(admin=True)
    one = client.register(spec())
    reserved = client.reserve(one, [key("a")])
    client.fill(reserved.refs)
    client.commit(reserved.write, [0], digests=b"d" * 16)
    assert not world.jobs
    (row,) = client.list("chunks")
    assert row["state"] == "sealed"
    assert world.memory[0].digest == b"d" * 16
