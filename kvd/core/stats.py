"""What `stat` shows of the core: the same numbers that are enforced.

The law of this module: it reads, and keeps no number of its own.
"""

from __future__ import annotations

from typing import Any

from kvd.core.counters import as_dict
from kvd.core.leases import Leases
from kvd.core.lower import Lower
from kvd.core.shares import UNBOUNDED
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.core.writes import Phase, Writes


def stat(
    store: Store,
    leases: Leases,
    writes: Writes,
    uptime_ns: int,
    namespace: str | None,
    moving: dict[str, int],
) -> dict[str, Any]:
    """All sections; of one tenant, or of all (namespace None). A tenant's has its own counters and
    gauges, and of the tiers how full they are, for that is what it is refused by."""
    slabs = store.slabs
    spaces = [s for s in store.spaces.all() if namespace in (None, s.namespace)]
    if namespace is None:
        gauges = {
            "leased_chunks": store.leased_chunks,
            "active_leases": len(leases.by_number),
            "active_writes": len(writes.by_number),
            "writing_bytes": store.writing_bytes,
            "condemned_bytes": store.condemned_bytes,
            "held_bytes": store.held_bytes,
            "pending_touches": len(store.touches),
            "transient_bytes": store.transient_bytes,
            "kept_bytes": store.keeping.nbytes,
            **moving,
        }
        counters = store.counters.total()
        sessions = len(store.sessions)
    else:
        gauges = _own(leases, writes, namespace)
        gauges["kept_bytes"] = store.keeping.of(namespace)
        counters = as_dict(store.counters.tenant(namespace))
        sessions = sum(s.namespace == namespace for s in store.sessions.by_number.values())
    tier: dict[str, Any] = {
        "name": "dram",
        "limit_bytes": store.config.size,
        "used_bytes": slabs.taken_bytes,
        "slot_bytes": slabs.slot_bytes(),
        "chunks": sum(space.chunks for space in spaces),
        "slabs_free": slabs.blanks,
        "reserved_bytes": slabs.open * slabs.size,
        "condemned_bytes": gauges["condemned_bytes"],
        "writing_bytes": gauges["writing_bytes"],
        "held_bytes": store.held_bytes,
        "leased_chunks": gauges["leased_chunks"],
        "state": "draining" if store.draining else "degraded" if store.policy.error else "ok",
    }
    if namespace is None:
        tier["eviction"] = store.policy.shown()
    below = [
        {
            "name": lower.name,
            "chunks": lower.chunks,
            "payload_bytes": lower.bytes,
            "policy": lower.config.policy.value,
            "reading": lower.reading,
            "writing": lower.writing,
            "overdue": lower.overdue,
            "eviction": lower.policy.shown(),
            "state": "ok" if _well(lower) else "degraded",
        }
        for lower in store.ladder.lowers
    ]
    if namespace is not None:  # how much others have there is nobody's business
        below = [{"name": row["name"], "state": row["state"]} for row in below]
    elif below:
        tier["transient_bytes"] = store.transient_bytes
    names = [namespace] if namespace is not None else tenant_names(store)
    tenants = {
        name: {
            "chunks": sum(s.chunks for s in spaces if s.namespace == name),
            "bytes": sum(s.bytes for s in spaces if s.namespace == name),
            "chunks_below": sum(s.alone for s in spaces if s.namespace == name),
            "bytes_below": sum(s.below_bytes for s in spaces if s.namespace == name),
            "tiers": _shares(store, spaces, name, whole=namespace is None),
            "counters": as_dict(store.counters.tenant(name)),
        }
        for name in names
    }
    return {
        "instance": store.config.instance,
        "epoch": store.config.epoch,
        "uptime_s": uptime_ns / 1e9,
        "sessions": sessions,
        "tiers": [tier, *below],
        "counters": {**counters, **gauges},
        "tenants": tenants,
    }


def _well(lower: Lower) -> bool:
    return lower.readable and lower.writable and not lower.policy.error


def tenant_names(store: Store) -> list[str]:
    """All namespaces that have rules or chunks, or asked for something."""
    shares = store.shares
    used = {name for n, name in enumerate(shares.names) if any(t.use[n] for t in shares.tiers)}
    return sorted({*store.counters.namespaces(), *shares.ruled, *used} - {""})


def _shares(store: Store, spaces: list[Space], name: str, *, whole: bool) -> dict[str, Any]:
    """What a tenant has of each tier, and may have: what the core goes by, in slot bytes. Not
    `whole`: without what would tell the tenant of others."""
    tenant = store.shares.find(name)
    if tenant is None:
        return {}
    queues = {queue for space in spaces if space.namespace == name for queue in space.queues}
    chunks = [sum(space.chunks for space in spaces if space.namespace == name)]
    chunks += [
        sum(lower.residents.get(queue, 0) for queue in queues) for lower in store.ladder.lowers
    ]
    most = [tier.maximum[tenant] for tier in store.shares.tiers]
    shown = {
        tier.name: {
            "used_bytes": tier.use[tenant],
            "chunks": chunks[n],
            "minimum_bytes": tier.minimum[tenant],
            "share_bytes": int(tier.share[tenant]),
            "maximum_bytes": None if most[n] == UNBOUNDED else most[n],
            "weight": tier.told[tenant].weight,
        }
        for n, tier in enumerate(store.shares.tiers)
    }
    if not whole:
        for tier in store.shares.tiers:
            row = shown[tier.name]
            del row["share_bytes"]
            row["minimum_bytes"] = tier.told[tenant].minimum.of(tier.limit)
    return shown


def _own(leases: Leases, writes: Writes, namespace: str) -> dict[str, int]:
    """The gauges of one tenant: of its sessions that are open."""
    held = [lease for lease in leases.by_number.values() if lease.namespace == namespace]
    rows = {int(row) for lease in held for row in lease.rows}
    mine = [w for w in writes.by_number.values() if w.session.namespace == namespace]
    items = [item for write in mine for item in write.items if item is not None]
    condemned = sum(item.size for item in items if item.phase is Phase.CONDEMNED)
    writing = sum(item.size for item in items if item.phase in (Phase.OPEN, Phase.EVICTED))
    return {
        "leased_chunks": len(rows),
        "active_leases": len(held),
        "active_writes": len(mine),
        "writing_bytes": writing,
        "condemned_bytes": condemned,
    }
