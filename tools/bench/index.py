"""The core alone, in a process of its own: memory a chunk, lookups, adoption.

The law of this module: nothing is measured but the core. The child makes the records of an earlier
life, hands them over (that is timed), drops them, and only then looks at its own anonymous memory:
all of it, the interpreter's and numpy's too. Lookups are whole events of one key each, over keys
in random order, most of them of the largest size first, so that no cache is flattered.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import (
    RECORD_DTYPE,
    HeaderFlag,
    Kind,
    KVSpec,
    ShardSpec,
    State,
    namespace_digest,
)
from kvd.core import Core, CoreConfig
from kvd.core import events as ev
from kvd.eviction import factory
from kvd.tools.bench.daemon import BenchError

SIZES = (10_000, 1_000_000)
SLOT = 4096
CHAIN = 512  # chunks of one prompt
SLABS = 32
NAMESPACE = "default"
S = 1_000_000_000
LOOKUPS = 60_000
BATCHES = 200


def run_index(sizes: Sequence[int] = SIZES, *, quick: bool = False) -> dict[str, Any]:
    """Measure each size in a fresh process; the figures of the largest, with the lookups of the
    smallest beside them."""
    if quick:
        sizes = (sizes[0], sizes[0] * 5)
    rows = [measure(size) for size in sorted(sizes)]
    small, large = rows[0], rows[-1]
    return {
        **large,
        "lookups_per_s_at_10k": small["lookups_per_s"],
        "lookup_512_us_at_10k": small["lookup_512_us"],
    }


def measure(chunks: int) -> dict[str, Any]:
    """One size, in a process that does nothing else. BenchError if it fails."""
    code = (
        f"import json; from kvd.tools.bench.index import child; print(json.dumps(child({chunks})))"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the core failed at {chunks} chunks: {done.stderr.strip()[-400:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def child(chunks: int) -> dict[str, Any]:
    """What `measure` runs in the process that it starts."""
    spec = _spec()
    config = _config(chunks)
    records = _records(chunks, spec)
    core = Core(config, factory("default"))
    core.grow(config.size)
    sizes = [SLOT] * config.slab_count
    numbers = np.arange(chunks)
    gc.collect()
    gc.disable()
    begun = time.perf_counter()
    core.adopt(sizes, records, numbers, [NAMESPACE], [spec], [], 0, S)
    adopt_s = time.perf_counter() - begun
    gc.enable()
    keys = records["chunk"].tobytes()
    prints = records["fingerprint"].tobytes()
    del records, numbers
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what adoption worked with, the allocator may keep
    anonymous = _anonymous() - len(keys) - len(prints)
    gc.freeze()
    core.handle(ev.OpenSession(1, b"p" * 16, NAMESPACE, b"g", True, "bench", True), 2 * S)
    return {
        "chunks": chunks,
        "rss_bytes_per_chunk": round(anonymous / chunks, 1),
        "lookups_per_s": round(_singles(core, spec, keys, prints, chunks)),
        "lookup_512_us": round(_batches(core, spec, keys, prints, chunks), 1),
        "adopt_s": round(adopt_s, 3),
    }


def _spec() -> KVSpec:
    shard = ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SLOT)
    return KVSpec("bench", "", "none", "bench", "u8", "", "raw", 16, 1, 1, 1, (), (), (shard,))


def _config(chunks: int) -> CoreConfig:
    slab = -(-chunks // SLABS) * SLOT
    return CoreConfig("bench", epoch=1, size=slab * SLABS, slab_size=slab)


def _records(chunks: int, spec: KVSpec) -> NDArray[np.void]:
    """Sealed records of chains of CHAIN chunks, as a scan of the table gives them."""
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 256, (chunks, 32), np.uint8)
    records = np.zeros(chunks, RECORD_DTYPE)
    place = np.arange(chunks) % CHAIN
    parents = np.roll(hashes, 1, axis=0)
    parents[place == 0] = 0
    records["kind"] = Kind.PREFIX
    records["state"] = State.READY
    records["namespace_digest"] = np.void(namespace_digest(NAMESPACE))
    records["spec"] = np.void(spec.digest)
    records["chunk"] = hashes.view("V32").reshape(-1)
    records["parent"] = parents.view("V32").reshape(-1)
    records["shard_count"] = 1
    records["index"] = place
    records["tokens"] = spec.chunk_tokens
    records["pos0"] = place * spec.chunk_tokens
    records["fingerprint"] = rng.integers(0, 256, (chunks, 16), np.uint8).view("V16").reshape(-1)
    records["flags"] = HeaderFlag.SEALED
    records["length"] = SLOT
    records["generation"] = np.arange(chunks) + 1
    records["created_unix_ns"] = S
    return records


def _anonymous() -> int:
    """Anonymous bytes of this process that are resident."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise BenchError("this kernel does not tell RssAnon in /proc/self/status")


def _event(spec: KVSpec, hashes: bytes, prints: bytes) -> ev.Lookup:
    return ev.Lookup(1, 0, spec.digest, Kind.PREFIX, (0,), hashes, prints, 0, 0, bytes(32), 0, 0)


def _singles(core: Core, spec: KVSpec, keys: bytes, prints: bytes, chunks: int) -> float:
    """Lookups of one key each, a second."""
    picks = np.random.default_rng(2).integers(0, chunks, LOOKUPS).tolist()
    events = [_event(spec, keys[32 * n : 32 * n + 32], prints[16 * n : 16 * n + 16]) for n in picks]
    begun = time.perf_counter()
    for event in events:
        core.handle(event, 3 * S)
    return LOOKUPS / (time.perf_counter() - begun)


def _batches(core: Core, spec: KVSpec, keys: bytes, prints: bytes, chunks: int) -> float:
    """Median microseconds of a lookup of 512 keys in chain order, without a lease."""
    starts = np.random.default_rng(3).integers(0, max(1, chunks // CHAIN), BATCHES) * CHAIN
    times = []
    for n in starts.tolist():
        event = _event(spec, keys[32 * n : 32 * (n + CHAIN)], prints[16 * n : 16 * (n + CHAIN)])
        begun = time.perf_counter()
        core.handle(event, 3 * S)
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) * 1e6
