"""Prompts that come batch by batch, as engines store them: whoever goes by last use is told of each
use from the root on, and pays for it; whoever needs that not, does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from world import KIB, S, World, chain, spec

from kvd.chunk import NO_PARENT, Outcome
from kvd.core import Core, TierConfig
from kvd.eviction import POLICIES
from kvd.eviction.base import Policy
from kvd.eviction.crf import Crf
from kvd.eviction.lru import Lru
from kvd.eviction.reuse import Reuse

ONE = spec()
CHUNKS, BATCH, PROMPTS = 128, 16, 4
ROOM = PROMPTS * CHUNKS


class Watched(Lru):
    """Counts what is looked at, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = 0
        self.told: list[list[int]] = []

    def touch(self, chain: Sequence[int], now: int) -> None:
        self.told.append(list(chain))
        super().touch(chain, now)

    def first(self, queue: int, now: int) -> int:
        self.looked += 1
        return super().first(queue, now)

    def leaves(self, queue: int, now: int) -> Iterator[int]:
        for chunk in super().leaves(queue, now):
            self.looked += 1
            yield chunk


class Told(Reuse):
    """The default, which keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[int]] = []

    def touch(self, chain: Sequence[int], now: int) -> None:
        self.told.append(list(chain))
        super().touch(chain, now)


class Plain(Policy):
    """What somebody writes who goes by the contract alone: the longest unused first."""

    name = "plain"

    def __init__(self) -> None:
        self.here: dict[int, int] = {}  # chunk -> queue, coldest first
        self.told: list[list[int]] = []

    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        self.here[chunk] = queue

    def touch(self, chain: Sequence[int], now: int) -> None:
        self.told.append(list(chain))
        for chunk in reversed(chain):
            if chunk in self.here:
                self.here[chunk] = self.here.pop(chunk)

    def victims(self, queue: int, now: int) -> Iterator[int]:
        return iter([chunk for chunk, its in self.here.items() if its == queue])

    def coldness(self, queue: int, now: int) -> float | None:
        return 1.0 if queue in self.here.values() else None

    def forget(self, chunk: int, *, evicted: bool) -> None:
        self.here.pop(chunk, None)

    def value(self, chunk: int, now: int) -> float:
        return 1.0

    def __len__(self) -> int:
        return len(self.here)


class Stored:
    """A world with a policy, in which prompts are stored batch by batch, 2 ms each."""

    def __init__(self, make: type[Policy], **settings: object) -> None:
        self.made: list[Policy] = []

        def policy() -> Policy:
            self.made.append(make())
            return self.made[-1]

        self.world = World(ROOM * 8 * KIB, 64 * KIB, write_share=1.0, ahead_share=0.0, **settings)
        self.world.core = Core(self.world.config, policy)
        self.world.core.grow(ROOM * 8 * KIB)
        self.world.tiers_are_up()
        self.client = self.world.open()
        self.client.register(ONE)

    def store(self, name: object) -> None:
        keys = chain(name, CHUNKS)
        for at in range(0, CHUNKS, BATCH):
            parent = keys[at - 1] if at else NO_PARENT
            told = self.client.store(ONE, keys[at : at + BATCH], parent=parent, index0=at)
            assert set(told) == {Outcome.OK}
            self.world.now += 2_000_000
        self.world.advance(3 * S // 10)

    def load(self, name: object) -> None:
        keys = chain(name, CHUNKS)
        for at in range(0, CHUNKS, BATCH):
            parent = keys[at - 1] if at else NO_PARENT
            got = self.client.lease(ONE, keys[at : at + BATCH], parent=parent, index0=at)
            self.client.release(got.lease)
            self.world.now += 2_000_000
        self.world.advance(3 * S // 10)

    def left(self) -> list[int]:
        names = range(PROMPTS)
        return [self.client.lookup(ONE, chain(name, CHUNKS)).leading for name in names]


def batches(told: list[list[int]]) -> list[int]:
    """How many chunks each use was told with, before anything was evicted."""
    return [len(chunks) for chunks in told if chunks]


@pytest.mark.parametrize("kind", [Watched, Plain])
def test_the_prompt_that_was_used_longest_ago_goes_first_and_from_its_end(
    kind: type[Policy],
) -> None:
    stored = Stored(kind)
    for n in range(PROMPTS):
        stored.store(n)
    stored.store("new")
    assert stored.left() == [0, CHUNKS, CHUNKS, CHUNKS]
    stored.load(1)
    stored.store("newer")
    assert stored.left() == [0, CHUNKS, 0, CHUNKS]


def test_who_goes_is_the_first_that_is_looked_at() -> None:
    """Ancestors that are colder than what hangs below them are candidates that may not go."""
    stored = Stored(Watched)
    for n in range(PROMPTS):
        stored.store(n)
    [policy] = stored.made
    assert isinstance(policy, Watched)
    policy.looked = 0
    stored.store("new")
    gone = stored.world.counter("chunks_evicted", "capacity")
    assert gone == CHUNKS and policy.looked <= 2 * gone


@pytest.mark.parametrize("kind", [Watched, Plain])
def test_a_policy_is_told_whole_chains_unless_it_says_that_it_needs_none(
    kind: type[Policy],
) -> None:
    stored = Stored(kind)
    stored.store(0)
    assert stored.made[0].whole_chains()
    assert batches(stored.made[0].told) == list(range(BATCH, CHUNKS + 1, BATCH))  # type: ignore[attr-defined]


def test_the_default_is_told_of_each_chunk_of_a_prompt_once() -> None:
    stored = Stored(Told)
    stored.store(0)
    assert batches(stored.made[0].told) == [BATCH] * (CHUNKS // BATCH)  # type: ignore[attr-defined]


def test_whom_two_uses_so_close_are_two_is_told_whole_chains() -> None:
    assert all(not kind().whole_chains() for kind in POLICIES.values() if kind is not Lru)
    assert not Crf(same_use_s=0.1).whole_chains()
    assert Crf(same_use_s=0.05).whole_chains()


def test_of_the_order_of_tiers_below_the_same_holds() -> None:
    below = TierConfig("nvme", ROOM * 8 * KIB)
    stored = Stored(Watched, tiers=(below,))
    stored.store(0)
    dram, lower = stored.made
    assert batches(dram.told) == batches(lower.told)  # type: ignore[attr-defined]
    assert batches(lower.told) == list(range(BATCH, CHUNKS + 1, BATCH))  # type: ignore[attr-defined]
