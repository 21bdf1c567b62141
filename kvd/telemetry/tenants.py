"""Figures by tenant, for few tenants or many.

The law of this module: a tenant that has a row of its own keeps it, and one that is told under
`other` stays there, so that no counter ever falls; the sum over all rows is the sum over all
tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["OTHER", "capped"]

OTHER = "other"


def capped(rows: Mapping[str, Any], order: Iterable[str], limit: int) -> dict[str, Any]:
    """`rows` by tenant, for the first `limit` of `order`; the others' sums under `other`, as well
    as those of a tenant with that name."""
    own = [name for name in dict.fromkeys(order) if name in rows and name != OTHER][:limit]
    told = {name: rows[name] for name in own}
    rest: Any = None
    for name, row in rows.items():
        if name not in told:
            rest = row if rest is None else _sum(rest, row)
    return told if rest is None else {**told, OTHER: rest}


def _sum(one: Any, other: Any) -> Any:
    """Numbers added up, maps by key; what can't be added is nothing."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            key: _sum(one[key], other[key])
            if key in one and key in other
            else one.get(key, other.get(key))
            for key in {**one, **other}
        }
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return None
