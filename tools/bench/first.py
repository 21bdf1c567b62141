"""How soon the first chunk of a long load from NVMe is there, beside a bare read of one chunk.

The law of this module: the bare read and the load take turns over the same chunks, on a disk that
has done with what was written before: else the limit is what is left over from that.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from kvd.arena.mapping import Mapping
from kvd.client import Client, Selector
from kvd.tools.bench.daemon import BenchError, Daemon, until
from kvd.tools.bench.keys import chain, spec
from kvd.tools.bench.machine import doing

__all__ = ["run_first", "steady"]

MIB = 1 << 20
FIRSTS = 31
GROUP = 7  # reads whose median is one look at the disk
LOOKS = 4  # that have to be alike
ALIKE = 1.2  # the slowest over the fastest of them
PAUSE_S = 0.25
STEADY_S = 30.0  # at most; what is measured on a disk that never comes to rest says so


def run_first(folder: Path, *, quick: bool = False) -> dict[str, float]:
    """Time until the first of 64 chunks from NVMe can be copied, over a bare read of one into
    ordinary memory, and over one into huge pages, in which the arena lies."""
    doing("first chunk of a load from nvme")
    size, count = 4 * MIB, 16 if quick else 64
    path = folder / "first"
    flags = ("--nvme-path", str(path), "--nvme-limit", str(3 * size * count), "--nvme-reserve", "0")
    bare, huge = _Bare(folder / "bare", size, count), _Bare(folder / "huge", size, count, huge=True)
    firsts, singles, into_huge = [], [], []
    arena = ("--arena-size", str(2 * size * count))
    with closing(bare), closing(huge), Daemon(None, *arena, *flags) as daemon:
        with Client(daemon.socket, timeout_s=30) as client:
            handle = client.register(spec("first", size))
            hashes = chain(count).hashes
            data = np.random.default_rng(3).integers(0, 256, size, np.uint8)
            client.store_chunks(handle, hashes, None, [data] * count, timeout_s=60)
            client.tier("nvme", "drain")
            until(lambda: client.stat()["tiers"][1]["chunks"] == count)
            at = iter(range(1 << 30))
            if not steady(lambda: bare.read(next(at) % count), 2.0 if quick else STEADY_S):
                doing("the disk did not come to rest: its reads differ from moment to moment")
            for n in range(FIRSTS):
                client.evict(Selector(tier="dram", everything=True))
                singles.append(bare.read(7 * n % count))
                into_huge.append(huge.read(7 * n % count))
                begun = time.perf_counter()
                with client.lookup(handle, hashes, load=True) as found:
                    if found.transfer is None:
                        raise BenchError("nothing came back from nvme")
                    next(iter(found.transfer))
                    firsts.append(time.perf_counter() - begun)
                    for _index in found.transfer:
                        pass
    first = statistics.median(firsts)
    return {
        "first_chunk_ratio": first / statistics.median(singles),
        "first_chunk_huge_ratio": first / statistics.median(into_huge),
    }


def steady(read: Callable[[], float], seconds: float) -> bool:
    """Wait until reads take about as long from one look to the next, at most that long: a disk goes
    on with what was written to it long after the writes were done. False if it is over first."""
    end = time.monotonic() + seconds
    looks: list[float] = []
    while time.monotonic() < end:
        looks.append(statistics.median(read() for _ in range(GROUP)))
        last = looks[-LOOKS:]
        if len(last) == LOOKS and max(last) <= ALIKE * min(last):
            return True
        time.sleep(PAUSE_S)
    return False


class _Bare:
    """Single reads of one chunk, into shared memory from tmpfs. `huge`: in huge pages, where the
    kernel gives them."""

    def __init__(self, path: Path, size: int, count: int, *, huge: bool = False) -> None:
        self._size = size
        shared = os.memfd_create("kvd-bench")
        os.ftruncate(shared, size * count)
        self._mapping = Mapping(shared, size * count, writable=True)
        if huge:
            os.posix_fallocate(shared, 0, size * count)
            self._mapping.collapse(0, size * count)
        os.close(shared)
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(path, flags, 0o600)
        rng = np.random.default_rng(4)
        with self._mapping.bytes.data as view:
            for at in range(0, size * count, size):
                view[at : at + size] = rng.integers(0, 256, size, np.uint8).tobytes()
                os.pwrite(self._fd, view[at : at + size], at)

    def read(self, n: int) -> float:
        """Seconds."""
        at = n * self._size
        with self._mapping.bytes.data as view, view[at : at + self._size] as into:
            begun = time.perf_counter()
            os.preadv(self._fd, [into], at)
            return time.perf_counter() - begun

    def close(self) -> None:
        os.close(self._fd)
        self._mapping.close()
