"""What waits in a tier: which job is next, and that each leaves once."""

from __future__ import annotations

import random
import select
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers_kit import CONFIG, SECOND, Chunk, Rig

from kvd.tiers.base import NEVER, Answer, Delete, Job, Probe, Read, Use, Write
from kvd.tiers.faults import Fault
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.waiting import PATIENCE, Line, Waiting, line_of, tenant_of

MIB = 1 << 20


def read(number: int, use: Use = Use.LOAD, *, tenant: bytes = b"", deadline: int = NEVER) -> Read:
    return Chunk(number).read(deadline=deadline)._replace(use=use, tenant=tenant)


def write(number: int, tenant: bytes = b"") -> Write:
    return Chunk(number).write()._replace(tenant=tenant)


def taken(waiting: Waiting, *, behind: bool = True) -> list[Job]:
    order: list[Job] = []
    while jobs := waiting.take(behind=behind):
        order += jobs
    return order


def test_loads_go_first_and_prefetches_last() -> None:
    waiting = Waiting()
    jobs: list[Job] = [
        read(1, Use.PREFETCH), read(2, Use.SCRUB), write(3), Chunk(4).delete(), read(5),
        Probe(None),
    ]  # fmt: skip
    for job in jobs:
        waiting.put(job)
    assert [line_of(job) for job in taken(waiting)] == sorted(Line)


def test_who_is_named_pays_else_the_keys_namespace() -> None:
    chunk = Chunk(1)
    for job in (chunk.write(), chunk.read(), chunk.delete()):
        assert tenant_of(job) == chunk.header.namespace_digest
        assert tenant_of(job._replace(tenant=b"me")) == b"me"


@pytest.mark.parametrize("weight", [1, 3])
def test_a_flood_of_loads_by_one_tenant_lets_the_other_have_its_share(weight: int) -> None:
    waiting = Waiting()
    waiting.set_weight(b"b", weight)
    for n in range(100):
        waiting.put(read(n, tenant=b"a"))
    for n in range(30):
        waiting.put(read(200 + n, tenant=b"b"))
    first = taken(waiting)[:40]
    got = Counter(tenant_of(job) for job in first)
    assert abs(got[b"b"] - 40 * weight / (weight + 1)) <= 1
    mine = [job.key for job in first if tenant_of(job) == b"b"]
    assert mine == [Chunk(200 + n).key for n in range(len(mine))], "in the order given"


def test_writes_are_shared_too() -> None:
    waiting = Waiting()
    for n in range(50):
        waiting.put(write(n, b"a"))
    for n in range(10):
        waiting.put(write(100 + n, b"b"))
    assert Counter(tenant_of(job) for job in taken(waiting)[:20]) == {b"a": 10, b"b": 10}


def test_loads_without_end_starve_nothing() -> None:
    """Each line that waits gets one part in seventeen of the bytes, as long as it waits."""
    waiting = Waiting()
    for n in range(20):
        for job in (write(100 + n), read(200 + n, Use.SCRUB), read(300 + n, Use.PREFETCH)):
            waiting.put(job)
    waiting.put(Chunk(2).delete())
    seen: list[Line] = []
    for n in range(10 * PATIENCE):
        waiting.put(read(1000 + n))
        seen += [line_of(job) for job in waiting.take(behind=True)]
    assert Line.DELETE in seen[: PATIENCE + 1]
    for line in (Line.MOVE, Line.SCRUB, Line.PREFETCH):
        assert 7 <= seen.count(line) <= 10
    assert seen.count(Line.LOAD) >= 0.8 * len(seen)


def test_while_no_worker_is_to_spare_only_loads_and_deletes_go() -> None:
    waiting = Waiting()
    for job in (write(1), read(2, Use.SCRUB), read(3, Use.PREFETCH), read(4), Chunk(5).delete()):
        waiting.put(job)
    assert [line_of(job) for job in taken(waiting, behind=False)] == [Line.LOAD, Line.DELETE]
    assert len(waiting) == 3


def test_a_read_on_its_way_to_another_tier_goes_with_writes_and_is_a_read_nevertheless() -> None:
    waiting = Waiting()
    move = read(1, Use.MOVE)
    for job in (read(2, Use.SCRUB), move, write(3)):
        waiting.put(job)
    (dropped,) = waiting.drop(Write, Delete)
    assert isinstance(dropped, Write) and len(waiting) == 2
    assert taken(waiting)[0] is move


def test_deletes_go_together_as_far_as_the_medium_takes_them() -> None:
    waiting = Waiting(delete_batch=3)
    for n in range(5):
        waiting.put(Chunk(n).delete())
    assert [len(waiting.take(behind=True)) for _ in range(3)] == [3, 2, 0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 120))
def test_each_job_leaves_once_by_whichever_door(seed: int, steps: int) -> None:
    """Against a plain list: taken, expired, dropped; never twice, none forgotten."""
    rng = random.Random(seed)
    waiting, inside = Waiting(rng.choice([1, 4])), []
    for now in range(steps):
        for _ in range(rng.randrange(3)):
            deadline = rng.choice([NEVER, now + rng.randrange(1, 20)])
            tenant = rng.choice([b"a", b"b", b"c"])
            job = rng.choice([
                lambda: read(rng.randrange(9), rng.choice(list(Use))),
                lambda: write(rng.randrange(9)),
                lambda: Chunk(rng.randrange(9)).delete(),
            ])()._replace(deadline=deadline, tenant=tenant)  # fmt: skip
            waiting.put(job)
            inside.append(job)
        if rng.random() < 0.5:
            jobs = waiting.take(behind=True)
            assert bool(jobs) == bool(inside)
            leaving = jobs
        elif rng.random() < 0.9:
            leaving = waiting.expire(now)
            assert sorted(map(id, leaving)) == sorted(id(j) for j in inside if j.deadline <= now)
        else:
            kinds = rng.choice([(), (Read,), (Write, Delete)])
            leaving = waiting.drop(*kinds)
            assert sorted(map(id, leaving)) == sorted(
                id(j) for j in inside if not kinds or isinstance(j, kinds)
            )
        gone = {id(job) for job in leaving}
        assert len(gone) == len(leaving) and gone <= {id(job) for job in inside}
        inside = [job for job in inside if id(job) not in gone]
        assert len(waiting) == len(inside)


def stored(rig: Rig, many: list[Chunk]) -> list[Read]:
    """Reads of chunks that were written."""
    written = rig.do([chunk.write() for chunk in many])
    return [chunk.read(done.place) for chunk, done in zip(many, written, strict=True)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    config = CONFIG._replace(workers=1, writers=1, spares=0, stuck_ns=60 * SECOND)
    rig = Rig(MemoryBackend(64 * MIB), config=config).start()
    yield rig
    rig.close()


def test_through_a_real_pool_a_flood_of_one_tenant_leaves_the_other_its_turns(rig: Rig) -> None:
    """One worker. The flood was there first; the other's loads are through after as many of it."""
    many = [Chunk(n) for n in range(60)]
    reads = stored(rig, many)
    rig.faults.add("get", Fault.HANG, times=1)
    flood: list[Job] = [read._replace(tenant=b"a") for read in reads[:40]]
    loads: list[Job] = [read._replace(tenant=b"b") for read in reads[40:]]
    rig.tier.submit(flood)
    rig.until(lambda: rig.faults.calls.get("get") == 1)
    rig.tier.submit(loads)
    rig.faults.release()
    done = []
    while len(done) < 60:
        select.select([rig.completions], [], [], 10)
        done += rig.completions.take()
    assert all(one.answer is Answer.OK for one in done)
    order = [one.job.tenant for one in done if isinstance(one.job, Read)]
    assert order[:41].count(b"b") == 20


def test_what_is_behind_loads_never_takes_the_last_worker_of_a_pool() -> None:
    config = CONFIG._replace(workers=2, writers=1, spares=0, stuck_ns=60 * SECOND)
    rig = Rig(MemoryBackend(64 * MIB), config=config).start()
    try:
        many = [Chunk(n) for n in range(6)]
        reads = stored(rig, many)
        rig.faults.add("get", Fault.HANG, where=lambda key: key != many[5].key)
        slow: list[Job] = [read._replace(use=Use.PREFETCH) for read in reads[:5]]
        rig.tier.submit(slow)
        rig.until(lambda: rig.faults.calls.get("get") == 1)
        assert rig.one(reads[5]).answer is Answer.OK
        assert rig.faults.calls["get"] == 2
        rig.faults.release()
        assert {done.answer for done in rig.wait(slow)} == {Answer.OK}
    finally:
        rig.close()
