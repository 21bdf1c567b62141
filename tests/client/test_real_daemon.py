"""The client and the daemon as they are: real processes, real signals, real memory."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from daemon import DaemonProcess
from fake_daemon import in_child, keys, make_spec

from kvd.chunk import Outcome
from kvd.client import Client, Selector
from kvd.errors import (
    ClientClosed,
    ConfigError,
    LeaseLost,
    LimitExceeded,
    StaleEpoch,
    Unavailable,
    UnknownHandle,
    WrongInstance,
)

OK = Outcome.OK
SIZE = 64 * 1024


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="16MiB") as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.socket, timeout_s=10) as made:
        yield made


def chunk(number: int) -> bytes:
    return number.to_bytes(4, "little") * (SIZE // 4)


def prints(count: int, start: int = 0) -> list[bytes]:
    return [(start + i + 1).to_bytes(16, "big") for i in range(count)]


def eventually(what: Callable[[], object], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def dram(client: Client) -> dict[str, Any]:
    tier: dict[str, Any] = client.stat()["tiers"][0]
    return tier


def stored(client: Client, count: int, start: int = 0) -> Any:
    handle = client.register(make_spec(nbytes=SIZE))
    said = client.store_chunks(
        handle,
        keys(count, start),
        prints(count, start),
        [chunk(start + i) for i in range(count)],
    )
    assert said == [OK] * count
    return handle


def test_streams_round_trip_and_verify(client: Client) -> None:
    handle = stored(client, 40)
    target = [bytearray(SIZE) for _ in range(42)]
    said = client.load_chunks(handle, keys(42), target, verify=True, batch=8)
    assert said == [OK] * 40 + [Outcome.MISS, Outcome.SKIPPED]
    assert [bytes(t) for t in target[:40]] == [chunk(i) for i in range(40)]
    assert (
        client.store_chunks(handle, keys(40), prints(40), [b"\0" * SIZE] * 40)
        == [Outcome.EXISTS] * 40
    )


def test_another_fingerprint_is_no_hit(client: Client) -> None:
    handle = stored(client, 2)
    found = client.lookup(handle, keys(2), prints(2, 7), lease=False)
    assert found.leading == 0 and found.outcomes[0] is Outcome.MISMATCH


@pytest.mark.parametrize("mapped", [True, False])
def test_put_and_get_with_and_without_shared_memory(daemon: DaemonProcess, mapped: bool) -> None:
    with Client(daemon.socket, map_memory=mapped) as client:
        handle = client.register(make_spec(2, SIZE))
        key, print_ = keys(1)[0], prints(1)[0]
        assert client.put(handle, key, print_, chunk(1), shard=0) is OK
        assert client.put(handle, key, print_, chunk(2), shard=1) is OK
        assert client.put(handle, key, print_, chunk(2), shard=1) is Outcome.EXISTS
        assert client.get(handle, key, print_, shard=0) == chunk(1)
        assert client.get(handle, key, shard=1) == chunk(2)
        assert client.get(handle, keys(1, 9)[0]) is None
        target = [bytearray(SIZE) for _ in range(6)]
        source = [chunk(i) for i in range(6)]
        more = keys(3, 100)
        assert client.store_chunks(handle, more, None, source, shards=(0, 1)) == [OK] * 6
        assert client.load_chunks(handle, more, target, shards=(0, 1)) == [OK] * 6
        assert [bytes(t) for t in target] == source


def test_an_aborted_reservation_and_a_released_lease_leave_nothing(client: Client) -> None:
    handle = stored(client, 2)
    with client.reserve(handle, keys(3, 50), prints(3)):
        assert dram(client)["writing_bytes"] == 3 * SIZE
    with client.lookup(handle, keys(2), load=True) as found:
        assert found.transfer is not None and list(found.transfer) == [0, 1]
        assert dram(client)["leased_chunks"] == 2
    tier = dram(client)
    assert tier["writing_bytes"] == 0 and tier["leased_chunks"] == 0


def test_what_a_full_arena_can_not_take_is_named(client: Client) -> None:
    handle = client.register(make_spec(nbytes=SIZE))
    many = 400  # 25 MiB into 16 MiB: the oldest go
    said = client.store_chunks(handle, keys(many), prints(many), lambda i, v: None, batch=16)
    assert len(said) == many and set(said) <= {OK, Outcome.NO_SPACE, Outcome.OVER_QUOTA}
    assert said.count(OK) >= 100
    tier = dram(client)
    assert tier["used_bytes"] <= tier["limit_bytes"] and tier["writing_bytes"] == 0


def test_limits_told_at_hello_are_what_is_enforced(client: Client) -> None:
    """K09"""
    limits = client.info().limits
    handle = client.register(make_spec())
    assert client.lookup(handle, keys(limits.keys), lease=False).leading == 0
    with pytest.raises(LimitExceeded, match=str(limits.keys)):
        client.lookup(handle, keys(limits.keys + 1), lease=False)
    exact = client.register(make_spec(nbytes=limits.chunk_bytes, model="largest"))
    over = client.register(make_spec(nbytes=limits.chunk_bytes + 1, model="larger"))
    with client.reserve(exact, keys(1), prints(1)) as reservation:
        assert reservation.outcomes == (Outcome.GRANTED,)
    with client.reserve(over, keys(1), prints(1)) as reservation:
        assert reservation.outcomes == (Outcome.TOO_LARGE,)


def test_who_names_no_life_of_a_lease_or_write_gets_the_daemons() -> None:
    limits = ("--limits-lease-s", "2", "--limits-lease-max-s", "3", "--limits-write-s", "1",
              "--limits-write-max-s", "2")  # fmt: skip
    with DaemonProcess(arena_size="16MiB", args=limits) as daemon, Client(daemon.socket) as client:
        spec = make_spec(nbytes=SIZE)
        assert client.store_chunks(spec, keys(2), None, [bytes(SIZE)] * 2) == [OK, OK]
        assert client.put(spec, keys(3)[2], None, bytes(SIZE), parent=keys(2)[1], index=2) is OK
        with client.lookup(spec, keys(3), reserve_misses=True) as found:
            assert found.leading == 3 and found.lease is not None
            assert 0 < found.lease.expiry_ns - time.monotonic_ns() <= 2_000_000_000
        assert client.load_chunks(spec, keys(3), [bytearray(SIZE)] * 3) == [OK] * 3
        with Client(daemon.socket, map_memory=False) as inline:
            assert inline.get(spec, keys(1)[0]) == bytes(SIZE)


def test_what_gives_slots_says_so_to_a_client_that_maps_no_memory(
    daemon: DaemonProcess, client: Client
) -> None:
    """Named before the daemon is asked, so nothing is granted or leased for it."""
    stored(client, 2)
    spec = make_spec(nbytes=SIZE)
    with Client(daemon.socket, map_memory=False) as inline:
        for call, what in (
            (lambda: inline.reserve(spec, keys(1, 7)), "reserve"),
            (lambda: inline.lookup(spec, keys(2), load=True), "lookup with load"),
            (lambda: inline.lookup(spec, keys(3), reserve_misses=True), "reserve_misses"),
        ):
            with pytest.raises(ConfigError, match=f"{what} .*map_memory=False.*load_chunks"):
                call()
        with inline.lookup(spec, keys(2)) as found:
            assert found.leading == 2 and found.lease is not None
            with pytest.raises(ConfigError, match="load gives slots"):
                found.lease.load()
        assert inline.load_chunks(spec, keys(2), [bytearray(SIZE)] * 2) == [OK] * 2
    eventually(lambda: not client.stat()["counters"]["active_leases"])
    assert client.stat()["counters"]["active_writes"] == 0


def test_a_payload_over_the_limit_is_refused_at_once_and_nobody_loses_the_connection(
    daemon: DaemonProcess,
) -> None:
    with Client(daemon.socket, map_memory=False) as inline:
        most = inline.info().limits.inline
        large = make_spec(nbytes=most + 1)
        before = time.monotonic()
        for store in (
            lambda: inline.put(large, keys(1)[0], None, bytes(most + 1)),
            lambda: inline.store_chunks(large, keys(1), None, [bytes(most + 1)]),
        ):
            with pytest.raises(LimitExceeded, match=f"inline payload bytes: {most + 1}, at most"):
                store()
        assert time.monotonic() - before < 2
        assert inline.put(make_spec(nbytes=SIZE), keys(1)[0], None, bytes(SIZE)) is OK
        assert (inline.counters.links, inline.counters.lost) == (1, 0)


def test_a_killed_daemon_is_a_miss_and_a_restarted_one_has_what_was_stored(
    daemon: DaemonProcess, client: Client
) -> None:
    """K92"""
    handle = stored(client, 10)
    before = client.info().epoch
    lease = client.lookup(handle, keys(2)).lease
    assert lease is not None
    daemon.kill()
    with pytest.raises(Unavailable):
        client.lookup(handle, keys(10), timeout_s=0.5)
    daemon.start()
    target = [bytearray(SIZE) for _ in range(10)]
    assert client.load_chunks(handle, keys(10), target, verify=True) == [OK] * 10
    assert [bytes(t) for t in target] == [chunk(i) for i in range(10)]
    assert client.info().epoch > before
    with pytest.raises(StaleEpoch):
        lease.renew(5)


def test_bytes_read_over_a_restart_are_lease_lost(daemon: DaemonProcess, client: Client) -> None:
    handle = stored(client, 2)
    with pytest.raises(LeaseLost), client.lookup(handle, keys(2), load=True) as found:
        assert found.transfer is not None
        view = found.transfer.view(0)
        daemon.kill()
        daemon.start()
        assert len(bytes(view)) == SIZE  # memory, but nobody's word for it
        found.transfer.check()


def test_a_load_whose_client_was_closed_says_so(client: Client) -> None:
    handle = stored(client, 2)
    found = client.lookup(handle, keys(2), load=True)
    transfer, lease = found.transfer, found.lease
    assert transfer is not None and lease is not None
    view = transfer.view(0)
    client.close()
    assert bytes(view) == chunk(0)  # still memory
    for use in (lambda: transfer.view(1), transfer.check, lease.check):
        with pytest.raises(ClientClosed):
            use()


def test_a_daemon_that_drains_says_so_and_ends_well(daemon: DaemonProcess, client: Client) -> None:
    stored(client, 2)
    assert daemon.stop() == 0
    with pytest.raises(Unavailable):
        client.stat(timeout_s=0.3)


def test_a_stopped_daemon_is_unavailable_and_then_itself_again(
    daemon: DaemonProcess, client: Client
) -> None:
    """K01"""
    handle = stored(client, 3)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        os.waitpid(daemon.pid, os.WUNTRACED)
        begin = time.monotonic()
        for _ in range(3):
            with pytest.raises(Unavailable):
                client.lookup(handle, keys(3), timeout_s=0.2)
        assert time.monotonic() - begin < 5
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    for _ in range(100):
        assert client.lookup(handle, keys(3), lease=False).leading == 3
    eventually(lambda: dram(client)["leased_chunks"] == 0)


class Proxy(threading.Thread):
    """Between a client and the daemon's ZMQ socket; the attach socket is the daemon's own.
    Swallows the answers for which `drop` says so."""

    def __init__(self, front: str, back: str) -> None:
        super().__init__(name="proxy")
        self.drop: Callable[[bytes], bool] = lambda frame: False
        self.dropped = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("ipc://" + front)
        os.symlink(back + ".a", front + ".a")
        self._back = back
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        backs: dict[bytes, Any] = {}
        while not self._ending.is_set():
            poller = zmq.Poller()
            poller.register(self._front, zmq.POLLIN)
            for socket in backs.values():
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(50))
            if self._front in ready:
                route, *frames = self._front.recv_multipart()
                if route not in backs:
                    backs[route] = self._context.socket(zmq.DEALER)
                    backs[route].connect("ipc://" + self._back)
                backs[route].send_multipart(frames)
            for route, socket in backs.items():
                if socket in ready:
                    frames = socket.recv_multipart()
                    if self.drop(frames[0]):
                        self.dropped += 1
                    else:
                        self._front.send_multipart([route, *frames])
        for socket in [self._front, *backs.values()]:
            socket.close(0)

    def close(self) -> None:
        self._ending.set()
        self.join(10)
        self._context.term()


@pytest.fixture
def proxy(daemon: DaemonProcess) -> Iterator[Proxy]:
    made = Proxy(os.path.join(daemon.directory, "proxy"), daemon.socket)
    yield made
    made.close()


def test_a_swallowed_reply_of_the_real_daemon_harms_no_later_request(
    daemon: DaemonProcess, proxy: Proxy
) -> None:
    """K01"""
    with Client(os.path.join(daemon.directory, "proxy")) as client:
        handle = stored(client, 20)
        once = [True]
        proxy.drop = lambda frame: frame[6] == 6 and bool(once) and once.pop()
        with pytest.raises(Unavailable):
            client.lookup(handle, keys(5), timeout_s=0.3)
        for turn in range(100):
            found = client.lookup(handle, keys(turn % 20 + 1), lease=False)
            assert found.leading == turn % 20 + 1
        assert proxy.dropped == 1


def test_a_retried_reserve_is_carried_out_once_by_the_real_daemon(
    daemon: DaemonProcess, proxy: Proxy
) -> None:
    """K07"""
    with Client(os.path.join(daemon.directory, "proxy"), timeout_s=15) as client:
        handle = client.register(make_spec(nbytes=SIZE))
        once = [True]
        proxy.drop = lambda frame: frame[6] == 3 and bool(once) and once.pop()
        with client.reserve(handle, keys(3), prints(3)) as reservation:
            assert reservation.granted == [0, 1, 2]
            assert dram(client)["writing_bytes"] == 3 * SIZE
            assert reservation.commit() == [OK] * 3
        assert proxy.dropped == 1 and client.counters.resends >= 1


def test_a_killed_clients_writes_and_leases_end(daemon: DaemonProcess, client: Client) -> None:
    """K97: and the next one of the same name has nothing to do with it."""
    handle = stored(client, 20)
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from fake_daemon import keys, make_spec\n"
        "from kvd.client import Client\n"
        f"c = Client({daemon.socket!r}, name='w0')\n"
        f"h = c.register(make_spec(nbytes={SIZE}))\n"
        "l = [c.lookup(h, keys(1, i)) for i in range(20)]\n"
        "r = c.reserve(h, keys(3, 500))\n"
        "print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        tier = dram(client)
        assert tier["leased_chunks"] == 20 and tier["writing_bytes"] == 3 * SIZE
        process.kill()
        process.wait(10)
        killed = time.monotonic()
        with Client(daemon.socket, name="w0") as again:
            leases = [again.lookup(handle, keys(1, i)).lease for i in range(10)]

            def only_ours() -> bool:
                tier = dram(client)
                return (
                    tier["leased_chunks"] == 10
                    and tier["writing_bytes"] == 0
                    and tier["condemned_bytes"] == 0
                )

            eventually(only_ours, 5)
            assert time.monotonic() - killed < 5
            for lease in leases:
                assert lease is not None
                lease.check()
                lease.renew(10)


def test_a_forked_child_ends_and_the_parents_session_does_not(
    daemon: DaemonProcess, client: Client
) -> None:
    """K105"""
    handle = stored(client, 3)
    found = client.lookup(handle, keys(3), load=True)
    assert found.lease is not None and found.transfer is not None

    def child() -> None:
        with Client(daemon.socket) as mine:
            for _ in range(100):
                assert mine.lookup(handle, keys(3), lease=False).leading == 3

    for _ in range(3):
        assert in_child(child) == 0
        for _ in range(100):
            assert client.lookup(handle, keys(3), lease=False).leading == 3
    found.transfer.check()
    found.lease.release(wait=True)
    assert client.counters.links == 1


def test_a_client_finds_out_that_it_reached_another_daemon(daemon: DaemonProcess) -> None:
    """K98"""
    with Client(daemon.socket, expected_instance="somebody-else", timeout_s=20) as client:
        begin = time.monotonic()
        with pytest.raises(WrongInstance):
            client.lookup(make_spec(), keys(1))
        assert time.monotonic() - begin < 5
    with Client(daemon.socket, expected_instance=daemon.instance) as client:
        assert client.info().instance == daemon.instance


def test_a_group_shares_its_leases_and_strangers_do_not(daemon: DaemonProcess) -> None:
    secret = secrets.token_bytes(16)
    with (
        Client(daemon.socket, group=secret) as scheduler,
        Client(daemon.socket, group=secret) as worker,
        Client(daemon.socket) as stranger,
    ):
        handle = stored(scheduler, 3)
        taken = scheduler.lookup(handle, keys(3)).lease
        assert taken is not None
        shared = taken.share()
        with worker.join(shared) as lease:
            transfer = lease.load([1])
            assert [bytes(transfer.view(i)) for i in transfer] == [chunk(1)]
        with pytest.raises(UnknownHandle):
            stranger.join(shared).load()
        taken.check()
        worker.join(shared).release(wait=True)
        with pytest.raises(LeaseLost):
            taken.release(wait=True)
        with pytest.raises(StaleEpoch):
            worker.join(shared._replace(epoch=1))


def test_evicting_and_listing_follow_their_cursors(client: Client) -> None:
    stored(client, 30)
    rows = list(client.rows("chunks", Selector(namespace="default"), page=7))
    assert len(rows) == 30 and {row["state"] for row in rows} <= {"sealed", "unsealed"}
    dry = client.evict(Selector(everything=True), dry_run=True, step=7)
    assert dry.matched == 30 and dry.evicted in (0, 30) and len(dry.named) == 30
    gone = client.evict(Selector(everything=True), step=7)
    assert gone.evicted == 30 and gone.bytes == 30 * SIZE
    assert list(client.rows("chunks")) == []


def test_sixteen_threads_store_and_load_through_one_client(client: Client) -> None:
    """K104"""
    handle = client.register(make_spec(nbytes=SIZE))
    failed: list[Exception] = []

    def work(number: int) -> None:
        try:
            mine = keys(6, 100 * number)
            source = [chunk(number)] * 6
            said = client.store_chunks(handle, mine, prints(6, 100 * number), source, batch=2)
            assert set(said) == {OK}
            target = [bytearray(SIZE) for _ in range(6)]
            assert set(client.load_chunks(handle, mine, target, batch=2)) == {OK}
            assert all(bytes(t) == chunk(number) for t in target)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == [] and not any(t.is_alive() for t in threads)
    eventually(lambda: dram(client)["leased_chunks"] == 0)


def test_a_write_that_outlives_its_session_keeps_its_slot_from_reuse(
    daemon: DaemonProcess, client: Client
) -> None:
    """The session's lock is held by the unfinished reservation, not by the connection."""
    handle = client.register(make_spec(nbytes=SIZE))
    writer = Client(daemon.socket)
    reservation = writer.reserve(handle, keys(1), prints(1))
    view = reservation.view(0)
    writer.close()
    eventually(lambda: dram(client)["condemned_bytes"] == SIZE)
    time.sleep(0.5)
    view[:] = chunk(1)  # a late writer: into nobody's slot
    assert dram(client)["condemned_bytes"] == SIZE
    assert client.lookup(handle, keys(1), lease=False).leading == 0
    del view
    reservation.abort()
    eventually(lambda: dram(client)["condemned_bytes"] == 0)
