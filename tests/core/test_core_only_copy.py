"""The only copy of a chunk: it is dropped when a tier below has a verified one, or it is a miss."""

from __future__ import annotations

from typing import Any

from world import KIB, LookupFlag, O, S, World, chain, content, refs_of, spec

from kvd.chunk import Kind
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig

ONE = spec("one", 28 * KIB)
TWO = spec("two", 28 * KIB, 28 * KIB)
CHUNKS = 100
WAITING = 1 << 20  # the number of a request that is answered later


def test_every_hit_loads_although_three_in_ten_writes_fail() -> None:
    """K46: DRAM of twenty chunks, a disk that refuses three writes in ten, a hundred chunks: each
    hit loads with the right bytes, the others are plain misses, and the counters add up."""
    world = World(640 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 1 << 24),), write_share=1.0)
    writes = 0

    def fails(job: Any) -> int:
        nonlocal writes
        if not isinstance(job, ac.TierWrite):
            return 0
        writes += 1
        return writes % 10 in (1, 4, 7)

    world.fails = fails
    client = world.open()
    client.register(ONE)
    for n in range(CHUNKS):
        assert client.store(ONE, chain(n, 1)) == [O.OK]
        world.settle()
    assert writes > 50
    hits = misses = 0
    for n in range(CHUNKS):
        found = client.lookup(ONE, chain(n, 1), LookupFlag.LEASE | LookupFlag.LOAD)
        if not found.leading:
            assert list(found.outcomes) == [O.MISS] and not found.lease
            misses += 1
            continue
        world.settle()
        done = client.load(found.lease)
        assert list(done.outcomes) == [O.OK]
        (ref,) = refs_of(done.refs)
        record = world.record_at(ref.offset)
        assert world.memory[record].chunk == chain(n, 1)[0]
        assert world.payload[record] == content(world.memory[record])
        client.release(found.lease)
        hits += 1
    assert hits + misses == CHUNKS and hits > 20
    dropped = sum(world.counter("chunks_evicted", why) for why in ("undemoted", "capacity"))
    assert misses == dropped
    assert world.counter("demotions", "written") == len(world.shelves[0].there)
    assert world.counter("chunks_evicted", "demoted") >= hits - 20


def test_a_chunk_that_is_lost_while_its_store_waits_for_room_begins_anew() -> None:
    """One shard of it lies below, and a reserve of the other one waits for a demotion when a scrub
    finds that one damaged: what is stored then is a new chunk, with the uses of none before it."""
    world = World(1024 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 1 << 24),), auto=False)
    client = world.open(admin=True)
    for one in (ONE, TWO):
        client.register(one)
    (hash_,) = chain("a", 1)
    client.store(TWO, [hash_], shards=(1,), flags=4)
    world.ask(ev.TierCommand(client.number, 0, "nvme", "drain"))
    world.work()
    world.settle()
    client.evict(ev.Selector(tier="dram", everything=True))
    for _ in range(2):
        found = client.lease(TWO, [hash_], shards=(1,))
        client.release(found.lease)
    (row,) = _rows(world, hash_)
    before = _told(world, row)
    assert (before["hits"], before["below"], before["ready"]) == (2, 1, 0)

    world.advance(100 * S)
    world.ask(ev.TierCommand(client.number, 0, "nvme", "scrub"))
    (scrub,) = [job for job in world.jobs if isinstance(job, ac.TierScrub)]
    _fill(world, client)
    world.handle(client.reserve_event(TWO, [hash_], shards=(0,), flags=4)._replace(request=WAITING))
    assert WAITING not in world.replies, "it waits for the demotion of something else"
    ((name, (at, generation, header, _)),) = world.shelves[0].there.items()
    world.shelves[0].there[name] = (at, generation, header, b"damaged")
    world.do(scrub)
    assert WAITING not in world.replies and not world.shelves[0].there
    while WAITING not in world.replies:
        # a demotion ends, and a slot is free
        world.do(next(j for j in world.jobs if not isinstance(j, ac.Verify)))
        world.settle()

    assert list(world.replies[WAITING].result.outcomes) == [O.GRANTED]
    assert _rows(world, hash_) == [row]
    after = _told(world, row)
    assert after == before | {
        "hits": 0,
        "born": before["born"] + 100,
        "last": before["last"] + 100 * S,
        "below": 0,
        "writing": 1,
    }


def _rows(world: World, hash_: bytes) -> list[int]:
    space = world.core._store.spaces.find("default", TWO.digest, Kind.PREFIX)
    assert space is not None
    return [space.get(hash_)]


def _told(world: World, row: int) -> dict[str, Any]:
    """All that is known of a chunk."""
    chunks = world.core._store.chunks
    columns = ("hits", "born", "last", "flags", "tokens", "index", "ready", "writing", "below")
    return {name: getattr(chunks, name)[row] for name in columns}


def _fill(world: World, client: Any) -> None:
    """Until no slot is free: what is on its way down is still here."""
    for n in range(32):
        event = client.reserve_event(ONE, chain(("fill", n), 1))
        world.handle(event._replace(request=-n))
        client.fill(world.replies[-n].result.refs)
        world.handle(ev.Commit(client.number, -100 - n, world.replies[-n].result.write, None, None))
