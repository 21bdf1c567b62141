"""The end of a client, in every way it can come: what it held is free, and only that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon import DaemonProcess
from server_raw import RawClient, gone, spec

from kvd.chunk import Outcome
from kvd.errors import UnknownHandle, UnknownSession
from kvd.wire import LookupFlag, Op
from kvd.wire import messages as m

NOTICED_S = 2.0  # 1 s, plus 0.1 s a GiB that it had mapped, on a machine that others use too


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as found:
        yield found


class Child:
    """A forked process that runs `life` with a client of its own and then waits for its end."""

    def __init__(self, path: str, life: Callable[[RawClient], Any], *, fork: bool = False) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            try:
                client = RawClient(path, name="w0")
                life(client)
                if fork:
                    child = os.fork()
                    if child == 0:
                        signal.pause()
                    os.write(write, child.to_bytes(4, "big"))
                os.write(write, client.session)
                os.close(write)
                signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        self.grandchild = int.from_bytes(os.read(read, 4), "big") if fork else 0
        self.token = os.read(read, 16)
        os.close(read)
        assert len(self.token) == 16, "the child failed"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def kill_grandchild(self) -> None:
        os.kill(self.grandchild, signal.SIGKILL)


def dram(client: RawClient) -> dict[str, Any]:
    tier: dict[str, Any] = client.stat()["tiers"][0]
    return tier


def within(condition: Callable[[], bool], seconds: float = NOTICED_S) -> float:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "too late"
        time.sleep(0.01)
    return time.monotonic() - begun


def holds(first: int, leases: int, writes: int) -> Callable[[RawClient], None]:
    def life(client: RawClient) -> None:
        digest = client.register(spec())
        for _ in range(leases):
            assert client.lookup(digest, 0, 1, int(LookupFlag.LEASE)).lease
        for i in range(writes):
            assert client.reserve(digest, first + i, 1).outcomes == bytes([Outcome.GRANTED])

    return life


def test_a_killed_writer_blocks_its_key_only_until_its_death_is_noticed(
    daemon: DaemonProcess,
) -> None:
    """K88"""
    child = Child(daemon.socket, holds(100, 0, 1))
    with RawClient(daemon.socket) as client:
        digest = client.register(spec())
        assert client.lookup(digest, 100, 1).outcomes == bytes([Outcome.MISS])
        assert client.reserve(digest, 100, 1).outcomes == bytes([Outcome.BUSY])
        assert dram(client)["writing_bytes"] == 4096
        child.kill()
        within(lambda: dram(client)["writing_bytes"] + dram(client)["condemned_bytes"] == 0)
        assert client.store(digest, 100, 1) == bytes([Outcome.OK])
        assert client.lookup(digest, 100, 1).leading == 1


def test_a_client_that_comes_back_under_its_name_is_somebody_else(daemon: DaemonProcess) -> None:
    """K97"""
    with RawClient(daemon.socket, name="watcher") as client:
        digest = client.register(spec())
        client.store(digest, 0, 1)
        first = Child(daemon.socket, holds(20, 20, 3))
        assert dram(client)["writing_bytes"] == 3 * 4096
        first.kill()
        with RawClient(daemon.socket, name="w0") as second:
            second.register(spec())
            leases = [second.lookup(digest, 0, 1, int(LookupFlag.LEASE)).lease for _ in range(10)]
            within(lambda: client.stat()["sessions"] == 2)
            within(lambda: dram(client)["writing_bytes"] + dram(client)["condemned_bytes"] == 0)
            assert dram(client)["leased_chunks"] == 1
            # a late message of the dead session
            client.send(Op.STAT, m.encode_request(m.Stat()), session=first.token)
            assert isinstance(client.recv().error, UnknownSession)
            for lease in leases:
                assert second.call(m.Release(lease)).message.chunks == 1
            with pytest.raises(UnknownHandle):
                second.ask(m.Release(leases[0]))
        within(lambda: dram(client)["leased_chunks"] == 0)


def test_a_forked_child_keeps_the_slots_from_reuse_but_not_the_leases(
    daemon: DaemonProcess,
) -> None:
    """The child still has the mapping (here: the lock's descriptor), so what the parent was
    writing is condemned until the child is gone too."""
    with RawClient(daemon.socket) as client:
        digest = client.register(spec())
        client.store(digest, 0, 1)
        child = Child(daemon.socket, holds(30, 1, 2), fork=True)
        assert dram(client)["leased_chunks"] == 1
        child.kill()
        try:
            within(lambda: dram(client)["leased_chunks"] == 0)
            within(lambda: dram(client)["condemned_bytes"] == 2 * 4096)
            time.sleep(0.3)
            assert dram(client)["condemned_bytes"] == 2 * 4096
            assert client.stat()["loop"]["locks_watched"] == 1
        finally:
            child.kill_grandchild()
        within(lambda: dram(client)["condemned_bytes"] == 0, 5)
        assert client.store(digest, 30, 2) == bytes([Outcome.OK]) * 2


def test_a_stopped_client_keeps_what_it_holds_and_nobody_waits_for_it(
    daemon: DaemonProcess,
) -> None:
    child = Child(daemon.socket, holds(40, 0, 1))
    os.kill(child.pid, signal.SIGSTOP)
    try:
        with RawClient(daemon.socket) as client:
            digest = client.register(spec())
            for _ in range(50):
                begun = time.monotonic()
                assert client.reserve(digest, 40, 1).outcomes == bytes([Outcome.BUSY])
                assert time.monotonic() - begun < 2
            assert dram(client)["writing_bytes"] == 4096
    finally:
        child.kill()


def test_a_write_that_takes_too_long_is_condemned_until_its_writer_has_stopped(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.socket) as client:
        digest = client.register(spec())
        reserved = client.reserve(digest, 50, 2, ttl_s=0.1)
        within(lambda: dram(client)["condemned_bytes"] == 2 * 4096)
        first = (0).to_bytes(4, "little")
        late = client.call(m.Commit(reserved.write, first, None)).message
        assert late.outcomes == bytes([Outcome.EXPIRED])
        assert dram(client)["condemned_bytes"] == 4096
        client.call(m.Abort(reserved.write, None))
        assert dram(client)["used_bytes"] == 0


def test_a_writer_that_outlives_the_daemon_keeps_its_slots_from_the_next_life(
    daemon: DaemonProcess,
) -> None:
    child = Child(daemon.socket, holds(60, 0, 2))
    try:
        daemon.restart()
        with RawClient(daemon.socket) as client:
            client.register(spec())
            assert dram(client)["condemned_bytes"] == 2 * 4096
            child.kill()
            within(lambda: dram(client)["condemned_bytes"] == 0, 5)
    finally:
        if not dead(child.pid):
            child.kill()


def dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_killed_daemon_hangs_up_on_its_clients_and_the_next_one_knows_no_old_token(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.socket) as client:
        daemon.kill()
        assert client.attach_socket is not None
        assert gone(client.attach_socket)
        daemon.start()
        client.send(Op.STAT, m.encode_request(m.Stat()))
        assert isinstance(client.recv().error, UnknownSession)


def test_eight_clients_killed_under_load_disturb_nobody(daemon: DaemonProcess) -> None:
    """K99"""

    def busy(client: RawClient) -> None:
        digest = client.register(spec(256 * 1024))
        first = os.getpid() * 100
        reserved = client.reserve(digest, first, 8)
        assert reserved.write
        client.call(m.Commit(reserved.write, b"\0\0\0\0\1\0\0\0", None))
        assert client.lookup(digest, first, 2, int(LookupFlag.LEASE | LookupFlag.LOAD)).lease

    victims = [Child(daemon.socket, busy) for _ in range(8)]
    with RawClient(daemon.socket) as client:
        digest = client.register(spec())
        assert dram(client)["writing_bytes"] > 0
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        slowest = 0.0
        for i in range(300):
            begun = time.monotonic()
            if i % 3 == 0:
                client.store(digest, 1000 + i, 1)
            else:
                client.lookup(digest, 1000 + i - i % 3, 1)
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 1
        for victim in victims:
            os.waitpid(victim.pid, 0)
        within(lambda: client.stat()["sessions"] == 1)
        within(lambda: dram(client)["writing_bytes"] + dram(client)["condemned_bytes"] == 0)
        assert dram(client)["leased_chunks"] == 0
        assert client.stat()["loop"]["faults"] == 0
