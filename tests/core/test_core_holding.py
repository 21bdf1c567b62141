"""Everything held has an owner and an end: leases, unfinished writes, condemned slots."""

from __future__ import annotations

import random

import pytest
from world import KIB, O, S, World, chain, key, refs_of, spec

from kvd.chunk import State
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.errors import ErrorCode

ONE = spec()


@pytest.fixture
def world() -> World:
    return World()


# -- leases -------------------------------------------------------------------------------------


def test_a_load_tells_chunk_by_chunk_what_was_delivered(world: World) -> None:
    """K31: without a lease an evicted chunk is a miss by name; nothing delivered is no success."""
    client = world.open(admin=True)
    client.register(ONE)
    keys = [key("k", n) for n in range(10)]
    client.store(ONE, keys, kind=2)
    assert client.lookup(ONE, keys, LookupFlag.EVERY, kind=2).leading == 10
    client.evict(ev.Selector(keys=tuple(keys[::2])))
    got = client.lookup(ONE, keys, LookupFlag.EVERY | LookupFlag.LEASE | LookupFlag.LOAD, kind=2)
    assert list(got.outcomes) == [O.MISS, O.OK] * 5
    assert list(got.load.outcomes) == [O.OK] * 5
    assert len(refs_of(got.load.refs)) == 5
    client.release(got.lease)
    client.evict(ev.Selector(keys=tuple(keys)))
    got = client.lookup(ONE, keys, LookupFlag.EVERY | LookupFlag.LEASE | LookupFlag.LOAD, kind=2)
    assert list(got.outcomes) == [O.MISS] * 10
    assert (got.lease, got.load) == (0, None)


def test_a_handle_that_is_not_valid_now_gets_an_error_and_no_bytes(world: World) -> None:
    """K32: random id, item beyond the list, released, before a restart, another tenant's, and one
    whose memory was used again."""
    client, other = world.open(group=b"a"), world.open("other", group=b"a")
    client.register(ONE)
    keys = chain("p", 5)
    client.store(ONE, keys)

    def refused(who: object, lease: int, items: list[int] | None = None) -> ErrorCode:
        got = who.load(lease, items)  # type: ignore[attr-defined]
        assert isinstance(got, ac.Fail)
        return got.code

    lease = client.lease(ONE, keys).lease
    assert refused(client, 12345) is ErrorCode.UNKNOWN_HANDLE
    assert refused(client, lease, [5]) is ErrorCode.BAD_KEY
    assert refused(other, lease) is ErrorCode.UNKNOWN_HANDLE
    refs = refs_of(client.load(lease).refs)
    client.release(lease)
    assert refused(client, lease) is ErrorCode.UNKNOWN_HANDLE
    for n in range(40):
        client.store(ONE, chain(("fill", n), 5))
    assert not any(
        world.memory[ref.record].generation == ref.generation
        and world.memory[ref.record].state == State.READY
        for ref in refs
    )
    keys = chain("q", 5)
    client.store(ONE, keys)
    lease = client.lease(ONE, keys).lease
    world.restart()
    client = world.open(group=b"a")
    assert refused(client, lease) is ErrorCode.UNKNOWN_HANDLE
    assert client.lease(ONE, keys).lease != lease


def test_what_a_lookup_promised_stays_until_release() -> None:
    """K40: 40 of 50 chunks leased, 200 stored by another: all 40 load, and only then can go."""
    world = World(50 * 8 * KIB, 40 * KIB, lease_share=1.0, write_share=1.0)
    reader, writer = world.open(), world.open()
    reader.register(ONE)
    keys = chain("mine", 40)
    assert set(reader.store(ONE, keys)) == {O.OK}
    lease = reader.lease(ONE, keys)
    assert lease.leading == 40
    outcomes = [o for n in range(20) for o in writer.store(ONE, chain(("other", n), 10))]
    assert set(outcomes) == {O.OK}
    load = reader.load(lease.lease)
    assert list(load.outcomes) == [O.OK] * 40
    for ref in refs_of(load.refs):
        assert world.memory[ref.record].generation == ref.generation
    big = writer.reserve(ONE, chain("big", 20))
    assert list(big.outcomes) == [O.GRANTED] * 10 + [O.NO_SPACE] * 10
    writer.abort(big.write)
    reader.release(lease.lease)
    for n in range(20):
        assert set(writer.store(ONE, chain(("more", n), 10))) == {O.OK}
    assert reader.lookup(ONE, keys).leading == 0


def test_release_is_by_lease_id_and_one_that_matches_nothing_is_an_error(world: World) -> None:
    """K48"""
    client, other = world.open(), world.open("other")
    client.register(ONE)
    keys = chain("salted", 5)
    client.store(ONE, keys)
    lease = client.lease(ONE, keys).lease
    assert other.release(lease).code == ErrorCode.UNKNOWN_HANDLE
    assert client.release(lease + 99).code == ErrorCode.UNKNOWN_HANDLE
    assert world.tier["leased_chunks"] == 5
    assert client.release(lease) == ac.LeaseResult(0, 5)
    assert world.tier["leased_chunks"] == 0
    assert client.release(lease).code == ErrorCode.UNKNOWN_HANDLE
    for n in range(50):
        assert set(client.store(ONE, chain(n, 5))) == {O.OK}
    assert client.lookup(ONE, keys).leading == 0


def test_unused_lookups_leave_nothing() -> None:
    """K109: a third load, a third release, a third forget: at the end nothing is leased, and
    all can go."""
    world = World(lease_share=1.0)
    client = world.open(group=b"g")
    client.register(ONE)
    keys = chain("p", 50)
    client.store(ONE, keys[:30])
    client.store(ONE, keys)
    for n in range(600):
        if n % 100 == 0:
            client.close()
            client = world.open(group=b"g")
        lease = client.lease(ONE, keys[: 1 + n % 50], lease=5 * S).lease
        if lease and n % 3 == 0:
            client.load(lease)
        elif lease and n % 3 == 1:
            client.release(lease)
        world.now += S // 10
    assert world.core.leases > 0
    world.advance(6 * S)
    assert world.core.leases == 0 and world.tier["leased_chunks"] == 0
    assert world.core.next_deadline() is None
    for n in range(60):
        assert set(client.store(ONE, chain(n, 5))) == {O.OK}
    assert client.lookup(ONE, keys).leading == 0


def test_leases_are_shared_within_a_group_only(world: World) -> None:
    scheduler = world.open(group=b"engine")
    worker, stranger = world.open(group=b"engine"), world.open(group=b"another")
    scheduler.register(ONE)
    keys = chain("p", 3)
    scheduler.store(ONE, keys)
    lease = scheduler.lease(ONE, keys).lease
    assert list(worker.load(lease).outcomes) == [O.OK] * 3
    assert isinstance(stranger.load(lease), ac.Fail)
    scheduler.close()
    assert isinstance(worker.load(lease), ac.Fail)
    assert world.tier["leased_chunks"] == 0


def test_a_lease_expires_by_the_clock_and_renew_puts_it_off(world: World) -> None:
    client = world.open()
    client.register(ONE)
    keys = chain("p", 3)
    client.store(ONE, keys)
    lease = client.lease(ONE, keys, lease=10 * S)
    world.advance(9 * S)
    assert client.renew(lease.lease, 10 * S).expiry == world.now + 10 * S
    world.advance(9 * S)
    assert list(client.load(lease.lease).outcomes) == [O.OK] * 3
    assert client.renew(lease.lease, 10_000 * S).expiry == world.now + 600 * S
    client.renew(lease.lease, S)
    world.now += S
    assert isinstance(client.load(lease.lease), ac.Fail)


@pytest.mark.parametrize("later_ns", [0, 1, 10_000_000, 20_000_000, -10_000_000])
def test_a_lease_that_is_renewed_to_nearly_the_same_moment_ends_then(
    world: World, later_ns: int
) -> None:
    client = world.open()
    client.register(ONE)
    keys = chain("p", 3)
    client.store(ONE, keys)
    lease = client.lease(ONE, keys, lease=10 * S)
    expiry = client.renew(lease.lease, 10 * S + later_ns).expiry
    world.advance(expiry - world.now)
    assert world.tier["leased_chunks"] == 0
    assert isinstance(client.load(lease.lease), ac.Fail)


def test_the_horizon_follows_the_latest_lease_that_there_is(world: World) -> None:
    """So a next life holds nothing back for the readers of leases that had ended."""
    client = world.open()
    client.register(ONE)
    keys = chain("p", 3)
    client.store(ONE, keys)
    short = client.lease(ONE, keys, lease=10 * S)
    lease = client.lease(ONE, keys, lease=600 * S)
    assert lease.expiry <= world.horizon < lease.expiry + S
    client.release(lease.lease)
    assert short.expiry <= world.horizon < short.expiry + S
    assert client.renew(short.lease, 300 * S).expiry <= world.horizon
    client.renew(short.lease, 20 * S)
    assert world.horizon <= world.now + 21 * S
    log = len(world.log)
    for _ in range(100):  # what comes and goes is not written each time
        client.release(client.lease(ONE, keys, lease=25 * S).lease)
    assert sum(isinstance(a, ac.LeaseHorizon) for a in world.log[log:]) == 1
    world.advance(2 * S)
    assert world.horizon <= world.now + 19 * S
    client.release(short.lease)
    world.advance(2 * S)
    assert world.horizon == 0


def test_the_horizon_of_an_earlier_life_stands_while_its_readers_may_be_there(
    world: World,
) -> None:
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("p", 3))
    until = client.lease(ONE, chain("p", 3), lease=300 * S).expiry
    for _ in range(2):
        world.restart()
        other = world.open()
        other.register(ONE)
        other.release(other.lease(ONE, chain("p", 3), lease=400 * S).lease)
        assert until <= world.horizon < until + S
    client.free_lock()
    for later in list(world.locks):
        world.handle(ev.LockFreed(later))
    assert world.horizon == 0


def test_a_sessions_leases_have_a_cap() -> None:
    world = World(lease_share=0.125)  # 16 chunks of 8 KiB
    client, other = world.open(), world.open()
    client.register(ONE)
    keys = chain("p", 20)
    client.store(ONE, keys)
    got = client.lease(ONE, keys)
    assert got.leading == 16
    assert list(got.outcomes) == [O.OK] * 16 + [O.OVER_QUOTA] + [O.SKIPPED] * 3
    assert client.lease(ONE, keys[:3]).leading == 3  # what is leased already costs nothing
    assert client.lease(ONE, chain("p", 4, 16)).outcomes[0] == O.OVER_QUOTA
    assert other.lease(ONE, keys).leading == 16
    client.release(got.lease)
    assert client.lease(ONE, keys).leading == 16
    assert client.lease(ONE, chain("p", 4, 16)).leading == 0


# -- writes -------------------------------------------------------------------------------------


def test_an_unfinished_write_has_an_owner_and_an_end(world: World) -> None:
    """K88: a writer that dies between reserve and commit: others may hear busy, then can store."""
    writer, other = world.open(), world.open()
    writer.register(ONE)
    keys = chain("p", 3)
    writer.reserve(ONE, keys)
    assert list(other.reserve(ONE, keys).outcomes) == [O.BUSY] * 3
    assert list(other.lookup(ONE, keys).outcomes) == [O.MISS, O.SKIPPED, O.SKIPPED]
    writer.close()
    assert other.store(ONE, keys) == [O.OK] * 3
    assert world.tier["condemned_bytes"] == 3 * 8 * KIB
    writer.free_lock()
    assert world.tier["condemned_bytes"] == 0
    assert world.tier["used_bytes"] == 3 * 8 * KIB


def test_a_writer_that_surely_stopped_gives_back_at_once(world: World) -> None:
    """K88"""
    mapped, inline = world.open(), world.open(maps_memory=False)
    mapped.register(ONE)
    mapped.reserve(ONE, chain("a", 3))
    inline.reserve(ONE, chain("b", 3))
    mapped.close(stopped=True)
    inline.close()
    assert world.tier["used_bytes"] == 0
    assert world.counter("slots_condemned", "session") == 0


def test_a_late_writer_meets_no_reader_and_no_other_writer(world: World) -> None:
    writer, other = world.open(), world.open()
    writer.register(ONE)
    keys = chain("p", 2)
    got = writer.reserve(ONE, keys, ttl=S)
    late = {ref.record for ref in refs_of(got.refs)}
    world.advance(2 * S)
    assert {r for r in late if world.memory[r].state == State.CONDEMNED} == late
    for n in range(100):
        other.store(ONE, chain(n, 4))
        taken = {r for r, h in world.memory.items() if h.state in (State.READY, State.WRITING)}
        assert not late & taken
    assert list(writer.commit(got.write).outcomes) == [O.EXPIRED] * 2
    assert world.tier["condemned_bytes"] == 0
    assert world.counter("slots_reclaimed", "committed") == 2
    assert {world.memory[record].state for record in late} == {State.FREE}
    assert isinstance(writer.abort(got.write), ac.Fail)


def test_a_late_writer_that_aborts_gives_back_too(world: World) -> None:
    writer = world.open()
    writer.register(ONE)
    got = writer.reserve(ONE, chain("p", 2), ttl=S)
    world.advance(2 * S)
    assert world.tier["condemned_bytes"] == 2 * 8 * KIB
    assert list(writer.abort(got.write).outcomes) == [O.ABORTED] * 2
    assert world.tier["condemned_bytes"] == 0
    assert isinstance(writer.abort(got.write), ac.Fail)


def test_a_client_that_is_always_late_never_runs_out_of_its_share() -> None:
    world = World(write_share=0.125)  # 16 chunks
    client = world.open()
    client.register(ONE)
    for n in range(100):
        got = client.reserve(ONE, chain(n, 4), ttl=S)
        assert list(got.outcomes) == [O.GRANTED] * 4
        world.advance(S)
        assert list(client.commit(got.write).outcomes) == [O.EXPIRED] * 4
    assert world.tier["used_bytes"] == 0
    assert client.store(ONE, chain("p", 4)) == [O.OK] * 4


def test_condemned_slots_count_against_their_session() -> None:
    world = World(write_share=0.125)  # 16 chunks
    client = world.open()
    client.register(ONE)
    client.reserve(ONE, chain("a", 10), ttl=S)
    world.advance(2 * S)
    got = client.reserve(ONE, chain("b", 10))
    assert list(got.outcomes) == [O.GRANTED] * 6 + [O.OVER_QUOTA] * 4
    client.free_lock()
    client.abort(got.write)
    assert list(client.reserve(ONE, chain("c", 10)).outcomes) == [O.GRANTED] * 10


def test_an_evict_marks_what_is_being_written(world: World) -> None:
    writer, admin = world.open(), world.open(admin=True)
    writer.register(ONE)
    keys = chain("p", 3)
    got = writer.reserve(ONE, keys)
    evicted = admin.evict(ev.Selector(everything=True))
    assert (evicted.matched, evicted.writing, evicted.evicted) == (3, 3, 0)
    again = admin.reserve(ONE, keys)  # a later reserve is a new write
    assert list(again.outcomes) == [O.GRANTED] * 3
    assert not {r.record for r in refs_of(got.refs)} & {r.record for r in refs_of(again.refs)}
    assert list(writer.commit(got.write).outcomes) == [O.EVICTED] * 3
    admin.fill(again.refs)
    assert list(admin.commit(again.write).outcomes) == [O.OK] * 3
    assert world.tier["used_bytes"] == 3 * 8 * KIB


def test_a_drain_takes_no_stores_and_lets_loads_finish(world: World) -> None:
    client = world.open()
    client.register(ONE)
    keys = chain("p", 3)
    client.store(ONE, keys)
    begun = client.reserve(ONE, chain("q", 1))
    world.handle(ev.Drain())
    assert client.store(ONE, chain("r", 2)) == [O.DRAINING] * 2
    assert list(client.commit(begun.write).outcomes) == [O.OK]
    lease = client.lease(ONE, keys)
    assert list(client.load(lease.lease).outcomes) == [O.OK] * 3


# -- sessions -----------------------------------------------------------------------------------


def test_each_connection_is_a_session_of_its_own(world: World) -> None:
    """K97: dead and back under the same name: the old one's holdings end, the new one's stay."""
    old = world.open(name="w0", group=b"old")
    old.register(ONE)
    keys = chain("p", 10)
    old.store(ONE, keys)
    for n in range(20):
        assert old.lease(ONE, keys[: 1 + n % 10]).lease
    begun = old.reserve(ONE, chain("half", 3))
    new = world.open(name="w0", group=b"new")
    leases = [new.lease(ONE, keys).lease for _ in range(10)]
    old.close()
    assert world.core.leases == 10
    assert world.stat()["counters"]["active_writes"] == 0
    assert world.tier["leased_chunks"] == 10
    late = old.commit(begun.write)
    assert isinstance(late, ac.Fail) and late.code == ErrorCode.UNKNOWN_SESSION
    for lease in leases:
        assert isinstance(new.load(lease), ac.LoadResult)
    old.free_lock()
    assert world.core.leases == 10
    assert world.tier["condemned_bytes"] == 0


def test_a_disconnect_that_frees_much_goes_in_slices(world: World) -> None:
    client, other = world.open(), world.open()
    client.register(ONE)
    keys = chain("p", 4)
    client.store(ONE, keys)
    for _ in range(1000):
        client.lease(ONE, keys[:1])
    world.handle(ev.CloseSession(client.number, False))
    assert world.core.busy and world.core.leases > 500
    lease = other.lease(ONE, keys).lease  # others are served meanwhile
    world.settle()
    assert world.core.leases == 1
    assert other.release(lease).chunks == 4


# -- accounting ---------------------------------------------------------------------------------


def test_at_rest_bytes_used_are_the_sum_of_what_is_there() -> None:
    """K110: five times the capacity with all operations and faults, then silence: the books
    balance, nothing is held, and a clear brings usage to 0."""
    world = World(auto=False)
    rng = random.Random(3)
    admin = world.open(admin=True)
    admin.register(ONE)
    clients = [world.open() for _ in range(4)]
    for _ in range(700):
        client = rng.choice(clients)
        keys = chain(rng.randrange(40), rng.randrange(1, 8))
        what = rng.random()
        if what < 0.5:
            got = client.reserve(ONE, keys, ttl=rng.choice([1, 30]) * S)
            if got.write and what < 0.45:
                client.fill(got.refs)
                client.commit(got.write)
            elif got.write and what < 0.48:
                client.abort(got.write)
        elif what < 0.9:
            lease = client.lease(ONE, keys).lease
            if lease and rng.random() < 0.5:
                client.load(lease)
                client.release(lease)
        elif what < 0.95:
            admin.evict(ev.Selector(keys=tuple(keys)))
        else:
            clients.remove(client)
            client.close()
            if rng.random() < 0.8:
                client.free_lock()
            clients.append(world.open())
        world.advance(S // 10)
        while world.jobs and rng.random() < 0.7:
            world.do(world.jobs[0], fail=rng.random() < 0.1)
    for client in clients:
        client.close(stopped=True)
    for lock in sorted(world.locks - {admin.public_id}):
        world.locks.discard(lock)
        world.handle(ev.LockFreed(lock))
    world.advance(60 * S)
    world.work()
    rows = admin.list("chunks")
    assert sum(row["bytes"] for row in rows) == world.tier["used_bytes"]
    assert sum(row["leases"] for row in rows) == 0
    assert all(row["state"] in ("sealed", "unsealed") for row in rows)
    tier, counters = world.tier, world.stat()["counters"]
    for name in ("condemned_bytes", "writing_bytes", "held_bytes", "leased_chunks"):
        assert tier[name] == 0
    for name in ("active_leases", "active_writes", "pending_touches"):
        assert counters[name] == 0
    assert len(world.in_state(State.READY)) == tier["chunks"] == len(rows)
    admin.evict(ev.Selector(everything=True))
    world.settle()
    assert world.tier["used_bytes"] == world.tier["chunks"] == 0
    assert len(world.core._store.index) == 0
