"""Miss-ratio curves that a daemon measured on its own requests.

The law of this module: what a sample can't tell is not told. A curve says how many uses and keys it
stands on, and how far it may be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2, sqrt
from typing import Any, NamedTuple

ENOUGH_USES = 1000  # sampled
ENOUGH_KEYS = 200  # followed
EVERYBODY = ""  # the curve over all namespaces


class Curve(NamedTuple):
    """`points`: bytes of an LRU, percent of the chunks asked for that it would have hit."""

    tenant: str
    uses: int
    sampled: int
    followed: int
    rate: float
    points: tuple[tuple[int, float], ...]

    @property
    def enough(self) -> bool:
        return (
            self.sampled >= ENOUGH_USES and self.followed >= ENOUGH_KEYS and len(self.points) >= 2
        )

    def hit_pct(self, nbytes: float) -> float:
        """At any capacity: between two points on a line over the logarithm."""
        before: tuple[int, float] | None = None
        for at, hit in self.points:
            if nbytes < at:
                if before is None:
                    return 0.0
                part = log2(nbytes / before[0]) / log2(at / before[0])
                return before[1] + part * (hit - before[1])
            before = (at, hit)
        return before[1] if before is not None else 0.0

    def margin_pct(self, nbytes: float) -> float:
        """By how many points a hit ratio may well be off: two standard errors, keys being what
        was drawn. 0 where all keys are followed."""
        if not self.followed:
            return 100.0
        share = self.hit_pct(nbytes) / 100.0
        return 200.0 * sqrt(share * (1.0 - share) * (1.0 - self.rate) / self.followed)

    def row(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant or None,
            "uses": self.uses,
            "sampled": self.sampled,
            "followed": self.followed,
            "rate": self.rate,
            "points": [{"bytes": at, "hit_pct": hit} for at, hit in self.points],
        }


def curves(stat: Mapping[str, Any]) -> list[Curve]:
    """The curves in a daemon's answer to stat: everybody's first, where it is told."""
    reuse = stat.get("reuse") or {}
    found = [_curve(EVERYBODY, reuse["all"])] if reuse.get("all") else []
    found += [_curve(name, row) for name, row in sorted((reuse.get("tenants") or {}).items())]
    return found


def _curve(tenant: str, row: Mapping[str, Any]) -> Curve:
    points = tuple((int(at), float(hit)) for at, hit in row.get("curve", ()))
    return Curve(
        tenant,
        int(row.get("uses", 0)),
        int(row.get("sampled", 0)),
        int(row.get("followed", 0)),
        float(row.get("rate", 1.0)),
        points,
    )
