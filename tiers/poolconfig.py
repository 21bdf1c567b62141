"""How many work in a pool, on what, and how long it waits for them.

The law of this module: plain numbers; nothing here changes while a pool lives. Times in ns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvd.tiers.breaker import BreakerConfig

__all__ = ["DEFAULT", "PoolConfig"]

SECOND: Final = 1_000_000_000


class PoolConfig(NamedTuple):
    """`workers` jobs run at a time; `writers` of them at most are writes, scrubs or prefetches, so
    that a load never waits behind a whole batch of demotions; fewer for `quiet_ns` after a load
    (tiers/quiet.py). `depth` calls that write, and as many that read, are in the medium at a time
    (tiers/seats.py); 0: as many as work."""

    workers: int = 4
    writers: int = 3
    depth: int = 0
    quiet_ns: int = 0
    spares: int = 4  # workers beyond, while others are stuck
    stuck_ns: int = 10 * SECOND  # without a deadline, a job that runs longer is stuck
    probe_ns: int = 10 * SECOND  # a probe's own deadline
    close_ns: int = 5 * SECOND
    verify_source: bool = True
    breaker: BreakerConfig = BreakerConfig()

    def for_disk(self, depth: int, quiet_ns: int) -> PoolConfig:
        """For a disk that is to have `depth` calls at a time: beside them one worker takes the
        digest of what it writes next, and one is left for a load."""
        return self._replace(
            workers=depth + 2, writers=depth + 1, depth=depth, spares=depth, quiet_ns=quiet_ns
        )


DEFAULT: Final = PoolConfig()
