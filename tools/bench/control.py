"""`kvd-bench control`: what asking costs, beside bare ZMQ.

The law of this module: lookups and bare round trips take turns in blocks within one run, so that
both meet the same weather. A lookup leases what it finds, as an engine's does; giving the lease
back is not part of the figure. Keys are asked in chain order.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from itertools import cycle
from typing import Any

from kvd.chunk import Kind
from kvd.client import Client, SpecHandle
from kvd.tools.bench import machine
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.data import _all_ok
from kvd.tools.bench.echo import Echo
from kvd.tools.bench.keys import Chain, chain, spec
from kvd.tools.bench.measure import Weather, median, percentile, quiet_collector
from kvd.wire import messages
from kvd.wire.messages import Selector

_CHUNK_BYTES = 4096  # what a lookup costs does not depend on the payload's size
_CHAINS = 16
_DEPTH = 512
_COUNTS = (1, 32, 512)
_WINDOW = 128  # requests on their way; a session may have 256
_ECHO_BYTES = 256  # about a single-key lookup with its header
_BLOCK = 50  # lookups between two blocks of bare round trips


def run_control(socket: str | None, *, quick: bool = False) -> dict[str, Any]:
    """Percentiles in milliseconds, rates a second."""
    blocks = 4 if quick else 40
    patience = 0 if quick else 2 * blocks  # disturbed blocks that are measured again
    requests = 2_000 if quick else 20_000
    rounds = 2 if quick else 5
    with Daemon(socket, "--arena-size", "256MiB") as daemon:
        with (
            tempfile.TemporaryDirectory(prefix="kvd-echo-", dir="/tmp") as directory,
            Echo(os.path.join(directory, "echo")) as echo,
            Client(daemon.socket, timeout_s=30, name="kvd-bench") as client,
        ):
            handle = client.register(spec("control", _CHUNK_BYTES))
            chains = [_stored(client, handle) for _ in range(_CHAINS)]
            weather = Weather(lambda: daemon.cpu_s() + echo.cpu_s() + time.process_time())
            with quiet_collector():
                lookups, bare = _latencies(client, handle, chains, echo, weather, blocks, patience)
                ours, echoed = [], []
                for _ in range(rounds):
                    echoed.append(echo.pipelined(bytes(_ECHO_BYTES), requests, _WINDOW))
                    ours.append(_pipelined(client, handle, chains, requests))
            client.evict(Selector(spec=handle.digest))
    return {
        "lookup": lookups,
        "pipelined_lookups_per_s": median(ours),
        "zmq_rtt_p50_ms": percentile(bare, 0.5) * 1e3,
        "zmq_rtt_p99_ms": percentile(bare, 0.99) * 1e3,
        "zmq_pipelined_per_s": median(echoed),
    }


def _stored(client: Client, handle: SpecHandle) -> Chain:
    keys = chain(_DEPTH)

    def fill(chunk: int, view: memoryview) -> None:
        view[:8] = chunk.to_bytes(8, "little")

    outcomes = client.store_chunks(handle, keys.hashes, keys.fingerprints, fill, batch=64)
    _all_ok(outcomes, "store")
    return keys


def _latencies(
    client: Client,
    handle: SpecHandle,
    chains: list[Chain],
    echo: Echo,
    weather: Weather,
    blocks: int,
    patience: int,
) -> tuple[list[dict[str, Any]], list[float]]:
    bare: list[float] = []
    seconds: dict[tuple[int, bool], list[float]] = {
        (count, hit): [] for count in _COUNTS for hit in (True, False)
    }
    known = cycle(chains)
    message = bytes(_ECHO_BYTES)
    done, windy = -1, 0  # the first block warms up
    while done < blocks:
        weather.begin()
        times: dict[tuple[int, bool], list[float]] = {}
        trips: list[float] = []
        for count, hit in seconds:
            times[count, hit] = [
                _lookup(client, handle, (next(known) if hit else chain(count)), count, hit)
                for _ in range(_BLOCK)
            ]
            trips += [echo.round_trip(message) for _ in range(_BLOCK)]
        if done >= 0 and not weather.calm() and windy < patience:
            windy += 1
            continue
        if done >= 0:
            for case, spent in seconds.items():
                spent += times[case]
            bare += trips
        done += 1
    if windy and windy == patience:
        machine.busy(f"{windy} of {windy + blocks} blocks of lookups")
    rows = [
        {
            "keys": count,
            "hit": hit,
            "p50_ms": percentile(spent, 0.5) * 1e3,
            "p99_ms": percentile(spent, 0.99) * 1e3,
        }
        for (count, hit), spent in seconds.items()
    ]
    return rows, bare


def _lookup(client: Client, handle: SpecHandle, keys: Chain, count: int, hit: bool) -> float:
    """Seconds until the answer to a lookup of the chain's first `count` keys is there."""
    hashes, prints = keys.part(0, count)
    begin = time.perf_counter()
    found = client.lookup(handle, hashes, prints)
    spent = time.perf_counter() - begin
    if found.leading != (count if hit else 0):
        raise BenchError(f"lookup: {found.leading} of {count} keys found, hit={hit}")
    if found.lease is not None:
        found.lease.release()
    return spent


def _pipelined(client: Client, handle: SpecHandle, chains: list[Chain], count: int) -> float:
    """Single-key lookups a second, with a window of them on their way: the client's own requests,
    replies in order. They lease nothing, as a router's or a scheduler's probes."""
    digest, kind, parent = handle.digest, int(Kind.PREFIX), bytes(32)
    asks = cycle(
        [
            messages.Lookup(digest, kind, (0,), *keys.part(at, at + 1), 0, 0, parent, 0, 0)
            for keys in chains
            for at in range(keys.length)
        ]
    )
    deadline_ns = client.deadline_ns(60)
    submit = client.submit_at
    begin = time.perf_counter()
    flying = deque(submit(next(asks), deadline_ns) for _ in range(min(_WINDOW, count)))
    for number in range(count):
        answer = flying.popleft().result()
        assert isinstance(answer, messages.LookupReply)
        if answer.leading != 1:
            raise BenchError("pipelined lookup: a stored key was not found")
        if number + _WINDOW < count:
            flying.append(submit(next(asks), deadline_ns))
    return count / (time.perf_counter() - begin)
