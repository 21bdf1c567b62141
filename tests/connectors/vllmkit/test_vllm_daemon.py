"""The daemon dies, hangs, restarts or refuses while an engine runs: requests go on, with the right
bytes (the kit asserts each block), within their deadlines, and kvd comes back by itself."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest
from daemon import LOW_LIMITS, DaemonProcess
from engine_kit import Engine

CHUNK = 32
DEADLINES = {"lookup_deadline_s": 0.5, "load_deadline_s": 1.0, "store_deadline_s": 1.0}


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.fixture
def own() -> Iterator[DaemonProcess]:
    """A daemon that a test may kill."""
    with DaemonProcess(arena_size="64MiB") as process:
        yield process


def hits_again(engine: Engine, tokens: list[int], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    number = 0
    while True:
        engine.forget()
        number += 1
        if engine.ask(f"again{number}-{time.monotonic_ns()}", tokens):
            return
        assert time.monotonic() < end, "kvd did not come back"
        time.sleep(0.05)


def test_an_engine_starts_without_a_daemon_and_finds_it_later() -> None:
    with DaemonProcess(start=False) as late:
        with Engine(late.socket, chunk_tokens=CHUNK, **DEADLINES) as engine:
            tokens = prompt(200, 1)
            begun = time.monotonic()
            for number in range(5):
                assert engine.ask(f"r{number}", prompt(200, number)) == 0
            assert time.monotonic() - begun < 5
            late.start()
            hits_again(engine, tokens)


def test_a_killed_daemon_is_a_miss_and_a_restarted_one_a_hit(own: DaemonProcess) -> None:
    with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES) as engine:
        tokens = prompt(300, 2)
        engine.ask("a", tokens)
        engine.forget()
        own.kill()
        begun = time.monotonic()
        assert engine.ask("b", tokens) == 0
        for number in range(5):
            engine.ask(f"c{number}", prompt(100, 50 + number))
        assert time.monotonic() - begun < 5
        own.start()
        hits_again(engine, tokens)


@pytest.mark.parametrize("when", ["matched", "loading"])
def test_a_daemon_that_dies_between_match_and_load_costs_a_recomputation(
    own: DaemonProcess, when: str
) -> None:
    with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES) as engine:
        tokens = prompt(300, 3)
        engine.ask("a", tokens)
        engine.forget()
        worker = engine.workers[0].connector._worker
        if when == "loading":
            join = worker._client.join

            def kill_then_join(*args, **more):
                own.kill()
                return join(*args, **more)

            worker._client.join = kill_then_join
        request = engine.add("b", tokens)
        while engine.connector.get_num_new_matched_tokens(request, 0)[0] is None:
            time.sleep(0.001)
        if when == "matched":
            own.kill()
        engine.run()
        assert engine.told.computed["b"] == 301
        assert engine.counts["failed_loads"] == 1
        if when == "loading":
            worker._client.join = join
        own.start()
        hits_again(engine, tokens)


def test_a_lease_of_an_earlier_life_loads_nothing(own: DaemonProcess) -> None:
    """A restart between match and load: the worker reaches the new daemon with an old lease."""
    with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES) as engine:
        tokens = prompt(300, 4)
        engine.ask("a", tokens)
        engine.forget()
        request = engine.add("b", tokens)
        while engine.connector.get_num_new_matched_tokens(request, 0)[0] is None:
            time.sleep(0.001)
        own.restart()
        engine.run()
        assert engine.told.computed["b"] == 301
        hits_again(engine, tokens)


def test_a_stopped_daemon_holds_nobody_up_and_is_used_again_when_it_goes_on(
    own: DaemonProcess,
) -> None:
    with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES) as engine:
        tokens = prompt(300, 5)
        engine.ask("a", tokens)
        engine.forget()
        request = engine.add("b", tokens)
        while engine.connector.get_num_new_matched_tokens(request, 0)[0] is None:
            time.sleep(0.001)
        own.signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            engine.run()
            for number in range(10):
                engine.ask(f"c{number}", prompt(100, 60 + number))
            assert time.monotonic() - begun < 8
        finally:
            own.signal(signal.SIGCONT)
        hits_again(engine, tokens)
        assert engine.counts.get("errors", 0) == 0


def test_a_store_that_waits_for_a_stopped_daemon_gives_its_blocks_up_at_once(
    own: DaemonProcess,
) -> None:
    """K137: the fence waits for copies, never for the daemon."""
    with Engine(
        own.socket, chunk_tokens=CHUNK, local_cache=False, **DEADLINES | {"store_deadline_s": 30.0}
    ) as engine:
        engine.ask("warm", prompt(100, 6))
        own.signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            for number in range(8):
                engine.add(f"r{number}", prompt(300, 70 + number))
            while engine.requests:
                engine.step()
            assert time.monotonic() - begun < 8
        finally:
            own.signal(signal.SIGCONT)
        engine.run()
        assert engine.counts.get("fenced_chunks", 0) + engine.counts.get("dropped_chunks", 0)


def test_another_namespace_or_instance_than_the_configured_is_not_used(
    own: DaemonProcess,
) -> None:
    tokens = prompt(200, 7)
    for wrong in ({"namespace": "someone-else"}, {"instance": "another"}):
        with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES, **wrong) as engine:
            engine.ask("a", tokens)
            assert not engine.counts.get("stored_chunks")
            engine.forget()
            assert engine.ask("b", tokens) == 0
    right = {"namespace": "default", "instance": own.instance}
    with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES, **right) as engine:
        engine.ask("a", tokens)
        engine.forget()
        assert engine.ask("b", tokens) == 192


@pytest.mark.parametrize("wanted", [{}, {"lease_s": 60.0}], ids=["default", "configured"])
def test_a_daemon_with_limits_below_ours_is_used_all_the_same(
    wanted: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(300, 9)
    with (
        DaemonProcess(args=LOW_LIMITS) as short,
        Engine(short.socket, chunk_tokens=CHUNK, **DEADLINES, **wanted) as engine,
    ):
        for number in range(3):
            engine.ask(f"r{number}", tokens)
            engine.forget()
        assert engine.told.loaded_tokens == {"r0": 0, "r1": 288, "r2": 288}
        assert "lookup_errors" not in engine.counts
    said = [r.getMessage() for r in caplog.records if "limits.lease_max_s" in r.getMessage()]
    assert len(said) == 1 and "of 2 s" in said[0]


def test_a_daemon_that_comes_back_with_lower_limits_is_used_again(own: DaemonProcess) -> None:
    tokens = prompt(300, 10)
    with Engine(own.socket, chunk_tokens=CHUNK, **DEADLINES) as engine:
        engine.ask("a", tokens)
        own.args += LOW_LIMITS
        own.restart()
        hits_again(engine, tokens)


def test_an_engine_that_ends_gives_everything_back(own: DaemonProcess, eventually) -> None:
    from kvd.client import Client

    tokens = prompt(300, 8)
    engine = Engine(own.socket, chunk_tokens=CHUNK)
    engine.ask("a", tokens)
    engine.forget()
    request = engine.add("b", tokens)
    while engine.connector.get_num_new_matched_tokens(request, 0)[0] is None:
        time.sleep(0.001)
    engine.close()
    with Client(own.socket) as client:
        eventually(lambda: client.stat()["tiers"][0]["leased_chunks"] == 0)
        eventually(lambda: client.stat()["sessions"] == 1)
