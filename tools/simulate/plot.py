"""Miss-ratio curves as a picture.

The law of this module: matplotlib is imported here, when asked for, and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


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


def draw(cells: Sequence[Point], path: Path) -> None:
    """One panel a trace, one line a policy. With no cells only checks that it could."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError(f"--plot needs matplotlib: pip install 'kvd[plot]' ({error})") from error
    if not cells:
        return
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    figure, axes = pyplot.subplots(
        1, len(traces), figsize=(5.5 * len(traces), 4), squeeze=False, layout="constrained"
    )
    for axis, trace in zip(axes[0], traces, strict=True):
        for policy in dict.fromkeys(cell.policy for cell in cells):
            points = sorted(
                (cell.capacity_pct, 100.0 - cell.block_hit_pct)
                for cell in cells
                if cell.trace == trace and cell.policy == policy
            )
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy)
        axis.set_xscale("log")
        ticks = sorted({cell.capacity_pct for cell in cells})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_title(trace)
        axis.set_xlabel("capacity, % of unique blocks")
        axis.set_ylabel("missed blocks, %")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
