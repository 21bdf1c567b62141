"""The naive tier in memory keeps the contract that it is the oracle of."""

from __future__ import annotations

import pytest
from conformance import Conformance, Medium
from tiers_kit import CONFIG, Chunk, Rig

from kvd.tiers.backend import Backend
from kvd.tiers.base import Answer
from kvd.tiers.memory import MemoryBackend


class InMemory:
    limit = 8 << 20

    def backend(self) -> Backend:
        return MemoryBackend(self.limit)


class TestMemory(Conformance):
    @pytest.fixture
    def medium(self) -> Medium:
        return InMemory()


def test_a_medium_that_fails_to_tell_its_room_costs_no_answer_and_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    def room(length: int) -> int:
        """Asked before each write, and after it."""
        nonlocal asked
        asked += 1
        if asked % 2:
            return 1
        raise RuntimeError("a fault")

    config = CONFIG._replace(workers=1, writers=1, spares=0)
    rig = Rig(MemoryBackend(8 << 20), config=config).start()
    monkeypatch.setattr(rig.tier.backend, "room", room)
    try:
        for n in range(3):
            done = rig.one(Chunk(n).write())
            assert (done.answer, done.room) == (Answer.OK, -1)
    finally:
        rig.close()
