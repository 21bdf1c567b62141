"""Loads that hold the blocks which others need, in vLLM's real scheduler: it never stands still.

A request whose load is on its way, or has come, holds blocks and does not run: vLLM preempts it
for nobody. Here a pool of 44 blocks of 32 tokens, and loads that all end in one step.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon import DaemonProcess

from kvd.tools.engine.vllm import Answer, VllmServer

_spec = importlib.util.find_spec("vllm")
if _spec is None or _spec.loader is None:
    pytest.skip("vLLM is not installed here: make test-engines", allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

EXTRA = {"chunk_tokens": 64, "lookup_deadline_s": 2.0, "load_deadline_s": 10.0}
DONE_S = 60.0  # of all requests together, once loads end again; a second or two when all is well


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 1024), k=length)


class Small(VllmServer):
    """A server with 44 blocks, whose loads end while `held` does not exist."""

    def __init__(self, model: Path, daemon: DaemonProcess, held: Path, *args: str) -> None:
        self.held = held
        self.done = -1.0
        super().__init__(
            model, daemon.socket, extra=EXTRA, module="faulty_kvd", max_model_len=1024,
            args=["--num-gpu-blocks-override", "45", *args],
            env={"HOLD_FILE": str(held), "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip

    def keep(self, prompts: list[list[int]], eventually: Callable[..., None]) -> None:
        """Until all full chunks of these prompts are stored, and out of vLLM's own cache."""
        self.ask_all(prompts, 1, at_once=1)
        eventually(self.settled, timeout_s=30, interval_s=0.3)
        self.forget()

    def settled(self) -> bool:
        """Whether as many chunks are done with as when this was last asked."""
        before = self.done
        self.done = sum(self.kvd(n) for n in ("stored_chunks", "known_chunks", "fenced_chunks"))
        return self.done == before

    @contextmanager
    def asking(self) -> Iterator[Callable[..., Future[Answer]]]:
        """A way to ask without waiting, while no load ends."""
        self.held.touch()
        pool = ThreadPoolExecutor(16)
        try:
            yield lambda p, tokens, **more: pool.submit(self.ask, p, tokens, **more)
        finally:
            self.held.unlink(missing_ok=True)
            pool.shutdown(wait=False, cancel_futures=True)

    def waiting(self) -> float:
        return self.metric("num_requests_waiting")


def test_loads_that_come_together_leave_room_for_each_others_ends(
    tiny: Path, daemon: DaemonProcess, tmp_path: Path, eventually
) -> None:
    """As vLLM comes: a load is let in only if what those before it still need is left over, and if
    all of its own request fits. Then prompts of many lengths, which also preempt each other."""
    crowd = [prompt(650 + 2 * n, 800 + n) for n in range(6)]
    mixed = [prompt(250 + 110 * n, 820 + n) for n in range(6)]
    with Small(tiny, daemon, tmp_path / "held") as server:
        cold = server.ask_all(crowd + mixed, 100, at_once=1)
        server.keep(crowd + mixed, eventually)
        before = server.kvd("loads")
        with server.asking() as ask:
            answers = [ask(p, 100) for p in crowd]
            eventually(lambda: server.waiting() == 6, timeout_s=30)
            assert server.kvd("loads") - before == 2, "20 of 44 blocks each, and 1 for the end"
            server.held.unlink()
            told = [a.result(DONE_S) for a in answers]
            answers = [ask(p, 100) for p in mixed]
            told += [a.result(DONE_S) for a in answers]
        assert all(a.same_as(c) for a, c in zip(told, cold, strict=True))
        assert all(a.cached_tokens >= 640 for a in told[:6])
        assert server.kvd("errors") == 0


def test_where_vllm_lets_in_what_does_not_fit_loads_still_do_not_wait_for_each_other(
    tiny: Path, daemon: DaemonProcess, tmp_path: Path, eventually
) -> None:
    """With these flags vLLM let both loads in; the later one, first in line by its priority, then
    lacked 10 blocks of which 4 were free, and the earlier one, which lacked 1, was never reached:
    nothing ran any more, for ever."""
    early, late = prompt(650, 810), prompt(950, 811)
    flags = ("--scheduling-policy", "priority", "--no-scheduler-reserve-full-isl")
    with Small(tiny, daemon, tmp_path / "held", *flags) as server:
        cold = [server.ask(p, 24, cache_salt="another") for p in (early, late)]
        server.keep([early, late[:641]], eventually)
        before = server.kvd("loads")
        with server.asking() as ask:
            first = ask(early, 24, priority=1)
            eventually(lambda: server.kvd("loads") - before == 1, timeout_s=30)
            second = ask(late, 24, priority=0)
            eventually(lambda: server.waiting() == 2, timeout_s=30)
            server.held.unlink()
            told = [first.result(DONE_S), second.result(DONE_S)]
        assert all(a.same_as(c) for a, c in zip(told, cold, strict=True))
        assert server.kvd("errors") == 0
