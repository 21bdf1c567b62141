"""What `stat` shows of the core: the same numbers that are enforced.

The law of this module: it reads, and keeps no number of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core.counters import as_dict
from kvd.core.leases import Leases
from kvd.core.store import Store

if TYPE_CHECKING:
    from kvd.core.writes import Writes


def stat(
    store: Store,
    leases: Leases,
    writes: Writes,
    uptime_ns: int,
    namespace: str | None,
    moving: dict[str, int],
) -> dict[str, Any]:
    """All sections; of one tenant, or of all (namespace None)."""
    slabs = store.slabs
    spaces = store.spaces.all()
    tier = {
        "name": "dram",
        "limit_bytes": store.config.size,
        "used_bytes": slabs.taken_bytes,
        "slot_bytes": slabs.slot_bytes(),
        "chunks": sum(space.chunks for space in spaces),
        "slabs_free": slabs.blanks,
        "reserved_bytes": slabs.open * slabs.size,
        "condemned_bytes": store.condemned_bytes,
        "writing_bytes": store.writing_bytes,
        "held_bytes": store.held_bytes,
        "leased_chunks": store.leased_chunks,
        "state": "draining" if store.draining else "ok",
    }
    below = [
        {
            "name": lower.name,
            "chunks": lower.chunks,
            "payload_bytes": lower.bytes,
            "policy": lower.config.policy.value,
            "reading": lower.reading,
            "writing": lower.writing,
            "overdue": lower.overdue,
            "state": "ok" if lower.readable and lower.writable else "degraded",
        }
        for lower in store.ladder.lowers
    ]
    if below:
        tier["transient_bytes"] = store.transient_bytes
    names = store.counters.namespaces() if namespace is None else [namespace]
    tenants = {
        name: {
            "chunks": sum(s.chunks for s in spaces if s.namespace == name),
            "bytes": sum(s.bytes for s in spaces if s.namespace == name),
            "chunks_below": sum(s.alone for s in spaces if s.namespace == name),
            "bytes_below": sum(s.below_bytes for s in spaces if s.namespace == name),
            "counters": as_dict(store.counters.tenant(name)),
        }
        for name in names
    }
    return {
        "instance": store.config.instance,
        "epoch": store.config.epoch,
        "uptime_s": uptime_ns / 1e9,
        "sessions": len(store.sessions),
        "tiers": [tier, *below],
        "counters": {
            **store.counters.total(),
            "leased_chunks": store.leased_chunks,
            "active_leases": len(leases.by_number),
            "active_writes": len(writes.by_number),
            "writing_bytes": store.writing_bytes,
            "condemned_bytes": store.condemned_bytes,
            "held_bytes": store.held_bytes,
            "pending_touches": len(store.touches),
            "transient_bytes": store.transient_bytes,
            **moving,
        },
        "tenants": tenants,
    }
