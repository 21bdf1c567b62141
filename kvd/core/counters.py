"""Counters of the core, by declared name and label.

The law of this module: only what stands in kvd.telemetry.table can be counted, and a counter that
is kept by namespace has no second, separate total.
"""

from __future__ import annotations

from typing import Any

from kvd.telemetry import METRICS, MetricKind

Counts = dict[tuple[str, str], int]


def _zeros(tenant: bool) -> Counts:
    return {
        (m.name, value): 0
        for m in METRICS.values()
        if m.kind is MetricKind.COUNTER and m.tenant == tenant
        for value in (m.values or ("",))
    }


class Counters:
    """`own` holds what is not kept by namespace; `tenant(ns)` the rest. Keys are (name, label);
    a key that is not declared is a KeyError where it is counted."""

    def __init__(self) -> None:
        self.own: Counts = _zeros(tenant=False)
        self._tenants: dict[str, Counts] = {}

    def tenant(self, namespace: str) -> Counts:
        counts = self._tenants.get(namespace)
        if counts is None:
            counts = self._tenants[namespace] = _zeros(tenant=True)
        return counts

    def namespaces(self) -> list[str]:
        return sorted(self._tenants)

    def total(self) -> dict[str, Any]:
        """{name: value or {label: value}}, every declared counter."""
        sums: Counts = {**self.own, **_zeros(tenant=True)}
        for counts in self._tenants.values():
            for key, value in counts.items():
                sums[key] += value
        return as_dict(sums)


def as_dict(counts: Counts) -> dict[str, Any]:
    """{name: value or {label: value}}."""
    result: dict[str, Any] = {}
    for (name, value), count in counts.items():
        if METRICS[name].values:
            result.setdefault(name, {})[value] = count
        else:
            result[name] = count
    return result
