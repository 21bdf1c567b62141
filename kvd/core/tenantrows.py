"""What tenants have, as rows: one for each, or one for several together.

The law of this module: it reads nothing but what it is given, so it may be of a moment that is
past, and in any thread. A row costs much more than a sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from kvd.core.counters import Counts, add, of_tenant
from kvd.core.shares import UNBOUNDED, TierShare

__all__ = ["Slices", "Sums", "TenantTable", "Use"]

T = TypeVar("T")
# What works something out and gives way in between: it yields how much it has done since, in units
# of 10 to 20 us.
Slices = Generator[int, None, T]


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


class Share(NamedTuple):
    """What a tenant, or several, have of a tier, and may have, in slot bytes."""

    used_bytes: int
    chunks: int
    minimum_bytes: int
    share_bytes: int
    maximum_bytes: int | None
    weight: float

    def plus(self, other: Share) -> Share:
        most = None
        if self.maximum_bytes is not None and other.maximum_bytes is not None:
            most = self.maximum_bytes + other.maximum_bytes
        return Share(
            self.used_bytes + other.used_bytes,
            self.chunks + other.chunks,
            self.minimum_bytes + other.minimum_bytes,
            self.share_bytes + other.share_bytes,
            most,
            self.weight + other.weight,
        )


class TenantTable:
    """Numbers by tenant, as rows. `own`: to the one tenant that it is about."""

    def __init__(
        self,
        own: bool,
        counts: dict[str, Counts],
        spaces: list[Sums],
        residents: list[dict[int, int]],
        uses: list[Use],
        tenants: list[str],
    ) -> None:
        self._own = own
        self._counts = counts
        self._residents = residents
        self._uses = uses
        self._spaces: dict[str, list[Sums]] = defaultdict(list)
        for space in spaces:
            self._spaces[space.namespace].append(space)
        self._numbers = {name: number for number, name in enumerate(tenants) if name}

    def row(self, name: str) -> dict[str, Any]:
        return self._shown(self._held(name), self._shares(name), self._counts.get(name, {}))

    def sum(self, names: list[str]) -> Slices[dict[str, Any]]:
        """One row for all of these. Pre: there are some."""
        held = [0, 0, 0, 0]
        shares: list[Share] = []
        counts: Counts = {}
        for at, name in enumerate(names, 1):
            held = [a + b for a, b in zip(held, self._held(name), strict=True)]
            mine = self._shares(name)
            if shares and mine:
                shares = [a.plus(b) for a, b in zip(shares, mine, strict=True)]
            shares = shares or mine
            add(counts, self._counts.get(name, {}))
            if at % 8 == 0:
                yield 8
        return self._shown(held, shares, counts)

    def _held(self, name: str) -> list[int]:
        spaces = self._spaces.get(name, ())
        return [
            sum(s.chunks for s in spaces),
            sum(s.bytes for s in spaces),
            sum(s.alone for s in spaces),
            sum(s.below_bytes for s in spaces),
        ]

    def _shares(self, name: str) -> list[Share]:
        """By tier: what the core goes by. To the tenant itself without what would tell it of
        others."""
        tenant = self._numbers.get(name)
        if tenant is None:
            return []
        spaces = self._spaces.get(name, ())
        queues = {queue for space in spaces for queue in space.queues}
        chunks = [sum(space.chunks for space in spaces)]
        chunks += [sum(by.get(queue, 0) for queue in queues) for by in self._residents]
        found = []
        for tier, count in zip(self._uses, chunks, strict=True):
            told, most = tier.told[tenant], tier.maximum[tenant]
            least = tier.minimum[tenant]
            if self._own:
                least = told.minimum.of(tier.limit)
            found.append(
                Share(
                    tier.use[tenant],
                    count,
                    least,
                    int(tier.share[tenant]),
                    None if most == UNBOUNDED else most,
                    told.weight,
                )
            )
        return found

    def _shown(self, held: list[int], shares: list[Share], counts: Counts) -> dict[str, Any]:
        tiers = {
            tier.name: share._asdict()
            for tier, share in zip(self._uses, shares, strict=bool(shares))
        }
        if self._own:
            for row in tiers.values():
                del row["share_bytes"]
        chunks, nbytes, below, below_bytes = held
        return {
            "chunks": chunks,
            "bytes": nbytes,
            "chunks_below": below,
            "bytes_below": below_bytes,
            "tiers": tiers,
            "counters": of_tenant(counts),
        }
