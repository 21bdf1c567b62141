"""One process of the demo: load the model, answer, say how long the first token took.

    python -m kvd.tools.demo.answer --model DIR --threads N [--socket PATH] QUESTION...

Prints one JSON object a question, one a line. With `--socket` the prompt goes through kvd, without
it through plain transformers.

The law of this module: the time to first token runs from the moment when the prompt's token ids
are there until the first new token is out. The model is loaded and its threads are warm before
(an unrelated short prompt), as in a process that serves; the look-up in kvd, the load, and the
computing of what is left are inside.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from kvd.connectors.transformers import KvdCache
from kvd.tools.demo.questions import prompt

CHUNK_TOKENS = 64
NEW_TOKENS = 24


class FirstToken(BaseStreamer):
    """When the first new token came: wall clock and CPU time of this process, seconds."""

    def __init__(self) -> None:
        self._puts = 0
        self.at = self.cpu_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.at, self.cpu_at = time.perf_counter(), time.process_time()

    def end(self) -> None:
        pass


def answer(model: Any, tokenizer: Any, question: str, kv: KvdCache | None) -> dict[str, Any]:
    """Greedy answer to one question about the document, with what it took."""
    ids = prompt(tokenizer, question)
    first = FirstToken()
    generate = kv.generate if kv else model.generate
    before = dict(kv.counts) if kv else {}
    at, cpu_at = time.perf_counter(), time.process_time()
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        streamer=first,
    )
    new = output[0, ids.shape[1] :]
    counts = {k: v - before.get(k, 0) for k, v in kv.counts.items()} if kv else {}
    return {
        "question": question,
        "answer": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": new.tolist(),
        "prompt_tokens": ids.shape[1],
        "reused_tokens": counts.get("reused_tokens", 0),
        "ttft_s": first.at - at,
        "ttft_cpu_s": first.cpu_at - cpu_at,
        "counts": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvd.tools.demo.answer")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--socket")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")
    told = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(told.threads)
    model = AutoModelForCausalLM.from_pretrained(told.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(told.model)
    cache = (
        KvdCache(model, told.socket, chunk_tokens=CHUNK_TOKENS) if told.socket else nullcontext()
    )
    with cache as kv:
        warm_up = torch.full((1, CHUNK_TOKENS), 7)
        model.generate(warm_up, attention_mask=torch.ones_like(warm_up), max_new_tokens=2)
        for question in told.questions:
            print(json.dumps(answer(model, tokenizer, question, kv)), flush=True)


if __name__ == "__main__":
    main()
