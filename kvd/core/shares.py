"""What each tenant may have of each tier, and what it has: who gives when there is no room.

The law of this module: `use` is exact at all times, and it is what is shown, too. Room that nobody
else needs is lent to whoever asks. When there is none, the tenant with the largest use over its
share gives, never one that is at or below its minimum; who asks is a candidate like any other once
it is above its own minimum, and the last resort if nobody else can give. Each decision looks at
each tenant once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

NOBODY: Final = 0  # the tenant of slots that belong to none: of an earlier life, or on their way
PUBLIC: Final = "public"  # the namespace that all may read
MAX_TENANTS: Final = 1 << 16  # a slot has 16 bits for its tenant
UNBOUNDED: Final = 1 << 62


class Amount(NamedTuple):
    """Bytes, or a part of the tier."""

    bytes: int = 0
    part: float = 0.0

    def of(self, total: int) -> int:
        """Bytes of a tier with so many."""
        return self.bytes + int(self.part * total)


class TierShare(NamedTuple):
    """What a tenant may have of one tier. `weight` divides what no minimum claims."""

    minimum: Amount = Amount()
    weight: float = 1.0
    maximum: Amount | None = None


class TenantRules(NamedTuple):
    """All about one tenant that the core goes by."""

    tiers: Mapping[str, TierShare] = {}  # by the tier's name; "dram" is the first
    public: bool = False  # its lookups go on in the public namespace, unasked
    inflight: int = 0  # slot bytes of unfinished writes at a time; 0: not bounded


_NO_RULES: Final = TenantRules()
_DEFAULT: Final = TierShare()


class TierUse:
    """One tier. All lists by tenant, in slot bytes."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit  # percentages are of this
        self.total = limit  # what can be used of it now: minima fit in here together
        self.use: list[int] = []
        self.leaving: list[int] = []  # of `use`: chosen, and about to go
        self.coming: list[int] = []  # not of `use` yet: being written
        self.minimum: list[int] = []  # enforced: scaled down if all together don't fit
        self.share: list[float] = []
        self.maximum: list[int] = []
        self.told: list[TierShare] = []  # as configured

    def add(self) -> None:
        """One tenant more, without rules of its own."""
        self.use.append(0)
        self.leaving.append(0)
        self.coming.append(0)
        self.minimum.append(0)
        self.share.append(0.0)
        self.maximum.append(UNBOUNDED)
        self.told.append(_DEFAULT)

    def resize(self, total: int) -> None:
        """So much can be used now."""
        if total != self.total:
            self.total = total
            self.settle()

    def settle(self) -> None:
        """Work out minima and shares anew. NOBODY has none."""
        self.maximum = [
            UNBOUNDED if told.maximum is None else told.maximum.of(self.limit)
            for _, told in self._all()
        ]
        wanted = [  # no more than it may have, or there is: that would cost the others theirs
            0 if t == NOBODY else min(told.minimum.of(self.limit), self.maximum[t], self.limit)
            for t, told in self._all()
        ]
        claimed = sum(wanted)
        scale = min(1.0, self.total / claimed) if claimed else 1.0
        self.minimum = [int(least * scale) for least in wanted]
        rest = max(0, self.total - sum(self.minimum))
        weights = [0.0 if t == NOBODY else told.weight for t, told in self._all()]
        whole = sum(weights) or 1.0
        self.share = [
            max(1.0, min(least + rest * weight / whole, most))
            for least, weight, most in zip(self.minimum, weights, self.maximum, strict=True)
        ]

    def _all(self) -> Iterable[tuple[int, TierShare]]:
        return enumerate(self.told)

    def stays(self, tenant: int) -> int:
        """What it has, less what is about to go."""
        return self.use[tenant] - self.leaving[tenant]

    def above(self, tenant: int) -> bool:
        """Whether it has more than its minimum, so that others may ask for it."""
        return self.use[tenant] - self.leaving[tenant] > self.minimum[tenant]

    def beyond(self, tenant: int, more: int) -> bool:
        """Whether so much more would be more than its share: room that others lend."""
        return self.use[tenant] + more > self.share[tenant]

    def full(self, tenant: int, more: int) -> bool:
        """Whether so much more would be beyond its maximum."""
        return self.use[tenant] + more > self.maximum[tenant]

    def victim(self, tenants: Iterable[int], asker: int, more: int) -> int:
        """Who of these gives room for `more` bytes of the asker (NOBODY: nobody in particular);
        -1 if none of them may."""
        best, most, own = -1, -1.0, False
        for tenant in tenants:
            stays = self.use[tenant] - self.leaving[tenant]
            if tenant == asker:
                own = True
                stays += more
            if stays <= self.minimum[tenant]:
                continue
            ratio = stays / self.share[tenant]
            if ratio > most or (ratio == most and tenant == asker):
                best, most = tenant, ratio
        return asker if best < 0 and own else best

    def may_give(self, tenant: int, nbytes: int, asker: int) -> bool:
        """Whether a tenant can give so much to another at once and be no worse off than that one
        afterwards."""
        if tenant == asker:
            return True
        left = self.stays(tenant) - nbytes
        if left < self.minimum[tenant]:
            return False
        gets = self.use[asker] + nbytes
        if asker == NOBODY or gets <= self.minimum[asker]:
            return True
        return left / self.share[tenant] >= gets / self.share[asker]


class Shares:
    """All tenants by number (from 1; 0 is nobody) and the tiers that they share."""

    def __init__(
        self,
        isolate: bool,
        tiers: Iterable[tuple[str, int]],
        rules: Mapping[str, TenantRules] | None = None,
    ) -> None:
        self.isolate = isolate  # False: one pool, and the coldest goes, whoever's it is
        self.tiers = [TierUse(name, limit) for name, limit in tiers]
        self.dram = self.tiers[0]
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._rules: dict[str, TenantRules] = {}
        self.writing: list[int] = []  # by tenant: slot bytes of unfinished writes
        self._add("")
        for name, rule in (rules or {}).items():
            self.set(name, rule)

    def _add(self, name: str) -> int:
        number = len(self.names)
        if number >= MAX_TENANTS:
            return NOBODY  # its chunks are nobody's: they have no minimum
        self.names.append(name)
        self._numbers[name] = number
        self.writing.append(0)
        for tier in self.tiers:
            tier.add()
            tier.settle()
        return number

    def number(self, name: str) -> int:
        """The tenant of a namespace; new if need be."""
        found = self._numbers.get(name) if name else NOBODY
        return self._add(name) if found is None else found

    def find(self, name: str) -> int | None:
        return self._numbers.get(name) if name else None

    @property
    def ruled(self) -> list[str]:
        """Tenants with rules of their own."""
        return list(self._rules)

    @property
    def rules_given(self) -> bool:
        """Whether there are any rules."""
        return bool(self._rules)

    def rules(self, name: str) -> TenantRules:
        return self._rules.get(name, _NO_RULES)

    def room_in_flight(self, tenant: int) -> int | None:
        """Bytes that a tenant may still begin to write; None: not bounded."""
        most = self.rules(self.names[tenant]).inflight
        return max(0, most - self.writing[tenant]) if most else None

    def set(self, name: str, rules: TenantRules | None) -> None:
        """These rules hold from now on; None: those of a tenant without any."""
        number = self.number(name)
        if rules is None:
            self._rules.pop(name, None)
        else:
            self._rules[name] = rules
        if number == NOBODY:
            return
        for tier in self.tiers:
            tier.told[number] = self.rules(name).tiers.get(tier.name, _DEFAULT)
            tier.settle()
