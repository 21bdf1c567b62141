"""`kvd-cli simulate`: what a policy and a capacity would have done for a trace.

The law of this module: it speaks of what it replayed and of nothing else. Capacities are percent
of the trace's own unique blocks, so that figures of different traces can be read side by side.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvd.errors import ConfigError
from kvd.eviction.base import Policy
from kvd.eviction.registry import DEFAULT, POLICIES, factory
from kvd.tools.cli.console import Output
from kvd.tools.simulate.plot import PlotError, draw
from kvd.tools.simulate.replay import Count, replay
from kvd.tools.simulate.trace import BLOCK_TOKENS, Trace, TraceError, read_trace

CAPACITIES = "1,2,5,10,20,50"
_KNOWN = ", ".join(sorted(POLICIES))


class Cell(NamedTuple):
    """One replay. `capacity_pct`: of the upper tier, percent of the trace's unique blocks."""

    trace: str
    policy: str
    capacity_pct: float
    tiers: int
    block_hit_pct: float
    token_hit_pct: float
    counts: Count

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
                cells.append(
                    Cell(
                        trace.name,
                        name,
                        percent,
                        tiers,
                        count.block_hit_pct,
                        count.token_hit_pct,
                        count,
                    )
                )
    return cells


@click.command()
@click.argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
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
    type=click.FloatRange(min=0.0, min_open=True),
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
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE.png",
    help="Also draw the miss-ratio curves (needs the extra kvd[plot]).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object (docs/eviction.md).")
@click.pass_context
def simulate(
    ctx: click.Context,
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    capacity: list[float],
    tiers: int,
    lower: float,
    block_tokens: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay request traces through eviction policies, at several capacities.

    A trace is a file of JSON lines with timestamp (ms), input_length (tokens) and hash_ids, as
    Mooncake publishes them. Nothing is asked of a daemon.

    \b
    Examples:
      kvd-cli simulate conversation_trace.jsonl
      kvd-cli simulate day.jsonl --policy lru --policy default --capacity 1,2,5,10,20,50
      kvd-cli simulate day.jsonl --policy crf:half_life_s=300 --tiers 2 --lower 4 --json
      kvd-cli simulate day.jsonl --plot curves.png
    """
    output = Output("simulate", as_json=as_json or bool((ctx.obj or {}).get("as_json")))
    makers = _makers(policies or ("lru", "default"))
    try:
        if plot is not None:
            draw([], plot)  # say that it can't be drawn before the work, not after
        read = [read_trace(path, block_tokens) for path in traces]
    except (TraceError, PlotError) as error:
        raise click.ClickException(str(error)) from error
    began = time.perf_counter()
    total = sum(len(trace.requests) for trace in read) * len(makers) * len(capacity)
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
        cells = simulate_cells(
            read,
            makers,
            capacity,
            tiers=tiers,
            lower=lower,
            progress=lambda done: bar.advance(task, done),
        )
    seconds = time.perf_counter() - began
    if plot is not None:
        try:
            draw(cells, plot)
        except PlotError as error:
            raise click.ClickException(str(error)) from error
    if output.as_json:
        output.json(cells=[cell.row() for cell in cells], seconds=round(seconds, 3))
        return
    for trace in read:
        _show(output, trace, [cell for cell in cells if cell.trace == trace.name], tiers, lower)
    output.say(f"{total} requests replayed in {seconds:.1f} s", style="dim")
    if plot is not None:
        output.say(f"curves drawn in {plot}")


def _makers(names: tuple[str, ...]) -> dict[str, Callable[[], Policy]]:
    makers = {}
    for name in names:
        try:
            makers[name] = factory(name, importlib.import_module)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--policy") from error
    return makers


def _show(output: Output, trace: Trace, cells: list[Cell], tiers: int, lower: float) -> None:
    below = f", second tier {lower:g} times as large" if tiers == 2 else ""
    output.say(
        f"{trace.name}: {len(trace.requests)} requests, {trace.accesses} blocks,"
        f" {trace.unique_blocks} unique; block hits / token hits in percent{below}",
        style="bold",
    )
    percents = sorted({cell.capacity_pct for cell in cells})
    table = output.table("", "policy", *(f">{percent:g} %" for percent in percents))
    for name in dict.fromkeys(cell.policy for cell in cells):
        mine = {cell.capacity_pct: cell for cell in cells if cell.policy == name}
        table.add_row(
            name,
            *(f"{mine[p].block_hit_pct:.2f} / {mine[p].token_hit_pct:.2f}" for p in percents),
        )
    output.show(table)
