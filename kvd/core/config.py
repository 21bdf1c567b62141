"""What the core is told at its start. The law of this module: nothing here changes afterwards."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 4096
SECOND_NS = 1_000_000_000
MAX_ROWS = 1 << 24  # chunks and cells that the flat arrays can hold at most


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
    max_keys: int = 4096
    max_results: int = 16384
    max_specs: int = 4096
    write_share: float = 0.25  # of the arena: a session's unfinished and condemned writes
    lease_share: float = 0.5  # of the arena: a session's leases
    seals_in_flight: int = 64
    verifies_in_flight: int = 16
    copies_in_flight: int = 4
    horizon_step_ns: int = SECOND_NS  # the lease horizon is moved in steps of this

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
        return min(2 * self.slab_count * self.records_per_slab + 64, MAX_ROWS)

    @property
    def write_cap(self) -> int:
        return int(self.size * self.write_share)

    @property
    def lease_cap(self) -> int:
        return int(self.size * self.lease_share)


def slot_size(nbytes: int) -> int:
    """The size class of a payload: rounded up to 4 KiB."""
    return -(-nbytes // PAGE) * PAGE
