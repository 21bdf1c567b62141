"""Exactly once, deadlines, and replies that can't be sent: over real sockets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from daemon import DaemonProcess
from server_raw import NS, RawClient, key, prints, spec

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.errors import (
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    Unavailable,
    UnknownSession,
)
from kvd.wire import LookupFlag, Op
from kvd.wire import messages as m

GET_BYTES = 1 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as found:
        yield found


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as found:
        yield found


def reserve(digest: bytes, first: int, count: int = 1) -> m.Reserve:
    hashes = b"".join(key(first + i) for i in range(count))
    return m.Reserve(digest, 1, (0,), hashes, bytes(32), 0, prints(count), None, None, 0, 30 * NS)


def test_a_retry_gets_the_same_reply_and_is_not_carried_out_again(client: RawClient) -> None:
    """K01"""
    digest = client.register(spec(4096))
    body = m.encode_request(reserve(digest, 100))
    request = client.send(Op.RESERVE, body)
    first = client.recv()
    client.send(Op.RESERVE, body, request=request)
    assert client.recv() == first
    stat = client.stat()
    assert stat["counters"]["replayed"] >= 1
    assert stat["tiers"][0]["writing_bytes"] == 4096
    client.call(m.Abort(first.message.write, None))


def test_a_retry_by_another_connection_gets_the_same_reply(
    daemon: DaemonProcess, client: RawClient
) -> None:
    digest = client.register(spec())
    body = m.encode_request(reserve(digest, 200))
    request = client.send(Op.RESERVE, body)
    first = client.recv()
    with RawClient(daemon.socket, attach=False) as other:
        other.send(Op.RESERVE, body, request=request, session=client.session)
        assert other.recv() == first
    client.call(m.Abort(first.message.write, None))


def test_an_acknowledged_request_is_never_carried_out_anew(client: RawClient) -> None:
    digest = client.register(spec())
    body = m.encode_request(reserve(digest, 300))
    request = client.send(Op.RESERVE, body)
    write = client.recv().message.write
    client.call(m.Heartbeat(), ack=request)
    client.send(Op.RESERVE, body, request=request)
    assert isinstance(client.recv().error, ProtocolError)
    client.call(m.Abort(write, None))


def test_a_request_past_its_deadline_has_no_effect(client: RawClient) -> None:
    digest = client.register(spec())
    now = time.monotonic_ns()
    with pytest.raises(DeadlineExceeded):
        client.ask(reserve(digest, 400), deadline=now - 1)
    assert client.lookup(digest, 400, 1).outcomes == bytes([2])
    assert client.stat()["tiers"][0]["writing_bytes"] == 0
    assert client.stat()["counters"]["requests_expired"] >= 1
    granted = client.call(reserve(digest, 400), deadline=now + 60 * NS).message
    assert granted.outcomes == bytes([3])
    client.call(m.Abort(granted.write, None))


def test_requests_that_waited_while_the_daemon_stood_still_expire(daemon: DaemonProcess) -> None:
    """A stopped daemon that goes on does not do what nobody waits for any more."""
    with RawClient(daemon.socket) as client:
        digest = client.register(spec())
        daemon.signal(signal.SIGSTOP)
        try:
            client.send(
                Op.RESERVE,
                m.encode_request(reserve(digest, 500)),
                deadline=time.monotonic_ns() + NS // 10,
            )
            with pytest.raises(TimeoutError):
                client.recv(0.3)
        finally:
            daemon.signal(signal.SIGCONT)
        assert isinstance(client.recv().error, DeadlineExceeded)
        assert client.stat()["tiers"][0]["writing_bytes"] == 0


def test_requests_in_flight_are_capped_and_the_cap_is_told(client: RawClient) -> None:
    digest = client.register(spec())
    client.store(digest, 600, 1)
    cap = client.hello_reply.limits.inflight
    # nothing keeps a request in flight as surely as the daemon's own stop: many at once
    for _ in range(cap * 4):
        client.send(Op.HEARTBEAT, m.encode_request(m.Heartbeat()))
    answers = [client.recv() for _ in range(cap * 4)]
    assert all(a.error is None or isinstance(a.error, LimitExceeded) for a in answers)
    assert client.stat()["loop"]["requests_in_flight"] == 1


def test_bye_ends_the_session_and_its_token(client: RawClient) -> None:
    client.call(m.Bye())
    client.send(Op.STAT, m.encode_request(m.Stat()))
    assert isinstance(client.recv().error, UnknownSession)


def test_a_peer_that_reads_nothing_loses_its_session_and_nobody_waits(
    daemon: DaemonProcess,
) -> None:
    """A stopped peer must not block the loop: every send is DONTWAIT, its queue is bounded."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # asks for much and is stopped before it reads any of it
        os.close(read)
        asking = RawClient(daemon.socket, name="stopped")
        body = m.encode_request(m.List("namespaces", m.Selector(everything=True), 0, 100))
        os.write(write, b"go")
        for request in range(10, 6000):
            asking.send(Op.LIST, body, request=request)
        os.write(write, b"!!")
        signal.pause()
        os._exit(0)
    os.close(write)
    try:
        assert os.read(read, 2) == b"go"
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        with RawClient(daemon.socket) as client:
            for _ in range(200):
                begun = time.monotonic()
                client.call(m.Heartbeat())
                assert time.monotonic() - begun < 2
        os.kill(pid, signal.SIGCONT)
        assert os.read(read, 2) == b"!!"
        os.kill(pid, signal.SIGSTOP)
        with RawClient(daemon.socket) as client:
            end = time.monotonic() + 15
            while client.stat()["counters"]["sends_failed"]["full"] == 0:
                assert time.monotonic() < end, client.stat()["counters"]
                time.sleep(0.05)
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_peer_that_is_gone_before_its_reply_ends_its_session(
    daemon: DaemonProcess, eventually
) -> None:
    with RawClient(daemon.socket) as watcher:
        client = RawClient(daemon.socket)
        digest = client.register(spec())
        client.store(digest, 700, 1)
        found = client.lookup(digest, 700, 1, int(LookupFlag.LEASE))
        assert found.lease
        client.dealer.close(0)  # the attach connection stays
        other = client.context.socket(5)
        other.setsockopt(17, 0)
        other.connect(f"ipc://{daemon.socket}")
        client.dealer = other
        client.stat()  # a new connection of the same session goes on
        eventually(lambda: watcher.stat()["sessions"] == 2)
        client.close()
        eventually(lambda: watcher.stat()["sessions"] == 1)


def test_what_is_given_back_late_is_given_back() -> None:
    """A deadline says how long somebody waits, and nobody waits for an abort or a release."""
    with (
        DaemonProcess(arena_size="16MiB") as daemon,
        Client(daemon.socket, timeout_s=0.4) as client,
    ):
        layout = spec(65536)
        keys = [bytes([n + 1]) * 32 for n in range(8)]
        assert client.put(layout, keys[0], None, bytes(65536), timeout_s=5) is Outcome.OK
        found = client.lookup(layout, keys[:1], timeout_s=5)
        held = client.reserve(layout, keys[1:4], timeout_s=5)
        waited = client.reserve(layout, keys[4:6], timeout_s=5)
        assert found.lease is not None and held.granted and waited.granted
        daemon.signal(signal.SIGSTOP)
        try:
            found.lease.release()
            held.abort()
            with pytest.raises(Unavailable):
                waited.abort(wait=True)
            time.sleep(0.5)  # every deadline is over
        finally:
            daemon.signal(signal.SIGCONT)
        stat = client.stat(timeout_s=5)
        (dram,) = [tier for tier in stat["tiers"] if tier["name"] == "dram"]
        assert dram["writing_bytes"] == dram["condemned_bytes"] == dram["leased_chunks"] == 0
        assert stat["counters"]["requests_expired"] == 0
