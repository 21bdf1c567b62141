"""What every eviction policy must do: one suite for all of them.

A policy's test file subclasses `PolicyConformance` and says how to make one:

    class TestLru(PolicyConformance):
        make = staticmethod(Lru)

`Cache` does what the core does around a policy, the simple way: chunks in chains, a capacity in
chunks, only legal victims taken, whole chains touched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgpack
import numpy as np
import pytest

from kvd.eviction.base import LATELY_NS, Policy
from kvd.eviction.leaves import LeafPolicy

S = 1_000_000_000
NONE = -1
SKIPS = 16


class Cache:
    """Chunks by name in one queue, around a policy."""

    def __init__(self, policy: Policy, capacity: int, queue: int = 0) -> None:
        self.policy = policy
        self.capacity = capacity
        self.queue = queue
        self.now = 1_000 * S
        self.row: dict[object, int] = {}
        self.name: dict[int, object] = {}
        self.parent: dict[int, int] = {}
        self.kids: dict[int, int] = {}
        self.free: list[int] = []
        self.evictions = 0
        self.skipped = 0
        self.pinned: set[int] = set()
        self.leased: set[object] = set()  # names

    def legal(self, chunk: int) -> bool:
        if chunk not in self.name or self.kids[chunk] or chunk in self.pinned:
            return False
        return self.name[chunk] not in self.leased

    def evict(self) -> None:
        """As the core does it: some candidates are passed over, deferred, and asked for anew."""
        looked = 0
        while looked < len(self.row):
            passed: list[int] = []
            for chunk in self.policy.leaves(self.queue, self.now):
                if self.legal(chunk):
                    self.policy.defer(passed, self.now)
                    self.skipped += len(passed)
                    self.remove(chunk, evicted=True)
                    self.evictions += 1
                    return
                passed.append(chunk)
                if len(passed) >= SKIPS:
                    break
            self.policy.defer(passed, self.now)
            self.skipped += len(passed)
            looked += len(passed)
            if len(passed) < SKIPS:
                break
        raise AssertionError("nothing could go, although something may")

    def remove(self, chunk: int, *, evicted: bool = False) -> None:
        parent = self.parent.pop(chunk)
        if parent in self.kids:
            self.kids[parent] -= 1
        del self.row[self.name.pop(chunk)], self.kids[chunk]
        self.free.append(chunk)
        self.policy.forget(chunk, evicted=evicted)

    def use(self, names: Iterable[object]) -> int:
        """Ask for a chain, store what is missing; how many were there at its start."""
        chain: list[int] = []
        hits = 0
        parent = NONE
        for name in names:
            chunk = self.row.get(name, NONE)
            if chunk == NONE:
                self.pinned = set(chain)
                while len(self.row) >= self.capacity:
                    self.evict()
                chunk = self.free.pop() if self.free else len(self.row)
                self.row[name], self.name[chunk] = chunk, name
                self.parent[chunk], self.kids[chunk] = parent, 0
                if parent != NONE:
                    self.kids[parent] += 1
                self.now += 1
                self.policy.insert(
                    chunk,
                    parent=parent,
                    queue=self.queue,
                    size=1,
                    ghost=hash((name, 7)) & (1 << 64) - 1,
                    now=self.now,
                )
            elif len(chain) == hits:
                hits += 1
            chain.append(chunk)
            parent = chunk
        self.pinned = set()
        self.now += S // 100
        self.policy.touch(chain, self.now)
        return hits

    def prefix_closed(self) -> bool:
        return all(p == NONE or p in self.name for p in self.parent.values())


def prompt(name: object, length: int) -> list[object]:
    """The chunks of a prompt, by name."""
    return [(name, n) for n in range(length)]


def insert(policy: Policy, chunk: int, now: int, parent: int = NONE, queue: int = 0) -> None:
    policy.insert(chunk, parent=parent, queue=queue, size=1, ghost=chunk * 2654435761, now=now)


class Chunk(NamedTuple):
    """A resident chunk before and after a restart."""

    old: int
    new: int
    parent: int  # its new id
    queue: int
    ghost: int


NO_GHOSTS = (np.empty(0, np.uint64), np.empty((0, 0)))


def settle(policy: Policy, now: int) -> None:
    """No chunk is held back as the newest any more."""
    dummy = 5_000
    insert(policy, dummy, now, queue=77)
    policy.forget(dummy, evicted=False)


def reborn(old: Policy, new: Policy, chunks: Sequence[Chunk], now: int) -> None:
    """What a restart does with a policy. `chunks`: those of each queue in their order."""
    state = msgpack.unpackb(msgpack.packb(old.snapshot()))
    ghosts, begin = [], 0
    while (part := old.ghosts(begin, 5)) is not None:
        ghosts.append(part)
        begin += 5
    told = tuple(map(np.concatenate, zip(*ghosts, strict=True))) if ghosts else NO_GHOSTS
    new.restore(state, told, now)
    for queue in {chunk.queue for chunk in chunks}:
        mine = [chunk for chunk in chunks if chunk.queue == queue]
        new.load(
            np.array([chunk.new for chunk in mine], np.int64),
            np.arange(len(mine)) * S,
            parents=np.array([chunk.parent for chunk in mine], np.int64),
            queue=queue,
            size=1,
            ghosts=np.array([chunk.ghost for chunk in mine], np.uint64),
            memory=old.memory(np.array([chunk.old for chunk in mine], np.int64)),
        )


class PolicyConformance:
    """Subclass it, with `make`."""

    make: Callable[[], Policy]

    def filled(self, count: int = 20, queue: int = 0) -> Policy:
        """Chunks 0..count-1 without parents, each used once, in this order."""
        policy = self.make()
        for chunk in range(count):
            insert(policy, chunk, chunk * S, queue=queue)
            policy.touch([chunk], chunk * S)
        return policy

    # -- what is named --------------------------------------------------------------------------

    def test_every_resident_chunk_is_named_once(self) -> None:
        policy = self.filled()
        assert sorted(policy.victims(0, 30 * S)) == list(range(20))
        assert policy.first(0, 30 * S) == next(iter(policy.victims(0, 30 * S)))
        assert len(policy) == 20

    def test_naming_removes_nothing(self) -> None:
        policy = self.filled()
        assert list(policy.victims(0, 30 * S)) == list(policy.victims(0, 30 * S))
        assert len(policy) == 20

    def test_where_all_may_have_to_stay_leaves_are_named_and_nothing_above_them(self) -> None:
        cache = Cache(self.make(), 200)
        for n in range(12):
            cache.use(prompt(n % 9, 1 + n % 7))
            cache.now += 2 * S
        cache.policy.cool([cache.row[prompt(5, 6)[-1]]], cache.now)
        cache.policy.defer([cache.row[prompt(3, 4)[-1]]], cache.now)
        order = list(cache.policy.victims(0, cache.now))
        leaves = list(cache.policy.leaves(0, cache.now))
        assert len(set(leaves)) == len(leaves) and leaves[0] == order[0]
        assert {c for c in order if not cache.kids[c]} == {c for c in leaves if not cache.kids[c]}
        if isinstance(cache.policy, LeafPolicy):
            assert not [c for c in leaves if cache.kids[c]] and len(leaves) < len(order)
        assert list(cache.policy.victims(0, cache.now)) == order, "naming changes nothing"

    def test_what_was_forgotten_is_not_named(self) -> None:
        policy = self.filled()
        policy.forget(3, evicted=True)
        policy.forget(5, evicted=False)
        assert sorted(policy.victims(0, 30 * S)) == [c for c in range(20) if c not in (3, 5)]
        assert len(policy) == 18

    def test_an_empty_queue_names_nothing(self) -> None:
        policy = self.make()
        assert list(policy.victims(0, 0)) == []
        assert policy.first(0, 0) == -1
        assert policy.coldness(0, 0) is None
        assert len(policy) == 0

    def test_a_queue_names_only_its_own(self) -> None:
        policy = self.make()
        for chunk in range(12):
            insert(policy, chunk, chunk * S, queue=chunk % 3)
        for queue in range(3):
            assert sorted(policy.victims(queue, 20 * S)) == list(range(queue, 12, 3))
        assert policy.coldness(7, 20 * S) is None

    def test_the_iterator_can_be_left_early(self) -> None:
        policy = self.filled()
        victims = policy.victims(0, 30 * S)
        first = [next(victims) for _ in range(3)]
        del victims
        for chunk in first:
            policy.forget(chunk, evicted=True)
        assert set(policy.victims(0, 30 * S)) == set(range(20)) - set(first)

    # -- unknown ids ----------------------------------------------------------------------------

    def test_unknown_ids_are_passed_over(self) -> None:
        policy = self.filled(4)
        policy.forget(99, evicted=True)
        policy.forget(-1, evicted=False)
        policy.touch([-1, 99, 2, 1_000_000], 5 * S)
        policy.forget(2, evicted=True)
        policy.forget(2, evicted=True)
        policy.touch([2], 6 * S)
        assert sorted(policy.victims(0, 9 * S)) == [0, 1, 3]

    def test_an_id_can_come_back_as_another_chunk(self) -> None:
        policy = self.make()
        insert(policy, 0, 0)
        insert(policy, 1, 1, parent=0)
        policy.forget(1, evicted=True)
        policy.forget(0, evicted=True)
        insert(policy, 1, 2 * S, queue=3)
        insert(policy, 0, 3 * S, parent=1, queue=3)
        policy.touch([1, 0], 4 * S)
        assert list(policy.victims(0, 5 * S)) == []
        assert list(policy.victims(3, 5 * S)) == [0, 1]

    # -- order ----------------------------------------------------------------------------------

    def test_a_fresh_chunk_is_not_the_first_victim(self) -> None:
        """K44"""
        policy = self.filled()
        for chunk in range(20, 40):
            insert(policy, chunk, chunk * S)
            assert next(iter(policy.victims(0, chunk * S))) != chunk

    def test_a_chain_is_named_from_its_leaf(self) -> None:
        policy = self.make()
        for chunk in range(10):
            insert(policy, chunk, chunk, parent=chunk - 1)
        policy.touch(range(10), S)
        assert list(policy.victims(0, 2 * S)) == list(range(9, -1, -1))

    def test_a_chain_that_came_in_parts_is_named_from_its_leaf(self) -> None:
        """K38: chunked prefill stores a prompt in several calls; a touch refreshes ancestors."""
        cache = Cache(self.make(), 100)
        for part in range(6):
            cache.use(prompt("long", 10 * (part + 1)))
        for _ in range(2):
            cache.use(prompt("long", 10))
        n = 0
        while cache.evictions < 30:
            cache.use(prompt(("other", n), 5))
            n += 1
        kept = {name[1] for name in cache.row if name[0] == "long"}  # type: ignore[index]
        assert kept == set(range(len(kept)))
        assert cache.prefix_closed()

    def test_a_chain_that_is_told_as_the_policy_wants_it_is_named_from_its_leaf(self) -> None:
        """Where no whole chains are needed, of a chain that grows only the end is told."""
        policy = self.make()
        for chunk in range(40):
            insert(policy, chunk, S + chunk * LATELY_NS // 40, parent=chunk - 1)
            if chunk % 10 == 9:
                first = 0 if policy.whole_chains() else chunk - 9
                policy.touch(range(first, chunk + 1), S + chunk * LATELY_NS // 40)
        assert list(policy.victims(0, 2 * S)) == list(range(39, -1, -1))

    def test_branches_go_before_what_they_share(self) -> None:
        policy = self.make()
        insert(policy, 0, 0)
        for branch in (1, 2, 3):
            insert(policy, branch, branch * S, parent=0)
            policy.touch([0, branch], branch * S)
        order = list(policy.victims(0, 9 * S))
        assert order[-1] == 0

    def test_whatever_happens_prefixes_stay_closed(self) -> None:
        rng = random.Random(5)
        cache = Cache(self.make(), 60)
        for _ in range(1500):
            shared = prompt(rng.randrange(6), rng.randrange(1, 8))
            own = [(shared[-1], rng.randrange(12), n) for n in range(rng.randrange(0, 10))]
            cache.use([*shared, *own])
            assert len(cache.row) <= 60
            assert len(cache.policy) == len(cache.row)
        assert cache.prefix_closed()
        assert cache.evictions > 100
        # Illegal candidates cost time: there must be few of them.
        assert cache.skipped <= 20 * cache.evictions

    def test_new_entries_are_not_starved_by_old_frequency(self) -> None:
        """K44: what was read 50 times long ago makes way for what is read now."""
        cache = Cache(self.make(), 100)
        for n in range(100):
            cache.use(prompt(("old", n), 1))
        for _ in range(50):
            for n in range(100):
                cache.use(prompt(("old", n), 1))
        second = asked = 0
        for n in range(5_000):
            cache.now += S
            cache.use(prompt(("new", n), 1))
            if n >= 10:
                hit = cache.use(prompt(("new", n - 10), 1))
                if n >= 1_000:
                    asked += 1
                    second += hit
        assert second >= 0.95 * asked
        old = sum(1 for name in cache.row if name[0][0] == "old")  # type: ignore[index]
        assert old <= 20

    # -- what may not go ------------------------------------------------------------------------

    def test_what_was_deferred_is_named_after_the_others(self) -> None:
        policy = self.filled()
        now = 30 * S
        order = list(policy.victims(0, now))
        policy.defer(order[:5], now)
        after = list(policy.victims(0, now))
        assert sorted(after) == sorted(order)
        assert set(after[-6:]) >= set(order[:5])  # beside them, at most what came last
        assert [chunk for chunk in after if chunk not in order[:5]][:10] == order[5:15]

    def test_a_search_meets_each_candidate_once(self) -> None:
        policy = self.filled()
        met: list[int] = []
        while len(met) < 20:
            some = [c for c, _ in zip(policy.victims(0, 30 * S), range(4), strict=False)]
            policy.defer(some, 30 * S)
            met += some
        assert sorted(met) == list(range(20))

    def test_what_was_deferred_does_not_stay_for_ever(self) -> None:
        """It may go again when its lease has ended: others' evictions bring it back."""
        cache = Cache(self.make(), 64)
        for n in range(32):
            cache.use(prompt(("leased", n), 1))
        cache.leased = set(cache.row)
        for n in range(200):
            cache.use(prompt(("other", n), 1))
        assert all(prompt(("leased", n), 1)[0] in cache.row for n in range(32))
        cache.leased = set()
        for n in range(200, 2000):
            cache.now += 20 * S
            cache.use(prompt(("other", n), 1))
        assert sum(prompt(("leased", n), 1)[0] in cache.row for n in range(32)) <= 2

    def test_many_leased_chunks_cost_each_eviction_no_more(self) -> None:
        """All of them are colder than what may go; a search that met them each time would look at
        1,000 a time."""
        count, free = 1_000, 50
        cache = Cache(self.make(), count + free)
        for n in range(count // 8):
            cache.use(prompt(("leased", n), 8))
        cache.leased = set(cache.row)
        for n in range(1_000):
            cache.use(prompt(("other", n), 1))
        assert cache.evictions >= 950
        assert cache.skipped <= 2 * count + 20 * cache.evictions
        assert cache.leased <= set(cache.row)
        assert cache.prefix_closed()

    def test_a_queue_of_what_was_deferred_is_colder_than_none(self) -> None:
        policy = self.make()
        for chunk in range(20):
            insert(policy, chunk, chunk * S, queue=chunk % 2)
        for _ in range(3):
            for n in range(1, 20, 2):
                policy.touch([n], (30 + n) * S)
        now = 2000 * S
        policy.defer(list(policy.victims(0, now)), now)
        cold, other = policy.coldness(0, now), policy.coldness(1, now)
        assert cold is not None and other is not None
        assert cold >= other

    # -- hints ----------------------------------------------------------------------------------

    def test_what_was_cooled_goes_first_leaf_by_leaf(self) -> None:
        cache = Cache(self.make(), 100)
        for n in range(10):
            cache.use(prompt(n, 5))
            cache.now += 2 * S
        for _ in range(3):
            cache.use(prompt(4, 5))
            cache.now += 2 * S
        suffix = [cache.row[name] for name in reversed(prompt(4, 5)[2:])]
        cache.policy.cool(suffix, cache.now)
        order = list(cache.policy.victims(0, cache.now))
        assert sorted(order) == sorted(cache.row.values())
        assert order[:3] == suffix
        assert cache.policy.coldness(0, cache.now) is not None

    def test_a_use_takes_a_hint_back(self) -> None:
        cache = Cache(self.make(), 100)
        for n in range(10):
            cache.use(prompt(n, 3))
            cache.now += 2 * S
        chain = [cache.row[name] for name in prompt(7, 3)]
        cache.policy.cool(chain[::-1], cache.now)
        other = cache.policy
        for chunk in list(other.victims(0, cache.now))[:3]:
            assert chunk in chain
        cache.use([*prompt(7, 3), "longer"])  # stored below, and used
        assert not set(chain) & set(list(other.victims(0, cache.now))[:9])

    def test_what_was_cooled_and_is_leased_costs_no_more_than_others(self) -> None:
        cache = Cache(self.make(), 1_000)
        for n in range(100):
            cache.use(prompt(n, 9))
            cache.policy.cool([cache.row[name] for name in reversed(prompt(n, 9))], cache.now)
        cache.leased = set(cache.row)
        for n in range(1_000):
            cache.use(prompt(("other", n), 1))
        assert cache.evictions >= 850
        assert cache.skipped <= 2 * 900 + 20 * cache.evictions
        cache.leased = set()
        for n in range(1_000):
            cache.use(prompt(("more", n), 1))
        assert not any((n, 0) in cache.row for n in range(100))

    def test_whatever_is_hinted_prefixes_stay_closed(self) -> None:
        rng = random.Random(13)
        cache = Cache(self.make(), 60)
        for n in range(1000):
            shared = prompt(rng.randrange(6), rng.randrange(1, 8))
            cache.use([*shared, *[(shared[-1], rng.randrange(12), k) for k in range(n % 9)]])
            some = rng.sample(sorted(cache.row.values()), min(5, len(cache.row)))
            cache.policy.cool(some, cache.now)
            assert len(cache.policy) == len(cache.row)
            assert cache.prefix_closed()
        assert cache.evictions > 100

    def test_whatever_is_leased_prefixes_stay_closed(self) -> None:
        rng = random.Random(11)
        cache = Cache(self.make(), 80)
        for n in range(1500):
            shared = prompt(rng.randrange(6), rng.randrange(1, 8))
            own = [(shared[-1], rng.randrange(12), n) for n in range(rng.randrange(0, 10))]
            cache.use([*shared, *own])
            if n % 3 == 0:
                cache.leased = set(rng.sample(sorted(cache.row, key=repr), min(6, len(cache.row))))
            assert len(cache.row) <= 80
            assert len(cache.policy) == len(cache.row)
            assert cache.prefix_closed()
        assert cache.evictions > 100

    # -- value ----------------------------------------------------------------------------------

    def test_coldness_is_the_value_of_the_first_victim(self) -> None:
        policy = self.filled()
        first = next(iter(policy.victims(0, 30 * S)))
        assert policy.coldness(0, 30 * S) == policy.value(first, 30 * S)

    def test_a_queue_of_what_is_used_is_not_colder_than_one_of_what_is_not(self) -> None:
        policy = self.make()
        for chunk in range(20):
            insert(policy, chunk, chunk, queue=chunk % 2)
        for n in range(50):
            policy.touch([2 * (n % 10) + 1], (10 + n) * S)
        used, unused = policy.coldness(1, 70 * S), policy.coldness(0, 70 * S)
        assert used is not None and unused is not None
        assert unused <= used

    # -- time -----------------------------------------------------------------------------------

    def test_time_may_stand_still_or_leap(self) -> None:
        policy = self.make()
        for chunk in range(5):
            insert(policy, chunk, 7 * S)
            policy.touch([chunk], 7 * S)
        policy.touch([0], 7 * S + 10**15)
        insert(policy, 5, 7 * S + 10**15)
        order = list(policy.victims(0, 7 * S + 10**15))
        assert sorted(order) == [0, 1, 2, 3, 4, 5]

    def test_the_same_calls_give_the_same_order(self) -> None:
        orders = []
        for _ in range(2):
            rng = random.Random(9)
            cache = Cache(self.make(), 40)
            for _ in range(300):
                cache.use(prompt(rng.randrange(20), rng.randrange(1, 6)))
            orders.append([cache.name[c] for c in cache.policy.victims(0, cache.now)])
        assert orders[0] == orders[1]

    # -- restart --------------------------------------------------------------------------------

    def test_a_restart_keeps_the_order(self) -> None:
        """Under other ids, by digests."""
        rng = random.Random(2)
        cache = Cache(self.make(), 40)
        for _ in range(300):
            cache.use(prompt(rng.randrange(20), rng.randrange(1, 6)))
        settle(cache.policy, cache.now)
        before = [cache.name[c] for c in cache.policy.victims(0, cache.now)]
        ids = {name: 100 + n for n, name in enumerate(sorted(cache.row, key=repr))}
        chunks = [cache.row[name] for name in before]
        other = self.make()
        reborn(
            cache.policy,
            other,
            [
                Chunk(
                    c,
                    ids[cache.name[c]],
                    NONE if cache.parent[c] == NONE else ids[cache.name[cache.parent[c]]],
                    0,
                    hash((cache.name[c], 7)) & (1 << 64) - 1,
                )
                for c in chunks
            ],
            cache.now,
        )
        assert len(other) == len(cache.policy)
        names = {n: name for name, n in ids.items()}
        same = [names[c] for c in other.victims(0, cache.now)]
        assert sorted(map(repr, same)) == sorted(map(repr, before))
        # chunks of one value may stand in any order among each other
        value = {name: other.value(ids[name], cache.now) for name in before}
        assert [value[n] for n in same] == pytest.approx([value[n] for n in before])

    def test_what_is_remembered_of_strangers_does_no_harm(self) -> None:
        policy = self.make()
        count = 6
        width = policy.memory(np.empty(0, np.int64)).shape[1]
        memory = np.full((count, width), np.nan)
        memory[1:3] = 1e300
        memory[3:5] = -1e300
        policy.load(
            np.arange(count),
            np.arange(count) * S,
            parents=np.full(count, NONE),
            queue=1,
            size=1,
            ghosts=np.arange(count, dtype=np.uint64),
            memory=memory,
        )
        assert sorted(policy.victims(1, 20 * S)) == list(range(count))
        insert(policy, 9, 21 * S, queue=1)
        policy.touch(range(10), 22 * S)
        policy.forget(next(iter(policy.victims(1, 23 * S))), evicted=True)
        assert policy.coldness(1, 24 * S) is not None

    def test_a_snapshot_of_another_policy_is_refused(self) -> None:
        with pytest.raises((ValueError, KeyError)):
            self.make().restore({"policy": "of one's own", "time": 1}, NO_GHOSTS, 0)

    def test_many_can_come_at_once(self) -> None:
        """After a restart: coldest first, each before its ancestors."""
        policy = self.make()
        order = np.array([9, 8, 7, 3, 2, 1, 0], np.int64)  # chains 0-1-2-3 and 7-8-9
        parents = np.array([8, 7, NONE, 2, 1, 0, NONE], np.int64)
        born = np.array([5, 4, 3, 9, 8, 7, 6], np.int64) * S
        policy.load(
            order,
            born,
            parents=parents,
            queue=4,
            size=1,
            ghosts=order.astype(np.uint64) * np.uint64(2654435761),
        )
        assert len(policy) == 7
        named = list(policy.victims(4, 20 * S))
        assert sorted(named) == sorted(order.tolist())
        for chain in ([3, 2, 1, 0], [9, 8, 7]):
            assert [c for c in named if c in chain] == chain
        insert(policy, 20, 21 * S, queue=4)
        assert next(iter(policy.victims(4, 21 * S))) != 20
        policy.touch([7, 8, 9], 22 * S)
        policy.forget(9, evicted=True)
        assert 9 not in list(policy.victims(4, 23 * S))
