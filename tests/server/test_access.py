"""Who is let in by a real daemon: other users, groups and tokens, with the kernel's word for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import DaemonProcess
from server_raw import RawClient, dial, spec

from kvd.errors import AuthError
from kvd.wire import messages as m

TOKEN = b"a-secret-of-team-t-0123456789"
CONFIG = """
[[namespaces]]
name = "team-u"
uids = [41001]

[[namespaces]]
name = "team-g"
gids = [41500]

[[namespaces]]
name = "team-t"
token_file = "{token}"

[admin]
uids = [41003]
"""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_bytes(TOKEN + b"\n")
    token.chmod(0o600)
    with DaemonProcess(config=CONFIG.format(token=token)) as found:
        Path(found.directory).chmod(0o755)
        yield found


def as_user(
    daemon: DaemonProcess, uid: int, groups: list[int], token: bytes | None = None
) -> list[str]:
    """[namespace, admin] of a process of that user, or [name of the error]."""

    def told() -> list[str]:
        with RawClient(daemon.socket, token=token) as client:
            return [client.hello_reply.namespace, str(client.hello_reply.admin)]

    return forked(told, uid, groups)


def forked(life: Callable[[], list[str]], uid: int, groups: list[int]) -> list[str]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(0)  # the socket's group: that is how its mode lets the process in
            os.setuid(uid)
            try:
                answer = life()
            except AuthError as error:
                answer = [type(error).__name__]
            os.write(write, "\n".join(answer).encode())
        finally:
            os._exit(0)
    os.close(write)
    answer = os.read(read, 4096).decode().split("\n")
    os.close(read)
    os.waitpid(pid, 0)
    return answer


@as_root
def test_uid_group_and_token_decide(daemon: DaemonProcess) -> None:
    assert as_user(daemon, 41001, []) == ["team-u", "False"]
    assert as_user(daemon, 41002, [41500]) == ["team-g", "False"]
    assert as_user(daemon, 41002, []) == ["AuthError"]
    assert as_user(daemon, 41002, [], TOKEN) == ["team-t", "False"]
    assert as_user(daemon, 41003, [41500]) == ["team-g", "True"]
    assert as_user(daemon, 41001, [], b"a-wrong-secret-0123456789") == ["AuthError"]


def test_the_daemons_own_user_is_default_and_admin(daemon: DaemonProcess) -> None:
    with RawClient(daemon.socket) as client:
        assert (client.hello_reply.namespace, client.hello_reply.admin) == ("default", True)
    with RawClient(daemon.socket, token=TOKEN) as client:
        assert client.hello_reply.namespace == "team-t"
    with pytest.raises(AuthError, match="token"):
        RawClient(daemon.socket, token=b"x" * 32)


def test_a_foreign_key_looks_like_a_miss(daemon: DaemonProcess) -> None:
    with RawClient(daemon.socket) as mine, RawClient(daemon.socket, token=TOKEN) as theirs:
        digest = mine.register(spec())
        theirs.register(spec())
        mine.store(digest, 0, 3)
        assert mine.lookup(digest, 0, 3).leading == 3
        absent = theirs.lookup(digest, 100, 3)
        assert theirs.lookup(digest, 0, 3) == absent


@as_root
def test_without_the_admin_role_one_sees_and_evicts_ones_own(daemon: DaemonProcess) -> None:
    with RawClient(daemon.socket) as mine:
        digest = mine.register(spec(8192))
        mine.store(digest, 0, 3)

        def life() -> list[str]:
            with RawClient(daemon.socket) as client:
                everything = m.Selector(everything=True)
                names = client.ask(m.List("namespaces", everything, 0, 100)).rows
                evicted = client.ask(m.Evict(everything, False, 0, 100)).evicted
                told = [row["namespace"] for row in names]
                try:
                    client.ask(m.Evict(m.Selector(namespace="default"), False, 0, 100))
                except AuthError:
                    told.append("refused")
                return [*told, str(evicted)]

        assert forked(life, 41001, []) in (["team-u", "refused", "0"], ["refused", "0"])
        assert mine.lookup(digest, 0, 3).leading == 3


@as_root
def test_what_others_do_does_not_show_in_a_tenants_stat(daemon: DaemonProcess) -> None:
    def life() -> list[str]:
        with RawClient(daemon.socket) as client:
            stat = client.stat()
            return [json.dumps({name: stat[name] for name in ("counters", "gauges", "loop")})]

    before = forked(life, 41001, [])
    with RawClient(daemon.socket) as mine:
        digest = mine.register(spec(12288))
        mine.store(digest, 0, 3)
        assert mine.lookup(digest, 0, 3).leading == 3
        with pytest.raises(AuthError):
            RawClient(daemon.socket, token=b"z" * 32)
    assert forked(life, 41001, []) == before


def test_refusals_are_counted_by_reason(daemon: DaemonProcess) -> None:
    with RawClient(daemon.socket) as client:
        before = client.stat()["counters"]["attach_refused"]["auth"]
        with pytest.raises(AuthError):
            RawClient(daemon.socket, token=b"y" * 32)
        assert client.stat()["counters"]["attach_refused"]["auth"] == before + 1


def test_half_a_handshake_of_zeromq_disturbs_nobody(daemon: DaemonProcess) -> None:
    """K03"""
    import socket

    socks = []
    for data in (b"", b"\xff", b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.0\r\n\r\n", bytes(70)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(daemon.socket)
        sock.send(data)
        socks.append(sock)
    with RawClient(daemon.socket) as client:
        assert client.stat()["version"]
    for sock in socks:
        sock.close()
    with dial(daemon.socket) as silent, RawClient(daemon.socket) as client:
        assert client.stat()["loop"]["faults"] == 0
        silent.close()
