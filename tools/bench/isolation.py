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
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvd.chunk import NO_PARENT, Kind, KVSpec, ShardSpec, payload_digest
from kvd.client import Client, Selector
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.requests import Request, read, shipped
from kvd.wire import LookupFlag
from kvd.wire import messages as m

CHUNK = 4096
SHARE = 0.10  # of the victim's unique blocks, as in the measurements of caches on this trace
WINDOW_MS = 120_000
REQUESTS = 1800  # ten minutes
QUICK_REQUESTS = 120
RATE = 4  # blocks of the scan for each of the victim's
BATCH = 64
FEW_HITS = 20  # a window with fewer is no measure
VICTIM, NEIGHBOUR = "victim", "neighbour"
LOADED = 64  # chunks that are loaded from NVMe
LOAD_CHUNK = 1 << 20


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
        ratio = _load_ratio(folder, quick=quick)
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
                    "p99_load_ratio": ratio if name == "scan4x" else None,
                }
            )
        if pyplot is not None and plot is not None:
            _plot(pyplot, plot, curves)
        return {
            "scenarios": scenarios,
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


# -- two tenants of one daemon --------------------------------------------------------------------


class _Tenant:
    """One tenant's client, and how it asks: look up, then store what is missing."""

    def __init__(self, daemon: Daemon, token: bytes, salt: int, nbytes: int = CHUNK) -> None:
        self.client = Client(daemon.socket, token=token, timeout_s=60, name=f"tenant-{salt}")
        shard = ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes)
        spec = KVSpec("bench", "", "w", "b", "bf16", "", "raw", 16, 1, 1, 1, (), (), (shard,))
        self.spec = spec
        self.handle = self.client.register(spec)
        self.payload = np.random.default_rng(salt).integers(0, 256, nbytes, np.uint8).tobytes()
        self.digest = payload_digest(self.payload)
        self._salt = np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)

    def hashes(self, blocks: Any) -> bytes:
        words = np.empty((len(blocks), 4), np.uint64)
        words[:] = np.asarray(blocks, np.uint64)[:, None]
        words[:, 1:] *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= self._salt
        words[:, 3] = self._salt
        return words.tobytes()

    def ask(self, blocks: Any, parent: bytes = NO_PARENT, index0: int = 0) -> int:
        """One prompt: the longest run that is there; the rest is stored. Blocks that were hit."""
        hashes = self.hashes(blocks)
        prints = np.frombuffer(hashes, np.uint64).reshape(-1, 4)[:, :2].tobytes()
        flags = int(LookupFlag.LEASE | LookupFlag.RESERVE_MISSES)
        message = m.Lookup(
            self.spec.digest, int(Kind.PREFIX), (0,), hashes, prints, flags, 30_000_000_000,
            parent, index0, 30_000_000_000,
        )  # fmt: skip
        client = self.client
        with client.lookup_of(client.submit_at(message, client.deadline_ns(60))) as found:
            made = found.reservation
            if made is not None and made.granted:
                for index in made.granted:
                    made.view(index)[:] = self.payload
                made.commit([self.digest] * len(made.granted))
        return int(found.leading)

    def close(self) -> None:
        self.client.close()


class _Bench:
    """Replays over daemons that are started for each."""

    def __init__(self, folder: Path, requests: list[Request], share: int) -> None:
        self.folder = folder
        self.requests = requests
        self.share = share
        self.tokens = {name: os.urandom(24).hex().encode() for name in (VICTIM, NEIGHBOUR)}
        for name, token in self.tokens.items():
            path = folder / f"{name}.token"
            path.write_bytes(token)
            path.chmod(0o600)

    def config(self, name: str, *, isolation: bool = True, tier: str = "dram") -> str:
        text = f"[tenancy]\nisolation = {str(isolation).lower()}\n"
        for tenant in self.tokens:
            text += f'[tenants.{tenant}]\ntoken_file = "{self.folder / tenant}.token"\n'
            text += f'[tenants.{tenant}.{tier}]\nmin = "50%"\n'
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return str(path)

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
        with Daemon(None, "--config", self.config(name, isolation=isolation), *flags) as daemon:
            victim = _Tenant(daemon, self.tokens[VICTIM], 1)
            other = _Tenant(daemon, self.tokens[NEIGHBOUR], 2)
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


def _idle(tenant: _Tenant, bench: _Bench) -> Between:
    return lambda n, blocks: None


def _scan(tenant: _Tenant, bench: _Bench, begin: float = 0.0, end: float = 1.0) -> Between:
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


def _burst(tenant: _Tenant, bench: _Bench) -> Between:
    return _scan(tenant, bench, 1 / 3, 2 / 3)


def _loop(tenant: _Tenant, bench: _Bench) -> Between:
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


def _waker(tenant: _Tenant, bench: _Bench) -> Between:
    """Idle for half of the time; then a tenant with reuse of its own, which wants its share."""
    half = len(bench.requests) // 2

    def between(n: int, blocks: int) -> None:
        if n >= half:
            tenant.ask(bench.requests[n - half].blocks)

    return between


_SCENARIOS = ("scan4x", "burst", "loop", "waker")
_NEIGHBOURS: dict[str, Callable[[_Tenant, _Bench], Between]] = {
    "idle": _idle,
    "scan4x": _scan,
    "burst": _burst,
    "loop": _loop,
    "waker": _waker,
}


# -- the tier below -------------------------------------------------------------------------------


def _load_ratio(folder: Path, *, quick: bool) -> float:
    """p99 of the victim's loads of one chunk from NVMe while the neighbour floods that tier, over
    p99 without it; in turns."""
    _note("loads from nvme beside a flood")
    folder = folder / "below"
    folder.mkdir()
    bench = _Bench(folder, [], 0)
    rounds, loads = (1, 50) if quick else (3, 200)
    flags = (
        "--nvme-path", str(folder / "nvme"), "--nvme-limit", "512MiB", "--nvme-reserve", "0",
        "--arena-size", "256MiB",
    )  # fmt: skip
    with Daemon(None, "--config", bench.config("nvme", tier="nvme"), *flags) as daemon:
        victim = _Tenant(daemon, bench.tokens[VICTIM], 1, LOAD_CHUNK)
        try:
            _below(daemon, victim, bench.tokens[VICTIM])
            quiet: list[float] = []
            loud: list[float] = []
            _loads(victim, loads // 4)  # the first ones are not like the others
            for _ in range(rounds):
                quiet.append(_loads(victim, loads))
                with _flood(daemon, bench.tokens[NEIGHBOUR]):
                    loud.append(_loads(victim, loads))
        finally:
            victim.close()
    return round(statistics.median(loud) / statistics.median(quiet), 3)


def _below(daemon: Daemon, tenant: _Tenant, token: bytes) -> None:
    """The tenant's chunks lie in the tier, and nowhere else."""
    tenant.ask(np.arange(LOADED))
    with Client(daemon.socket, timeout_s=60, map_memory=False) as admin:
        end = time.monotonic() + 60
        admin.tier("nvme", "drain")
        while admin.stat()["counters"]["moving"]:
            if time.monotonic() > end:
                raise BenchError("the tier did not take what it was to hold")
            time.sleep(0.02)
        admin.evict(Selector(tier="dram", everything=True))


def _loads(tenant: _Tenant, count: int) -> float:
    """p99 of loads of one chunk each, at a pace that leaves the tier idle in between, in s."""
    took = []
    hashes = tenant.hashes(np.arange(LOADED))
    for n in range(count):
        at = 32 * (n % LOADED)
        begun = time.perf_counter()
        with tenant.client.lookup(
            tenant.handle, [hashes[at : at + 32]], load=True, every=True
        ) as f:
            transfer = f.transfer
            if transfer is None:
                raise BenchError("nothing came back from nvme")
            for _index in transfer:
                pass
            took.append(time.perf_counter() - begun)
        tenant.client.evict(Selector(tier="dram", keys=(hashes[at : at + 32],)))
        time.sleep(0.002)
    return float(np.percentile(took, 99))


@contextmanager
def _flood(daemon: Daemon, token: bytes) -> Iterator[None]:
    """The neighbour writes and reads in that tier as much as it can."""
    stop = threading.Event()
    errors: list[Exception] = []

    def flood() -> None:
        other = _Tenant(daemon, token, 2, LOAD_CHUNK)
        n = 0
        try:
            while not stop.is_set():
                other.ask(np.arange(n, n + 16))
                n += 16
        except Exception as error:  # noqa: BLE001 - told by whoever waits for the thread
            errors.append(error)
        finally:
            other.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise BenchError(f"the neighbour ended: {errors[0]}")


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
