"""What policies know goes on after a restart: recency, frequency, and what they remember of keys
that are gone."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest
from world import KIB, S, World, chain, spec

from kvd.chunk import Outcome
from kvd.core import TierConfig
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.recollection import Recollection, collect
from kvd.eviction import POLICIES

SLOTS = 128  # of 8 KiB in the world's 1 MiB
ONE = spec("m", 8 * KIB)


def busy(policy: str, **settings: Any) -> World:
    """A world at its limit, with chunks that were used often, seldom, and long ago."""
    rng = random.Random(4)
    world = World(policy=policy, write_share=1.0, **settings)
    client = world.open()
    client.register(ONE)
    for n in range(60):
        use(world, client, rng.choice([n, n // 4, 2]), 1 + n % 6)
    client.close(stopped=True)
    return world


def use(world: World, client: Any, name: object, length: int) -> int:
    """One request; how many chunks were there."""
    looked = client.lease(ONE, chain(name, length))
    client.release(looked.lease) if looked.lease else None
    assert client.store(ONE, chain(name, length)) is not None
    world.advance(3 * S)
    return int(looked.leading)


def told(world: World) -> dict[str, Recollection]:
    """What the next life gets, through the file's encoding."""
    packed = [msgpack.packb(part) for part in world.core.remember()]
    return collect(msgpack.unpackb(part) for part in packed)


def order(world: World) -> list[tuple[bytes, float]]:
    """Keys and values as they would go, over all queues."""
    store = world.core._store
    rows = [
        row
        for queue in range(len(store.residents))
        for row in store.policy.victims(queue, store.now)
    ]
    return [(store.chunks.key_of(row), store.policy.value(row, store.now)) for row in rows]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_order_of_eviction_survives(policy: str) -> None:
    world = busy(policy)
    known = told(world)
    world.restart(known=known)
    first = order(world)
    assert world.recalled == ["dram"]
    world.restart(known=told(world))  # once more: nothing is lost on the way
    second = order(world)
    assert len(first) > SLOTS / 2
    assert [value for _, value in first] == pytest.approx([value for _, value in second])
    tied = {value for _, value in first if [v for _, v in first].count(value) > 1}
    assert [k for k, v in first if v not in tied] == [k for k, v in second if v not in tied]


@pytest.mark.parametrize("policy", ["crf", "reuse", "lru"])
def test_what_was_worth_keeping_is_kept_after_a_restart(policy: str) -> None:
    """Values are what they were before, not those of chunks that have just come."""
    world = busy(policy)
    before = dict(order(world))
    world.restart(known=told(world))
    after = dict(order(world))
    assert set(after) == set(before)
    names = sorted(before)
    warm = np.corrcoef([before[n] for n in names], [after[n] for n in names])[0, 1]
    assert warm > 0.95
    world.restart()
    bare = dict(order(world))
    assert max(abs(before[n] - after[n]) for n in names) < max(
        abs(before[n] - bare[n]) for n in names
    )


def test_keys_that_were_evicted_are_remembered() -> None:
    world = World(policy="crf", write_share=1.0)
    client = world.open()
    client.register(ONE)
    for _ in range(5):
        use(world, client, "often", 1)
    world.advance(200 * S)
    for n in range(SLOTS + 8):
        client.store(ONE, chain(("once", n), 1))
    assert client.lookup(ONE, chain("often", 1)).leading == 0
    known = told(world)
    client.close(stopped=True)
    world.restart(known=known)
    client = world.open()
    client.register(ONE)
    client.store(ONE, chain("new", 1))
    client.store(ONE, chain("often", 1))
    value = dict(order(world))
    assert value[chain("often", 1)[0]] > 10 * value[chain("new", 1)[0]]


def test_a_tier_below_goes_on_where_it_was() -> None:
    world = busy("crf", size=512 * KIB, tiers=(TierConfig("nvme", 256 * 8 * KIB),))
    lower = world.core._store.ladder.lowers[0]
    store = world.core._store
    lower.policy.touch([], store.now)  # its time is that of its last use
    before = {
        store.chunks.key_of(row): lower.policy.value(row, store.now)
        for row in lower.policy.victims(0, store.now)
    }
    known = told(world)
    assert set(known) == {"dram", "nvme"}
    world.restart(known=known)
    assert world.recalled == ["dram", "nvme"]
    store = world.core._store
    lower = store.ladder.lowers[0]
    assert lower.policy.recollection is None
    after = {
        store.chunks.key_of(row): lower.policy.value(row, store.now)
        for row in lower.policy.victims(0, store.now)
    }
    assert before and after == pytest.approx(before, rel=1e-6)


def test_a_serving_daemon_tells_it_in_parts() -> None:
    world = busy("reuse")
    world.log.clear()
    world.handle(ev.Remember())
    world.handle(ev.Remember())  # under way already
    world.settle()
    parts = [action.part for action in world.log if isinstance(action, ac.Remembered)]
    assert parts[-1] is None and None not in parts[:-1]
    assert parts[:-1] == list(world.core.remember())
    for part in parts[:-1]:
        assert part is not None and len(msgpack.packb(part)) < 1 << 20


def test_another_policys_knowledge_is_of_no_use() -> None:
    world = busy("arc")
    known = told(world)
    world.policy = "crf"
    world.restart(known=known)
    assert world.recalled == [] and world.counter("policy_errors") == 0
    client = world.open()
    client.register(ONE)
    assert client.store(ONE, chain("after", 8)) == [Outcome.OK] * 8


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("how", ["state", "memory", "ghosts", "wild"])
def test_knowledge_that_does_not_hold_is_a_cold_policy(policy: str, how: str) -> None:
    world = busy(policy)
    known = told(world)
    it = known["dram"]
    if how == "state":
        it.state = {name: None for name in it.state} or {"something": 1}
    elif how == "memory":
        it.memory = np.zeros((len(it.digests), 9))
    elif how == "ghosts":
        it.ghosts, it.ghost_values = np.arange(5, dtype=np.uint64), np.full((5, 7), np.nan)
    else:
        it.memory = np.full_like(it.memory, 1e200)
        it.last[:] = 1 << 62
        it.ghost_values = np.full_like(it.ghost_values, 1e15)
    world.restart(known=known)
    client = world.open()
    client.register(ONE)
    for n in range(3 * SLOTS // 8):
        assert client.store(ONE, chain(("after", n), 8)) == [Outcome.OK] * 8
    assert world.counter("policy_errors") == 0
    if how in ("state", "memory"):
        assert world.recalled == []


@pytest.mark.inside
def test_a_policy_that_can_not_tell_costs_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """K39: the daemon goes on, and keeps nothing of it."""
    world = busy("crf")
    monkeypatch.setattr(POLICIES["crf"], "memory", None)
    world.handle(ev.Remember())
    world.settle()
    assert world.counter("policy_errors") == 1
    parts = [action.part for action in world.log if isinstance(action, ac.Remembered)]
    assert parts == [None]
    assert list(world.core.remember()) == []


def test_one_tenants_use_of_a_key_is_not_anothers() -> None:
    """Digests in a policy's memory differ by tenant, or who stores what another has evicted would
    see it stay longer."""
    world = World(policy="crf")
    for name in ("a", "b"):
        client = world.open(name)
        client.register(ONE)
        client.store(ONE, chain("same", 4))
    store = world.core._store
    rows = np.flatnonzero(store.chunks.np_ready[: store.chunks.used] > 0)
    digests = store.ghosts(rows)
    assert len(rows) == 8 and len(set(digests.tolist())) == 8
    assert digests.tolist() == [store.ghost(row) for row in rows.tolist()]
