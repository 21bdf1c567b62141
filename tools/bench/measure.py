"""Clocks, buffers and medians: how kvd-bench measures.

The law of this module: what is compared is measured in turns, in the same run, over the same
bytes. Buffers are page-aligned and were touched before the clock starts (an unaligned source
costs 10-16 % of a copy, a first touch four fifths of it).
"""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GB = 1e9
MIB = 1 << 20
Bytes = NDArray[np.uint8]
_TICK = os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """One timed pass: seconds of wall clock, and of this process's CPU (user and system)."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Sample:
    """Run `work` once under both clocks, with Python's collector at rest."""
    with quiet_collector():
        cpu = time.process_time_ns()
        wall = time.perf_counter_ns()
        work()
        wall = time.perf_counter_ns() - wall
        cpu = time.process_time_ns() - cpu
    return Sample(wall / 1e9, cpu / 1e9)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No cyclic garbage collection inside a measurement."""
    was_on = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Weather:
    """Whether other processes had the machine while something was measured.

    A round of which others took more than `share` of one core says as much about them as about
    kvd; it is measured again. The judgement looks at them only, never at the figures.
    """

    def __init__(self, own_cpu_s: Callable[[], float], share: float = 0.1) -> None:
        """`own_cpu_s`: seconds of CPU so far of all processes that take part."""
        self._own_cpu_s = own_cpu_s
        self._share = share
        self.begin()

    def begin(self) -> None:
        self._busy, self._own = _busy_s(), self._own_cpu_s()
        self._wall = time.perf_counter()

    def calm(self) -> bool:
        """Since `begin`. A tick of 10 ms either way is forgiven."""
        others = (_busy_s() - self._busy) - (self._own_cpu_s() - self._own)
        return others <= self._share * (time.perf_counter() - self._wall) + 2 / _TICK


def process_cpu_s(pid: int) -> float:
    """User and system seconds of a process so far, from /proc (10 ms steps)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def threads_cpu_s(pid: int) -> float:
    """Seconds on a CPU of the threads that a process has now: exact, where what it takes is less
    than the steps of `process_cpu_s`."""
    spent = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            spent += int(file.read().split()[0])
    return spent / 1e9


def _busy_s() -> float:
    """Seconds of CPU that all processes of this machine took, and that others stole from it."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, file.readline().split()[1:9]
        )
    return (user + nice + system + irq + softirq + steal) / _TICK


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(np.ceil(share * len(ordered))) - 1))]


class Buffer:
    """Page-aligned memory that was written once: private, or shared as the arena's is."""

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        self._fd = -1
        if shared:
            # the same file system and the same kind of mapping as an arena; no name is left
            self._fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._fd, 0, nbytes)
            self._map = mmap.mmap(self._fd, nbytes)
        else:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.array[:: mmap.PAGESIZE] = 1  # fault every page in

    def fill(self, seed: int) -> None:
        """Bytes without a pattern, different for each seed."""
        words = self.array[: len(self.array) // 8 * 8].view(np.uint64)
        step = MIB // 8
        block = np.random.default_rng(seed).integers(0, 2**63, size=step, dtype=np.uint64)
        for at in range(0, len(words), step):
            part = words[at : at + step]
            np.add(block[: len(part)], np.uint64(at), out=part)

    def close(self) -> None:
        del self.array
        try:
            self._map.close()
        except BufferError:  # somebody still looks at it; the kernel frees it with the process
            pass
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
