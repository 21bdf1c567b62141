"""Session locks: they say whether any process may still be writing, and nothing else does."""

from __future__ import annotations

import array
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from arena_kit import Open, Spawn

from kvd.errors import ArenaError

ONE, TWO = b"1" * 16, b"2" * 16


def hand_over(fd: int, to: socket.socket) -> None:
    to.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)


CLIENT = """
    import socket
    peer = socket.socket(fileno=0)
    held = peer.recvmsg(1, 100, socket.MSG_CMSG_CLOEXEC)[1]
    say("holding", len(held))
    time.sleep(600)
"""


def test_a_lock_is_held_until_its_last_descriptor_is_closed(open_arena: Open) -> None:
    owner = open_arena()
    fd = owner.session_lock_create(ONE)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert not os.get_inheritable(fd)
    copy = os.dup(fd)
    os.close(fd)
    assert not owner.session_lock_free(ONE)
    assert owner.session_locks() == [ONE]
    os.close(copy)
    assert owner.session_lock_free(ONE)
    assert owner.session_lock_free(ONE)  # no file any more: free
    assert owner.session_locks() == []


def test_the_holders_are_listed_and_files_of_the_dead_are_removed(
    base: Path, open_arena: Open
) -> None:
    owner = open_arena()
    one, two = owner.session_lock_create(ONE), owner.session_lock_create(TWO)
    folder = base.with_name(base.name + ".s")
    for stranger in ("notes", "ab", "A" * 32):
        (folder / stranger).touch()
    os.close(two)
    assert owner.session_locks() == [ONE]
    assert sorted(p.name for p in folder.iterdir()) == sorted([ONE.hex(), "notes", "ab", "A" * 32])
    os.close(one)


def test_a_session_can_not_be_locked_twice_or_without_an_id(open_arena: Open) -> None:
    owner = open_arena()
    fd = owner.session_lock_create(ONE)
    with pytest.raises(ArenaError, match="File exists"):
        owner.session_lock_create(ONE)
    with pytest.raises(ArenaError, match="16 bytes"):
        owner.session_lock_create(b"../../etc")
    os.close(fd)


def test_a_session_lock_survives_the_owner_and_ends_with_the_client(
    base: Path, open_arena: Open, spawn: Spawn, eventually: Callable[..., None]
) -> None:
    """K89: the next daemon learns which earlier writers may still be copying."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = spawn(CLIENT, stdin=theirs)
    theirs.close()
    daemon = spawn(
        """
        import array, socket
        owner = arena()
        peer = socket.socket(fileno=0)
        fd = owner.session_lock_create(b"1" * 16)
        peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        os.close(fd)
        say("sent")
        time.sleep(600)
        """,
        stdin=ours,
    )
    ours.close()
    assert daemon.stdout and daemon.stdout.readline() == "sent\n"
    assert client.stdout and client.stdout.readline() == "holding 1\n"
    daemon.kill()
    daemon.wait()
    owner = open_arena()
    assert owner.adopted
    assert owner.session_locks() == [ONE]
    client.send_signal(signal.SIGSTOP)  # a stopped writer may go on
    assert not owner.session_lock_free(ONE)
    client.kill()
    client.wait()
    eventually(lambda: owner.session_lock_free(ONE))
    assert owner.session_locks() == []


def test_a_lock_on_its_way_to_a_client_is_held(open_arena: Open) -> None:
    owner = open_arena()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hand_over(owner.session_lock_create(ONE), ours)
    assert not owner.session_lock_free(ONE)
    theirs.close()  # the client died before it received
    ours.close()
    assert owner.session_lock_free(ONE)


def test_a_forked_child_that_keeps_the_descriptor_keeps_the_lock(
    open_arena: Open, eventually: Callable[..., None]
) -> None:
    """That is why a client closes it in its forked children."""
    owner = open_arena()
    fd = owner.session_lock_create(ONE)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        os._exit(0)
    os.close(fd)
    assert not owner.session_lock_free(ONE)
    os.write(write, b"x")
    os.waitpid(pid, 0)
    eventually(lambda: owner.session_lock_free(ONE))
    os.close(read)
    os.close(write)


def test_an_executed_program_does_not_inherit_any_of_it(open_arena: Open, spawn: Spawn) -> None:
    owner = open_arena()
    fd = owner.session_lock_create(ONE)
    child = spawn("say('up'); time.sleep(600)", close_fds=False)
    assert child.stdout and child.stdout.readline() == "up\n"
    open_files = [
        os.readlink(f"/proc/{child.pid}/fd/{n}") for n in os.listdir(f"/proc/{child.pid}/fd")
    ]
    assert not [f for f in open_files if "kvd-test" in f]
    os.close(fd)
    assert owner.session_lock_free(ONE)
