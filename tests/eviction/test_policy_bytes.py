"""Every policy in a cache that is counted in bytes: sizes differ, leases hold, restarts happen.

The shelf beside the policy keeps plain dicts; what it checks is what the core relies on, whatever
the order that a policy prefers.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from policy_conformance import Chunk, reborn, settle

from kvd.eviction.base import Policy
from kvd.eviction.registry import POLICIES, factory

S = 1_000_000_000
NONE = -1
CAPACITY = 100


def ghost_of(name: tuple[int, int]) -> int:
    """The digest of a (prompt, place)."""
    return name[0] << 8 | name[1]


class Shelf:
    """Chunks of any size in one queue, at most CAPACITY bytes."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self.make = make
        self.policy = make()
        self.now = 1_000 * S
        self.size: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.leases: dict[int, int] = {}
        self.row: dict[tuple[int, int], int] = {}
        self.name: dict[int, tuple[int, int]] = {}
        self.evictions = 0

    @property
    def bytes(self) -> int:
        return sum(self.size.values())

    def legal(self, chunk: int) -> bool:
        leaf = chunk not in self.parent.values()
        return chunk in self.size and leaf and not self.leases.get(chunk)

    def room(self, nbytes: int) -> bool:
        """Evict until so many bytes are free; False if what is left may not go."""
        while self.bytes + nbytes > CAPACITY:
            victim = next(filter(self.legal, self.policy.victims(0, self.now)), NONE)
            if victim == NONE:
                assert not any(map(self.legal, self.size)), "somebody could have gone"
                return False
            before = self.bytes
            size = self.size[victim]
            self.remove(victim, evicted=True)
            assert self.bytes == before - size  # its own bytes and no others
            self.evictions += 1
        return True

    def remove(self, chunk: int, *, evicted: bool) -> None:
        assert not self.leases.get(chunk)
        del self.size[chunk], self.parent[chunk], self.row[self.name.pop(chunk)]
        self.policy.forget(chunk, evicted=evicted)

    def use(self, prompt: int, length: int, size: int) -> list[int]:
        """Store what is missing of a prompt, and touch all of it; its chunks."""
        chain: list[int] = []
        for n in range(length):
            chunk = self.row.get((prompt, n), NONE)
            if chunk == NONE:
                for held in chain:
                    self.lease(held, 1)
                fits = self.room(size)
                for held in chain:
                    self.lease(held, -1)
                if not fits:
                    break
                chunk = next(free for free in range(10_000) if free not in self.size)
                self.row[prompt, n], self.name[chunk] = chunk, (prompt, n)
                self.size[chunk] = size
                self.parent[chunk] = chain[-1] if chain else NONE
                self.policy.insert(
                    chunk,
                    parent=self.parent[chunk],
                    queue=0,
                    size=size,
                    ghost=ghost_of((prompt, n)),
                    now=self.now,
                )
            chain.append(chunk)
        self.now += S // 100
        self.policy.touch(chain, self.now)
        return chain

    def lease(self, chunk: int, count: int) -> None:
        self.leases[chunk] = self.leases.get(chunk, 0) + count

    def restart(self) -> None:
        """Another policy takes up what this one knew, and names the same chunks."""
        other = self.make()
        settle(self.policy, self.now)
        order = list(self.policy.victims(0, self.now))
        reborn(
            self.policy,
            other,
            [Chunk(c, c, self.parent[c], 0, ghost_of(self.name[c])) for c in order],
            self.now,
        )
        assert sorted(other.victims(0, self.now)) == sorted(order)
        assert len(other) == len(self.policy)
        self.policy = other

    def check(self) -> None:
        assert self.bytes <= CAPACITY
        assert len(self.policy) == len(self.size)
        assert all(p == NONE or p in self.size for p in self.parent.values())


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("use"), st.integers(0, 7), st.integers(1, 6), st.sampled_from([1, 3, 7, 40])
        ),
        st.tuples(st.just("lease"), st.integers(0, 7), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("release"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 60, 4_000]), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=50,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=60, deadline=None)
@given(some=steps)
def test_bytes_leases_and_restarts_hold_under_every_policy(
    name: str, some: list[tuple[str, int, int, int]]
) -> None:
    shelf = Shelf(factory(name))
    for step, first, second, size in some:
        shelf.now += S // 10
        if step == "use":
            # a prompt's chunks are of one size, as those of a spec are
            shelf.use(first, second, size if first % 2 else 1 + first)
        elif step == "lease" and (first, second) in shelf.row:
            shelf.lease(shelf.row[first, second], 1)
        elif step == "release":
            shelf.leases.clear()
        elif step == "wait":
            shelf.now += first * S
        elif step == "restart":
            shelf.restart()
        shelf.check()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_leased_prompt_outlives_any_number_of_others(name: str) -> None:
    shelf = Shelf(factory(name))
    held = shelf.use(1, 4, 5)
    for chunk in held:
        shelf.lease(chunk, 1)
    for prompt in range(2, 60):
        shelf.use(prompt, 5, 1 + prompt % 9)
        shelf.check()
    assert all(chunk in shelf.size for chunk in held)
    assert shelf.evictions > 100
    shelf.leases.clear()
    for prompt in range(60, 400):
        shelf.now += 60 * S
        shelf.use(prompt, 5, 1 + prompt % 9)
    assert shelf.name.get(held[-1]) != (1, 3)  # once it may go, it goes
