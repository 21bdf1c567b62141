"""Counters of the core, by declared name and label.

The law of this module: only what stands in kvd.telemetry.table can be counted, and a counter that
is kept by namespace has no second, separate total.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from kvd.telemetry import METRICS, MetricKind

Counts = dict[tuple[str, str], int]


def _declared(*, tenant: bool) -> dict[str, tuple[str, ...]]:
    """Names of counters, and the labels of each; none: a plain number."""
    return {
        m.name: m.values
        for m in METRICS.values()
        if m.kind is MetricKind.COUNTER and m.tenant == tenant
    }


_OWN, _TENANT = _declared(tenant=False), _declared(tenant=True)
_KEYS: Final = frozenset(
    (name, label) for name, labels in _TENANT.items() for label in labels or ("",)
)


class TenantCounts(Counts):
    """Of one namespace. Only what has been counted stands in it: most tenants use few counters, and
    a copy is made of all tenants at once."""

    __slots__ = ()

    def __missing__(self, key: tuple[str, str]) -> int:
        if key not in _KEYS:
            raise KeyError(key)
        return 0


class Counters:
    """`own` holds what is not kept by namespace; `tenant(ns)` the rest. Keys are (name, label);
    a key that is not declared is a KeyError where it is counted."""

    def __init__(self) -> None:
        self.own: Counts = {
            (name, label): 0 for name, labels in _OWN.items() for label in labels or ("",)
        }
        self._tenants: dict[str, TenantCounts] = {}

    def tenant(self, namespace: str) -> Counts:
        counts = self._tenants.get(namespace)
        if counts is None:
            counts = self._tenants[namespace] = TenantCounts()
        return counts

    @property
    def namespaces(self) -> Iterable[str]:
        """That have counted something."""
        return self._tenants.keys()

    def values(self, namespace: str) -> Counts:
        """A copy. It is no use of the namespace: one that has not counted stays so."""
        counts = self._tenants.get(namespace)
        return {} if counts is None else counts.copy()

    def tenants(self) -> dict[str, Counts]:
        """Copies, by namespace."""
        return {name: counts.copy() for name, counts in self._tenants.items()}


def add(sums: Counts, counts: Counts) -> None:
    """To what other namespaces have counted."""
    for key, count in counts.items():
        sums[key] = sums.get(key, 0) + count


def total(own: Counts, tenants: Counts) -> dict[str, Any]:
    """{name: value or {label: value}} of every declared counter; `tenants` is the sum over all."""
    return {**_nested(_OWN, own), **_nested(_TENANT, tenants)}


def of_tenant(counts: Counts) -> dict[str, Any]:
    """The same of what is kept by namespace."""
    return _nested(_TENANT, counts)


def _nested(declared: dict[str, tuple[str, ...]], counts: Counts) -> dict[str, Any]:
    get = counts.get
    return {
        name: {label: get((name, label), 0) for label in labels} if labels else get((name, ""), 0)
        for name, labels in declared.items()
    }
