"""The connector against a real daemon, from real processes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from daemon import LOW_LIMITS, DaemonProcess

from kvd.connectors.transformers import KvdCache

Make = Callable[..., Any]
WORKER = Path(__file__).with_name("worker.py")


class Told(NamedTuple):
    tokens: list[int]
    reused: int
    stored: int


def process(folder: Path, daemon: DaemonProcess, length: int, *more: object) -> Told:
    """One engine process, from start to end."""
    command = [sys.executable, str(WORKER), str(folder), daemon.socket, str(length)]
    done = subprocess.run(
        [*command, *map(str, more)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Told(**json.loads(done.stdout))


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="64MiB") as process:
        yield process


@pytest.fixture
def folder(llama: Make, tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Clock:
    """Of a connector's backoff; it stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    @classmethod
    def of(cls, kv: KvdCache) -> Clock:
        clock = cls()
        kv._clock = lambda: clock.now
        return clock


def plain(model: Any, ids: torch.Tensor) -> list[int]:
    return model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()


def generate(kv: KvdCache, ids: torch.Tensor) -> tuple[list[int], int]:
    before = kv.counts["reused_tokens"]
    tokens = kv.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    return tokens, kv.counts["reused_tokens"] - before


def test_processes_with_one_model_share_and_others_do_not(
    daemon: DaemonProcess, folder: Path, llama: Make, prompt: Make
) -> None:
    """K10: what one process stored, another finds, with the same tokens as without kvd. Another
    RoPE base is another identity."""
    ids = prompt(100, seed=1)
    want = plain(llama(), ids)
    assert process(folder, daemon, 100, 1) == Told(want, reused=0, stored=6)
    assert process(folder, daemon, 100, 1) == Told(want, reused=96, stored=0)
    other = llama(rope_parameters={"rope_type": "default", "rope_theta": 50_000.0})
    with KvdCache(other, daemon.socket, chunk_tokens=16, deadline_s=10.0) as kv:
        assert generate(kv, ids) == (plain(other, ids), 0)
        assert kv.counts["stored_chunks"] == 6


def test_chunks_that_the_daemon_can_not_hold_are_said_once_with_the_way_out(
    llama: Make, prompt: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    with DaemonProcess(arena_size="2MiB") as small:  # slots of 64 KiB
        with KvdCache(model, small.socket, chunk_tokens=128, deadline_s=10.0) as kv:
            for seed in (1, 2):
                generate(kv, prompt(300, seed=seed))
            assert kv.counts["stored_chunks"] == 0 and kv.counts["store.too_large"] == 4
        said = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(said) == 1
        most = int(re.search(r"chunk_tokens of at most (\d+)", said[0])[1])
        for words in ("128 tokens", "98304 bytes", "65536", "--arena-size", "--arena-slab-size"):
            assert words in said[0], said[0]
        with KvdCache(model, small.socket, chunk_tokens=most, deadline_s=10.0) as kv:
            generate(kv, prompt(300))
            assert kv.counts["stored_chunks"] > 0  # the advice holds


def test_a_daemon_with_low_limits_is_used_all_the_same(llama: Make, prompt: Make) -> None:
    model, ids = llama(), prompt(100)
    want = plain(model, ids)
    with (
        DaemonProcess(args=LOW_LIMITS) as low,
        KvdCache(model, low.socket, chunk_tokens=16, deadline_s=10.0) as kv,
    ):
        assert generate(kv, ids) == (want, 0)
        assert generate(kv, ids) == (want, 96)


def test_a_killed_daemon_is_a_miss_and_a_restarted_one_has_kept_the_prompt(
    daemon: DaemonProcess, llama: Make, prompt: Make
) -> None:
    model, ids = llama(), prompt(100)
    want = plain(model, ids)
    with KvdCache(model, daemon.socket, chunk_tokens=16, deadline_s=2.0) as kv:
        clock = Clock.of(kv)
        assert generate(kv, ids) == (want, 0)
        assert generate(kv, ids) == (want, 96)
        daemon.kill()
        assert generate(kv, ids) == (want, 0)
        daemon.start()
        assert generate(kv, ids) == (want, 0), "not asked again yet"
        clock.now += 1
        assert generate(kv, ids) == (want, 96)


def test_a_stopped_daemon_costs_the_deadline_once(
    daemon: DaemonProcess, llama: Make, prompt: Make, eventually: Callable[..., None]
) -> None:
    model, ids = llama(), prompt(100)
    want = plain(model, ids)
    with KvdCache(model, daemon.socket, chunk_tokens=16, deadline_s=0.5) as kv:
        clock = Clock.of(kv)
        generate(kv, ids)
        daemon.signal(signal.SIGSTOP)
        for _ in range(3):
            assert generate(kv, ids) == (want, 0)
        assert kv.counts["load.silent"] == 2
        clock.now += 0.99
        assert generate(kv, ids) == (want, 0)
        assert kv.counts["load.silent"] == 3
        clock.now += 0.01
        assert generate(kv, ids) == (want, 0)
        assert kv.counts["load.silent"] == 3, "one trial, when its pause is over"
        daemon.signal(signal.SIGCONT)

        def back() -> bool:  # a slow machine may need more than a deadline to go on
            clock.now += 60
            return generate(kv, ids) == (want, 96)

        eventually(back)


def test_an_evicted_document_is_computed_again(llama: Make, prompt: Make) -> None:
    """More prompts than the arena holds: each answer is right, whatever is left of its prompt."""
    model = llama(num_hidden_layers=8, num_key_value_heads=4, hidden_size=256)  # 16 KiB a token
    prompts = [prompt(300, seed=s) for s in range(5)]  # 25 MB
    want = [plain(model, ids) for ids in prompts]
    with (
        DaemonProcess(arena_size="16MiB") as small,
        KvdCache(model, small.socket, chunk_tokens=16, deadline_s=10.0) as kv,
    ):
        for _ in range(2):
            for ids, tokens in zip(prompts, want, strict=True):
                assert generate(kv, ids)[0] == tokens
        assert kv.counts["stored_chunks"] > 5 * 18


def test_threads_share_one_connector(daemon: DaemonProcess, llama: Make, prompt: Make) -> None:
    """Loads and stores from several threads do not mix up their prompts."""
    model = llama()
    prompts = [prompt(80, seed=s) for s in range(8)]
    want = [plain(model, ids) for ids in prompts]
    with KvdCache(model, daemon.socket, chunk_tokens=16, deadline_s=10.0) as kv:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                got = list(pool.map(lambda ids: generate(kv, ids)[0], prompts))
                assert got == want
        assert kv.counts["stored_chunks"] == 8 * 5


def test_a_forked_child_has_a_client_of_its_own(
    daemon: DaemonProcess, llama: Make, prompt: Make
) -> None:
    """K105: a server that loads its model and then forks reuses in every child."""
    model, ids = llama(), prompt(100)
    with KvdCache(model, daemon.socket, chunk_tokens=16, deadline_s=10.0) as kv:
        generate(kv, ids)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # no cleanup of pytest's may run here
            try:
                os.write(write, str(kv.load(ids).reused_tokens).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            assert told.read() == "96"
        assert os.waitpid(child, 0)[1] == 0
        assert generate(kv, ids)[1] == 96
