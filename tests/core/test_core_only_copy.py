"""The only copy of a chunk: it is dropped when a tier below has a verified one, or it is a miss."""

from __future__ import annotations

from typing import Any

from world import KIB, LookupFlag, O, World, chain, content, refs_of, spec

from kvd.core import actions as ac
from kvd.core.config import TierConfig

ONE = spec("one", 28 * KIB)
CHUNKS = 100


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
