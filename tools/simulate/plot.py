"""Miss-ratio curves as a picture.

The law of this module: matplotlib is imported here, when asked for, and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_TICKS = 10  # capacities named below a panel


class PlotError(Exception):
    """The picture can't be drawn; the message says what is missing."""


class Point(Protocol):
    """What is drawn of a cell."""

    @property
    def trace(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def capacity_pct(self) -> float: ...
    @property
    def block_hit_pct(self) -> float: ...


def draw(cells: Sequence[Point], path: Path, base: str = "lru") -> None:
    """A column a trace, a line a policy: missed blocks, and below, where `base` was replayed
    beside others, the points that these found more. With no cells only checks that it could."""
    pyplot = _pyplot()
    if not cells:
        return
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    compared = base in policies and len(policies) > 1
    figure, axes = pyplot.subplots(
        2 if compared else 1,
        len(traces),
        figsize=(5 * len(traces), 5.6 if compared else 3.6),
        squeeze=False,
        sharex="col",
        height_ratios=(3, 2) if compared else None,
        layout="constrained",
    )
    for column, trace in enumerate(traces):
        found = _found(cells, trace)
        ticks = sorted({percent for percent, _ in found})
        top = axes[0][column]
        top.set_title(trace)
        top.set_ylabel("missed blocks, %")
        _lines(top, policies, ticks, {cell: 100.0 - hit for cell, hit in found.items()})
        top.legend(fontsize="small")
        if compared:
            more = {cell: hit - found[cell[0], base] for cell, hit in found.items()}
            _lines(axes[1][column], policies, ticks, more)
            axes[1][column].set_ylabel(f"found more than {base},\n% of blocks")
        axes[-1][column].set_xlabel("capacity, % of unique blocks")
    _save(pyplot, figure, path)


def draw_curves(curves: Sequence[tuple[str, Sequence[tuple[int, float]]]], path: Path) -> None:
    """One line for each named curve of (bytes, hit percent): missed chunks over the capacity."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    for name, points in curves:
        axis.plot(
            [at / (1 << 30) for at, _ in points],
            [100.0 - hit for _, hit in points],
            label=name,
        )
    axis.set_xscale("log")
    axis.set_xlabel("capacity, GiB")
    axis.set_ylabel("missed chunks, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    _save(pyplot, figure, path)


def _pyplot() -> Any:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError(f"--plot needs matplotlib: pip install 'kvd[plot]' ({error})") from error


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:  # ValueError: a kind of picture that nobody knows
        raise PlotError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _found(cells: Sequence[Point], trace: str) -> dict[tuple[float, str], float]:
    """Hits in percent by capacity and policy."""
    return {(c.capacity_pct, c.policy): c.block_hit_pct for c in cells if c.trace == trace}


def _lines(
    axis: Any, policies: list[str], ticks: list[float], values: dict[tuple[float, str], float]
) -> None:
    for policy in policies:
        points = [values[tick, policy] for tick in ticks]
        axis.plot(ticks, points, marker="o", markersize=3, label=policy)
    axis.set_xscale("log")
    shown = ticks if len(ticks) <= _TICKS else ticks[:: -(-len(ticks) // _TICKS)]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
