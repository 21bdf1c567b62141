"""What the demo asks and tells; with the real model where `make demo` has prepared it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvd.client import Client
from kvd.connectors.transformers import KvdCache
from kvd.tools.demo import app
from kvd.tools.demo.daemon import Daemon, DaemonFailed
from kvd.tools.demo.model import NAME, model_dir
from kvd.tools.demo.questions import QUESTIONS, document, prompt


def answer(ttft_s: float, reused: int, tokens: list[int]) -> app.Answer:
    return app.Answer("Who?", "She.", tokens, 1986, reused, ttft_s, 2 * ttft_s, {})


OUTCOME = app.Outcome(
    runs=[answer(4.0, 0, [1]), answer(0.25, 1920, [2]), answer(0.2, 1920, [3])],
    plain=[answer(4.1, 0, [1]), answer(4.2, 0, [2]), answer(4.3, 0, [3])],
)


def shown(outcome: app.Outcome) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(app.table(outcome))
    return out.getvalue()


def test_the_figures_are_those_of_the_three_runs() -> None:
    assert OUTCOME.to_json() == {
        "ttft_cold_s": 4.0,
        "ttft_warm_s": 0.25,
        "ttft_after_restart_s": 0.2,
        "reused_tokens": 1920,
        "identical": True,
    }
    text = shown(OUTCOME)
    assert "16.0 x" in text and "20.0 x" in text and "1,920" in text
    assert text.count("yes") == 3


def test_one_other_token_is_told() -> None:
    other = OUTCOME._replace(plain=[*OUTCOME.plain[:2], answer(4.3, 0, [4])])
    assert not other.identical and other.to_json()["identical"] is False
    assert shown(other).count("yes") == 2


def test_every_answer_stands_in_the_document() -> None:
    for fact in (
        "The director of the observatory is Dr. Amara Okafor",
        "called Kepler",
        "Lindqvist",
    ):
        assert fact in document()


def test_a_core_that_is_taken_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for load, threads in ((0.2, 4), (1.4, 3), (9.0, 1)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert app.sensible_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert app.sensible_threads() == 7


def test_the_demos_daemon_keeps_its_arena_when_killed_and_leaves_nothing_at_the_end() -> None:
    with Daemon("16MiB") as daemon:
        daemon.start()
        with Client(daemon.socket) as client:
            first = client.info().epoch
        daemon.kill()
        daemon.start()
        with Client(daemon.socket) as client:
            assert client.info().epoch > first
        left = [Path(daemon.socket).parent, daemon._arena]
        assert all(folder.is_dir() for folder in left)
    assert not any(folder.exists() for folder in left)


def test_a_daemon_that_does_not_start_says_why() -> None:
    with Daemon("16 parsecs") as daemon, pytest.raises(DaemonFailed, match="parsecs"):
        daemon.start()


@pytest.mark.slow
@pytest.mark.skipif(
    not (model_dir() / NAME / "prepared.json").is_file(), reason="make demo prepares the model"
)
def test_the_real_model_answers_the_same_from_what_was_stored(store: Any) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir() / NAME, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir() / NAME)
    first, second = (prompt(tokenizer, question) for question in QUESTIONS[:2])
    weights = "sha256:not looked at"  # hashing is tested elsewhere
    with torch.no_grad():
        KvdCache(model, store, chunk_tokens=64, weights=weights).prefill(first)
    warm = KvdCache(model, store, chunk_tokens=64, weights=weights)
    told = warm.generate(second, max_new_tokens=12, do_sample=False)[0, second.shape[1] :]
    assert warm.counts["reused_tokens"] >= 1900
    assert tokenizer.decode(told, skip_special_tokens=True) == "The cat is called Kepler."
