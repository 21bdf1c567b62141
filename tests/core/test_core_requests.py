"""A request that can't be carried out is answered with a typed error, and has no effect."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, O, S, World, chain, key, spec

from kvd.chunk import NO_PARENT
from kvd.core import Core, CoreConfig, CoreFault
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.core.jobs import Pause
from kvd.errors import ErrorCode, InternalError
from kvd.eviction.lru import Lru

ONE = spec()
KEYS = chain("p", 3)


@pytest.fixture
def world() -> World:
    world = World()
    client = world.open()
    client.register(ONE)
    return world


def reserve(**changes: Any) -> ev.Reserve:
    base = ev.Reserve(
        1, 0, ONE.digest, 1, (0,), b"".join(KEYS), NO_PARENT, 0, bytes(48), None, None, 0, S
    )
    return base._replace(**changes)


def lookup(**changes: Any) -> ev.Lookup:
    base = ev.Lookup(1, 0, ONE.digest, 1, (0,), b"".join(KEYS), bytes(48), 0, S, NO_PARENT, 0, S)
    return base._replace(**changes)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (reserve(session=99), ErrorCode.UNKNOWN_SESSION),
        (reserve(spec=b"?" * 32), ErrorCode.SPEC),
        (reserve(kind=3), ErrorCode.BAD_KEY),
        (reserve(shards=()), ErrorCode.BAD_KEY),
        (reserve(shards=(0, 0)), ErrorCode.BAD_KEY),
        (reserve(shards=(1,)), ErrorCode.SPEC),
        (reserve(shards=(-1,)), ErrorCode.SPEC),
        (reserve(hashes=b""), ErrorCode.LIMIT),
        (reserve(hashes=b"x" * 33), ErrorCode.BAD_KEY),
        (reserve(hashes=bytes(32 * 4097), fingerprints=bytes(16 * 4097)), ErrorCode.LIMIT),
        (reserve(fingerprints=bytes(47)), ErrorCode.BAD_KEY),
        (reserve(parent=b"short"), ErrorCode.BAD_KEY),
        (reserve(parent=key("x"), index0=0), ErrorCode.BAD_KEY),
        (reserve(parent=key("x"), index0=1, kind=2), ErrorCode.BAD_KEY),
        (reserve(index0=-1), ErrorCode.BAD_KEY),
        (reserve(index0=1 << 31), ErrorCode.BAD_KEY),
        (reserve(tokens=bytes(12)), ErrorCode.BAD_KEY),
        (reserve(tokens=(17).to_bytes(4, "little") * 3), ErrorCode.BAD_KEY),
        (reserve(tokens=bytes(4)), ErrorCode.BAD_KEY),
        (reserve(pos0=bytes(8)), ErrorCode.BAD_KEY),
        (reserve(flags=1 << 32), ErrorCode.BAD_KEY),
        (ev.Commit(1, 0, 5, None, None), ErrorCode.UNKNOWN_HANDLE),
        (ev.Abort(1, 0, 5, None), ErrorCode.UNKNOWN_HANDLE),
        (lookup(session=99), ErrorCode.UNKNOWN_SESSION),
        (lookup(spec=b"?" * 32), ErrorCode.SPEC),
        (lookup(fingerprints=bytes(16)), ErrorCode.BAD_KEY),
        (lookup(flags=LookupFlag.LOAD), ErrorCode.PROTOCOL),
        (lookup(flags=LookupFlag.RESERVE_MISSES, fingerprints=None), ErrorCode.BAD_KEY),
        (lookup(flags=LookupFlag.RESERVE_MISSES, parent=key("x")), ErrorCode.BAD_KEY),
        (lookup(flags=LookupFlag.LEASE, lease_ns=-1), ErrorCode.BAD_KEY),
        (ev.Load(1, 0, 5, None, None), ErrorCode.UNKNOWN_HANDLE),
        (ev.Wait(1, 0, 5, 0, 0), ErrorCode.UNKNOWN_HANDLE),
        (ev.Cancel(1, 0, 5), ErrorCode.UNKNOWN_HANDLE),
        (ev.Renew(1, 0, 5, S), ErrorCode.UNKNOWN_HANDLE),
        (ev.Release(1, 0, 5), ErrorCode.UNKNOWN_HANDLE),
        (ev.List(1, 0, "chunks", ev.Selector(namespace="other"), 0, 9), ErrorCode.AUTH),
        (ev.Evict(1, 0, ev.Selector(namespace="other"), False, 0, 9), ErrorCode.AUTH),
        (ev.Stat(99, 0), ErrorCode.UNKNOWN_SESSION),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, tuple) else value.name,
)
def test_what_does_not_hold_is_refused_without_effect(
    world: World, event: Any, code: ErrorCode
) -> None:
    before = {k: v for k, v in world.stat().items() if k != "counters"}
    got = world.ask(event)
    assert isinstance(got, ac.Fail)
    assert got.code == code and got.message
    assert {k: v for k, v in world.stat().items() if k != "counters"} == before
    assert not world.memory


def test_items_are_checked_against_what_there_is(world: World) -> None:
    client = world.open()
    got = client.reserve(ONE, KEYS)
    bad = client.commit(got.write, [3])
    assert isinstance(bad, ac.Fail) and bad.code == ErrorCode.BAD_KEY
    odd = world.ask(ev.Commit(client.number, 0, got.write, b"abc", None))
    assert isinstance(odd, ac.Fail) and odd.code == ErrorCode.BAD_KEY
    few = world.ask(ev.Commit(client.number, 0, got.write, None, b"d" * 16))
    assert isinstance(few, ac.Fail) and few.code == ErrorCode.BAD_KEY
    assert list(client.commit(got.write, [0, 0]).outcomes) == [O.OK, O.FAILED]
    assert list(client.commit(got.write).outcomes) == [O.FAILED, O.OK, O.OK]


def test_results_are_limited_not_only_keys() -> None:
    world = World(4096 * KIB, 256 * KIB)
    wide = spec("wide", *[4 * KIB] * 8)
    client = world.open()
    client.register(wide)
    event = client.lookup_event(wide, [key(n) for n in range(2049)])
    got = world.ask(event)
    assert isinstance(got, ac.Fail) and got.code == ErrorCode.LIMIT
    assert "16384" in got.message


def test_specs_are_limited_and_registering_again_is_free() -> None:
    world = World(max_specs=2)
    client = world.open()
    for name in ("a", "b", "a"):
        client.register(spec(name))
    got = world.ask(ev.RegisterSpec(client.number, 0, spec("c")))
    assert isinstance(got, ac.Fail) and got.code == ErrorCode.LIMIT
    assert [s.model for s in world.core.specs] == ["a", "b"]
    bad = world.ask(ev.RegisterSpec(client.number, 0, spec("")))
    assert isinstance(bad, ac.Fail) and bad.code == ErrorCode.SPEC


def test_the_registry_tells_when_it_has_grown() -> None:
    world = World()
    version = world.core.registry_version
    client = world.open("tenant")
    assert world.core.registry_version > version and "tenant" in world.core.namespaces
    version = world.core.registry_version
    client.register(ONE)
    assert world.core.registry_version > version
    version = world.core.registry_version
    client.register(ONE)
    world.open("tenant")
    assert world.core.registry_version == version


def test_a_fault_of_the_server_is_no_answer_to_a_client() -> None:
    world = World()
    client = world.open()
    event = ev.OpenSession(client.number, b"p" * 16, "default", b"g", False, "", True)
    with pytest.raises(CoreFault) as fault:
        world.handle(event)
    assert isinstance(fault.value.__cause__, InternalError)
    assert fault.value.actions == []


def test_closing_twice_and_late_workers_harm_nothing(world: World) -> None:
    client = world.open()
    client.close()
    world.handle(ev.CloseSession(client.number, True))
    world.handle(ev.LockFreed(b"?" * 16))
    world.handle(ev.Sealed(0, 1, b"d" * 16))
    world.handle(ev.Verified(7, 1, False))
    world.handle(ev.Copied(7, True))
    assert world.tier["used_bytes"] == 0


def test_a_seal_counts_only_for_the_generation_that_was_hashed() -> None:
    world = World(auto=False)
    client = world.open(admin=True)
    client.register(ONE)
    client.store(ONE, KEYS[:1])
    (job,) = world.jobs
    client.evict(ev.Selector(everything=True))
    client.store(ONE, [key("other")])
    world.do(job)
    assert [row["state"] for row in client.list("chunks")] == ["unsealed"]
    world.work()
    assert [row["state"] for row in client.list("chunks")] == ["sealed"]
    assert world.counter("shards_sealed", "daemon") == 1


def test_a_seal_that_fails_leaves_the_chunk_readable() -> None:
    world = World(auto=False)
    client = world.open(admin=True)
    client.register(ONE)
    client.store(ONE, KEYS)
    for job in list(world.jobs):
        world.do(job, fail=True)
    assert world.counter("seals_failed") == 3
    assert client.lookup(ONE, KEYS).leading == 3


def test_sealing_keeps_a_few_workers_busy_and_no_more() -> None:
    world = World(auto=False, seals_in_flight=2)
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("p", 9))
    seen = 0
    while world.jobs:
        assert len(world.jobs) <= 2
        world.do(world.jobs[0])
        seen += 1
    assert seen == 9


def test_odd_positions_and_short_chunks_are_kept(world: World) -> None:
    client = world.open()
    event = client.reserve_event(ONE, KEYS)._replace(
        tokens=b"".join(n.to_bytes(4, "little") for n in (16, 16, 3)),
        pos0=b"".join(n.to_bytes(8, "little") for n in (5, 16, 1 << 40)),
    )
    got = world.ask(event)
    headers = [world.memory[r] for r in sorted(world.memory)]
    assert [(h.tokens, h.pos0) for h in headers] == [(16, 5), (16, 16), (3, 1 << 40)]
    client.fill(got.refs)
    client.commit(got.write)
    assert client.store(ONE, KEYS) == [O.MISMATCH, O.EXISTS, O.MISMATCH]


def test_a_core_that_was_given_no_memory_says_no_space() -> None:
    world = World()
    world.core = Core(CoreConfig("t", 9, 1024 * KIB, 64 * KIB), Lru)
    client = world.open()
    client.register(ONE)
    assert client.store(ONE, KEYS) == [O.NO_SPACE] * 3
    assert client.lookup(ONE, KEYS).leading == 0
    assert world.stat()["tiers"][0]["chunks"] == 0
    world.settle()
    assert len(world.core._store.index) == 0


def test_time_never_goes_back() -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    client.store(ONE, KEYS)
    lease = client.lease(ONE, KEYS, lease=S)
    world.now -= 10 * S
    assert client.renew(lease.lease, S).expiry == lease.expiry


@pytest.mark.inside
def test_a_fault_leaves_core_and_records_of_one_mind(world: World) -> None:
    """What was granted, evicted or pinned before the fault is undone or carried out; nothing that
    was evicted comes back with the next life."""
    client = world.open(admin=True)
    for n in range(128):
        client.store(ONE, chain(n, 1))  # the arena is full
    evictions = world.core._evictions
    slot, calls = evictions.slot, iter(range(100))

    def fails(size: int) -> Any:
        record = yield from slot(size)
        if next(calls) == 5:
            world.core._store.slabs.give(record)
            raise ZeroDivisionError
        return record

    evictions.slot = fails  # type: ignore[method-assign]
    event = client.reserve_event(ONE, chain("new", 10))._replace(request=9000)
    with pytest.raises(CoreFault) as fault:
        world.core.handle(event, world.now)
    evictions.slot = slot  # type: ignore[method-assign]
    (answer,) = [a for a in fault.value.actions if isinstance(a, ac.Reply | ac.Fail)]
    assert isinstance(answer, ac.Fail)
    assert (answer.request, answer.code) == (9000, ErrorCode.INTERNAL)
    world._carry(fault.value.actions)
    assert not world.core._store.pinned
    assert world.tier["writing_bytes"] == 0
    assert client.store(ONE, chain("new", 10)) == [O.OK] * 10
    client.evict(ev.Selector(everything=True))
    assert world.tier["used_bytes"] == 0
    world.restart()
    assert world.tier["chunks"] == 0


@pytest.mark.inside
def test_a_fault_in_a_later_slice_is_the_answer_of_the_request_that_waits(world: World) -> None:
    client = world.open()

    def fails(size: int, tenant: int) -> Any:
        yield Pause.SLICE
        raise ZeroDivisionError

    world.core._evictions.slot = fails  # type: ignore[method-assign]
    event = client.reserve_event(ONE, chain("new", 2))._replace(request=9000)
    assert not [a for a in world.handle(event) if isinstance(a, ac.Reply | ac.Fail)]
    with pytest.raises(CoreFault) as fault:
        world.handle(ev.Tick())
    (answer,) = fault.value.actions
    assert isinstance(answer, ac.Fail)
    assert (answer.request, answer.code) == (9000, ErrorCode.INTERNAL)
    assert not world.core._store.pinned
