"""`kvd-bench isolation`: what a neighbour can do to a tenant, and what it can't.

The law of this module: real daemons, and two tenants with tokens of their own. The victim's
requests are those of a real trace, in trace time, not in real time; the neighbour's come between
them. The index is the victim's hits over those that it has alone on its share, in the same trace;
the control is the same daemon without isolation.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.flood import run_flood
from kvd.tools.bench.requests import Request, read, shipped
from kvd.tools.bench.tenants import CHUNK, NEIGHBOUR, VICTIM, Pair, Tenant

SHARE = 0.10  # of the victim's unique blocks, as in the measurements of caches on this trace
WINDOW_MS = 120_000
REQUESTS = 1800  # ten minutes
QUICK_REQUESTS = 120
RATE = 4  # blocks of the scan for each of the victim's
BATCH = 64
FEW_HITS = 20  # a window with fewer is no measure


class _Job(NamedTuple):
    """One replay to be made: a pool of so many chunks, and who else is there."""

    chunks: int
    neighbour: str | None
    isolation: bool = True


class Run(NamedTuple):
    """One replay: the victim's hits by request, and what the daemon says of it."""

    hits: list[int]
    below_min: int

    @property
    def total(self) -> int:
        return sum(self.hits)


def run_isolation(
    trace: str | None, directory: str | None, *, quick: bool = False, plot: str | None = None
) -> dict[str, Any]:
    """All scenarios."""
    pyplot = None if plot is None else _pyplot()
    limit = QUICK_REQUESTS if quick else REQUESTS
    requests = shipped(limit) if trace is None else read(trace, QUICK_REQUESTS if quick else None)
    unique = len({block for request in requests for block in request.blocks})
    share = max(512, int(unique * SHARE) // 64 * 64)
    with _folder(directory) as folder:
        _note("loads from nvme beside a flood")
        flood = run_flood(folder, quick=quick)
        bench = _Bench(folder, requests, share)
        _note(f"{len(requests)} requests, a share of {share} chunks")
        jobs = [
            _Job(2 * share, name, isolation) for name in _SCENARIOS for isolation in (True, False)
        ]
        jobs += [_Job(2 * share, None), _Job(2 * share, "idle"), _Job(share, None)]
        # one daemon and its clients keep about one core busy
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=context) as pool:
            # the longest first, so that the two end together
            *rest, whole, lent, alone = pool.map(bench.run, jobs)
        scenarios = []
        curves = {"alone on its share": bench.windows(alone)}
        for n, name in enumerate(_SCENARIOS):
            with_it, control = rest[2 * n : 2 * n + 2]
            curves[name] = bench.windows(with_it)
            curves[f"{name}, one pool"] = bench.windows(control)
            scenarios.append(
                {
                    "name": name,
                    "index": _ratio(with_it.total, alone.total),
                    "worst_window": bench.worst(with_it, alone),
                    "below_min_evictions": with_it.below_min,
                    "control_index": _ratio(control.total, alone.total),
                    "control_worst_window": bench.worst(control, alone),
                    "control_below_min_evictions": control.below_min,
                    "p99_load_ratio": flood["p99_ratio"] if name == "scan4x" else None,
                    "p99_load_ratio_same_cpu": (
                        flood["p99_ratio_over_same_cpu"] if name == "scan4x" else None
                    ),
                }
            )
        if pyplot is not None and plot is not None:
            _plot(pyplot, plot, curves)
        return {
            "scenarios": scenarios,
            "flood": flood,
            "work_conserving": _ratio(lent.total, whole.total),
            "requests": len(requests),
            "share_chunks": share,
            "hit_pct_alone": 100 * alone.total / sum(len(r.blocks) for r in requests),
        }


def _note(what: str) -> None:
    """What is under way: it takes minutes."""
    print(f"kvd-bench: {what}", file=sys.stderr)


def _ratio(one: int, other: int) -> float:
    return round(one / other, 4) if other else 1.0


@contextmanager
def _folder(directory: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Bench:
    """Replays over daemons that are started for each."""

    def __init__(self, folder: Path, requests: list[Request], share: int) -> None:
        self.folder = folder
        self.requests = requests
        self.share = share
        self.pair = Pair(folder)

    def run(self, job: _Job) -> Run:
        """The whole trace over a daemon with so many slots."""
        chunks, neighbour, isolation = job
        name = f"{neighbour or 'alone'}-{chunks}-{'shares' if isolation else 'one-pool'}"
        _note(name)
        size = chunks * CHUNK
        slab = max(65536, size // 32 // 65536 * 65536)
        flags = (
            "--arena-size", str(size), "--arena-slab-size", str(slab), "--eviction-policy", "lru",
        )  # fmt: skip
        with Daemon(
            None, "--config", self.pair.config(name, isolation=isolation), *flags
        ) as daemon:
            victim = Tenant(daemon.socket, self.pair.tokens[VICTIM], 1)
            other = Tenant(daemon.socket, self.pair.tokens[NEIGHBOUR], 2)
            try:
                between = _NEIGHBOURS[neighbour or "idle"](other, self)
                hits = []
                for n, request in enumerate(self.requests):
                    hits.append(victim.ask(request.blocks))
                    between(n, len(request.blocks))
                stat = victim.client.stat()["tenants"][VICTIM]["counters"]
                return Run(hits, sum(stat["evictions_below_minimum"].values()))
            finally:
                victim.close()
                other.close()

    def windows(self, run: Run) -> list[tuple[float, float]]:
        """(minute, share of blocks hit) by two-minute windows."""
        asked: dict[int, int] = {}
        hit: dict[int, int] = {}
        for request, hits in zip(self.requests, run.hits, strict=True):
            window = request.at_ms // WINDOW_MS
            asked[window] = asked.get(window, 0) + len(request.blocks)
            hit[window] = hit.get(window, 0) + hits
        return [(2.0 * w + 1, hit[w] / asked[w]) for w in sorted(asked)]

    def worst(self, run: Run, alone: Run) -> float:
        """The window that lost most."""
        sums: dict[int, list[int]] = {}
        for request, one, other in zip(self.requests, run.hits, alone.hits, strict=True):
            both = sums.setdefault(request.at_ms // WINDOW_MS, [0, 0])
            both[0] += one
            both[1] += other
        ratios = [one / other for one, other in sums.values() if other >= FEW_HITS]
        return round(min(ratios, default=1.0), 4)


Between = Callable[[int, int], None]


def _idle(tenant: Tenant, bench: _Bench) -> Between:
    return lambda n, blocks: None


def _scan(tenant: Tenant, bench: _Bench, begin: float = 0.0, end: float = 1.0) -> Between:
    """Blocks that nobody asks for again, four for each of the victim's."""
    due = made = 0

    def between(n: int, blocks: int) -> None:
        nonlocal due, made
        if begin * len(bench.requests) <= n < end * len(bench.requests):
            due += RATE * blocks
        while due - made >= BATCH:
            tenant.ask(np.arange(made, made + BATCH))
            made += BATCH

    return between


def _burst(tenant: Tenant, bench: _Bench) -> Between:
    return _scan(tenant, bench, 1 / 3, 2 / 3)


def _loop(tenant: Tenant, bench: _Bench) -> Between:
    """A cycle over three times its share: LRU's worst case."""
    whole = 3 * bench.share // BATCH
    due = made = 0

    def between(n: int, blocks: int) -> None:
        nonlocal due, made
        due += blocks
        while due - made >= BATCH:
            first = made // BATCH % whole * BATCH
            tenant.ask(np.arange(first, first + BATCH))
            made += BATCH

    return between


def _waker(tenant: Tenant, bench: _Bench) -> Between:
    """Idle for half of the time; then a tenant with reuse of its own, which wants its share."""
    half = len(bench.requests) // 2

    def between(n: int, blocks: int) -> None:
        if n >= half:
            tenant.ask(bench.requests[n - half].blocks)

    return between


_SCENARIOS = ("scan4x", "burst", "loop", "waker")
_NEIGHBOURS: dict[str, Callable[[Tenant, _Bench], Between]] = {
    "idle": _idle,
    "scan4x": _scan,
    "burst": _burst,
    "loop": _loop,
    "waker": _waker,
}


def _pyplot() -> Any:
    """Found before anything is measured. BenchError."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib: pip install 'kvd[plot]' ({error})") from error


def _plot(pyplot: Any, path: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    """The victim's hits by two-minute windows."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, pool in zip(axes, (False, True), strict=True):
        axis.set_title("one pool" if pool else "with shares")
        for name, points in curves.items():
            if name.startswith("alone") or name.endswith("one pool") == pool:
                bold = {"color": "black", "linewidth": 4, "alpha": 0.3}
                times, hits = zip(*points, strict=True)
                label = name.removesuffix(", one pool")
                percent = [100 * hit for hit in hits]
                axis.plot(times, percent, label=label, **(bold if name.startswith("alone") else {}))
        axis.set_xlabel("minutes of the trace")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("victim's blocks hit, %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
