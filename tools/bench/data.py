"""`kvd-bench data`: stores and loads beside the copy that they can't beat.

The law of this module: limit and product take turns, round by round, over the same bytes and as
many slots, and each ratio is the median of the rounds' own ratios, so that what slows the machine
for a while slows both. Every case ends with a check that the bytes came back unaltered.

Modes: `streamed` is how connectors store and load (a batch reserved ahead, commits in flight, all
acknowledged inside the time; releases not awaited); `awaited` is one request after the other with
every answer awaited; `verified` is streamed with payload digests: the client gives them with its
stores and compares them in its loads.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from kvd.chunk import Outcome, payload_digest
from kvd.client import Client, SpecHandle
from kvd.tools.bench import machine
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.keys import Chain, chain, spec
from kvd.tools.bench.layout import LAYOUTS, Layout
from kvd.tools.bench.measure import GB, MIB, Buffer, Bytes, Sample, Weather, median, timed
from kvd.wire.messages import Selector


class Shape(NamedTuple):
    """What one request carries, and how many bytes a pass moves."""

    chunk_bytes: int
    chunks: int  # a request
    pass_bytes: int


class Round(NamedTuple):
    """Limit and product in turns."""

    first: Sample  # the limit
    stored: Sample
    second: Sample  # the limit once more
    loaded: Sample
    daemon_cpu_s: float


class Case(NamedTuple):
    shape: Shape
    layout: str
    mode: str


_MODES = {"contiguous": ("streamed", "awaited", "verified"), "paged": ("streamed",)}
_FULL = (Shape(2 * MIB, 16, 512 * MIB), Shape(32 * MIB, 4, 512 * MIB))
_QUICK = (Shape(2 * MIB, 16, 64 * MIB), Shape(32 * MIB, 4, 128 * MIB))
_FEW = 3  # undisturbed rounds that make a median
_PACE = 1e9  # bytes a second
_PACED = (2.0, 7)  # seconds, how often
_PACED_QUICK = (1.0, 1)


def run_data(
    socket: str | None, *, quick: bool = False, rounds: int | None = None
) -> dict[str, Any]:
    """All cases and the daemon's CPU, as docs/claims.md cites them."""
    rounds = rounds or (2 if quick else 7)
    most = rounds if quick else 3 * rounds  # with those that others disturbed
    shapes = _QUICK if quick else _FULL
    options = ("--arena-size", "1GiB" if quick else "2GiB")
    paced = _PACED_QUICK if quick else _PACED
    cases: list[dict[str, Any]] = []
    with Daemon(socket, *options) as daemon:
        for shape in shapes:
            for layout, modes in _MODES.items():
                cases += _run_layout(daemon, shape, layout, modes, (rounds, most))
        sealing = _paced_cpu(daemon, shapes[0], *paced, seal=False)
        # chunks that come with their digests are sealed: the daemon has nothing to do
        plain = _paced_cpu(daemon, shapes[0], *paced, seal=True)
    return {
        "cases": cases,
        "daemon_cpu_pct_at_1gbps": plain,
        "daemon_cpu_pct_sealing": sealing,
        "digest_alone_pct": _digest_alone(shapes[0], 1 if quick else 5),
    }


def _run_layout(
    daemon: Daemon, shape: Shape, layout_name: str, modes: tuple[str, ...], rounds: tuple[int, int]
) -> list[dict[str, Any]]:
    """Every mode over one engine's memory. `rounds`: how many, and at most with disturbed ones."""
    count = shape.pass_bytes // shape.chunk_bytes
    layout = LAYOUTS[layout_name](shape.chunk_bytes, count)
    limit = Buffer(shape.pass_bytes, shared=layout_name == "contiguous")
    slots = [
        limit.array[at * shape.chunk_bytes : (at + 1) * shape.chunk_bytes] for at in range(count)
    ]
    try:
        with Client(daemon.socket, timeout_s=60, name="kvd-bench", prefault=True) as client:
            handle = client.register(spec(layout_name, shape.chunk_bytes))
            return [
                _run_case(
                    daemon, client, handle, Case(shape, layout_name, mode), layout, slots, rounds
                )
                for mode in modes
            ]
    finally:
        slots.clear()
        limit.close()
        layout.close()


def _run_case(
    daemon: Daemon,
    client: Client,
    handle: SpecHandle,
    case: Case,
    layout: Layout,
    slots: list[Bytes],
    rounds: tuple[int, int],
) -> dict[str, Any]:
    moved = Moves(client, handle, layout, case.shape.chunks)
    store, load = {
        "streamed": (moved.store, moved.load),
        "awaited": (moved.store_awaited, moved.load_awaited),
        "verified": (moved.store_with_digests, moved.load_verified),
    }[case.mode]

    def copy_all() -> None:
        for chunk, slot in enumerate(slots):
            layout.gather(chunk, slot)

    weather = Weather(lambda: daemon.cpu_s() + time.process_time())
    calm: list[Round] = []
    windy: list[Round] = []
    number = -1  # the first round warms up
    wanted, most = rounds
    while len(calm) < wanted and number < most:
        keys = chain(len(slots))
        layout.wipe()
        sealed = _sealed(client)
        weather.begin()
        cpu = daemon.cpu_s()
        first = timed(copy_all)
        stored = timed(lambda keys=keys: store(keys))  # type: ignore[misc]
        _settle(client, sealed + len(slots))
        second = timed(copy_all)
        loaded = timed(lambda keys=keys: load(keys))  # type: ignore[misc]
        this = Round(first, stored, second, loaded, daemon.cpu_s() - cpu)
        kept = calm if weather.calm() else windy
        if number <= 0 and not all(map(layout.same, range(len(slots)))):
            raise BenchError(f"{case.layout} {case.mode}: other bytes came back than were stored")
        client.evict(Selector(spec=handle.digest))
        if number >= 0:
            kept.append(this)
        number += 1
    if len(calm) < min(_FEW, wanted):
        machine.busy(f"{len(windy)} of {number} rounds of {case.layout} {case.mode}")
        calm += windy
    return _figures(case, calm)


def _sealed(client: Client) -> int:
    """Shards whose digest was taken so far."""
    counted = client.stat()["counters"]["shards_sealed"]
    return sum(counted.values()) if isinstance(counted, dict) else int(counted)


def _settle(client: Client, sealed: int) -> None:
    """Wait until the daemon has sealed what was stored: it does so in the pauses, and the limit is
    measured on a machine that does nothing else."""
    deadline = time.monotonic() + 30
    while _sealed(client) < sealed:
        if time.monotonic() > deadline:
            raise BenchError(f"the daemon has not sealed {sealed} chunks within 30 s")
        time.sleep(0.02)


def _figures(case: Case, rounds: list[Round]) -> dict[str, Any]:
    """A case's row, as docs/claims.md reads it."""
    size = case.shape.pass_bytes / GB
    limits = [one.wall_s for each in rounds for one in (each.first, each.second)]
    moved = 2 * size * len(rounds)
    cpu = sum(each.stored.cpu_s + each.loaded.cpu_s + each.daemon_cpu_s for each in rounds)
    return {
        "chunk_bytes": case.shape.chunk_bytes,
        "chunks": case.shape.chunks,
        "layout": case.layout,
        "mode": case.mode,
        "limit_gbps": size / median(limits),
        "store_gbps": size / median([each.stored.wall_s for each in rounds]),
        "load_gbps": size / median([each.loaded.wall_s for each in rounds]),
        "store_ratio": median([each.first.wall_s / each.stored.wall_s for each in rounds]),
        "load_ratio": median([each.second.wall_s / each.loaded.wall_s for each in rounds]),
        "cpu_s_per_gb": cpu / moved,
    }


class Moves:
    """The product's ways to move all chunks of a layout."""

    def __init__(self, client: Client, handle: SpecHandle, layout: Layout, batch: int) -> None:
        self._client = client
        self._spec = handle
        self._layout = layout
        self._batch = batch
        # whole buffers, where the engine has them: the client hashes while it copies
        self._sources: Any = getattr(layout, "sources", None) or self.fill
        self._targets: Any = getattr(layout, "targets", None) or self.take

    def fill(self, chunk: int, view: memoryview) -> None:
        self._layout.gather(chunk, np.frombuffer(view, dtype=np.uint8))

    def take(self, chunk: int, view: memoryview) -> None:
        self._layout.scatter(chunk, np.frombuffer(view, dtype=np.uint8))

    def store(self, keys: Chain) -> None:
        _all_ok(
            self._client.store_chunks(
                self._spec, keys.hashes, keys.fingerprints, self.fill, batch=self._batch
            ),
            "store",
        )

    def load(self, keys: Chain) -> None:
        _all_ok(
            self._client.load_chunks(self._spec, keys.hashes, self.take, batch=self._batch),
            "load",
        )

    def load_verified(self, keys: Chain) -> None:
        _all_ok(
            self._client.load_chunks(
                self._spec, keys.hashes, self._targets, batch=self._batch, verify=True
            ),
            "verified load",
        )

    def store_with_digests(self, keys: Chain) -> None:
        _all_ok(
            self._client.store_chunks(
                self._spec,
                keys.hashes,
                keys.fingerprints,
                self._sources,
                batch=self._batch,
                seal=True,
            ),
            "store with digests",
        )

    def store_awaited(self, keys: Chain) -> None:
        step = self._batch
        for at in range(0, keys.length, step):
            part = keys.part(at, at + step)
            with self._client.reserve(
                self._spec,
                part.hashes,
                part.fingerprints,
                parent=keys.part(at - 1, at).hashes if at else None,
                index0=at,
            ) as write:
                for chunk in range(part.length):
                    self.fill(at + chunk, write.view(chunk))
                _all_ok(write.commit(), "store")

    def load_awaited(self, keys: Chain) -> None:
        step = self._batch
        for at in range(0, keys.length, step):
            part = keys.part(at, at + step)
            found = self._client.lookup(self._spec, part.hashes, part.fingerprints, every=True)
            _all_ok(found.outcomes, "lookup")
            assert found.lease is not None
            with found.lease as lease:
                transfer = lease.load()
                for chunk in transfer:
                    self.take(at + chunk, transfer.view(chunk))
                lease.check()
                lease.release(wait=True)


def _paced_cpu(daemon: Daemon, shape: Shape, seconds: float, runs: int, *, seal: bool) -> float:
    """Percent of a core that the daemon takes while 1 GB/s is stored in batches: the median of
    undisturbed runs. `seal`: the client gives the digests with its stores."""
    source = Buffer(shape.chunk_bytes)
    source.fill(3)
    weather = Weather(lambda: daemon.cpu_s() + time.process_time())
    calm: list[float] = []
    windy: list[float] = []
    try:
        with Client(daemon.socket, timeout_s=60, name="kvd-bench", prefault=True) as client:
            pace = Pace(daemon, client, shape, source, seal=seal)
            pace.percent(0.2)  # warms up
            while len(calm) < runs and len(windy) < 2 * runs:
                weather.begin()
                percent = pace.percent(seconds)
                (calm if weather.calm() else windy).append(percent)
            client.evict(Selector(spec=pace.handle.digest))
    finally:
        source.close()
    if len(calm) < min(_FEW, runs):
        machine.busy(f"{len(windy)} of {len(calm) + len(windy)} runs at 1 GB/s")
        calm += windy
    return median(calm)


def _digest_alone(shape: Shape, runs: int) -> float:
    """Percent of a core that the digests of 1 GB/s take by themselves, of bytes that lie in memory
    and in no cache: what sealing must cost on this machine."""
    memory = Buffer(shape.pass_bytes)
    memory.fill(5)
    view, size = memory.array.data, shape.chunk_bytes
    took: list[float] = []
    try:
        for _ in range(runs):
            begun = time.process_time()
            for at in range(0, shape.pass_bytes, size):
                payload_digest(view[at : at + size])
            took.append(time.process_time() - begun)
    finally:
        view.release()
        memory.close()
    return 100 * median(took) * _PACE / shape.pass_bytes


class Pace:
    """Stores at 1 GB/s, in batches of a shape."""

    def __init__(
        self, daemon: Daemon, client: Client, shape: Shape, source: Buffer, *, seal: bool
    ) -> None:
        self.handle = client.register(spec("paced", shape.chunk_bytes))
        self._daemon = daemon
        self._client = client
        self._shape = shape
        self._source = source
        self._seal = seal
        self._begin = 0.0
        self._stored = 0  # chunks, before the prompt under way

    def percent(self, seconds: float) -> float:
        """What the daemon takes of a core for so many seconds' worth of stores. What is still to
        be sealed at the end counts, too."""
        shape, batch = self._shape, self._shape.chunks
        count = int(seconds * _PACE / shape.chunk_bytes) // batch * batch
        # in prompts that fit the arena: a prompt can't make room at its own cost
        prompt = max(batch, (256 << 20) // shape.chunk_bytes)
        sealed = _sealed(self._client)
        cpu, self._begin = self._daemon.threads_cpu_s(), time.perf_counter()
        for at in range(0, count, prompt):
            keys = chain(min(prompt, count - at))
            self._stored = at
            outcomes = self._client.store_chunks(
                self.handle,
                keys.hashes,
                keys.fingerprints,
                self._fill,
                batch=batch,
                seal=self._seal,
            )
            _all_ok(outcomes, "store")
        _settle(self._client, sealed + count)
        spent = self._daemon.threads_cpu_s() - cpu
        took = max(count * shape.chunk_bytes / _PACE, time.perf_counter() - self._begin)
        return 100 * spent / took

    def _fill(self, chunk: int, view: memoryview) -> None:
        batch = self._shape.chunks
        if chunk % batch == 0:
            due = self._begin + (self._stored + chunk) * self._shape.chunk_bytes / _PACE
            time.sleep(max(0.0, due - time.perf_counter()))
        np.copyto(np.frombuffer(view, dtype=np.uint8), self._source.array)


def _all_ok(outcomes: Any, what: str) -> None:
    """A figure of anything but complete success is none."""
    bad = [Outcome(one).name for one in outcomes if one != Outcome.OK]
    if bad:
        raise BenchError(f"{what}: {len(bad)} of {len(outcomes)} chunks ended as {bad[0]}")
