"""Counters of the core, by declared name and label.

The law of this module: only what stands in kvd.telemetry.table can be counted, and a counter that
is kept by namespace has no second, separate total.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
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


_TENANT = tuple(_zeros(tenant=True))  # the keys of a namespace's counters, in their order
Values = tuple[int, ...]  # of one namespace, in that order: a tenth of the room of a dict


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

    def values(self, namespace: str) -> Values:
        """A copy."""
        return tuple(self.tenant(namespace).values())

    def tenants(self) -> dict[str, Values]:
        """Copies, by namespace."""
        return {name: tuple(counts.values()) for name, counts in self._tenants.items()}


def summed(own: Counts, tenants: Iterable[Values]) -> Counts:
    """Every declared counter; what is kept by namespace is the sum over these tenants."""
    sums = [0] * len(_TENANT)
    for values in tenants:
        sums = list(map(add, sums, values))
    return {**own, **dict(zip(_TENANT, sums, strict=True))}


def of_tenant(values: Values | None) -> dict[str, Any]:
    """{name: value or {label: value}} of one namespace; None: it has not counted yet."""
    return as_dict(dict(zip(_TENANT, values or [0] * len(_TENANT), strict=True)))


def as_dict(counts: Counts) -> dict[str, Any]:
    """{name: value or {label: value}}."""
    result: dict[str, Any] = {}
    for (name, value), count in counts.items():
        if METRICS[name].values:
            result.setdefault(name, {})[value] = count
        else:
            result[name] = count
    return result
