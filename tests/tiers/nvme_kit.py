"""What tests of the NVMe tier share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiers_kit import CONFIG, Rig

from kvd.tiers.nvme import NvmeBackend, NvmeConfig
from kvd.tiers.pool import PoolConfig

MIB = 1 << 20


def disk(path: Path, limit: int = 8 * MIB, **how: object) -> NvmeBackend:
    config = {"reserve_bytes": MIB, "instance": "test", **how}
    return NvmeBackend(NvmeConfig(path, limit_bytes=limit, **config))  # type: ignore[arg-type]


def rig(path: Path, limit: int = 8 * MIB, pool: PoolConfig = CONFIG, **how: object) -> Rig:
    return Rig(disk(path, limit, **how), "nvme", pool).start()


def du(path: Path) -> int:
    """Bytes that the directory takes on disk."""
    total = os.stat(path).st_blocks * 512
    for entry in path.iterdir():
        try:
            total += entry.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def slabs(path: Path) -> list[Path]:
    return sorted(path.glob("kvd-slab-*"))


def script(source: str, *args: str, **how: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the tests' helpers to import."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environ.update(how.pop("environ", {}))  # type: ignore[call-overload]
    prefix: list[str] = how.pop("prefix", [])  # type: ignore[assignment]
    return subprocess.run(
        [*prefix, sys.executable, "-c", source, *args],
        capture_output=True, text=True, timeout=60, env=environ, check=False,
    )  # fmt: skip
