"""What `stat` shows of the core: the same numbers that are enforced.

The law of this module: it keeps no number of its own. `read` copies those of one moment, and is all
that the core's thread need do, quickly even with a thousand tenants; `shown` makes sections of a
copy and touches nothing else, so that any thread may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvd.core.counters import Counts, Values, as_dict, of_tenant, summed
from kvd.core.leases import Leases
from kvd.core.lower import Lower
from kvd.core.shares import UNBOUNDED, TierShare
from kvd.core.store import Store
from kvd.core.writes import Phase, Writes

__all__ = ["Reading", "read", "shown"]


class Sums(NamedTuple):
    """Of one space."""

    namespace: str
    chunks: int
    bytes: int
    alone: int
    below_bytes: int
    queues: tuple[int, ...]


class Use(NamedTuple):
    """One tier by tenant: what it has of it and may have, in slot bytes."""

    name: str
    limit: int
    use: list[int]
    minimum: list[int]
    share: list[float]
    maximum: list[int]
    told: list[TierShare]


class Reading(NamedTuple):
    """The numbers of one moment: of all tenants, or of one (`namespace`)."""

    namespace: str | None
    instance: str
    epoch: int
    uptime_ns: int
    sessions: int
    gauges: dict[str, int]
    tiers: list[dict[str, Any]]  # rows of plain values, dram first
    own: Counts  # what is not kept by namespace
    counts: dict[str, Values]  # by namespace
    spaces: list[Sums]
    residents: list[dict[int, int]]  # of each tier below, chunks by queue
    uses: list[Use]  # of all tiers, dram first
    tenants: list[str]  # by number, the first is nobody
    ruled: list[str]


def read(
    store: Store,
    leases: Leases,
    writes: Writes,
    uptime_ns: int,
    namespace: str | None,
    moving: dict[str, int],
) -> Reading:
    """Copy all that is shown; of one tenant, or of all (namespace None)."""
    spaces = [
        Sums(s.namespace, s.chunks, s.bytes, s.alone, s.below_bytes, s.queues)
        for s in store.spaces.all()
        if namespace in (None, s.namespace)
    ]
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
        counts = store.counters.tenants()
        sessions = len(store.sessions)
    else:
        gauges = _own(leases, writes, namespace)
        gauges["kept_bytes"] = store.keeping.of(namespace)
        counts = {namespace: store.counters.values(namespace)}
        sessions = sum(s.namespace == namespace for s in store.sessions.by_number.values())
    shares = store.shares
    return Reading(
        namespace,
        store.config.instance,
        store.config.epoch,
        uptime_ns,
        sessions,
        gauges,
        _tiers(store, gauges, sum(space.chunks for space in spaces), namespace),
        store.counters.own.copy(),
        counts,
        spaces,
        [lower.residents.copy() for lower in store.ladder.lowers],
        [
            Use(
                t.name,
                t.limit,
                t.use.copy(),
                t.minimum.copy(),
                t.share.copy(),
                t.maximum.copy(),
                t.told.copy(),
            )
            for t in shares.tiers
        ],
        shares.names.copy(),
        shares.ruled,
    )


def _tiers(
    store: Store, gauges: dict[str, int], chunks: int, namespace: str | None
) -> list[dict[str, Any]]:
    """A row each. A tenant's tells how full they are, for that is what it is refused by."""
    slabs = store.slabs
    tier: dict[str, Any] = {
        "name": "dram",
        "limit_bytes": store.config.size,
        "used_bytes": slabs.taken_bytes,
        "slot_bytes": slabs.slot_bytes(),
        "chunks": chunks,
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
    return [tier, *below]


def _well(lower: Lower) -> bool:
    return lower.readable and lower.writable and not lower.policy.error


def shown(reading: Reading, pause: Callable[[], object] | None = None) -> dict[str, Any]:
    """All sections. A tenant's has its own counters and gauges. `pause` is called now and then:
    another thread lets the core's have the interpreter."""
    namespace = reading.namespace
    names = [namespace] if namespace is not None else _names(reading)
    if namespace is None:
        counters = as_dict(summed(reading.own, reading.counts.values()))
    else:
        counters = of_tenant(reading.counts[namespace])
    spaces: dict[str, list[Sums]] = defaultdict(list)
    for space in reading.spaces:
        spaces[space.namespace].append(space)
    numbers = {name: number for number, name in enumerate(reading.tenants) if name}
    tenants = {}
    for at, name in enumerate(names):
        if pause is not None and at % 8 == 0:
            pause()
        tenants[name] = {
            "chunks": sum(s.chunks for s in spaces[name]),
            "bytes": sum(s.bytes for s in spaces[name]),
            "chunks_below": sum(s.alone for s in spaces[name]),
            "bytes_below": sum(s.below_bytes for s in spaces[name]),
            "tiers": _shares(reading, spaces[name], numbers.get(name)),
            "counters": of_tenant(reading.counts.get(name)),
        }
    return {
        "instance": reading.instance,
        "epoch": reading.epoch,
        "uptime_s": reading.uptime_ns / 1e9,
        "sessions": reading.sessions,
        "tiers": reading.tiers,
        "counters": {**counters, **reading.gauges},
        "tenants": tenants,
    }


def _names(reading: Reading) -> list[str]:
    """All namespaces that have rules or chunks, or asked for something."""
    used = {name for n, name in enumerate(reading.tenants) if any(t.use[n] for t in reading.uses)}
    return sorted({*reading.counts, *reading.ruled, *used} - {""})


def _shares(reading: Reading, spaces: Iterable[Sums], tenant: int | None) -> dict[str, Any]:
    """What a tenant has of each tier, and may have: what the core goes by, in slot bytes. In a
    tenant's own reading without what would tell it of others."""
    if tenant is None:
        return {}
    queues = {queue for space in spaces for queue in space.queues}
    chunks = [sum(space.chunks for space in spaces)]
    chunks += [sum(by.get(queue, 0) for queue in queues) for by in reading.residents]
    rows: dict[str, Any] = {}
    for tier, count in zip(reading.uses, chunks, strict=True):
        most = tier.maximum[tenant]
        row = rows[tier.name] = {
            "used_bytes": tier.use[tenant],
            "chunks": count,
            "minimum_bytes": tier.minimum[tenant],
            "share_bytes": int(tier.share[tenant]),
            "maximum_bytes": None if most == UNBOUNDED else most,
            "weight": tier.told[tenant].weight,
        }
        if reading.namespace is not None:
            del row["share_bytes"]
            row["minimum_bytes"] = tier.told[tenant].minimum.of(tier.limit)
    return rows


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
