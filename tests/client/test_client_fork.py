"""A client over a fork: the parent keeps it, the child is told."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import pytest
from fake_daemon import SLOT, FakeDaemon, in_child, keys, make_spec

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.errors import Forked


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """The standard library's helper of `spawn` lives as long as the process."""
    resource_tracker.ensure_running()


@pytest.fixture
def handle(client: Client) -> Any:
    made = client.register(make_spec())
    assert set(client.store_chunks(made, keys(3), None, [bytes(SLOT)] * 3)) == {Outcome.OK}
    return made


@pytest.mark.parametrize("leave", [os._exit, sys.exit], ids=["os._exit", "sys.exit"])
def test_a_child_is_told_and_the_parent_is_undisturbed(
    fake: FakeDaemon, client: Client, handle: Any, leave: Callable[[int], None]
) -> None:
    """K105"""
    found = client.lookup(handle, keys(3), load=True)
    assert found.transfer is not None and found.lease is not None
    reservation = client.reserve(handle, keys(1, 50))

    def child() -> None:
        for call in (
            client.info,
            client.stat,
            client.poll,
            client.fileno,
            lambda: client.lookup(handle, keys(3)),
            lambda: client.register(make_spec(2)),
            lambda: client.store_chunks(handle, keys(1), None, [b""]),
            lambda: found.transfer.view(0),  # type: ignore[union-attr]
            lambda: reservation.view(0),
            reservation.commit,
        ):
            try:
                call()
            except Forked:
                continue
            os._exit(1)
        reservation.abort()
        found.lease.release()  # type: ignore[union-attr]
        client.close()

    def leave_child(code: int) -> None:
        if leave is os._exit:
            os._exit(code)
        # Everything that sys.exit would do, without pytest's own handling of SystemExit.
        try:
            import gc

            gc.collect()
        finally:
            os._exit(code)

    assert in_child(child, leave=leave_child) == 0
    for _ in range(100):
        assert client.lookup(handle, keys(3), lease=False).leading == 3
    found.transfer.check()
    assert found.lease.renew(30)
    assert reservation.commit() == [Outcome.OK]
    assert client.counters.links == 1 and len(fake.sessions) == 1


def test_a_child_makes_a_client_of_its_own(fake: FakeDaemon, client: Client, handle: Any) -> None:
    """K105"""

    def child() -> None:
        with Client(fake.socket) as mine:
            for _ in range(100):
                assert mine.lookup(handle, keys(3), lease=False).leading == 3

    assert in_child(child) == 0
    for _ in range(100):
        assert client.lookup(handle, keys(3), lease=False).leading == 3


def test_fork_while_other_threads_are_in_calls(
    fake: FakeDaemon, client: Client, handle: Any
) -> None:
    """K105"""
    stop = threading.Event()
    failed: list[Exception] = []

    def work() -> None:
        try:
            while not stop.is_set():
                assert client.lookup(handle, keys(3), lease=False).leading == 3
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:

        def child() -> None:
            with pytest.raises(Forked):
                client.stat()

        for _ in range(10):
            assert in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert failed == []


def test_a_childs_copies_of_the_session_are_closed(
    fake: FakeDaemon, client: Client, handle: Any
) -> None:
    """K105: so that the parent's end is the session's end."""
    link = client._channel._link
    assert link is not None and link.lock is not None
    attach, lock = link.attach_fd, link.lock._fd
    inodes = {os.fstat(fd).st_ino for fd in (attach, lock)}

    def child() -> None:
        for name in os.listdir("/proc/self/fd"):
            try:
                found = os.fstat(int(name)).st_ino
            except OSError:
                continue
            assert found not in inodes

    assert in_child(child) == 0
    assert {os.fstat(fd).st_ino for fd in (attach, lock)} == inodes


def _with_multiprocessing(socket: str, queue: Any) -> None:
    with Client(socket) as mine:
        queue.put(mine.lookup(make_spec(), keys(3), lease=False).leading)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_work(
    fake: FakeDaemon, client: Client, handle: Any, method: str
) -> None:
    """K105"""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_with_multiprocessing, args=(fake.socket, queue))
    process.start()
    try:
        assert queue.get(timeout=30) == 3
    finally:
        process.join(30)
        queue.close()
        queue.join_thread()
    assert process.exitcode == 0
    assert client.lookup(handle, keys(3), lease=False).leading == 3


def test_fork_with_exec_and_a_normal_end_of_the_interpreter(fake: FakeDaemon) -> None:
    """K105: sys.exit in a child of a process that has a client open, and an interpreter that ends
    with clients that nobody closed."""
    code = f"""
import os, subprocess, sys
from kvd.client import Client
from kvd.errors import Forked
client = Client({fake.socket!r})
client.info()
pid = os.fork()
if pid == 0:
    try:
        client.stat()
    except Forked:
        sys.exit(3)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
assert subprocess.run(["/bin/true"]).returncode == 0
for _ in range(100):
    client.heartbeat()
print("undisturbed")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60, text=True
    )
    assert done.stdout == "undisturbed\n" and done.returncode == 0, done.stderr
    assert done.stderr == ""
