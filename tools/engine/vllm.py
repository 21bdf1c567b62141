"""vLLM's OpenAI server as a process, asked over HTTP.

    with VllmServer(model, socket) as server:
        answer = server.ask([5, 6, 7], tokens=16)

The law of this module: prompts and answers are token ids, answers are streamed, and the time to
the first token is taken where a user would take it. The server runs in a process group of its own,
which goes as a whole; when it ends before its time, the end of its log is in the error.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["Answer", "EngineFailed", "VllmServer"]

READY_S = 300.0
NAME = "model"
_TICK = os.sysconf("SC_CLK_TCK")


class EngineFailed(Exception):
    """The engine is not installed, did not start, or did not answer; holds what it said."""


class Answer(NamedTuple):
    """`gaps`: at each token, by how much the best log-probability leads, and the second's id."""

    tokens: list[int]
    gaps: list[tuple[float, int]]
    finish: str
    cached_tokens: int  # of the prompt, out of vLLM's own cache or kvd
    ttft_s: float
    ttft_cpu_s: float  # CPU time of the engine's processes until then, if it was asked for
    seconds: float

    def same_as(self, other: Answer, tie: float = 1e-4) -> bool:
        """Equal tokens. Where the composition of a batch changes the arithmetic, two tokens whose
        log-probabilities tie within `tie` are equal, and what follows is another text."""
        for at, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != theirs:
                gap, second = other.gaps[at]
                return gap <= tie and mine == second
        return len(self.tokens) == len(other.tokens)


def free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """`socket`: the daemon's; None: without the connector. `extra`: for kv_connector_extra_config.
    `module`: where the connector is. `threads`: of the model. EngineFailed without vLLM."""

    def __init__(
        self,
        model: Path,
        socket: str | None,
        *,
        extra: dict[str, Any] | None = None,
        module: str = "kvd.connectors.vllm",
        max_model_len: int = 4096,
        threads: int = 1,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise EngineFailed("vLLM is not installed here; `make test-engines` installs it")
        self.port = free_port()
        self.log_path = Path(tempfile.mkstemp(prefix="vllm-", suffix=".log", dir="/tmp")[1])
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--enforce-eager", "--dtype", "float32"]
        command += ["--max-model-len", str(max_model_len), "--block-size", "32"]
        command += [
            "--prefix-caching-hash-algo",
            "sha256_cbor",
            "--enable-prompt-tokens-details",
            *args,
        ]
        if socket is not None:
            config = {
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": socket, **(extra or {})},
            }
            command += ["--kv-transfer-config", json.dumps(config)]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait take the core from those that compute.
            "OMP_WAIT_POLICY": "PASSIVE",
            **(env or {}),
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, timeout_s: float = READY_S) -> VllmServer:
        """Until it answers."""
        end = time.monotonic() + timeout_s
        while True:
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                what = "is not ready" if code is None else f"ended with {code}"
                raise EngineFailed(f"vLLM {what}:\n{self.log[-6000:]}")
            try:
                if self._get("/health")[0] == 200:
                    return self
            except OSError:
                time.sleep(0.25)

    def close(self) -> None:
        """SIGINT, and SIGKILL for whatever of the group is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> VllmServer:
        try:
            return self.wait()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cpu_s(self) -> float:
        """CPU seconds of all processes of the server so far."""
        total = 0
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            if int(fields[2]) == self.process.pid:  # its process group
                total += int(fields[11]) + int(fields[12])
        return total / _TICK

    # -- asking ---------------------------------------------------------------------------------

    def _get(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _body(self, prompt: Sequence[int], tokens: int, more: dict[str, Any]) -> str:
        return json.dumps(
            {
                "model": NAME,
                "prompt": list(prompt),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 2,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "stream_options": {"include_usage": True},
                **more,
            }
        )

    def ask(
        self, prompt: Sequence[int], tokens: int = 16, *, cpu: bool = False, **more: Any
    ) -> Answer:
        """One streamed completion; `more` goes into the request's body (cache_salt), `cpu`: also
        take the CPU time until the first token. EngineFailed when it is refused."""
        found: list[int] = []
        gaps: list[tuple[float, int]] = []
        finish, cached, first, first_cpu = "", 0, 0.0, 0.0
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        before = self.cpu_s() if cpu else 0.0
        begun = time.monotonic()
        try:
            self._post(connection, prompt, tokens, more)
            response = connection.getresponse()
            if response.status != 200:
                raise EngineFailed(response.read().decode()[:2000])
            for raw in response:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                told = json.loads(line[6:])
                if "error" in told:
                    raise EngineFailed(str(told["error"]))
                usage = told.get("usage") or {}
                details = usage.get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or cached
                for choice in told["choices"]:
                    ids = choice.get("token_ids") or []
                    if ids and not first:
                        first = time.monotonic() - begun
                        first_cpu = self.cpu_s() - before if cpu else 0.0
                    found += ids
                    gaps += _gaps(ids, choice.get("logprobs"))
                    finish = choice.get("finish_reason") or finish
        finally:
            connection.close()
        seconds = time.monotonic() - begun
        return Answer(found, gaps, finish, cached, first, first_cpu, seconds)

    def _post(
        self,
        connection: http.client.HTTPConnection,
        prompt: Sequence[int],
        tokens: int,
        more: dict[str, Any],
    ) -> None:
        body = self._body(prompt, tokens, more)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)

    def ask_all(
        self, prompts: Sequence[Sequence[int]], tokens: int = 16, *, at_once: int = 16, **more: Any
    ) -> list[Answer]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda p: self.ask(p, tokens, **more), prompts))

    def ask_and_hang_up(self, prompt: Sequence[int], after_s: float, tokens: int = 64) -> None:
        """A client that goes away: vLLM aborts the request, wherever it is by then."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._post(connection, prompt, tokens, {})
        time.sleep(after_s)
        connection.close()

    def forget(self) -> None:
        """Drop vLLM's own prefix cache (kvd's stays). EngineFailed when it can't be."""
        status, said = self._get("/reset_prefix_cache", "POST")
        if status != 200:
            raise EngineFailed(f"/reset_prefix_cache: {status} {said}")

    def metric(self, name: str) -> float:
        """Sum over labels of a metric `vllm:NAME`."""
        total = 0.0
        for line in self._get("/metrics")[1].splitlines():
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def counts(self) -> dict[str, float]:
        """All that the connector counts."""
        found = {}
        for line in self._get("/metrics")[1].splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removesuffix("_total")
            if name.startswith("vllm:kvd_") and not name.endswith("_created"):
                found[name.removeprefix("vllm:kvd_")] = float(value)
        return found

    def kvd(self, name: str) -> float:
        return self.metric(f"kvd_{name}_total")


def _gaps(ids: list[int], told: dict[str, Any] | None) -> list[tuple[float, int]]:
    """From `top_logprobs`, whose keys are `token_id:N`."""
    gaps = []
    tops = (told or {}).get("top_logprobs") or [None] * len(ids)
    for chosen, top in zip(ids, tops, strict=False):
        ranked = sorted((top or {}).values(), reverse=True)
        gap = ranked[0] - ranked[1] if len(ranked) > 1 else float("inf")
        others = (int(name.removeprefix("token_id:")) for name in top or {})
        gaps.append((gap, next((other for other in others if other != chosen), -1)))
    return gaps
