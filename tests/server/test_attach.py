"""Attach: who may join, and when a session is over. The host is a stand-in; sockets, processes
and signals are real."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_raw import attach_answer, attach_over, dial, gone

from kvd.errors import AuthError, ConfigError, KvdError, ProtocolError, VersionError
from kvd.server import attach as attach_module
from kvd.server.access import Access, Grant, Peer
from kvd.server.attach import Attached, AttachServer
from kvd.server.endpoint import Endpoint
from kvd.server.loop import Loop
from kvd.server.sessions import Session, Sessions
from kvd.server.settings import NamespaceRule
from kvd.wire.attach import AttachReply, AttachRequest, encode_attach, encode_attach_reply


class Host:
    """Opens a session for everybody."""

    def __init__(self) -> None:
        self.sessions = Sessions(100, 16, 16)
        self.peers: list[Peer] = []
        self.failed: list[KvdError] = []
        self.ended: list[tuple[str, str]] = []
        self.refuse: KvdError | None = None

    def attach(self, request: AttachRequest, peer: Peer) -> Attached:
        if self.refuse is not None:
            raise self.refuse
        self.peers.append(peer)
        session = self.sessions.open(
            grant=Grant("default", False),
            name=request.name,
            group_secret=None,
            peer=peer,
            maps_memory=True,
            now_s=0.0,
        )
        lock = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        reply = AttachReply(session.token, session.public_id, "i", 1, "default", False, (), 1)
        return Attached(session, encode_attach_reply(reply), [0, 0, lock], [lock])

    def attach_failed(self, error: KvdError) -> None:
        self.failed.append(error)

    def lost(self, session: Session, why: str) -> None:
        self.sessions.remove(session)
        self.ended.append((session.name, why))


class Running:
    """The loop in a thread of its own, as the daemon's main thread would run it. `busy`: held while
    it does something else."""

    def __init__(self, path: str) -> None:
        self.busy = threading.Lock()
        self.path = path
        self.host = Host()
        self.loop = Loop()
        self.endpoint = Endpoint(path)
        self.endpoint.claim()
        self.server = AttachServer(self.loop, self.endpoint.listen_attach(), self.host)
        self.stop = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop:
            self.loop.turn(20)
            with self.busy:
                pass

    def close(self) -> None:
        self.stop = True
        self.thread.join()
        self.server.close()
        self.loop.close()
        self.endpoint.close()


@pytest.fixture
def running() -> Iterator[Running]:
    folder = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
    found = Running(str(Path(folder, "s")))
    yield found
    found.close()
    shutil.rmtree(folder)


REQUEST = AttachRequest(1, 0, "w0", 0, None, None, None)


def test_a_client_is_told_its_session_and_handed_descriptors(running: Running) -> None:
    with dial(running.path) as sock:
        told, descriptors = attach_over(sock, REQUEST)
        assert len(descriptors) == 3
        for descriptor in descriptors:
            os.close(descriptor)
        assert len(told.session) == 16 and told.session != told.public_id
    [peer] = running.host.peers
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert set(peer.gids) == {os.getgid(), *os.getgroups()}


def test_the_end_of_the_connection_ends_the_session(running: Running, eventually) -> None:
    with dial(running.path) as sock:
        for descriptor in attach_over(sock, REQUEST)[1]:
            os.close(descriptor)
    eventually(lambda: running.host.ended == [("w0", "connection")])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x00", ProtocolError),
        (b"\xc1" * 64, ProtocolError),
        (b"\x93\xa3abc\x01\x00", ProtocolError),
        (encode_attach(REQUEST._replace(major=2)), VersionError),
        (bytes(5000), KvdError),
    ],
)
def test_garbage_is_answered_with_a_typed_error_and_hung_up_on(
    running: Running, data: bytes, error: type[KvdError]
) -> None:
    """K03, K04"""
    with dial(running.path) as sock:
        sock.send(data)
        with pytest.raises(error):
            attach_answer(sock)
        assert gone(sock)
    assert len(running.host.failed) == 1
    with dial(running.path) as sock:
        for descriptor in attach_over(sock, REQUEST)[1]:
            os.close(descriptor)


def test_a_refusal_tells_its_reason(running: Running) -> None:
    running.host.refuse = AuthError("uid 7 belongs to no namespace")
    with dial(running.path) as sock, pytest.raises(AuthError, match="uid 7"):
        attach_over(sock, REQUEST)


def test_what_an_attached_client_says_later_is_thrown_away(running: Running, eventually) -> None:
    with dial(running.path) as sock:
        for descriptor in attach_over(sock, REQUEST)[1]:
            os.close(descriptor)
        for _ in range(100):
            sock.send(bytes(4000))
        with dial(running.path) as other:
            for descriptor in attach_over(other, REQUEST._replace(name="w1"))[1]:
                os.close(descriptor)
        assert running.host.ended in ([], [("w1", "connection")])
    eventually(lambda: len(running.host.ended) == 2)


def test_a_killed_parent_is_dead_although_its_child_holds_the_connection(
    running: Running, eventually
) -> None:
    """With a forked child alive there is no end-of-file; the pidfd fires."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        sock = dial(running.path)
        attach_over(sock, REQUEST)
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(write, child.to_bytes(4, "big"))
        signal.pause()
        os._exit(0)
    child = int.from_bytes(os.read(read, 4), "big")
    os.close(read)
    os.close(write)
    try:
        assert running.host.ended == []
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: running.host.ended == [("w0", "process")])
    finally:
        os.waitpid(pid, 0)
        os.kill(child, signal.SIGKILL)


def test_without_a_pidfd_the_end_of_the_connection_is_the_death(
    running: Running, eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "_pidfd_of", lambda sock, peer: -1)
    with dial(running.path) as sock:
        for descriptor in attach_over(sock, REQUEST)[1]:
            os.close(descriptor)
    eventually(lambda: len(running.host.ended) == 1)


def test_a_silent_connection_is_dropped(
    running: Running, eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "HELLO_S", 0.1)
    with dial(running.path) as sock:
        assert gone(sock, 5)
    eventually(lambda: len(running.host.failed) == 1)


def test_too_many_waiting_connections_push_out_the_oldest(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "MAX_WAITING", 4)
    socks = [dial(running.path) for _ in range(6)]
    assert gone(socks[0], 5) and gone(socks[1], 5)
    assert not gone(socks[5], 0.2)
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("limit", ["descriptors", "waiting", "time"])
def test_who_has_spoken_is_not_silent_because_the_loop_was_busy(
    running: Running, monkeypatch: pytest.MonkeyPatch, eventually, limit: str
) -> None:
    """The listener may be heard before those whose word has come."""
    socks = [dial(running.path) for _ in range(4)]
    eventually(lambda: len(running.server) == 4)
    with running.busy:
        time.sleep(0.05)  # the turn under way
        for sock in socks:
            sock.send(encode_attach(REQUEST))
        socks.append(dial(running.path))
        if limit == "descriptors":
            monkeypatch.setattr(attach_module, "SILENT_S", 0.0)
            monkeypatch.setattr(running.server, "_most", 0)
        elif limit == "waiting":
            monkeypatch.setattr(attach_module, "MAX_WAITING", 4)
        else:
            monkeypatch.setattr(attach_module, "HELLO_S", -1.0)
        if limit == "time":
            running.server._drop_silent(time.monotonic())
        else:
            running.server._accept(select.EPOLLIN)
        monkeypatch.undo()
    for sock in socks[:4]:
        for descriptor in attach_answer(sock)[1]:
            os.close(descriptor)
    assert gone(socks[4], 0.2) is (limit == "descriptors")
    assert running.host.failed == []
    for sock in socks:
        sock.close()


def test_who_says_nothing_makes_room_for_others(
    running: Running, monkeypatch: pytest.MonkeyPatch, eventually
) -> None:
    socks = [dial(running.path) for _ in range(5)]
    eventually(lambda: len(running.server) == 5)
    with running.busy:
        time.sleep(0.05)
        socks[1].send(encode_attach(REQUEST))
        monkeypatch.setattr(attach_module, "SILENT_S", 0.0)
        monkeypatch.setattr(running.server, "_most", 0)
        socks.append(dial(running.path))
        running.server._accept(select.EPOLLIN)
        monkeypatch.undo()
    for descriptor in attach_answer(socks[1])[1]:
        os.close(descriptor)
    assert [gone(sock, 0.2) for sock in socks] == [True, False, True, True, True, False]
    for sock in socks:
        sock.close()


def test_a_daemon_without_descriptors_hangs_up_and_does_not_spin(
    running: Running, eventually
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    first, second = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    fill = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        while True:
            try:
                fill.append(os.dup(0))
            except OSError:
                break
        first.connect(running.path + ".a")
        assert gone(first, 5)
        turns = running.loop.turns
        time.sleep(0.3)
        assert running.loop.turns - turns < 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fill:
            os.close(descriptor)
    second.settimeout(5)
    second.connect(running.path + ".a")
    for descriptor in attach_over(second, REQUEST)[1]:
        os.close(descriptor)
    first.close()
    second.close()


# -- who may join -------------------------------------------------------------------------------

ME = os.getuid()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(b"0123456789abcdef-secret\n")
    path.chmod(0o600)
    return path


def test_a_namespace_comes_from_uid_then_group_then_ones_own_uid(token: Path) -> None:
    access = Access([NamespaceRule("a", uids=(4001,)), NamespaceRule("b", gids=(50,))], (4001,), 60)
    assert access.grant(Peer(1, 4001, (50,)), None) == Grant("a", True)
    assert access.grant(Peer(1, 4002, (7, 50)), None) == Grant("b", False)
    assert access.grant(Peer(1, 4003, (50, 60)), None) == Grant("b", True)
    assert access.grant(Peer(1, ME, ()), None) == Grant("default", True)
    with pytest.raises(AuthError, match="uid 4004"):
        access.grant(Peer(1, 4004, (7,)), None)
    assert access.namespaces == ["default", "a", "b"]


def test_a_token_must_hold_and_wins_over_the_uid(token: Path) -> None:
    access = Access([NamespaceRule("t", token_file=str(token))], (), None)
    assert access.grant(Peer(1, 4004, ()), b"0123456789abcdef-secret") == Grant("t", False)
    assert access.grant(Peer(1, ME, ()), b"0123456789abcdef-secret\n") == Grant("t", True)
    with pytest.raises(AuthError, match="token"):
        access.grant(Peer(1, ME, ()), b"0123456789abcdef-secreT")


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [(b"short", 0o600, "16"), (b"x" * 32, 0o604, "chmod"), (b"x" * 9999, 0o600, "to")],
)
def test_a_token_file_that_keeps_no_secret_is_refused(
    token: Path, content: bytes, mode: int, says: str
) -> None:
    token.write_bytes(content)
    token.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        Access([NamespaceRule("t", token_file=str(token))], (), None)


assert sys.platform == "linux" and hasattr(select, "epoll")
