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
    rest = [row for name, row in rows.items() if name not in told]
    return {**told, OTHER: _sum(rest)} if rest else told


def _sum(rows: list[Any]) -> Any:
    """Numbers added up, maps by key; what can't be added is nothing."""
    if all(isinstance(row, Mapping) for row in rows):
        keys = dict.fromkeys(key for row in rows for key in row)
        return {key: _sum([row[key] for row in rows if key in row]) for key in keys}
    if len(rows) == 1:
        return rows[0]
    if all(isinstance(row, int | float) for row in rows):
        return sum(rows)
    return None
