"""One client, many threads."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_daemon import SLOT, SWALLOW, FakeDaemon, Seen, keys, make_spec

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.errors import ClientClosed, KvdError, Unavailable
from kvd.wire import messages as m


def run_all(count: int, what: Callable[[int], None], *, seconds: float = 60) -> list[Exception]:
    """Run in `count` threads; what they raised."""
    raised: list[Exception] = []

    def body(number: int) -> None:
        try:
            what(number)
        except Exception as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=body, args=(i,), name=f"t{i}") for i in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return raised


def test_thirty_two_threads_share_a_client_and_each_gets_its_own_answers(
    fake: FakeDaemon, client: Client
) -> None:
    """K104"""
    handle = client.register(make_spec())

    def work(number: int) -> None:
        mine = keys(8, 1000 * number)
        fill = bytes([number + 1]) * SLOT
        assert set(client.store_chunks(handle, mine, None, [fill] * 8, batch=3)) == {Outcome.OK}
        for turn in range(30):
            count = (number + turn) % 8 + 1
            with client.lookup(handle, mine[:count], load=True) as found:
                assert found.leading == count and found.transfer is not None
                for index in found.transfer:
                    assert found.transfer.view(index)[0] == number + 1
            if turn % 10 == 0:
                assert client.get(handle, mine[0]) == fill

    assert run_all(32, work) == []
    client.heartbeat()
    assert not fake.leases and not fake.writes
    assert client.counters.links == 1


def test_close_from_another_thread_ends_every_call_in_time(fake: FakeDaemon) -> None:
    """K104: also with answers that are lost, and calls that time out."""
    for _ in range(5):
        client = Client(fake.socket, timeout_s=30)
        handle = client.register(make_spec())
        fake.script = lambda seen: (
            SWALLOW if isinstance(seen.message, m.Stat) and random.random() < 0.3 else None
        )
        ended: list[int] = []

        def work(number: int, client: Client = client, ended: list[int] = ended) -> None:
            rng = random.Random(number)
            while True:
                try:
                    choice = rng.randrange(4)
                    if choice == 0:
                        client.stat(timeout_s=rng.choice((0.01, 5)))
                    elif choice == 1:
                        client.lookup(make_spec(), keys(3)).__exit__(None, None, None)
                    elif choice == 2:
                        client.poll(0.01)
                    else:
                        client.submit(m.Heartbeat())
                except Unavailable:
                    continue
                except ClientClosed:
                    ended.append(number)
                    return

        closer = threading.Timer(0.3, client.close)
        closer.start()
        begin = time.monotonic()
        assert run_all(32, work, seconds=20) == []
        closer.join()
        assert len(ended) == 32 and time.monotonic() - begin < 15
        assert handle.digest
        fake.script = lambda seen: None


def test_followers_are_served_when_the_leader_leaves_or_gives_up(
    fake: FakeDaemon, client: Client
) -> None:
    client.info()

    def script(seen: Seen) -> Any:
        return SWALLOW if isinstance(seen.message, m.Stat) else None

    fake.script = script

    def work(number: int) -> None:
        if number % 2:
            with pytest.raises(Unavailable):
                client.stat(timeout_s=0.05 * number)
        else:
            for _ in range(20):
                client.heartbeat(timeout_s=20)

    assert run_all(12, work, seconds=30) == []


def test_threads_that_poll_and_threads_that_wait_do_not_starve_each_other(client: Client) -> None:
    client.info()
    got: list[Any] = []
    stop = threading.Event()

    def poller() -> None:
        while not stop.is_set():
            got.extend(client.poll(0.2))

    thread = threading.Thread(target=poller)
    thread.start()
    try:
        sent = 0
        for _ in range(200):
            client.submit(m.Heartbeat())
            sent += 1
            client.heartbeat()
        end = time.monotonic() + 10
        while len(got) < sent and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join(10)
    assert len(got) == sent and len(set(got)) == sent


def test_a_wait_that_a_signal_ends_leaves_the_client_usable(
    fake: FakeDaemon, client: Client
) -> None:
    client.info()
    fake.script = lambda seen: SWALLOW if isinstance(seen.message, m.Stat) else None

    class Alarm(Exception):
        pass

    def ring(signum: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Alarm):
                client.stat(timeout_s=20)
            client.heartbeat()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert run_all(4, lambda number: client.heartbeat()) == []


def test_many_threads_over_restarts_get_answers_or_typed_errors(fake: FakeDaemon) -> None:
    """K92, K104"""
    stop = threading.Event()
    answers: list[int] = []
    with Client(fake.socket, timeout_s=10) as client:
        handle = client.register(make_spec())

        def work(number: int) -> None:
            while not stop.is_set():
                try:
                    mine = keys(4, 100 * number)
                    client.store_chunks(handle, mine, None, [bytes(SLOT)] * 4)
                    with client.lookup(handle, mine, load=True) as found:
                        answers.append(found.leading)
                except KvdError:
                    continue

        def restarts() -> None:
            for _ in range(4):
                time.sleep(0.3)
                fake.restart()
            time.sleep(0.3)
            stop.set()

        thread = threading.Thread(target=restarts)
        thread.start()
        try:
            assert run_all(8, work) == []
        finally:
            thread.join(20)
        before = len(answers)
        assert client.lookup(handle, keys(1)).outcomes
        assert before > 0 and client.counters.links >= 5
    assert os.getpid() == client._channel.pid
