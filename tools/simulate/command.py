"""`kvd-cli simulate`: what a policy and a capacity would have done for a trace.

The law of this module: it speaks of what it replayed, or of what a daemon measured, and of nothing
else. Capacities are percent of the trace's own unique blocks, so that figures of different traces
can be read side by side; a daemon's are in bytes.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvd.errors import ConfigError
from kvd.eviction.base import Policy
from kvd.eviction.registry import DEFAULT, POLICIES, factory
from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import clean, format_bytes, format_count
from kvd.tools.ranges import Range
from kvd.tools.simulate.live import EVERYBODY, Curve, curves
from kvd.tools.simulate.plot import PlotError, draw, draw_curves
from kvd.tools.simulate.replay import Count, replay, sampled_lru
from kvd.tools.simulate.trace import BLOCK_TOKENS, Trace, TraceError, read_trace

CAPACITIES = "1,2,5,10,20,50"
SAMPLED = "lru, sampled"
_ROWS = 12  # points of a daemon's curve that a table shows
_KNOWN = ", ".join(sorted(POLICIES))


class Cell(NamedTuple):
    """One replay. `capacity_pct`: of the upper tier, percent of the trace's unique blocks."""

    trace: str
    policy: str
    capacity_pct: float
    tiers: int
    block_hit_pct: float
    token_hit_pct: float

    def row(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "policy": self.policy,
            "capacity_pct": self.capacity_pct,
            "tiers": self.tiers,
            "block_hit_pct": round(self.block_hit_pct, 3),
            "token_hit_pct": round(self.token_hit_pct, 3),
        }


class Percents(click.ParamType):
    """1,2.5,10: percents above 0, at most 100."""

    name = "percents"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        if isinstance(value, list):
            return value
        try:
            percents = [float(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of percents such as {CAPACITIES}", param, ctx)
        if not all(0.0 < percent <= 100.0 for percent in percents):
            self.fail("a capacity is above 0 and at most 100 percent", param, ctx)
        return sorted(set(percents))


def simulate_cells(
    traces: list[Trace],
    policies: dict[str, Callable[[], Policy]],
    percents: list[float],
    *,
    tiers: int = 1,
    lower: float = 4.0,
    progress: Callable[[int], None] | None = None,
) -> list[Cell]:
    """Every trace under every policy at every capacity. `lower`: size of the second tier as a
    multiple of the first. `progress` is told how many requests more are done."""
    cells = []
    for trace in traces:
        for name, make in policies.items():
            for percent in percents:
                top = max(1, int(trace.unique_blocks * percent / 100.0))
                sizes = [top, max(1, int(top * lower))][:tiers]
                count = replay(trace, make, sizes, progress=progress)
                cells.append(_cell(trace, name, percent, tiers, count))
    return cells


def sampled_cells(
    traces: list[Trace], percents: list[float], progress: Callable[[int], None] | None = None
) -> list[Cell]:
    """The hits of an LRU as a daemon would estimate them, from its sample of reuse distances."""
    cells = []
    for trace in traces:
        sizes = [max(1, int(trace.unique_blocks * percent / 100.0)) for percent in percents]
        found = sampled_lru(trace, sizes, progress=progress)
        for percent, count in zip(percents, found, strict=True):
            cells.append(_cell(trace, SAMPLED, percent, 1, count))
    return cells


def _cell(trace: Trace, name: str, percent: float, tiers: int, count: Count) -> Cell:
    return Cell(trace.name, name, percent, tiers, count.block_hit_pct, count.token_hit_pct)


@click.command()
@click.argument(
    "traces",
    metavar="[TRACE]...",
    nargs=-1,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
)
@click.option(
    "--policy",
    "-p",
    "policies",
    multiple=True,
    metavar="NAME",
    help=f"Repeatable: default ({DEFAULT}), {_KNOWN}, package.module.Class;"
    " with options as crf:half_life_s=300.  [lru, default]",
)
@click.option(
    "--capacity",
    "-c",
    type=Percents(),
    default=CAPACITIES,
    show_default=True,
    metavar="PERCENTS",
    help="Of the trace's unique blocks.",
)
@click.option(
    "--tiers", type=click.IntRange(1, 2), default=1, show_default=True, help="2: NINE below."
)
@click.option(
    "--lower",
    type=Range(min=0.0, min_open=True),
    default=4.0,
    show_default=True,
    help="Size of the second tier, as a multiple of the first.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=BLOCK_TOKENS,
    show_default=True,
    help="Tokens of one block of the trace.",
)
@click.option(
    "--sampled",
    is_flag=True,
    help="Also what a daemon's sample of reuse distances would say of an LRU.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE.png",
    help="Also draw the miss-ratio curves (needs the extra kvd[plot]).",
)
@click.option(
    "--from-daemon", is_flag=True, help="No trace: the curves that a running daemon measured."
)
@click.option(
    "--check-daemon",
    is_flag=True,
    help="Run the requests through a daemon of its own, too, and compare.",
)
@click.option(
    "--speed",
    type=Range(min=0.0),
    default=12.0,
    show_default=True,
    help="With --check-daemon: at most so many times the trace's own pace; 0: no limit.",
)
@connection
def simulate(
    link: Link,
    output: Output,
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    capacity: list[float],
    tiers: int,
    lower: float,
    block_tokens: int,
    sampled: bool,
    plot: Path | None,
    from_daemon: bool,
    check_daemon: bool,
    speed: float,
) -> None:
    """Replay request traces through eviction policies, at several capacities.

    A trace is a file of JSON lines with timestamp (ms), input_length (tokens) and hash_ids, as
    Mooncake publishes them. Only --from-daemon asks a running daemon.

    \b
    Examples:
      kvd-cli simulate conversation_trace.jsonl
      kvd-cli simulate day.jsonl --policy lru --policy default --capacity 1,2,5,10,20,50
      kvd-cli simulate day.jsonl --policy crf:half_life_s=300 --tiers 2 --lower 4 --json
      kvd-cli simulate day.jsonl --plot curves.png
      kvd-cli simulate --from-daemon --plot live.png
    """
    if from_daemon == bool(traces):
        raise click.UsageError("name a trace, or --from-daemon and none")
    if from_daemon and check_daemon:
        raise click.UsageError("--check-daemon needs a trace")
    makers = _makers(policies or ("lru", "default"))
    try:
        if plot is not None:
            draw([], plot)  # say that it can't be drawn before the work, not after
        read = [read_trace(path, block_tokens) for path in traces]
        if from_daemon:
            _from_daemon(output, link, plot)
        elif check_daemon:
            _check_daemon(output, read, makers, capacity, speed)
        else:
            _replay(output, read, makers, capacity, tiers, lower, sampled, plot)
    except (TraceError, PlotError) as error:
        raise click.ClickException(str(error)) from error


def _makers(names: tuple[str, ...]) -> dict[str, Callable[[], Policy]]:
    makers = {}
    for name in names:
        try:
            makers[name] = factory(name, importlib.import_module)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--policy") from error
    return makers


# -- traces -------------------------------------------------------------------------------------


def _replay(
    output: Output,
    read: list[Trace],
    makers: dict[str, Callable[[], Policy]],
    capacity: list[float],
    tiers: int,
    lower: float,
    sampled: bool,
    plot: Path | None,
) -> None:
    began = time.perf_counter()
    requests = sum(len(trace.requests) for trace in read)
    total = requests * (len(makers) * len(capacity) + sampled)
    with _progress(output, total) as advance:
        cells = simulate_cells(read, makers, capacity, tiers=tiers, lower=lower, progress=advance)
        if sampled:
            cells += sampled_cells(read, capacity, advance)
    seconds = time.perf_counter() - began
    if plot is not None:
        draw(cells, plot)
    if output.as_json:
        output.json(cells=[one.row() for one in cells], seconds=round(seconds, 3))
        return
    for trace in read:
        _show(output, trace, [one for one in cells if one.trace == trace.name], tiers, lower)
    output.say(f"{total} requests replayed in {seconds:.1f} s", style="dim")
    if plot is not None:
        output.say(f"curves drawn in {plot}")


@contextmanager
def _progress(output: Output, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; tell it how many requests more are done."""
    bar = Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=output.side,
        transient=True,
    )
    with bar if output.side.is_terminal else nullcontext():
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.advance(task, done)


def _show(output: Output, trace: Trace, cells: list[Cell], tiers: int, lower: float) -> None:
    below = f", second tier {lower:g} times as large" if tiers == 2 else ""
    output.say(
        f"{trace.name}: {len(trace.requests)} requests, {trace.accesses} blocks,"
        f" {trace.unique_blocks} unique; block hits / token hits in percent{below}",
        style="bold",
    )
    percents = sorted({one.capacity_pct for one in cells})
    table = output.table("", "policy", *(f">{percent:g} %" for percent in percents))
    for name in dict.fromkeys(one.policy for one in cells):
        mine = {one.capacity_pct: one for one in cells if one.policy == name}
        table.add_row(
            name,
            *(f"{mine[p].block_hit_pct:.2f} / {mine[p].token_hit_pct:.2f}" for p in percents),
        )
    output.show(table)


# -- daemons ------------------------------------------------------------------------------------


def _check_daemon(
    output: Output,
    read: list[Trace],
    makers: dict[str, Callable[[], Policy]],
    capacity: list[float],
    speed: float,
) -> None:
    from kvd.tools.bench.daemon import BenchError
    from kvd.tools.simulate.agree import agreement  # starts processes; nothing else here does

    rows = []
    total = sum(len(trace.requests) for trace in read) * len(makers) * len(capacity)
    with _progress(output, total) as advance:
        for trace in read:
            for name, make in makers.items():
                for percent in capacity:
                    try:
                        rows.append(agreement(trace, name, make, percent, speed, advance))
                    except BenchError as error:
                        raise click.ClickException(str(error)) from error
    if output.as_json:
        output.json(agreement=[{**row._asdict(), "difference": row.difference} for row in rows])
        return
    table = output.table(
        "block hits in percent", "trace", "policy", ">capacity", ">blocks", ">daemon", ">replay",
        ">difference",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.trace,
            row.policy,
            f"{row.capacity_pct:g} %",
            str(row.blocks),
            f"{row.daemon_hit_pct:.2f}",
            f"{row.replay_hit_pct:.2f}",
            f"{row.difference:+.2f}",
        )
    output.show(table)


def _from_daemon(output: Output, link: Link, plot: Path | None) -> None:
    found = curves(link.stat())
    if plot is not None and found:
        draw_curves([(_tenant(curve), curve.points) for curve in found], plot)
    if output.as_json:
        output.json(curves=[curve.row() for curve in found])
        return
    if not found:
        output.say("no lookup that leases, and no store, was seen yet: there is no curve")
        return
    for curve in found:
        _show_curve(output, curve)
    if plot is not None:
        output.say(f"curves drawn in {plot}")


def _tenant(curve: Curve) -> str:
    return "all tenants" if curve.tenant == EVERYBODY else clean(curve.tenant)


def _show_curve(output: Output, curve: Curve) -> None:
    output.say(
        f"{_tenant(curve)}: {format_count(curve.uses)} chunks asked for,"
        f" {format_count(curve.sampled)} sampled, 1 key in {1 / max(curve.rate, 1e-9):.0f}",
        style="bold",
    )
    if not curve.enough:
        output.say("  too little was seen to tell anything yet", style="yellow")
    table = output.table("", ">an LRU of", ">would hit %", ">give or take")
    every = max(1, -(-len(curve.points) // _ROWS))
    for at, hit in curve.points[::-1][::every][::-1]:
        table.add_row(cell(format_bytes(at)), f"{hit:.1f}", f"{curve.margin_pct(at):.1f}")
    output.show(table)
