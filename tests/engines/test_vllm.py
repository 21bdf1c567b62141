"""vLLM's own server with kvd: the same tokens as without it, whatever happens to the daemon."""

from __future__ import annotations

import importlib.util
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from daemon import DaemonProcess

from kvd.client import Client
from kvd.tools.engine.vllm import Answer, VllmServer

_spec = importlib.util.find_spec("vllm")
if _spec is None or _spec.loader is None:
    pytest.skip("vLLM is not installed here: make test-engines", allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXTRA = {
    "chunk_tokens": 64,
    "lookup_deadline_s": 2.0,
    "load_deadline_s": 3.0,
    "store_deadline_s": 3.0,
    "measure": True,
}
DAEMON_S = 60.0  # within which kvd is used again after the daemon came back


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 1024), k=length)


def family() -> list[list[int]]:
    """200 prompts over 8 common beginnings of different length, cut in and between chunks."""
    order = random.Random(1)
    stems = [prompt(64 * (2 + n), 500 + n) for n in range(8)]
    prompts = []
    for number in range(200):
        stem = stems[number % 8]
        cut = order.choice((len(stem), len(stem) - 7, len(stem) // 2))
        prompts.append(stem[:cut] + prompt(order.randrange(1, 90), 600 + number))
    return prompts


SINGLE = [prompt(length, length) for length in (40, 64, 65, 300, 640, 1500)]
FAMILY = family()
CROWD = [prompt(300, 700 + n) for n in range(6)]


class Expected(NamedTuple):
    single: list[Answer]
    family: list[Answer]
    crowd: list[Answer]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Expected:
    """What vLLM says without a connector, each prompt from its own prefill."""
    with VllmServer(tiny, None, args=["--no-enable-prefix-caching"]) as plain:
        return Expected(
            [plain.ask(p) for p in SINGLE],
            plain.ask_all(FAMILY, 8, at_once=8),
            plain.ask_all(CROWD, 100, at_once=2),
        )


@pytest.fixture(scope="module")
def server(tiny: Path, daemon: DaemonProcess, expected: Expected) -> Iterator[VllmServer]:
    with VllmServer(tiny, daemon.socket, extra=EXTRA) as made:
        yield made


def leased(daemon: DaemonProcess) -> int:
    with Client(daemon.socket) as client:
        return sum(tier["leased_chunks"] for tier in client.stat()["tiers"])


def loaded(server: VllmServer, act: Callable[[], object]) -> float:
    """Chunks that came out of kvd while `act` ran."""
    before = server.kvd("loaded_chunks")
    act()
    return server.kvd("loaded_chunks") - before


def settle(server: VllmServer, eventually: Callable[..., None]) -> None:
    """Until what was computed is stored."""
    last = [-1.0]

    def still() -> bool:
        now = sum(server.kvd(n) for n in ("stored_chunks", "known_chunks", "fenced_chunks"))
        same, last[0] = now == last[0], now
        return same

    eventually(still, timeout_s=30, interval_s=0.3)


def hits_again(server: VllmServer, expected: Expected) -> None:
    """Kvd is used again within DAEMON_S, with the right tokens."""
    end = time.monotonic() + DAEMON_S
    chunks = 0.0
    while not chunks:
        assert time.monotonic() < end, "kvd did not come back"
        server.forget()
        answers: list[Answer] = []
        chunks = loaded(server, lambda to=answers: to.append(server.ask(SINGLE[4])))
        assert answers[0].same_as(expected.single[4])
        time.sleep(0.2)


def test_cold_and_loaded_answers_are_those_without_kvd(
    server: VllmServer, expected: Expected, eventually
) -> None:
    for ask, want in zip(SINGLE, expected.single, strict=True):
        assert server.ask(ask).same_as(want)
    settle(server, eventually)
    server.forget()
    for ask, want in zip(SINGLE, expected.single, strict=True):
        chunks = (len(ask) - 1) // 64
        answers: list[Answer] = []
        assert loaded(server, lambda a=ask, to=answers: to.append(server.ask(a))) == chunks
        assert answers[0].same_as(want)
    assert server.kvd("errors") == 0


def test_generated_tokens_are_reused_too(
    server: VllmServer, expected: Expected, eventually
) -> None:
    ask = SINGLE[3]
    first = server.ask(ask, 100)
    settle(server, eventually)
    server.forget()
    turn = ask + first.tokens + [9, 8, 7]
    assert loaded(server, lambda: server.ask(turn)) == (len(turn) - 1 - 3) // 64


def test_a_salt_keeps_its_own(server: VllmServer, expected: Expected, eventually) -> None:
    """K47: another tenant's salt misses, its own hits."""
    ask, want = SINGLE[5], expected.single[5]
    for salt, first in (("one", True), ("two", True), ("one", False)):
        server.forget()
        answers: list[Answer] = []
        chunks = loaded(server, lambda s=salt, to=answers: to.append(server.ask(ask, cache_salt=s)))
        assert (chunks == 0) is first, salt
        assert answers[0].same_as(want)
        settle(server, eventually)


def test_clients_that_go_away_at_any_time_leave_nothing_behind(
    server: VllmServer, daemon: DaemonProcess, expected: Expected, eventually
) -> None:
    """K138."""
    server.ask(SINGLE[5])
    settle(server, eventually)
    order = random.Random(2)
    for _ in range(6):
        server.forget()
        threads = [
            Thread(target=server.ask_and_hang_up, args=(SINGLE[order.randrange(3, 6)], delay))
            for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for ask, want in zip(SINGLE, expected.single, strict=True):
        assert server.ask(ask).same_as(want)
    eventually(lambda: leased(daemon) == 0, timeout_s=40)
    eventually(lambda: server.metric("num_requests_running") == 0, timeout_s=40)
    assert server.kvd("errors") == 0


def test_a_stopped_daemon_slows_nobody_beyond_the_deadline(
    server: VllmServer, daemon: DaemonProcess, expected: Expected, eventually
) -> None:
    """20 s of SIGSTOP: every answer is right and comes in its time; then kvd is used again."""
    daemon.signal(signal.SIGSTOP)
    try:
        end = time.monotonic() + 20
        slowest = 0.0
        turn = 0
        while time.monotonic() < end:
            server.forget()
            at = turn % len(SINGLE)
            turn += 1
            answer = server.ask(SINGLE[at])
            assert answer.same_as(expected.single[at])
            slowest = max(slowest, answer.ttft_s)
    finally:
        daemon.signal(signal.SIGCONT)
    assert turn > 5 and slowest < EXTRA["lookup_deadline_s"] + EXTRA["load_deadline_s"] + 10
    hits_again(server, expected)
    eventually(lambda: leased(daemon) == 0, timeout_s=40)


def test_a_daemon_that_is_killed_and_restarted_in_the_middle(
    server: VllmServer, daemon: DaemonProcess, expected: Expected, eventually
) -> None:
    server.forget()
    answers: list[Answer] = []
    busy = Thread(target=lambda: answers.extend(server.ask_all(FAMILY[:60], 8, at_once=6)))
    busy.start()
    time.sleep(0.5)
    daemon.kill()
    time.sleep(1.0)
    daemon.start()
    busy.join()
    assert all(a.same_as(w) for a, w in zip(answers, expected.family, strict=False))
    assert len(answers) == 60
    hits_again(server, expected)
    assert server.kvd("errors") == 0


def test_two_hundred_at_once_with_common_beginnings(
    server: VllmServer, daemon: DaemonProcess, expected: Expected, eventually
) -> None:
    settle(server, eventually)
    server.forget()
    answers: list[Answer] = []
    chunks = loaded(server, lambda: answers.extend(server.ask_all(FAMILY, 8, at_once=200)))
    wrong = [n for n, (a, w) in enumerate(zip(answers, expected.family, strict=True))
             if not a.same_as(w)]  # fmt: skip
    assert not wrong and chunks > 0
    eventually(lambda: leased(daemon) == 0, timeout_s=40)


def test_two_engines_share_at_the_same_time(
    server: VllmServer, daemon: DaemonProcess, tiny: Path, expected: Expected, eventually
) -> None:
    """A second process reuses what the first computed, and they go on side by side."""
    server.ask(SINGLE[5])
    settle(server, eventually)
    with VllmServer(tiny, daemon.socket, extra=EXTRA) as other:
        answer = other.ask(SINGLE[5])
        assert answer.same_as(expected.single[5])
        assert other.kvd("loaded_chunks") == 1499 // 64
        found: dict[str, list[Answer]] = {"one": [], "two": []}
        server.forget()
        threads = [
            Thread(target=lambda s=s, to=to: to.extend(s.ask_all(FAMILY[:80], 8, at_once=8)))
            for s, to in ((server, found["one"]), (other, found["two"]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answers in found.values():
            assert len(answers) == 80
            assert all(a.same_as(w) for a, w in zip(answers, expected.family, strict=False))
        assert other.kvd("errors") == server.kvd("errors") == 0


def test_preemption_and_broken_loads_change_no_token(
    tiny: Path, daemon: DaemonProcess, expected: Expected, tmp_path: Path, eventually
) -> None:
    """K137 and K142 in the real scheduler: a pool so small that requests are preempted, and loads
    that fail behind their first chunk, which `recompute` makes good."""
    fault = tmp_path / "fault"
    here = str(Path(__file__).parent)
    with VllmServer(
        tiny, daemon.socket, extra=EXTRA, module="faulty_kvd", max_model_len=1024,
        args=["--num-gpu-blocks-override", "45"],
        env={"FAULT_FILE": str(fault), "PYTHONPATH": here},
    ) as small:  # fmt: skip
        for turn in range(2):
            small.forget()
            answers = small.ask_all(CROWD, 100, at_once=6)
            assert all(a.same_as(w) for a, w in zip(answers, expected.crowd, strict=True)), turn
        assert small.metric("num_preemptions_total") > 0
        settle(small, eventually)
        fault.touch()
        small.forget()
        answer = small.ask(SINGLE[4])
        assert answer.same_as(expected.single[4]) and answer.finish == "length"
        failed = small.kvd("failed_loads")
        assert failed >= 1 and small.kvd("failed_chunks") >= 8
        fault.unlink()
        small.forget()
        assert small.ask(SINGLE[4]).same_as(expected.single[4])
        assert small.kvd("failed_loads") == failed and small.kvd("errors") == 0
    eventually(lambda: leased(daemon) == 0, timeout_s=40)
