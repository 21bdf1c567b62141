"""What a client does when all goes well: handles, streams, puts and gets."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from fake_daemon import SLOT, FakeDaemon, keys, make_spec, readable

from kvd.chunk import Outcome, payload_digest
from kvd.client import Client
from kvd.errors import (
    BadKey,
    ClientClosed,
    ConfigError,
    LimitExceeded,
    SpecError,
    Unavailable,
    UnknownHandle,
)
from kvd.wire import Trace
from kvd.wire import messages as m

OK = Outcome.OK


def chunk(number: int) -> bytes:
    return bytes([number % 251]) * SLOT


def stored(client: Client, count: int, start: int = 0, shards: int = 1) -> Any:
    """A spec under which `count` keys are stored."""
    handle = client.register(make_spec(shards))
    with client.reserve(handle, keys(count, start), shards=range(shards)) as reservation:
        for index in reservation.granted:
            reservation.view(index)[:] = chunk(start * shards + index)
        assert set(reservation.commit()) == {OK}
    return handle


def test_nothing_is_connected_before_the_first_call(fake: FakeDaemon) -> None:
    with Client(fake.socket) as client:
        assert not client.connected and fake.attached == 0
        info = client.info()
        assert client.connected and fake.attached == 1
    assert info.instance == fake.instance and info.namespace == "default" and info.maps_memory
    assert info.limits.keys == 4096 and info.limits.chunk_bytes == 64 * 1024


def test_what_was_committed_is_read_back_without_a_copy(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 5)
    with client.lookup(handle, keys(7), load=True) as found:
        assert found.leading == 5
        assert found.outcomes == (OK,) * 5 + (Outcome.MISS, Outcome.SKIPPED)
        assert found.transfer is not None and found.lease is not None
        for index in found.transfer:
            view = found.transfer.view(index)
            assert view.readonly and bytes(view) == chunk(index)
            assert found.transfer.array(index, "<u2", (2, -1)).shape == (2, SLOT // 4)
        found.transfer.check()
    assert (fake.requests(m.Release) and not fake.leases) or readable(client.fileno(), 1)


def test_views_are_writable_where_they_are_to_be_filled_and_have_shape(client: Client) -> None:
    torch = pytest.importorskip("torch")
    handle = client.register(make_spec())
    with client.reserve(handle, keys(2)) as reservation:
        reservation.tensor(0, torch.bfloat16, (2, -1))[:] = 1.5
        reservation.array(1, np.float32, (32, 64))[:] = 7
        assert reservation.commit() == [OK, OK]
    with client.lookup(handle, keys(2), load=True) as found:
        assert found.transfer is not None
        assert list(found.transfer) == [0, 1]
        assert found.transfer.tensor(0, torch.bfloat16).eq(1.5).all()
        array = found.transfer.array(1, np.float32)
        assert (array == 7).all() and not array.flags.writeable
        with pytest.raises(KeyError):
            found.transfer.view(2)
        del array


def test_a_reservation_that_is_left_without_commit_is_aborted(
    fake: FakeDaemon, client: Client
) -> None:
    handle = client.register(make_spec())
    with pytest.raises(RuntimeError), client.reserve(handle, keys(3)) as reservation:
        assert reservation.granted == [0, 1, 2]
        raise RuntimeError
    client.heartbeat()
    assert [a.write for a in fake.requests(m.Abort)] == [reservation.write]
    assert not fake.writes and not fake.chunks


def test_a_part_may_be_committed_and_the_rest_is_given_back(
    fake: FakeDaemon, client: Client
) -> None:
    handle = client.register(make_spec())
    with client.reserve(handle, keys(4)) as reservation:
        said = reservation.commit(items=[0, 1])
        assert said == [OK, OK, Outcome.GRANTED, Outcome.GRANTED]
        with pytest.raises(KeyError):
            reservation.commit(items=[1])
    client.heartbeat()
    assert len(fake.chunks) == 2 and not fake.writes
    assert fake.requests(m.Abort)[0].items == bytes([2, 0, 0, 0, 3, 0, 0, 0])


def test_what_exists_is_not_granted_and_not_stored_again(client: Client) -> None:
    handle = stored(client, 2)
    with client.reserve(handle, keys(3)) as reservation:
        assert reservation.outcomes == (Outcome.EXISTS, Outcome.EXISTS, Outcome.GRANTED)
        with pytest.raises(KeyError):
            reservation.view(0)
        assert reservation.commit() == [Outcome.EXISTS, Outcome.EXISTS, OK]


def test_digests_travel_with_a_sealing_commit(fake: FakeDaemon, client: Client) -> None:
    handle = client.register(make_spec())
    with client.reserve(handle, keys(2)) as reservation:
        for index in reservation.granted:
            reservation.view(index)[:] = chunk(index)
        reservation.commit(seal=True)
    assert fake.requests(m.Commit)[0].digests == payload_digest(chunk(0)) + payload_digest(chunk(1))


def test_a_lookup_may_reserve_its_misses(client: Client) -> None:
    handle = stored(client, 2)
    with client.lookup(handle, keys(5), load=True, reserve_misses=True) as found:
        assert found.leading == 2 and found.reservation is not None
        assert found.reservation.outcomes == (Outcome.GRANTED,) * 3
        for index in found.reservation.granted:
            found.reservation.view(index)[:] = chunk(2 + index)
        assert found.reservation.commit() == [OK] * 3
    assert client.lookup(handle, keys(5), lease=False).leading == 5


def test_a_lookup_without_lease_holds_nothing(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 2)
    found = client.lookup(handle, keys(2), lease=False)
    assert found.leading == 2 and found.lease is None and not fake.leases


def test_a_lease_is_renewed_loaded_from_and_released_once(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 3)
    found = client.lookup(handle, keys(3))
    lease = found.lease
    assert lease is not None
    before = lease.expiry_ns
    assert lease.renew(100) > before
    transfer = lease.load([2, 0])
    assert {i: bytes(transfer.view(i)) for i in transfer} == {0: chunk(2), 1: chunk(0)}
    lease.release(wait=True)
    lease.release(wait=True)
    assert len(fake.requests(m.Release)) == 1
    with pytest.raises(UnknownHandle):
        lease.renew(5)


def test_a_transfer_that_is_not_done_is_waited_for(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 4)
    fake.pending_load = True
    with client.lookup(handle, keys(4), load=True) as found:
        transfer = found.transfer
        assert transfer is not None and not transfer.done
        assert set(transfer.outcomes) == {Outcome.FAILED}
        assert [bytes(transfer.view(i)) for i in transfer] == [chunk(i) for i in range(4)]
        assert transfer.done and set(transfer.outcomes) == {OK}


def test_shards_are_chunk_major(client: Client) -> None:
    handle = stored(client, 3, shards=2)
    with client.lookup(handle, keys(3), shards=(0, 1), load=True) as found:
        assert found.transfer is not None
        assert [bytes(found.transfer.view(i)) for i in found.transfer] == [
            chunk(i) for i in range(6)
        ]


def test_streams_carry_every_chunk_and_tell_its_outcome(client: Client) -> None:
    handle = client.register(make_spec())
    source = [os.urandom(SLOT) for _ in range(100)]
    assert client.store_chunks(handle, keys(100), None, source, batch=16) == [OK] * 100
    target = [bytearray(SLOT) for _ in range(110)]
    said = client.load_chunks(handle, keys(110), target, batch=16, verify=True)
    assert said[:100] == [OK] * 100
    assert said[100:] == [Outcome.MISS] + [Outcome.SKIPPED] * 9
    assert target[:100] == source and target[105] == bytes(SLOT)


def test_streams_take_callables_and_shards(client: Client) -> None:
    handle = client.register(make_spec(2))

    def fill(index: int, view: memoryview) -> None:
        view[:] = chunk(index)

    assert client.store_chunks(handle, keys(20), None, fill, batch=3, shards=(0, 1)) == [OK] * 40
    seen: dict[int, bytes] = {}
    said = client.load_chunks(
        handle, keys(20), lambda i, v: seen.update({i: bytes(v)}), batch=7, shards=(0, 1)
    )
    assert said == [OK] * 40
    assert seen == {i: chunk(i) for i in range(40)}


def test_a_stream_looks_behind_a_miss_only_if_asked_to(fake: FakeDaemon, client: Client) -> None:
    handle = stored(client, 3)
    stored(client, 3, start=5)
    target = [bytearray(SLOT) for _ in range(8)]
    assert client.load_chunks(handle, keys(8), target, batch=4)[3:5] == [
        Outcome.MISS,
        Outcome.SKIPPED,
    ]
    said = client.load_chunks(handle, keys(8), target, batch=4, every=True)
    assert said == [OK] * 3 + [Outcome.MISS] * 2 + [OK] * 3
    assert bytes(target[7]) == chunk(7)
    client.heartbeat()
    assert not fake.leases


def test_a_stream_gets_by_with_room_for_less_than_it_asks(fake: FakeDaemon, client: Client) -> None:
    """Its own unfinished writes are in the way: it finishes them and asks again."""
    handle = client.register(make_spec())
    fake.free_run = 5
    source = [chunk(i) for i in range(40)]
    assert client.store_chunks(handle, keys(40), None, source, batch=4) == [OK] * 40
    fake.free_run = 0
    said = client.store_chunks(handle, keys(10, 900), None, source[:10], batch=4)
    assert said == [Outcome.OVER_QUOTA] * 10
    assert not fake.writes


def test_a_stream_that_fails_gives_back_what_it_had(fake: FakeDaemon, client: Client) -> None:
    handle = client.register(make_spec())

    def fill(index: int, view: memoryview) -> None:
        if index == 6:
            raise OSError("no source")

    with pytest.raises(OSError, match="no source"):
        client.store_chunks(handle, keys(20), None, fill, batch=4)
    client.heartbeat()
    client.heartbeat()
    assert not fake.writes
    with pytest.raises(ValueError, match="bytes"):
        client.store_chunks(handle, keys(1, 50), None, [b"short"])
    with pytest.raises(ValueError, match="buffers are due"):
        client.store_chunks(handle, keys(2, 50), None, [b"short"])


@pytest.mark.parametrize("mapped", [True, False])
def test_put_and_get_in_one_call_with_or_without_shared_memory(
    fake: FakeDaemon, mapped: bool
) -> None:
    with Client(fake.socket, map_memory=mapped) as client:
        handle = client.register(make_spec(2))
        key = keys(1)[0]
        assert client.info().maps_memory is mapped
        assert client.put(handle, key, None, chunk(1), shard=0) is OK
        assert client.put(handle, key, None, chunk(1), shard=0) is Outcome.EXISTS
        assert client.get(handle, key, shard=0) == chunk(1)
        assert client.get(handle, key, shard=1) is None
        array = np.arange(SLOT // 8, dtype="<u8")
        assert client.put(handle, key, None, array, shard=1) is OK
        assert client.get(handle, key, shard=1) == array.tobytes()
    assert bool(fake.requests(m.Put)) is not mapped
    assert bool(fake.requests(m.Get)) is not mapped


def test_streams_work_without_shared_memory(fake: FakeDaemon) -> None:
    with Client(fake.socket, map_memory=False) as client:
        handle = client.register(make_spec(2))
        source = [chunk(i) for i in range(40)]
        said = client.store_chunks(handle, keys(20), None, source, shards=(0, 1), batch=3)
        assert said == [OK] * 40
        target = [bytearray(SLOT) for _ in range(44)]
        said = client.load_chunks(handle, keys(22), target, shards=(0, 1), batch=3)
        assert said[:40] == [OK] * 40 and OK not in said[40:]
        assert [bytes(t) for t in target[:40]] == source


def test_pages_and_slices_are_followed_to_their_end(fake: FakeDaemon, client: Client) -> None:
    stored(client, 25)
    assert len(client.list("chunks", limit=10).rows) == 10
    assert [row["hash"] for row in client.rows("chunks", page=7)] == [k.hex() for k in keys(25)]
    gone = client.evict(m.Selector(everything=True), step=10)
    assert gone.evicted == 25 and gone.bytes == 25 * SLOT and gone.cursor is None
    assert client.stat() == {"instance": fake.instance, "chunks": 0}
    assert 0 < client.ping() < 5


def test_empty_batches_ask_nobody(client: Client) -> None:
    handle = client.register(make_spec())
    assert client.store_chunks(handle, [], None, []) == []
    assert client.load_chunks(handle, [], []) == []
    found = client.lookup(handle, [])
    assert found.outcomes == () and found.lease is None
    with client.reserve(handle, []) as reservation:
        assert reservation.outcomes == () and reservation.commit() == []


def test_keys_are_checked_before_they_are_sent(client: Client) -> None:
    handle = client.register(make_spec())
    for hashes in ([b"short"], bytes(33), np.zeros((2, 31), dtype=np.uint8)):
        with pytest.raises(BadKey):
            client.lookup(handle, hashes)
    with pytest.raises(BadKey):
        client.lookup(handle, keys(2), [bytes(16)])
    with pytest.raises(BadKey):
        client.reserve(handle, keys(2), tokens=[1])
    with pytest.raises(BadKey):
        client.reserve(handle, keys(1), tokens=[1.5])  # type: ignore[list-item]
    packed = np.frombuffer(b"".join(keys(2)), dtype=np.uint8).reshape(2, 32)
    assert client.lookup(handle, packed).outcomes == (Outcome.MISS, Outcome.SKIPPED)


def test_what_the_daemon_refuses_is_its_typed_error(client: Client) -> None:
    """K09"""
    handle = client.register(make_spec())
    with pytest.raises(LimitExceeded, match="keys a request: 5000, at most 4096"):
        client.lookup(handle, keys(5000))
    with pytest.raises(LimitExceeded, match="lease_ns"):
        client.lookup(handle, keys(1), lease_s=601)
    bad = make_spec()
    object.__setattr__(bad, "model", "")
    with pytest.raises(SpecError):
        client.register(bad)
    assert client.lookup(handle, keys(1)).leading == 0


def test_submitted_calls_come_back_by_poll_and_the_descriptor_says_when(client: Client) -> None:
    client.info()
    calls = [client.submit(m.Heartbeat()) for _ in range(600)]
    done = []
    while len(done) < 600:
        assert readable(client.fileno(), 5)
        done += client.poll()
    assert set(done) == set(calls)
    assert all(isinstance(call.result(), m.DoneReply) for call in done)
    assert client.poll(0.01) == []
    assert not readable(client.fileno(), 0.05)


def test_a_call_whose_result_was_taken_is_not_polled_again(client: Client) -> None:
    first, second = client.submit(m.Heartbeat()), client.submit(m.Stat())
    assert isinstance(second.result(), m.StatReply)
    end = time.monotonic() + 5
    done: list[Any] = []
    while not done and time.monotonic() < end:
        done += client.poll(1)
    assert done == [first]


def test_no_more_are_in_flight_than_the_daemon_allows(fake: FakeDaemon) -> None:
    """K09"""
    fake.limits = fake.limits._replace(inflight=4)
    most = 0
    with Client(fake.socket) as client:
        client.info()
        link = client._channel._link
        assert link is not None
        calls = [client.submit(m.Heartbeat()) for _ in range(200)]
        while not all(call.done for call in calls):
            most = max(most, len(link.pending))
            client.poll(1)
    assert 1 <= most <= 4


def test_answers_are_acknowledged(fake: FakeDaemon, client: Client) -> None:
    for _ in range(20):
        client.heartbeat()
    last = fake.seen[-1]
    assert last.ack == last.request - 1


def test_deadlines_and_trace_contexts_travel(fake: FakeDaemon) -> None:
    trace = Trace(bytes(range(16)), bytes(8), 1)
    with Client(fake.socket, trace=lambda: trace) as client:
        before = time.monotonic_ns()
        client.stat(timeout_s=3)
        seen = next(s for s in fake.seen if isinstance(s.message, m.Stat))
        assert seen.trace_id == bytes(range(16))
        assert before + 3e9 <= seen.deadline <= time.monotonic_ns() + 3e9


def test_a_prefetch_says_of_each_key_what_may_come(fake: FakeDaemon) -> None:
    with Client(fake.socket) as client:
        client.put(make_spec(), keys(1)[0], bytes(16), b"x" * SLOT)
        told = client.prefetch(make_spec(), keys(2), within_s=2.5)
        assert told == [Outcome.OK, Outcome.MISS]
        seen = next(s.message for s in fake.seen if isinstance(s.message, m.Prefetch))
        assert (seen.shards, seen.within) == ((0,), 2_500_000_000)
        assert client.prefetch(make_spec(), [], within_s=1) == []


def test_a_daemon_that_knows_no_prefetch_is_not_asked(fake: FakeDaemon) -> None:
    fake.features = tuple(name for name in fake.features if name != "prefetch")
    with Client(fake.socket) as client:
        assert client.prefetch(make_spec(), keys(2), within_s=1) == [Outcome.SKIPPED] * 2
        assert not any(isinstance(s.message, m.Prefetch) for s in fake.seen)


def test_a_prefaulted_arena_is_gone_through_in_the_background(fake: FakeDaemon) -> None:
    with Client(fake.socket, prefault=True) as client:
        client.info()
        end = time.monotonic() + 10
        while client.prefaulted < 4 << 20:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_closed_client_says_so(fake: FakeDaemon) -> None:
    client = Client(fake.socket)
    handle = stored(client, 1)
    found = client.lookup(handle, keys(1), load=True)
    assert found.transfer is not None
    view = found.transfer.view(0)
    client.close()
    client.close()
    for call in (client.info, client.fileno, client.poll, lambda: client.submit(m.Stat())):
        with pytest.raises(ClientClosed):
            call()
    found.lease.release()  # type: ignore[union-attr]
    assert bytes(view) == chunk(0)  # memory stays, though nobody keeps what is in it


@pytest.mark.parametrize("size", [108, 200])
def test_a_socket_path_that_is_too_long_is_refused_at_once(size: int) -> None:
    """K128: the connector's side."""
    with pytest.raises(ConfigError, match="at most 107"):
        Client("/tmp/" + "s" * (size - 5))


def test_a_daemon_that_is_not_there_is_unavailable_at_the_deadline(tmp_path: Any) -> None:
    with Client("/tmp/kvd-absent/none.sock") as client:
        begin = time.monotonic()
        with pytest.raises(Unavailable, match="none"):
            client.info(timeout_s=0.3)
        assert 0.25 < time.monotonic() - begin < 3
        call = client.submit(m.Stat(), deadline_s=0.1)
        assert client.poll(2) == [call]
        with pytest.raises(Unavailable):
            call.result()
