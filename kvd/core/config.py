"""What the core is told at its start. The law of this module: nothing here changes afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvd.core.shares import TenantRules

PAGE: Final = 4096
SECOND_NS: Final = 1_000_000_000
MAX_ROWS: Final = 1 << 24  # chunks and cells that the flat arrays can hold at most
MAX_TIERS: Final = 8


class WritePolicy(StrEnum):
    """When a chunk is written to a tier below."""

    ON_DEMOTE = "on-demote"  # when it leaves DRAM
    THROUGH = "through"  # as soon as it is sealed
    ON_SECOND_HIT = "on-second-hit"  # once it was hit twice, and when it leaves DRAM if it was


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier below DRAM. Times in ns; `limit` in bytes sizes the arrays only: the tier itself
    says when it is full."""

    name: str
    limit: int
    policy: WritePolicy = WritePolicy.ON_DEMOTE
    read_ns: int = 5 * SECOND_NS  # a read that takes longer is a miss
    write_ns: int = 10 * SECOND_NS
    reads: int = 4  # in flight
    writes: int = 8
    # The first read of a load goes alone, so that it has the whole medium for itself; wrong for a
    # medium whose requests don't slow each other.
    first_alone: bool = True
    durable: bool = True
    scrub: int = 0  # bytes a second that are read in the background; 0: none


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes in bytes, times in ns. `unix_offset_ns` is Unix time minus the monotonic clock, so
    that records carry a wall-clock time although the core has no clock."""

    instance: str
    epoch: int
    size: int
    slab_size: int
    arena: int = 0  # number of the arena in slot references
    unix_offset_ns: int = 0
    seed: int = 0  # of the index; a secret, so that no client can choose keys that collide
    lease_default_ns: int = 30 * SECOND_NS
    lease_max_ns: int = 600 * SECOND_NS
    ttl_default_ns: int = 30 * SECOND_NS
    ttl_max_ns: int = 600 * SECOND_NS
    apart: int | None = None  # tenants that have rows of their own in a stat; None: all
    max_keys: int = 4096
    max_results: int = 16384
    max_specs: int = 4096
    write_share: float = 0.25  # of the arena: a session's unfinished and condemned writes
    lease_share: float = 0.5  # of the arena: a session's leases
    seals_in_flight: int = 64
    verifies_in_flight: int = 16
    copies_in_flight: int = 4
    horizon_step_ns: int = SECOND_NS  # the lease horizon is moved in steps of this
    tiers: tuple[TierConfig, ...] = ()  # below DRAM, the next one first
    high: float = 0.97  # of a class's slots: beyond this, chunks are demoted
    low: float = 0.95  # down to here
    batch_share: float = 0.02  # of the arena: demoted at a time
    transient_share: float = 0.10  # of the arena: first hits below DRAM
    pin_share: float = 0.1  # of the arena: what hints of one tenant may keep
    pin_total_share: float = 0.5  # of the arena: what those of all tenants may
    pin_max_ns: int = 3600 * SECOND_NS  # that a hint holds
    room_wait_ns: int = SECOND_NS // 20  # that a store waits for demotions before victims drop
    ahead_share: float = 1 / 64  # of a class's slots: made free for the next store, see Ahead
    isolate: bool = True  # tenants have shares; False: one pool
    tenants: tuple[tuple[str, TenantRules], ...] = ()  # at the start; see SetTenant

    @property
    def records_per_slab(self) -> int:
        return self.slab_size // PAGE

    @property
    def slab_count(self) -> int:
        return self.size // self.slab_size

    @property
    def rows(self) -> int:
        """Rows of the flat arrays: every page a slot, and as many keys without bytes. Untouched
        rows cost address space only."""
        here = 2 * self.slab_count * self.records_per_slab + 64
        return min(here + sum(tier.limit // PAGE for tier in self.tiers), MAX_ROWS)

    @property
    def transient_cap(self) -> int:
        return int(self.size * self.transient_share)

    @property
    def write_cap(self) -> int:
        return int(self.size * self.write_share)

    @property
    def lease_cap(self) -> int:
        return int(self.size * self.lease_share)


def slot_size(nbytes: int) -> int:
    """The size class of a payload: rounded up to 4 KiB."""
    return -(-nbytes // PAGE) * PAGE
