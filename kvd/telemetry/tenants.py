"""Figures by tenant, for few tenants or many.

The law of this module: a tenant that has a row of its own keeps it, and one that is told under
`other` stays there, so that no counter ever falls; the sum over all rows is the sum over all
tenants.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["OTHER", "Apart", "told_apart"]

OTHER = "other"


class Apart(NamedTuple):
    own: list[str]  # with a row each
    rest: list[str]  # summed up under `other`


def told_apart(names: list[str], order: Iterable[str], limit: int | None) -> Apart:
    """The first `limit` of these names in that order, which names all; the rest are told under
    `other`, as is a tenant with that name. Without a limit each has a row."""
    if limit is None:
        return Apart(names, [])
    known = set(names)
    own = [name for name in dict.fromkeys(order) if name in known and name != OTHER][:limit]
    known.difference_update(own)
    return Apart(own, [name for name in names if name in known])
