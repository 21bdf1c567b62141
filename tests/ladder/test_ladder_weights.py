"""What tiers are told: a tenant's weights, at start and when an operator changes them, and that an
engine asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.chunk import namespace_digest
from kvd.core import TierConfig
from kvd.core import events as ev
from kvd.server.access import Access
from kvd.server.ladder import Ladder
from kvd.server.tenancy import Tenancy
from kvd.server.tenantrules import parse_tenant
from kvd.server.tenants import Registry
from kvd.server.tiers import TierPlan
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.pool import PooledTier

CALM, LOUD = namespace_digest("calm"), namespace_digest("loud")


class Noting(PooledTier):
    """Remembers who weighs what, and how often somebody asked."""

    weights: dict[bytes, float]
    heard = 0

    def asked(self) -> None:
        super().asked()
        self.heard += 1

    def set_weight(self, tenant: bytes, weight: float) -> None:
        super().set_weight(tenant, weight)
        self.weights = {**getattr(self, "weights", {}), tenant: weight}


class Host:
    sessions: Any = None

    def __init__(self) -> None:
        self.fed: list[Any] = []

    def feed(self, event: Any) -> None:
        self.fed.append(event)

    def end(self, session: Any, why: str) -> None:
        raise AssertionError("nobody is connected")


def plan(name: str) -> TierPlan:
    return TierPlan(
        TierConfig(name, 1 << 20), lambda done: Noting(name, MemoryBackend(1 << 20), done)
    )


@pytest.fixture
def ladder(tmp_path: Path) -> Iterator[Ladder]:
    found = Ladder([plan("nvme"), plan("s3")], memoryview(bytearray(8192)), tmp_path / "arena")
    found.start()
    yield found
    found.close()


def weights(ladder: Ladder) -> list[dict[bytes, float]]:
    return [tier.weights for tier in ladder.tiers if isinstance(tier, Noting)]


def test_each_tier_learns_that_an_engine_asks(ladder: Ladder) -> None:
    ladder.asked()
    assert [tier.heard for tier in ladder.tiers if isinstance(tier, Noting)] == [1, 1]


def test_each_tier_learns_a_tenants_weight_there_and_what_an_operator_changes(
    ladder: Ladder, tmp_path: Path
) -> None:
    calm = parse_tenant("calm", {"uids": [1], "nvme": {"weight": 3}, "s3": {"weight": 0.5}})
    registry = Registry([calm], str(tmp_path / "tenants.json"))
    tenancy = Tenancy(registry, Access((), (), None, registry.tenants()), None, ladder.weigh)
    tenancy.host = Host()
    assert weights(ladder) == [{CALM: 3.0}, {CALM: 0.5}]
    registry.add("loud", {"uids": [2], "nvme": {"weight": 2}}, token=False)
    assert weights(ladder) == [{CALM: 3.0, LOUD: 2.0}, {CALM: 0.5, LOUD: 1.0}]
    assert isinstance(tenancy.host, Host)
    (told,) = tenancy.host.fed
    assert isinstance(told, ev.SetTenant) and told.namespace == "loud"
