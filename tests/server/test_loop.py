"""The loop itself, the watch over locks, and what a service manager is told."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from kvd.server.lockwatch import LONGEST_S, LockWatch
from kvd.server.loop import Loop
from kvd.server.notify import Notifier


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop()
    yield found
    found.close()


def test_sockets_descriptors_and_time_are_waited_for_together(loop: Loop) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    a, b = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    a.bind("inproc://x")
    b.connect("inproc://x")
    read, write = os.pipe()
    seen: list[str] = []
    loop.add_socket(a, lambda: seen.append(a.recv().decode()))
    loop.watch(read, lambda events: seen.append(os.read(read, 10).decode()))
    loop.every(0.02, lambda now: seen.append("time"))
    b.send(b"socket")
    os.write(write, b"pipe")
    end = time.monotonic() + 5
    while not {"socket", "pipe", "time"} <= set(seen):
        assert time.monotonic() < end
        loop.turn(100)
    loop.remove_socket(a)
    loop.unwatch(read)
    a.close(0)
    b.close(0)
    context.term()
    os.close(read)
    os.close(write)


def test_a_callback_that_raises_is_counted_and_the_loop_goes_on(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """K03"""
    read, write = os.pipe()
    ran: list[int] = []

    def fail(events: int) -> None:
        os.read(read, 1)
        ran.append(events)
        raise ValueError("unforeseen")

    loop.watch(read, fail)
    with caplog.at_level(logging.CRITICAL):
        for _ in range(3):
            os.write(write, b"x")
            loop.turn(1000)
    assert (len(ran), loop.faults) == (3, 3)
    loop.unwatch(read)
    os.close(read)
    os.close(write)


def test_a_signal_is_told_in_a_turn(loop: Loop) -> None:
    seen: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    loop.on_signals([signal.SIGUSR1], seen.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == []
    loop.turn(1000)
    assert seen == [signal.SIGUSR1]
    loop.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_loop_that_is_done_ignores_signals_for_good(loop: Loop) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    loop.on_signals([signal.SIGUSR1], lambda number: None)
    try:
        loop.deafen()
        os.kill(os.getpid(), signal.SIGUSR1)
        loop.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_request_that_comes_meanwhile_goes_before_the_next_piece_of_other_work(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.server.loop.LOOK_S", 0.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    a, b = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    a.bind("inproc://between")
    b.connect("inproc://between")
    seen: list[str] = []
    events = [os.eventfd(1, os.EFD_NONBLOCK) for _ in range(3)]

    def work(event: int) -> None:
        os.eventfd_read(event)
        seen.append("work")
        b.send(b"request")

    loop.add_socket(a, lambda: seen.append(a.recv().decode()))
    for event in events:
        loop.watch(event, lambda _, event=event: work(event))  # type: ignore[misc]
    loop.turn(1000)
    loop.requests()
    assert seen == ["work", "request"] * 3
    loop.remove_socket(a)
    for event in events:
        loop.unwatch(event)
        os.close(event)
    a.close(0)
    b.close(0)
    context.term()


def test_an_idle_loop_sleeps(loop: Loop) -> None:
    begun, used = time.monotonic(), time.thread_time()
    loop.turn(300)
    assert 0.2 < time.monotonic() - begun < 5
    assert time.thread_time() - used < 0.05


def test_locks_are_asked_often_at_first_and_then_once_a_second() -> None:
    asked: list[float] = []
    now = 100.0
    free = False
    freed: list[bytes] = []

    def is_free(public_id: bytes) -> bool:
        asked.append(now)
        return free

    watch = LockWatch(is_free, freed.append)
    assert watch.wait_s(now) is None
    watch.add(b"a" * 16, now)
    while now < 120:
        watch.poll(now)
        now += 0.01
    gaps = [b - a for a, b in pairwise(asked)]
    assert asked[0] < 100.1 and gaps[0] < 0.1
    assert max(gaps) < LONGEST_S + 0.05
    assert len(asked) < 40
    free = True
    now += 2
    watch.poll(now)
    watch.poll(now + 5)
    assert freed == [b"a" * 16]
    assert len(watch) == 0


def test_a_lock_is_not_asked_for_while_one_of_our_copies_runs() -> None:
    freed: list[bytes] = []
    watch = LockWatch(lambda public_id: True, freed.append)
    watch.add(b"a" * 16, 0.0, copies=2)
    watch.poll(10.0)
    watch.copy_done(b"a" * 16)
    watch.poll(20.0)
    assert freed == [] and watch.wait_s(20.0) is None
    watch.copy_done(b"a" * 16)
    assert watch.wait_s(20.0) == 0.0
    watch.poll(20.0)
    assert freed == [b"a" * 16]
    watch.copy_done(b"unknown")


def test_nobody_is_told_without_a_service_manager() -> None:
    notifier = Notifier({})
    notifier.ready("x")
    notifier.stopping()
    assert notifier.watchdog_s is None
    Notifier({"NOTIFY_SOCKET": "/no/such/socket"}).ready("x")


def test_a_watchdog_for_another_process_is_not_ours(tmp_path: Path) -> None:
    environ = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    assert Notifier(environ).watchdog_s is None
    assert Notifier({**environ, "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 1.0


def test_an_abstract_notify_socket_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0kvd-test-{os.getpid()}")
        manager.settimeout(5)
        Notifier({"NOTIFY_SOCKET": f"@kvd-test-{os.getpid()}"}).status("hello")
        assert manager.recv(100) == b"STATUS=hello"
