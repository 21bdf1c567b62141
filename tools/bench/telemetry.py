"""`kvd-bench telemetry`: what a collector that does not work costs requests, memory and a stop.

The law of this module: daemons that differ in their collector alone are asked the same in turns,
one lookup each, so that whatever else the machine does meets them all.
"""

from __future__ import annotations

import importlib.util
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvd.client import Client, SpecHandle
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.keys import Chain, chain, spec
from kvd.tools.bench.measure import MIB, percentile, quiet_collector

__all__ = ["run_telemetry"]

KEYS = 64  # of a lookup
CHUNK_BYTES = 4096
INTERVAL_S = 1.0
TIMEOUT_S = 0.7
WARM_S = 2.0


def run_telemetry(*, quick: bool = False, seconds: float | None = None) -> dict[str, Any]:
    """`p99_ratio` is to the daemon that exports nothing; times in µs, `stop_s` from SIGTERM."""
    if importlib.util.find_spec("grpc") is None:
        raise BenchError("exports need packages that are not installed: pip install 'kvd[otel]'")
    length = seconds if seconds is not None else 1.0 if quick else 60.0
    with ExitStack() as stack:
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        gone = stack.enter_context(socket.socket())
        gone.bind(("127.0.0.1", 0))  # and does not listen
        cases = [
            stack.enter_context(_Case("none", None)),
            stack.enter_context(_Case("mute", mute)),
            stack.enter_context(_Case("away", gone)),
        ]
        _ask(cases, 0.2 if quick else WARM_S)
        for case in cases:
            case.begin()
        _ask(cases, length)
        rows = [case.end() for case in cases]
    for row in rows:
        row["p99_ratio"] = row["p99_us"] / rows[0]["p99_us"]
    return {"interval_s": INTERVAL_S, "keys": KEYS, "cases": rows}


class _Case:
    """A daemon, its client, and how long each lookup took."""

    def __init__(self, name: str, collector: socket.socket | None) -> None:
        self.name = name
        self.seconds: list[float] = []
        flags = ["--arena-size", "64MiB"]
        if collector is not None:
            flags += [
                "--telemetry-otlp-endpoint", f"http://127.0.0.1:{collector.getsockname()[1]}",
                "--telemetry-interval-s", str(INTERVAL_S),
                "--telemetry-timeout-s", str(TIMEOUT_S),
            ]  # fmt: skip
        self._daemon = Daemon(None, *flags)
        self._client = Client(self._daemon.socket, timeout_s=30, name="kvd-bench")

    def __enter__(self) -> _Case:
        self.handle: SpecHandle = self._client.register(spec("telemetry", CHUNK_BYTES))
        self.chain: Chain = chain(KEYS)
        zeros = [bytes(CHUNK_BYTES)] * KEYS
        self._client.store_chunks(self.handle, self.chain.hashes, self.chain.fingerprints, zeros)
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._daemon.close()

    def lookup(self) -> None:
        begun = time.perf_counter()
        self._client.lookup(self.handle, self.chain.hashes, lease=False)
        self.seconds.append(time.perf_counter() - begun)

    def begin(self) -> None:
        self.seconds.clear()
        self._rss = _rss(self._daemon.pid)

    def end(self) -> dict[str, Any]:
        exports = self._client.stat()["counters"]["exports"]
        grown = _rss(self._daemon.pid) - self._rss
        self._client.close()
        begun = time.perf_counter()
        self._daemon.close()
        return {
            "collector": self.name,
            "lookups": len(self.seconds),
            "p50_us": 1e6 * percentile(self.seconds, 0.5),
            "p99_us": 1e6 * percentile(self.seconds, 0.99),
            "rss_growth_mib": grown / MIB,
            "exports": exports,
            "stop_s": time.perf_counter() - begun,
        }


def _ask(cases: list[_Case], seconds: float) -> None:
    end = time.perf_counter() + seconds
    with quiet_collector():
        while time.perf_counter() < end:
            for case in cases:
                case.lookup()


def _rss(pid: int) -> int:
    """Anonymous resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/{pid}/status has no RssAnon")
