"""Eviction policies: which chunk is worth least.

The law of this package: it is pure, knows no engine and no store, and a policy is chosen by name.
"""

from __future__ import annotations

from kvd.eviction.base import Policy
from kvd.eviction.crf import Crf
from kvd.eviction.fifo import Fifo
from kvd.eviction.lru import Lru

POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (Lru, Fifo, Crf)}


def make_policy(name: str) -> Policy:
    """A new policy. ValueError naming the known ones."""
    cls = POLICIES.get(name)
    if cls is None:
        raise ValueError(f"policy {name!r} is unknown: {', '.join(sorted(POLICIES))}")
    return cls()


__all__ = ["POLICIES", "Policy", "make_policy"]
