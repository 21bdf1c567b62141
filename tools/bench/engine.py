"""What the connector costs vLLM, and what it saves.

The law of this module: two servers, with and without kvd, are asked the same in turns, so that what
else the machine does meets both; each prompt is new, so nothing is reused where the cost is
measured. The cost is CPU time in the connector's hooks and transfer threads, as the engine itself
counts it, over the CPU time of all of the engine's processes. Wall times come with their spread.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.demo.model import ModelMissing, prepare
from kvd.tools.engine.vllm import Answer, EngineFailed, VllmServer

__all__ = ["run_engine"]

CHUNK_TOKENS = 64
REUSED_TOKENS = 2000
VOCABULARY = 49152  # of the demo's model


def run_engine(socket: str | None, *, quick: bool, requests: int | None = None) -> dict[str, Any]:
    """The figures, see _figures. BenchError without vLLM or the model."""
    count = requests or (6 if quick else 60)
    rounds = 1 if quick else 3
    try:
        model = prepare().path
        with Daemon(socket, "--arena-size", "1GiB") as daemon:
            extra = {"chunk_tokens": CHUNK_TOKENS, "measure": True, "lookup_deadline_s": 2.0}
            with (
                VllmServer(model, None) as plain,
                VllmServer(model, daemon.socket, extra=extra) as kvd,
            ):
                return _measure(plain, kvd, count, rounds)
    except (EngineFailed, ModelMissing) as error:
        raise BenchError(str(error)) from error


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCABULARY), k=length)


def _measure(plain: VllmServer, kvd: VllmServer, count: int, rounds: int) -> dict[str, Any]:
    for server in (plain, kvd):
        server.ask(_prompt(256, 1), 16)
    hooks, cpu = kvd.kvd("hook_cpu_seconds"), kvd.cpu_s()
    without: list[Answer] = []
    with_kvd: list[Answer] = []
    for number in range(count):
        ask = _prompt(256 + 16 * (number % 16), 1000 + number)
        turns = [(plain, without), (kvd, with_kvd)]
        for server, answers in turns if number % 2 else reversed(turns):
            answers.append(server.ask(ask, 16))
    hooks, cpu = kvd.kvd("hook_cpu_seconds") - hooks, kvd.cpu_s() - cpu
    cold, warm, same = [], [], []
    for number in range(rounds):
        stem = _prompt(REUSED_TOKENS + CHUNK_TOKENS, 5000 + number)
        first, second = (stem + _prompt(24, 6000 + 2 * number + n) for n in (0, 1))
        cold.append(kvd.ask(first, 8))
        _settle(kvd)
        kvd.forget()
        warm.append(kvd.ask(second, 8))
        if warm[-1].cached_tokens < REUSED_TOKENS:
            raise BenchError(f"only {warm[-1].cached_tokens} tokens were reused")
        plain.forget()
        same.append(warm[-1].same_as(plain.ask(second, 8)))
    same += [a.same_as(b) for a, b in zip(with_kvd, without, strict=True)]
    return _figures(without, with_kvd, hooks, cpu, cold, warm, all(same))


def _settle(server: VllmServer) -> None:
    """Until the stores are through: their counts stand still."""
    last = -1.0
    for _ in range(100):
        now = server.kvd("stored_chunks") + server.kvd("known_chunks")
        if now == last:
            return
        last = now
        time.sleep(0.2)


def _figures(
    without: list[Answer],
    with_kvd: list[Answer],
    hooks: float,
    cpu: float,
    cold: list[Answer],
    warm: list[Answer],
    identical: bool,
) -> dict[str, Any]:
    """`overhead_*_pct`: median of with / without for each request, less one. `spread_pct`: the
    distance of its quartiles, of the total."""

    def over(field: str) -> list[float]:
        pairs = zip(with_kvd, without, strict=True)
        return sorted(100 * (getattr(a, field) / getattr(b, field) - 1) for a, b in pairs)

    total = over("seconds")
    low, high = total[len(total) // 4], total[3 * len(total) // 4]
    ttft_cold = statistics.median(a.ttft_s for a in cold)
    ttft_warm = statistics.median(a.ttft_s for a in warm)
    return {
        "engine": "vllm",
        "requests": len(without),
        "hook_cpu_pct": round(100 * hooks / cpu, 3),
        "overhead_ttft_pct": round(statistics.median(over("ttft_s")), 2),
        "overhead_total_pct": round(statistics.median(total), 2),
        "spread_pct": round(high - low, 2),
        "ttft_cold_s": round(ttft_cold, 4),
        "ttft_warm_s": round(ttft_warm, 4),
        "ttft_ratio": round(ttft_cold / ttft_warm, 2),
        "identical": identical,
    }
