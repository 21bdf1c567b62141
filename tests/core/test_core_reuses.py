"""The core learns from its requests what other capacities would have hit, and shows it."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, S, World, chain, spec

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.core.reuses import _NOTED, HALF_LIFE_S, SLICE, TENANTS, Note, Reuses
from kvd.core.spaces import Space

ONE = spec()
SLOT = 8 * KIB


def calm(world: World) -> World:
    """Until nothing is left to be done after the replies."""
    while world.core.busy:
        world.handle(ev.Tick())
    return world


def hit_at(shown: dict[str, Any], nbytes: int) -> float:
    """Percent at the first point of a curve that is not below so many bytes."""
    return float(next((hit for at, hit in shown["curve"] if at >= nbytes), shown["curve"][-1][1]))


def test_the_curve_tells_what_a_larger_cache_would_have_hit() -> None:
    """Prompts of 40 chunks come round in a ring three times as large as the arena: nothing is hit,
    and the curve says what would be."""
    world = World(size=1024 * KIB, lease_share=1.0, write_share=1.0)
    client = world.open("a", admin=True)
    client.register(ONE)
    for _ in range(6):
        for prompt in range(9):
            keys = chain(prompt, 40)
            got = client.lease(ONE, keys)
            if got.lease:
                client.release(got.lease)
            client.store(ONE, keys)
            world.advance(S)
    shown = calm(world).stat()["reuse"]
    ring = 9 * 40 * SLOT
    assert world.counter("chunks_hit") == 0
    assert shown["all"]["uses"] == world.counter("chunks_asked")
    assert hit_at(shown["all"], ring // 4) < 5
    assert hit_at(shown["all"], 2 * ring) == pytest.approx(100 * 5 / 6, abs=3)
    assert shown["all"]["curve"] == shown["tenants"]["a"]["curve"]


def test_a_lookup_without_a_lease_is_no_use() -> None:
    world = World()
    client = world.open()
    client.register(ONE)
    client.lookup(ONE, chain("p", 100))
    assert calm(world).stat()["reuse"]["all"] == {}
    client.lease(ONE, chain("p", 100))
    assert calm(world).stat()["reuse"]["all"]["uses"] == 100


def test_a_tenant_sees_its_own_curve_only() -> None:
    world = World(size=4096 * KIB)
    for name in ("a", "b"):
        client = world.open(name)
        client.register(ONE)
        for _ in range(3):
            client.store(ONE, chain(name, 60))
            client.lease(ONE, chain(name, 60))
    calm(world)
    everybody = world.core.stat()["reuse"]
    assert set(everybody) == {"all", "tenants", "left_out"}
    assert set(everybody["tenants"]) == {"a", "b"}
    own = world.core.stat("b")["reuse"]
    assert own == {"tenants": {"b": everybody["tenants"]["b"]}}
    assert world.core.stat("c")["reuse"] == {"tenants": {}}


def test_the_same_key_of_two_tenants_is_two_keys() -> None:
    world = World(size=4096 * KIB)
    for name in ("a", "b"):
        client = world.open(name)
        client.register(ONE)
        client.lease(ONE, chain("same", 200))
    shown = calm(world).stat()["reuse"]
    assert shown["all"]["curve"] == []  # nothing was used twice
    assert shown["all"]["followed"] > 20


def test_long_requests_are_looked_at_in_slices() -> None:
    reuses = Reuses(CoreConfig("t", 1, 1 << 30, 1 << 20))
    world = World()
    client = world.open()
    client.register(ONE)
    space = world.core._store.spaces.make("default", ONE.digest, 1)
    reuses.note(space, bytes(32) * (3 * SLICE + 5), 0)
    slices = 0
    while reuses.waiting:
        reuses.apply()
        slices += 1
    assert slices == 3  # the last five wait for more, or for somebody who asks
    assert reuses.stat(None)["all"]["uses"] == 3 * SLICE + 5


def some_space(namespace: str) -> Space:
    world = World()
    world.open(namespace).register(ONE)
    return world.core._store.spaces.make(namespace, ONE.digest, 1)


def test_what_comes_too_fast_is_left_out_and_counted() -> None:
    reuses = Reuses(CoreConfig("t", 1, 1 << 30, 1 << 20))
    space = some_space("a")
    for _ in range(_NOTED // 4096 + 3):
        reuses.note(space, bytes(32 * 4096), 0)
    assert reuses.crowded()
    assert reuses.stat(None)["left_out"] == 3 * 4096
    while reuses.waiting:
        reuses.apply()
    assert reuses._noted == 0 and not reuses.crowded()
    assert reuses.stat(None)["all"]["uses"] == _NOTED


def test_no_more_than_so_many_tenants_have_curves() -> None:
    """The idle make way; nobody who is in use does."""
    reuses = Reuses(CoreConfig("t", 1, 1 << 30, 1 << 20))
    space = some_space("a")

    def use(name: str, now: int) -> None:
        space.namespace = name
        reuses._tell(Note(False, space, bytes(32), now), bytes(32), [1])

    for n in range(TENANTS + 5):
        use(f"t{n}", n)
    assert len(reuses.stat(None)["tenants"]) == TENANTS
    assert f"t{TENANTS}" not in reuses.stat(None)["tenants"]
    use("late", int(HALF_LIFE_S * S) + 5)
    shown = reuses.stat(None)["tenants"]
    assert "late" in shown and "t0" not in shown and len(shown) == TENANTS


def test_clients_cannot_choose_what_is_followed() -> None:
    """Another seed, other keys."""
    space = some_space("a")
    hashes = b"".join(chain("p", 64))
    first = Reuses(CoreConfig("t", 1, 1 << 30, 1 << 20, seed=1))._digests(space, hashes)
    second = Reuses(CoreConfig("t", 1, 1 << 30, 1 << 20, seed=2))._digests(space, hashes)
    assert len(set(first.tolist()) | set(second.tolist())) == 128
