"""The demo: a real model answers over a document, cold, warm, and after the daemon was killed.

The law of this module: each answer comes from a process of its own, so that nothing but the daemon
can carry KV from one to the next, and every answer's tokens are compared with those of a run
without kvd.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvd.tools.demo.daemon import Daemon, DaemonFailed
from kvd.tools.demo.model import ModelMissing, Prepared, prepare
from kvd.tools.demo.questions import QUESTIONS
from kvd.tools.demo.services import services
from kvd.tools.services import ServiceFailed

__all__ = ["main"]

ARENA_SIZE = "512MiB"
ANSWER_S = 600.0  # bound on one process; a hang is a failure with a name


class AnswerFailed(Exception):
    """A process of the demo ended with an error; holds what it said."""


class Answer(NamedTuple):
    """What one process told about one question (see `answer.answer`)."""

    question: str
    answer: str
    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    ttft_cpu_s: float
    counts: dict[str, int]


class Outcome(NamedTuple):
    """Cold, warm, after the restart, then from each tier below; and the same without kvd."""

    runs: list[Answer]
    plain: list[Answer]
    tiers: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        return all(a.tokens == b.tokens for a, b in zip(self.runs, self.plain, strict=True))

    def to_json(self) -> dict[str, Any]:
        cold, warm, restarted, *below = self.runs
        told: dict[str, Any] = {
            "ttft_cold_s": round(cold.ttft_s, 4),
            "ttft_warm_s": round(warm.ttft_s, 4),
            "ttft_after_restart_s": round(restarted.ttft_s, 4),
            "reused_tokens": warm.reused_tokens,
            "identical": self.identical,
        }
        if below:
            by_tier = {"dram": warm, **dict(zip(self.tiers, below, strict=True))}
            told["ttft_from_s"] = {tier: round(a.ttft_s, 4) for tier, a in by_tier.items()}
            told["reused_from"] = {tier: a.reused_tokens for tier, a in by_tier.items()}
        return told


def ask(
    model: Path, threads: int, questions: Sequence[str], socket: str | None = None
) -> list[Answer]:
    """Answers from one new process. AnswerFailed, with its words."""
    command = [sys.executable, "-P", "-m", "kvd.tools.demo.answer", "--model", str(model)]
    command += ["--threads", str(threads), *(["--socket", socket] if socket else []), *questions]
    # Threads that spin while they wait take the core from those that compute.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired as error:
        raise AnswerFailed(f"no answer within {ANSWER_S:.0f} s") from error
    if done.returncode != 0:
        raise AnswerFailed(f"exit status {done.returncode}:\n{done.stderr[-2000:]}")
    return [Answer(**json.loads(line)) for line in done.stdout.splitlines()]


def ask_vllm(
    model: Path, threads: int, questions: Sequence[str], socket: str | None = None
) -> list[Answer]:
    """The same from vLLM, whose server is a new one too. AnswerFailed, with its words."""
    from kvd.tools.demo import vllm
    from kvd.tools.engine.vllm import EngineFailed

    try:
        return [Answer(*told) for told in vllm.ask(model, threads, questions, socket)]
    except EngineFailed as error:
        raise AnswerFailed(str(error)) from error


Ask = Callable[[Path, int, Sequence[str], str | None], list[Answer]]
ENGINES: dict[str, Ask] = {"transformers": ask, "vllm": ask_vllm}


def run(
    console: Console, model: Path, threads: int, daemon: Daemon, engine: str = "transformers"
) -> Outcome:
    """The job, told step by step. DaemonFailed, AnswerFailed."""
    ask = ENGINES[engine]
    first, second, third = QUESTIONS
    console.print("[bold]1[/] a daemon starts; a document and a question, cold")
    daemon.start()
    runs = ask(model, threads, [first], daemon.socket)
    _tell(console, runs[-1])
    console.print("[bold]2[/] a new process: the same document, another question")
    runs += ask(model, threads, [second], daemon.socket)
    _tell(console, runs[-1])
    console.print("[bold]3[/] the daemon is killed (SIGKILL) and started again; a third question")
    daemon.kill()
    daemon.start()
    runs += ask(model, threads, [third], daemon.socket)
    _tell(console, runs[-1])
    asked = [first, second, third]
    if daemon.tiers:
        console.print(f"  all that memory holds is written to {' and '.join(daemon.tiers)}")
        daemon.write_down()
    for tier in daemon.tiers:
        chunks = daemon.leave_only(tier)
        console.print(
            f"[bold]{len(runs) + 1}[/] everything above {tier} is emptied ({chunks} chunks lie "
            "there); a new process asks again"
        )
        before = daemon.bytes_read(tier)
        asked.append(QUESTIONS[len(asked) % len(QUESTIONS)])
        runs += ask(model, threads, [asked[-1]], daemon.socket)
        _tell(console, runs[-1])
        if daemon.bytes_read(tier) == before or not runs[-1].reused_tokens:
            raise AnswerFailed(f"nothing of the answer came from {tier}")
    console.print(f"[bold]{len(runs) + 1}[/] the questions without kvd, to compare")
    plain = ask(model, threads, QUESTIONS, None)
    plain += [plain[n % len(plain)] for n in range(len(plain), len(runs))]
    return Outcome(runs, plain, daemon.tiers)


def _tell(console: Console, answer: Answer) -> None:
    console.print(f"  Q: {answer.question}\n  A: {answer.answer}", markup=False, highlight=False)


def table(outcome: Outcome) -> Table:
    cold = outcome.runs[0]
    shown = Table(title="time to first token (TTFT)", title_justify="left", title_style="bold")
    shown.add_column("run", no_wrap=True)
    for column in ("prompt tokens", "reused tokens", "TTFT s", "CPU s", "cold / TTFT"):
        shown.add_column(column, justify="right")
    shown.add_column("identical")
    names = ["1 cold", "2 warm", "3 restarted"]
    names += [f"{n} from {tier}" for n, tier in enumerate(outcome.tiers, 4)]
    for name, answer, plain in zip(names, outcome.runs, outcome.plain, strict=True):
        shown.add_row(
            name,
            f"{answer.prompt_tokens:,}",
            f"{answer.reused_tokens:,}",
            f"{answer.ttft_s:.3f}",
            f"{answer.ttft_cpu_s:.3f}",
            f"{cold.ttft_s / answer.ttft_s:.1f} x",
            "yes" if answer.tokens == plain.tokens else "[red]no",
        )
    return shown


def look(console: Console, socket: str) -> None:
    """What an operator sees."""
    for arguments in (["status"], ["inspect", "--limit", "8"]):
        console.print(f"\n[bold]$ kvd-cli {' '.join(arguments)}")
        command = [sys.executable, "-P", "-m", "kvd.tools.cli", "--socket", socket, *arguments]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=False)


def prepare_model(console: Console) -> Prepared:
    """The model's folder, with a progress bar while it is made. ModelMissing, OSError."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("model", total=None, visible=False)

        def step(what: str, done: int, total: int) -> None:
            progress.update(
                task, description=f"model: {what}", completed=done, total=total, visible=True
            )

        return prepare(progress=step)


def sensible_threads() -> int:
    """As many as there are cores to have. Two OpenMP threads on a core that something else also
    wants are slower than one, so a core that is taken is left alone."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0))
    return max(1, cores - int(os.getloadavg()[0]))


@click.command(name="demo", help=__doc__.split("\n")[0])
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures there.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the model; default: by load.")
@click.option(
    "--engine", type=click.Choice(sorted(ENGINES)), default="transformers", show_default=True
)
@click.option(
    "--tiers", default="dram", show_default=True, metavar="NAME,...",
    help="dram, and tiers below it to answer from: nvme, redis, s3 (servers that are not named by "
    "KVD_S3_... and KVD_REDIS_... are started).",
)  # fmt: skip
def main(json_path: Path | None, threads: int | None, engine: str, tiers: str) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # clean up, too
    console = Console()
    threads = threads or sensible_threads()
    try:
        prepared = prepare_model(console)
        made = "prepared now" if prepared.fresh else "already prepared"
        console.print(
            f"{engine}: model {prepared.path} ({made}), {threads} thread(s)", highlight=False
        )
        below = [name.strip() for name in tiers.split(",") if name.strip() not in ("", "dram")]
        if unknown := set(below) - {"nvme", "redis", "s3"}:
            raise click.UsageError(f"--tiers: {', '.join(sorted(unknown))} is no tier")
        with (
            services(below, lambda said: console.print(said, highlight=False)) as environ,
            Daemon(ARENA_SIZE, below, environ) as daemon,
        ):
            outcome = run(console, prepared.path, threads, daemon, engine)
            console.print()
            console.print(table(outcome))
            same = "yes" if outcome.identical else "[red]no"
            console.print(f"tokens identical to a run without kvd: [bold]{same}")
            look(console, daemon.socket)
        if json_path is not None:
            json_path.write_text(json.dumps(outcome.to_json()) + "\n")
    except (ModelMissing, DaemonFailed, AnswerFailed, ServiceFailed, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not outcome.identical:
        raise click.ClickException("the tokens with kvd are not those without it")
