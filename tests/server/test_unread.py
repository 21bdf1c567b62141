"""Readers that do not read: what waits for them is bounded, and is their own affair."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq
from daemon import DaemonProcess
from server_raw import RawClient, key, spec

from kvd.client import Client
from kvd.errors import Busy
from kvd.server.unread import Unread, _cut
from kvd.wire import Op

MIB = 1 << 20


def session(number: int, tenant: str = "a", source: int = -1) -> Any:
    return SimpleNamespace(
        number=number, grant=SimpleNamespace(namespace=tenant), source=source, maps_memory=False
    )


class Held:
    done = False


def test_a_session_has_its_bound_and_one_reply_beyond_it_at_most() -> None:
    unread = Unread(each=100, most=1000)
    one = session(1)
    first = unread.copying(one, 150)  # alone a reply may be as large as it is
    with pytest.raises(Busy, match="at most 100 a session"):
        unread.copying(one, 1)
    with pytest.raises(Busy):
        unread.check(one)
    unread.check(session(2))
    first.over = True
    unread.check(one)
    assert unread.copying(one, 100)


def test_a_tenant_leaves_as_much_as_it_takes() -> None:
    unread = Unread(each=100, most=399)
    held = [Held() for _ in range(4)]
    unread.sent(session(1), 100, held[0])
    unread.sent(session(2), 100, held[1])
    with pytest.raises(Busy, match="200 bytes of this tenant, 200 of all, who share 399"):
        unread.copying(session(3), 1)
    unread.check(session(3))  # it has nothing to read: other replies it gets
    with pytest.raises(Busy):
        unread.check(session(1))
    assert unread.copying(session(4, "b"), 100)
    held[0].done = True
    with pytest.raises(Busy):  # it has 100, b has 100: 199 are left
        unread.copying(session(3), 100)
    assert unread.copying(session(3), 99)


@pytest.mark.parametrize(("waited_s", "cut"), [(0.0, False), (60.0, True)])
def test_who_reads_nothing_while_others_need_the_room_loses_its_connection(
    waited_s: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        unread = Unread(each=100, most=200, stuck_s=30)
        begun = time.monotonic()
        unread.sent(session(1, source=ours.fileno()), 100, Held())
        monkeypatch.setattr(time, "monotonic", lambda: begun + waited_s)
        with pytest.raises(Busy):
            unread.copying(session(2), 10)
        if cut:
            assert theirs.recv(1) == b""
        else:
            with pytest.raises(BlockingIOError):
                theirs.recv(1)


def test_nobody_elses_file_is_cut_for_a_number_that_was_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    other, end = socket.socketpair()
    with ours, theirs, other, end:
        end.setblocking(False)
        unread = Unread(each=100, most=200, stuck_s=-1)
        unread.sent(session(1, source=ours.fileno()), 100, Held())
        os.dup2(other.fileno(), ours.fileno())
        with pytest.raises(Busy):
            unread.copying(session(2), 10)
        with pytest.raises(BlockingIOError):
            end.recv(1)


def test_a_number_that_is_a_files_by_now_costs_no_descriptor() -> None:
    with tempfile.TemporaryFile() as file:
        inode = os.fstat(file.fileno()).st_ino
        before = len(os.listdir("/proc/self/fd"))
        for number in (inode, inode + 1):
            _cut(file.fileno(), number)
        assert len(os.listdir("/proc/self/fd")) == before


def test_readers_that_stand_still_cost_a_bounded_part_of_memory_and_no_other_tenant(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-of-the-other-team")
    token.chmod(0o600)
    config = f"[tenants.other]\ntoken_file = '{token}'\n"
    kv = spec(MIB)
    hashes = b"".join(key(100 * i) for i in range(16))
    with DaemonProcess(arena_size="64MiB", config=config) as daemon:
        with Client(daemon.socket, token=token.read_bytes(), map_memory=False) as other:
            assert other.put(kv, key(5), None, bytes(MIB)).name == "OK"
            with Client(daemon.socket) as client:
                for i in range(16):
                    assert client.put(kv, key(100 * i), None, bytes(MIB)).name == "OK"
            before = daemon.rss
            readers = [RawClient(daemon.socket, maps=False) for _ in range(8)]
            try:
                for reader in readers:
                    digest = reader.register(kv)
                    reader.dealer.setsockopt(zmq.RCVHWM, 1)
                    for _ in range(8):  # a GiB in all
                        reader.send(Op.GET, msgpack.packb([digest, 1, [0], hashes, None, 8]))
                end = time.monotonic() + 2
                while time.monotonic() < end:
                    assert daemon.rss - before < 400 * MIB
                    assert other.get(kv, key(5)) == bytes(MIB)
                counters = other.stat()["counters"]
                assert counters["requests_delayed"] > 0
            finally:
                for reader in readers:
                    reader.close()
            with Client(daemon.socket, map_memory=False) as client:  # of the readers' tenant
                assert client.get(kv, key(0), timeout_s=20) == bytes(MIB)
