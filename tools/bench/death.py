"""`kvd-bench death`: how long what a killed client held stays taken.

The law of this module: the client is a process of its own that has faulted in all of the arena, so
that the kernel has its page tables to tear down, and holds leases and unfinished writes over half
of it. The clock starts when SIGKILL is sent and stops when the daemon says that nothing of the
client is left: no session, no lease, no slot that it could still be writing to.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

from kvd.chunk import Outcome
from kvd.client import Client
from kvd.tools.bench.daemon import BenchError, Daemon
from kvd.tools.bench.keys import chain, spec
from kvd.tools.bench.measure import MIB, median
from kvd.wire.messages import Selector

_CHUNK_BYTES = 2 * MIB
_GIB = 1024 * MIB
_LOOK_S = 0.005
_PATIENCE_S = 60.0
_READY = b"ready\n"
_HOLDER = "import sys; from kvd.tools.bench import death; death.hold(sys.argv[1], int(sys.argv[2]))"


def run_death(*, quick: bool = False, gib: float | None = None) -> dict[str, Any]:
    """Seconds, at each size mapped; `aim_s` is 1 s and 0.1 s for each GiB."""
    sizes = [gib] if gib is not None else [0.25] if quick else [1.0, 4.0, 8.0]
    rounds = 1 if quick else 3
    return {"deaths": [_at(int(size * _GIB), rounds) for size in sizes]}


def _at(size: int, rounds: int) -> dict[str, Any]:
    with (
        Daemon(None, "--arena-size", str(size)) as daemon,
        Client(daemon.socket, timeout_s=30, name="kvd-bench", map_memory=False) as client,
    ):
        free = [_kill_one(daemon.socket, client, size) for _ in range(rounds)]
    return {
        "mapped_bytes": size,
        "held_bytes": min(held for _, held in free),
        "free_s": median([seconds for seconds, _ in free]),
        "worst_s": max(seconds for seconds, _ in free),
        "aim_s": 1 + 0.1 * size / _GIB,
    }


def _kill_one(socket: str, client: Client, size: int) -> tuple[float, int]:
    """Seconds from SIGKILL until all is free, and slot bytes that were held."""
    before = client.stat()["sessions"]
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", _HOLDER, socket, str(size)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != _READY:
            raise BenchError("the client that was to be killed did not get so far")
        tier = client.stat()["tiers"][0]
        held = tier["writing_bytes"] + tier["leased_chunks"] * _CHUNK_BYTES
        begin = time.perf_counter()
        holder.send_signal(signal.SIGKILL)
        while not _free(client.stat(), before):
            if time.perf_counter() - begin > _PATIENCE_S:
                raise BenchError(f"not free {_PATIENCE_S:.0f} s after the client's death")
            time.sleep(_LOOK_S)
        return time.perf_counter() - begin, held
    finally:
        holder.kill()
        holder.wait()
        client.evict(Selector(everything=True))


def _free(stat: dict[str, Any], sessions: int) -> bool:
    tier = stat["tiers"][0]
    held = tier["leased_chunks"] + tier["writing_bytes"] + tier["condemned_bytes"]
    return bool(stat["sessions"] == sessions and held == 0)


def hold(socket: str, size: int) -> None:
    """The client's life: take what a session may have, fault everything in, and say so."""
    part = size // 4 // _CHUNK_BYTES - 8  # a session may have a quarter in unfinished writes
    with Client(socket, timeout_s=60, name="kvd-bench-death", prefault=True) as client:
        handle = client.register(spec("death", _CHUNK_BYTES))
        keys = chain(part)
        outcomes = client.store_chunks(handle, keys.hashes, keys.fingerprints, _first_bytes)
        if any(outcome is not Outcome.OK for outcome in outcomes):
            raise BenchError("not all chunks were stored")
        lease = client.lookup(handle, keys.hashes, lease_s=600)
        fresh = chain(part)
        writes = client.reserve(handle, fresh.hashes, fresh.fingerprints, ttl_s=600)
        while client.prefaulted < size:
            time.sleep(0.01)
        if lease.leading == part and set(writes.outcomes) == {Outcome.GRANTED}:
            sys.stdout.buffer.write(_READY)
            sys.stdout.buffer.flush()
        signal.pause()


def _first_bytes(chunk: int, view: memoryview) -> None:
    view[:8] = chunk.to_bytes(8, "little")
