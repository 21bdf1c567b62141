"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from kvd.native import compiled


def facts() -> list[tuple[str, str]]:
    """Name and value of each fact that a reader needs to compare figures."""
    return [
        ("cpu", f"{_cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"),
        (
            "memory",
            f"{_meminfo('MemTotal') / 2**30:.1f} GiB, "
            f"{_meminfo('MemAvailable') / 2**30:.1f} GiB available",
        ),
        ("/dev/shm", _shm()),
        ("huge pages", f"anonymous {_choice('enabled')}, shared {_choice('shmem_enabled')}"),
        ("load", " ".join(f"{one:.2f}" for one in os.getloadavg())),
        ("kernel", platform.release()),
        (
            "software",
            f"Python {platform.python_version()}, numpy {version('numpy')}, "
            f"pyzmq {version('pyzmq')}, kvd {version('kvd')} "
            f"({'compiled' if compiled() else 'in Python'})",
        ),
    ]


def say(stream: TextIO | None = None) -> None:
    """Print the facts (to standard error, so that JSON on standard output stays alone)."""
    width = max(len(name) for name, _ in facts())
    for name, value in facts():
        print(f"{name:<{width}}  {value}", file=stream or sys.stderr)


def busy(what: str) -> None:
    """Say that other processes had the machine: the figures are of both."""
    print(f"busy machine: other processes took part in {what}", file=sys.stderr)


def doing(what: str) -> None:
    """Say what is measured now, where that takes a while."""
    print(f"kvd-bench: {what}", file=sys.stderr)


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Hardware", "cpu model"):
            return value.strip()
    return platform.machine()


def _meminfo(name: str) -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _shm() -> str:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return str(error)
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    return f"{size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"


def _choice(name: str) -> str:
    """The bracketed word of a transparent-huge-page setting."""
    text = " ".join(_lines(f"/sys/kernel/mm/transparent_hugepage/{name}"))
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
