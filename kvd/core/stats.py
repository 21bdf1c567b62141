"""What `stat` shows of the core: the same numbers that are enforced.

The law of this module: it keeps no number of its own. `read` copies those of one moment, and is all
that the core's thread need do at once, quickly even with a thousand tenants; what makes sections of
a copy touches nothing else, so that any thread may, and the core's in as many slices as it likes. A
row costs much more than a sum, so rows are made only for the tenants that are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvd.core.counters import Counts, add, of_tenant, total
from kvd.core.leases import Leases
from kvd.core.lower import Lower
from kvd.core.store import Store
from kvd.core.tenantrows import Slices, Sums, TenantTable, Use
from kvd.core.write import Phase
from kvd.core.writes import Writes
from kvd.telemetry.tenants import OTHER, told_apart

__all__ = ["Reading", "known", "read", "rows", "shown", "work_out"]

_SUMS: Final = attrgetter(*Sums._fields)  # of a space: they are called the same there


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
    counts: dict[str, Counts]  # by namespace
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
    spaces = _sums(store, None if namespace is None else {namespace})
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
        _uses(store),
        shares.names.copy(),
        shares.ruled,
    )


def _sums(store: Store, namespaces: set[str] | None) -> list[Sums]:
    """Of the spaces of these namespaces (None: of all)."""
    spaces = store.spaces.all()
    if namespaces is not None:
        spaces = [space for space in spaces if space.namespace in namespaces]
    return list(map(Sums._make, map(_SUMS, spaces)))


def _uses(store: Store) -> list[Use]:
    return [
        Use(
            t.name,
            t.limit,
            t.use.copy(),
            t.minimum.copy(),
            t.share.copy(),
            t.maximum.copy(),
            t.told.copy(),
        )
        for t in store.shares.tiers
    ]


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


def shown(
    reading: Reading, pause: Callable[[], object] | None = None, apart: int | None = None
) -> dict[str, Any]:
    """All sections, at once: as `work_out`. `pause` is called now and then: another thread lets the
    core's have the interpreter."""
    slices = work_out(reading, apart)
    while True:
        try:
            next(slices)
        except StopIteration as done:
            sections: dict[str, Any] = done.value
            return sections
        if pause is not None:
            pause()


def work_out(reading: Reading, apart: int | None = None) -> Slices[dict[str, Any]]:
    """All sections. A tenant's has its own counters and gauges. So many tenants have rows of their
    own (None: all), those that came first; what the others have is summed up under `other`."""
    namespace = reading.namespace
    if namespace is None:
        sums: Counts = {}
        for at, counts in enumerate(reading.counts.values(), 1):
            add(sums, counts)
            if at % 16 == 0:
                yield 3
        counters = total(reading.own, sums)
        uses = [tier.use for tier in reading.uses]
        names = _names(reading.counts, reading.ruled, reading.tenants, uses)
        yield len(names) // 16
    else:
        counters = of_tenant(reading.counts[namespace])
        names = [namespace]
    table = TenantTable(
        namespace is not None,
        reading.counts,
        reading.spaces,
        reading.residents,
        reading.uses,
        reading.tenants,
    )
    tenants: dict[str, Any] = {}
    own, rest = told_apart(names, [*reading.tenants, *names], apart)
    for name in own:
        tenants[name] = table.row(name)
        yield 4
    if rest:
        tenants[OTHER] = yield from table.sum(rest)
    return {
        "instance": reading.instance,
        "epoch": reading.epoch,
        "uptime_s": reading.uptime_ns / 1e9,
        "sessions": reading.sessions,
        "tiers": reading.tiers,
        "counters": {**counters, **reading.gauges},
        "tenants": tenants,
    }


def known(store: Store) -> list[str]:
    """All namespaces that have rules or chunks, or asked for something, in their order."""
    shares = store.shares
    uses = [tier.use for tier in shares.tiers]
    return _names(store.counters.namespaces, shares.ruled, shares.names, uses)


def _names(
    counted: Iterable[str], ruled: Iterable[str], tenants: list[str], uses: list[list[int]]
) -> list[str]:
    used = {name for use in uses for name, taken in zip(tenants, use, strict=True) if taken}
    return sorted({*counted, *ruled, *used} - {""})


def rows(store: Store, wanted: list[str], *, own: bool) -> dict[str, Any]:
    """What `tenants` shows of these namespaces now; `own`: to one of them itself, which is told
    nothing of others."""
    table = TenantTable(
        own,
        {name: store.counters.values(name) for name in wanted},
        _sums(store, set(wanted)),
        [lower.residents for lower in store.ladder.lowers],
        _uses(store),
        store.shares.names,
    )
    return {name: table.row(name) for name in wanted}


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
