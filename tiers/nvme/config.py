"""What an operator says about a disk, and the sizes that follow from it.

The law of this module: a limit has room for at least one slab beside what lies with the slabs; one
that has not is refused, in numbers that would do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvd.errors import ConfigError
from kvd.tiers.nvme.layout import PAGE

SLACK = 64 << 10  # of the limit, for the marker, the lock and the probe file
LEAST_SLAB = 1 << 20
MOST_SLAB = 1 << 30


class NvmeConfig(NamedTuple):
    """`slab_bytes` None: a 32nd of the limit, from 1 MiB to 1 GiB. `reserve_bytes` of the file
    system are left free. `preallocate` False: sparse slabs, which may meet a full disk."""

    directory: Path
    instance: str
    limit_bytes: int
    slab_bytes: int | None = None
    engine: str = "auto"
    reserve_bytes: int = 1 << 30
    preallocate: bool = True
    threads: int = 4

    @property
    def usual(self) -> int:
        """Bytes of a slab, if one slot needs no more."""
        part = self.limit_bytes // 32 // PAGE * PAGE
        return self.slab_bytes or min(MOST_SLAB, max(LEAST_SLAB, part))

    @property
    def budget(self) -> int:
        """Bytes of the limit that slabs may take."""
        return self.limit_bytes - SLACK


def check(config: NvmeConfig) -> None:
    """ConfigError naming the setting and what would be accepted."""
    usual = config.usual
    if usual % PAGE or usual < 4 * PAGE:
        raise ConfigError(f"tier nvme: slab_bytes {usual} must be a multiple of {PAGE}")
    if config.budget < usual:
        raise ConfigError(
            f"tier nvme: limit {config.limit_bytes} is too small: at least {usual + SLACK} bytes "
            f"are needed for one slab of {usual}"
        )
    paths = (config.directory, *config.directory.parents)
    there = next(path for path in paths if os.path.exists(path))
    if not there.is_dir():
        raise ConfigError(f"tier nvme: {there} is not a directory: choose another")
