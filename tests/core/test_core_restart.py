"""A new life over an old arena: what is taken over, what waits, what goes."""

from __future__ import annotations

import numpy as np
import pytest
from world import KIB, O, S, World, chain, key, refs_of, sealed, spec

from kvd.chunk import NO_PARENT, RECORD_DTYPE, ChunkHeader, Kind, State
from kvd.core import Core, CoreConfig
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.eviction import make_policy

ONE, TWO = spec(), spec("two", 8 * KIB, 12 * KIB)


def verifies(world: World) -> list[ac.Verify]:
    return [job for job in world.jobs if isinstance(job, ac.Verify)]


def test_chunks_survive_with_all_that_they_are() -> None:
    world = World()
    client = world.open(admin=True)
    for wanted in (ONE, TWO):
        client.register(wanted)
    client.store(ONE, chain("p", 5))
    client.store(TWO, chain("q", 3))
    client.store(ONE, [key("c")], kind=Kind.CONTENT)
    client.store(ONE, chain("orphan", 6)[4:], parent=chain("orphan", 6)[3], index0=4)
    world.advance(S)
    drop = {"age_s", "idle_s", "hits"}

    def rows(c: object) -> list[dict[str, object]]:
        found = c.list("chunks")  # type: ignore[attr-defined]
        return sorted(
            ({k: v for k, v in row.items() if k not in drop} for row in found),
            key=lambda row: str(row),
        )

    before, used = rows(client), world.tier["used_bytes"]
    world.restart()
    client = world.open(admin=True)
    assert rows(client) == before
    assert world.tier["used_bytes"] == used
    assert client.lookup(ONE, chain("p", 5)).leading == 5
    assert client.lookup(TWO, chain("q", 3)).leading == 3
    assert client.lookup(ONE, chain("orphan", 6)[4:]).leading == 0
    assert client.store(ONE, chain("p", 6)) == [O.EXISTS] * 5 + [O.OK]
    assert list(client.lookup(ONE, [key("c")], kind=Kind.CONTENT).outcomes) == [O.OK]


def test_a_payload_is_verified_once_before_its_first_load() -> None:
    """Whoever asks, and however many at once."""
    world = World()
    client = world.open()
    client.register(ONE)
    keys = chain("p", 3)
    client.store(ONE, keys)
    world.restart()
    world.auto = False
    clients = [world.open(group=b"g") for _ in range(3)]
    lease = clients[0].lease(ONE, keys).lease
    loads = [client.load(lease) for client in clients]
    assert len(verifies(world)) == 3  # not 9
    assert all(list(load.outcomes) == [O.FAILED] * 3 and load.refs == b"" for load in loads)
    for client, load in zip(clients, loads, strict=True):
        event = ev.Wait(client.number, 0, load.transfer, 0, world.now + 10 * S)
        world.handle(event._replace(request=1000 + client.number))
    assert not world.replies
    world.do(verifies(world)[1])
    first = [world.replies.pop(1000 + c.number).result for c in clients]  # type: ignore[union-attr]
    for got in first:
        assert (got.items, got.outcomes, got.known, got.done) == (
            (1).to_bytes(4, "little"),
            bytes([O.OK]),
            1,
            False,
        )
    world.work()
    got = world.ask(ev.Wait(clients[0].number, 0, loads[0].transfer, 1, world.now))
    assert got.done and got.known == 3 and len(refs_of(got.refs)) == 2
    again = clients[1].load(lease)
    assert again.done and list(again.outcomes) == [O.OK] * 3
    assert not world.jobs
    assert world.counter("shards_verified", "ok") == 3


def test_a_long_poll_ends_at_its_deadline() -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("p", 1))
    world.restart()
    world.auto = False
    client = world.open()
    got = client.lookup(ONE, chain("p", 1), LookupFlag.LEASE | LookupFlag.LOAD)
    event = ev.Wait(client.number, 55, got.load.transfer, 0, world.now + 2 * S)
    world.handle(event)
    world.advance(S)
    assert 55 not in world.replies
    world.advance(S)
    assert world.replies.pop(55).result.known == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["cancel", "release", "close", "expire"])
def test_a_transfer_ends_with_its_lease(how: str) -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("p", 2))
    world.restart()
    world.auto = False
    client, other = world.open(group=b"g"), world.open(group=b"g")
    got = client.lookup(ONE, chain("p", 2), LookupFlag.LEASE | LookupFlag.LOAD)
    world.handle(ev.Wait(other.number, 66, got.load.transfer, 0, world.now + 900 * S))
    if how == "cancel":
        world.ask(ev.Cancel(client.number, 0, got.load.transfer))
    elif how == "release":
        client.release(got.lease)
    elif how == "close":
        client.close()
    else:
        world.advance(31 * S)
    told = world.replies.pop(66).result  # type: ignore[union-attr]
    assert told.done and list(told.outcomes) == [O.CANCELLED] * 2
    assert isinstance(world.ask(ev.Wait(other.number, 0, got.load.transfer, 0, world.now)), ac.Fail)
    world.work()  # the worker's answer comes late, and harms nothing


def test_unsealed_chunks_are_taken_over_and_sealed() -> None:
    """They were acknowledged; the memory is the same."""
    world = World(auto=False)
    client = world.open()
    client.register(ONE)
    keys = chain("p", 3)
    client.store(ONE, keys)
    world.restart()
    client = world.open()
    got = client.lookup(ONE, keys, LookupFlag.LEASE | LookupFlag.LOAD)
    assert got.load.done and list(got.load.outcomes) == [O.OK] * 3
    world.work()
    assert all(sealed(h) for h in world.memory.values() if h.state == State.READY)
    assert world.counter("records_adopted", "unsealed") == 3


def test_unfinished_writes_wait_for_their_writers_lock() -> None:
    """A writer that outlives the daemon may still be copying."""
    world = World()
    alive, dead = world.open(), world.open()
    alive.register(ONE)
    mine = alive.reserve(ONE, chain("alive", 3))
    dead.reserve(ONE, chain("dead", 2))
    slots = {ref.record for ref in refs_of(mine.refs)}
    world.locks = {alive.public_id}
    world.restart()
    assert {r for r in slots if world.memory[r].state == State.CONDEMNED} == slots
    assert world.tier["condemned_bytes"] == 3 * 8 * KIB == world.tier["used_bytes"]
    client = world.open()
    client.register(ONE)
    assert client.store(ONE, chain("alive", 3)) == [O.OK] * 3
    for n in range(40):
        client.store(ONE, chain(n, 4))
        ready = {r for r, h in world.memory.items() if h.state == State.READY}
        assert not ready & slots
    alive.free_lock()
    assert world.tier["condemned_bytes"] == 0


def test_adopted_slots_are_not_used_again_while_a_reader_may_be_left() -> None:
    """Until the longest lease is over, or all earlier sessions are gone."""
    for end in ("time", "locks"):
        world = World(256 * KIB, 64 * KIB, write_share=1.0)
        reader = world.open(admin=True)
        reader.register(ONE)
        for n in range(4):
            assert set(reader.store(ONE, chain(n, 7))) == {O.OK}
        reader.lease(ONE, chain(0, 7), lease=30 * S)
        old = set(world.in_state(State.READY))
        world.restart()
        client = world.open(admin=True)
        assert client.store(ONE, chain("new", 8)) == [O.OK] * 4 + [O.NO_SPACE] * 4
        evicted = client.evict(ev.Selector(keys=tuple(chain(0, 7))))
        assert evicted.evicted == 7
        assert world.tier["held_bytes"] == 7 * 8 * KIB
        assert client.store(ONE, chain("new", 8))[4:] == [O.NO_SPACE] * 4
        reused = {
            r
            for r in old
            if world.memory[r].state == State.READY and world.memory[r].epoch == world.epoch
        }
        assert not reused
        if end == "time":
            world.advance(world.horizon - world.now)
        else:
            reader.free_lock()
        assert world.tier["held_bytes"] == 0
        assert client.store(ONE, chain("new", 8)) == [O.EXISTS] * 4 + [O.OK] * 4


def test_without_survivors_there_is_no_hold() -> None:
    world = World(256 * KIB, 64 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    for n in range(4):
        client.store(ONE, chain(n, 8))
    client.lease(ONE, chain(0, 8))
    world.locks.clear()
    world.restart()
    client = world.open()
    assert client.store(ONE, chain("new", 8)) == [O.OK] * 8


def test_a_record_that_does_not_hold_waits_for_all_earlier_sessions() -> None:
    world = World()
    one, two = world.open(), world.open()
    one.register(ONE)
    one.store(ONE, chain("p", 3))
    torn = world.in_state(State.READY)[1]
    world.restart([torn])
    assert world.memory[torn].state == State.CONDEMNED
    client = world.open()
    assert client.lookup(ONE, chain("p", 3)).leading == 1
    one.free_lock()
    assert world.tier["condemned_bytes"] == 8 * KIB
    world.restart()  # and once more: still not used
    assert world.tier["condemned_bytes"] == 8 * KIB
    for lock in sorted(world.locks):
        world.locks.discard(lock)
        world.handle(ev.LockFreed(lock))
    world.settle()
    assert world.tier["condemned_bytes"] == 0
    assert two.public_id not in world.locks


def test_nothing_given_out_is_ever_given_out_again() -> None:
    """Generations and handles go on from life to life."""
    world = World()
    seen: set[int] = set()
    generations: dict[int, int] = {}
    for _ in range(4):
        client = world.open()
        client.register(ONE)
        for n in range(30):
            got = client.reserve(ONE, chain(n, 8))
            for ref in refs_of(got.refs):
                assert ref.generation > generations.get(ref.record, 0)
                generations[ref.record] = ref.generation
            if got.write:
                assert got.write not in seen
                seen.add(got.write)
                client.fill(got.refs)
                client.commit(got.write)
        lease = client.lease(ONE, chain(29, 8)).lease
        assert lease and lease not in seen
        seen.add(lease)
        world.locks.clear()
        world.restart()


def header(keys: list[bytes], n: int, **more: object) -> ChunkHeader:
    """A good record of chunk n of a chain."""
    from kvd.chunk import namespace_digest

    base = ChunkHeader(
        kind=Kind.PREFIX,
        state=State.READY,
        namespace_digest=namespace_digest("default"),
        spec=ONE.digest,
        chunk=keys[n],
        parent=keys[n - 1] if n else NO_PARENT,
        shard_count=1,
        index=n,
        tokens=16,
        pos0=16 * n,
        length=8 * KIB,
        generation=1 + n,
        created_unix_ns=S,
    )
    return base._replace(**more)  # type: ignore[arg-type]


def adopt(headers: list[ChunkHeader], slot: int = 8 * KIB) -> tuple[Core, list[ac.Action]]:
    core = Core(CoreConfig("t", 100, 1024 * KIB, 64 * KIB), lambda: make_policy("lru"))
    core.grow(1024 * KIB)
    records = np.zeros(len(headers), RECORD_DTYPE)
    for n, h in enumerate(headers):
        records[n] = np.frombuffer(h.pack(), RECORD_DTYPE)[0]
    numbers = np.array([16 * (n // 8) + n % 8 for n in range(len(headers))])
    sizes = [slot] * 16
    actions = core.adopt(sizes, records, numbers, ["default"], [ONE], [], 0, 50 * S)
    return core, actions


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": b"?" * 32}, "unknown_spec"),
        ({"namespace_digest": b"?" * 32}, "unknown_namespace"),
        ({"kind": 0}, "unknown_spec"),
        ({"length": 8 * KIB - 4096}, "geometry"),
        ({"length": 1}, "geometry"),
        ({"shard": 1}, "geometry"),
        ({"shard_count": 2}, "geometry"),
        ({"tokens": 0}, "geometry"),
        ({"tokens": 17}, "geometry"),
        ({"index": 5}, "chain"),
        ({"state": State.QUARANTINED}, "quarantined"),
        ({"state": State.WRITING}, "unfinished"),
        ({"state": State.CONDEMNED}, "unfinished"),
    ],
)
def test_a_record_that_fits_nothing_is_not_taken_over(
    changes: dict[str, object], reason: str
) -> None:
    keys = chain("p", 6)
    headers = [header(keys, n) for n in range(6)]
    headers[2] = headers[2]._replace(**changes)  # type: ignore[arg-type]
    core, actions = adopt(headers)
    counters = core.stat()["counters"]
    assert counters["records_rejected"][reason] >= 1
    assert (
        sum(counters["records_rejected"].values()) + sum(counters["records_adopted"].values()) == 6
    )
    freed = [a.record for a in actions if isinstance(a, ac.PatchRecord)]
    assert 2 in freed
    for _ in range(10):
        core.handle(ev.Tick(), 51 * S)
    assert not core.busy
    used = core.stat()["tiers"][0]
    assert used["used_bytes"] == 8 * KIB * used["chunks"]


def test_of_two_records_for_one_shard_one_stays() -> None:
    keys = chain("p", 3)
    headers = [header(keys, n) for n in (0, 1, 1, 2)]
    core, actions = adopt(headers)
    assert core.stat()["tiers"][0]["chunks"] == 3
    assert core.stat()["tiers"][0]["used_bytes"] == 3 * 8 * KIB
    assert len([a for a in actions if isinstance(a, ac.PatchRecord)]) == 1


def test_records_in_any_order_make_the_same_tree() -> None:
    keys = chain("p", 40)
    headers = [header(keys, n) for n in range(40)]
    for step in (1, 7, 39):
        order = [headers[(n * step) % 40] for n in range(40)]
        core, _ = adopt(order)
        core.handle(ev.OpenSession(1, b"p" * 16, "default", b"g", True, "", True), 51 * S)
        event = ev.Lookup(1, 9, ONE.digest, 1, (0,), b"".join(keys), None, 0, 0, NO_PARENT, 0, 0)
        (reply,) = core.handle(event, 51 * S)
        assert isinstance(reply, ac.Reply) and reply.result.leading == 40  # type: ignore[union-attr]
        policy = core._store.policy
        rows = list(policy.victims(1, 51 * S))
        depths = [core._store.chunks.index[row] for row in rows]
        assert depths == sorted(depths, reverse=True)


def test_recency_after_a_restart_follows_creation_and_keeps_ancestors_hot() -> None:
    world = World(40 * 8 * KIB, 40 * KIB, write_share=1.0)
    client = world.open()
    client.register(ONE)
    shared = chain("sys", 4)
    client.store(ONE, shared)
    world.advance(10 * S)
    client.store(ONE, chain("old", 14))
    world.advance(10 * S)
    client.store(ONE, chain("new", 14))
    world.advance(10 * S)
    tail = [key("tail", n) for n in range(4)]
    client.store(ONE, tail, parent=shared[-1], index0=4)
    world.locks.clear()
    world.restart()
    client = world.open()
    client.store(ONE, chain("x", 4 + 12))
    assert client.lookup(ONE, shared).leading == 4
    assert client.lookup(ONE, [*shared, *tail]).leading == 8
    assert client.lookup(ONE, chain("new", 14)).leading == 14
    assert client.lookup(ONE, chain("old", 14)).leading == 2
