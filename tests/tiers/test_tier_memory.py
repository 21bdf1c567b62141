"""The naive tier in memory keeps the contract that it is the oracle of."""

from __future__ import annotations

import pytest
from conformance import Conformance, Medium

from kvd.tiers.backend import Backend
from kvd.tiers.memory import MemoryBackend


class InMemory:
    limit = 8 << 20

    def backend(self) -> Backend:
        return MemoryBackend(self.limit)


class TestMemory(Conformance):
    @pytest.fixture
    def medium(self) -> Medium:
        return InMemory()
