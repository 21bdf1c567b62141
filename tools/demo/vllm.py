"""The demo's answers out of vLLM's OpenAI server, which is started anew for each call of `ask`.

The law of this module: it measures what the default demo measures. The server has served another
prompt before, so that its threads are warm; the time to first token runs from the request, which
holds the token ids, until the first new token has come over HTTP. Without a socket vLLM runs
without a connector and without a prefix cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvd.tools.demo.questions import prompt
from kvd.tools.engine.vllm import VllmServer

__all__ = ["CHUNK_TOKENS", "Told", "ask"]

CHUNK_TOKENS = 64
NEW_TOKENS = 24


class Told(NamedTuple):
    """The fields of the demo's Answer."""

    question: str
    answer: str
    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    ttft_cpu_s: float
    counts: dict[str, int]


def ask(
    model: Path, threads: int, questions: Sequence[str], socket: str | None = None
) -> list[Told]:
    """Answers from one new server. EngineFailed, with the end of its log."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    args = [] if socket else ["--no-enable-prefix-caching"]
    extra = {"chunk_tokens": CHUNK_TOKENS, "lookup_deadline_s": 2.0}
    told = []
    with VllmServer(model, socket, extra=extra, threads=threads, args=args) as server:
        server.ask([7] * CHUNK_TOKENS, 2)
        for question in questions:
            ids = prompt(tokenizer, question)[0].tolist()
            before = server.counts() if socket else {}
            found = server.ask(ids, NEW_TOKENS, cpu=True, ignore_eos=False)
            after = server.counts() if socket else {}
            told.append(
                Told(
                    question,
                    tokenizer.decode(found.tokens, skip_special_tokens=True),
                    found.tokens,
                    len(ids),
                    found.cached_tokens if socket else 0,
                    found.ttft_s,
                    found.ttft_cpu_s,
                    {name: int(after[name] - before[name]) for name in after},
                )
            )
    return told
