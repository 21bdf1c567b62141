"""Figures of many tenants: rows for some, a sum of the others, in pieces, and all of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from world import KIB, LookupFlag, World, chain, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig
from kvd.core.shares import Amount, TenantRules, TierShare
from kvd.core.stats import shown, work_out
from kvd.telemetry.tenants import OTHER, told_apart

ONE = spec("one", 4 * KIB)
MANY, APART = 1000, 64


def world(tenants: int) -> World:
    """Each with a few chunks, some with rules; the last is called `other`."""
    it = World(16_384 * KIB, 64 * KIB, tiers=(TierConfig("nvme", 65_536 * KIB),), apart=APART)
    for n in range(tenants):
        name = OTHER if n == tenants - 1 else f"tenant-{(n * 7919) % 10_000:04}"
        if n % 3 == 0:
            most = Amount(bytes=(n + 1) * KIB) if n % 2 else None
            share = TierShare(Amount(part=0.0001), 1.0 + n / 8, most)
            it.handle(ev.SetTenant(name, TenantRules({"dram": share})))
        if n % 5 == 4:
            continue  # it has rules at most
        client = it.open(name)
        client.register(ONE)
        client.store(ONE, chain(n, 1 + n % 2))
        client.lookup(ONE, chain(n, 1 + n % 4))
    it.settle()
    return it


@pytest.fixture(scope="module")
def many() -> World:
    return world(MANY)


@pytest.fixture(scope="module")
def few() -> World:
    return world(12)


def capped(rows: Mapping[str, Any], order: list[str], limit: int) -> dict[str, Any]:
    """The naive way: all rows, then the sum of those that have none of their own."""
    own = [name for name in dict.fromkeys(order) if name in rows and name != OTHER][:limit]
    rest = [row for name, row in rows.items() if name not in own]
    told = {name: rows[name] for name in own}
    return {**told, OTHER: _sum(rest)} if rest else told


def _sum(rows: list[Any]) -> Any:
    if all(isinstance(row, Mapping) for row in rows):
        keys = dict.fromkeys(key for row in rows for key in row)
        return {key: _sum([row[key] for row in rows if key in row]) for key in keys}
    if len(rows) == 1:
        return rows[0]
    if all(isinstance(row, int | float) for row in rows):
        return sum(rows)
    return None


@given(apart=st.integers(0, 13))
def test_rows_of_some_tenants_and_the_sum_of_the_others(few: World, apart: int) -> None:
    reading = few.core.reading()
    every = shown(reading)["tenants"]
    assert len(every) == 11 and OTHER in every
    told = shown(reading, apart=apart)["tenants"]
    naive = capped(every, [*reading.tenants, *every], apart)
    assert told == naive and list(told) == list(naive)
    assert shown(reading, apart=apart)["counters"] == shown(reading)["counters"]


def test_each_of_a_thousand_tenants_is_shown_what_the_core_goes_by(many: World) -> None:
    core, store = many.core, many.core._store
    stat = core.stat()
    names = core.tenants
    assert names == sorted(stat["tenants"]) and len(names) > 0.8 * MANY
    rows = {}
    for begin in range(0, len(names), 32):
        rows.update(core.tenant_rows(names[begin : begin + 32], own=False))
    assert rows == stat["tenants"], "pages of the list say what stat says"
    for name, row in rows.items():
        number = store.shares.find(name)
        assert number is not None
        for tier in store.shares.tiers:
            told = row["tiers"][tier.name]
            assert told["used_bytes"] == tier.use[number]
            assert told["minimum_bytes"] == tier.minimum[number]
            assert told["share_bytes"] == int(tier.share[number])
        assert row["chunks"] == sum(
            space.chunks for space in store.spaces.all() if space.namespace == name
        )
    for metric in ("lookups", "chunks_stored", "chunks_asked"):
        total = sum(row["counters"][metric] for row in rows.values())
        assert stat["counters"][metric] == total > 0
    name = names[17]
    (own,) = core.tenant_rows([name], own=True).values()
    assert own == core.stat(name)["tenants"][name]
    assert "share_bytes" not in own["tiers"]["dram"]


def test_a_stat_of_a_thousand_tenants_holds_nobody_up_and_is_of_its_moment(many: World) -> None:
    admin = many.open(admin=True)
    name = many.core.tenants[40]
    client = many.open(name)
    client.register(ONE)
    client.store(ONE, chain("mine", 2))
    many.settle()
    expected = many.core.stat()
    expected["tenants"] = shown(many.core.reading(), apart=APART)["tenants"]
    del expected["uptime_s"]

    actions = many.handle(ev.Stat(admin.number, "stat"))
    assert not [a for a in actions if isinstance(a, ac.Reply)], "it is asked, and goes on"
    turns, done = 0, []
    while not done:
        if turns < 5:
            asked = client.lookup_event(ONE, chain("mine", 2), LookupFlag.LEASE)
            event = asked._replace(request=("between", turns))
            (answer,) = [a for a in many.handle(event) if isinstance(a, ac.Reply)]
            assert answer.result.leading == 2, "others are answered in between"
        assert many.core.busy
        done = [a for a in many.handle(ev.Tick()) if isinstance(a, ac.Reply)]
        turns += 1
    (reply,) = done
    stat = dict(reply.result.stat)
    del stat["uptime_s"], stat["namespace"]
    assert stat == expected, "what came later is not in it"
    assert turns > 10
    assert many.core.stat() != expected


def test_what_works_a_reading_out_gives_way_often(many: World) -> None:
    """Nobody's clock: each piece is of a few tenants."""
    pieces = list(work_out(many.core.reading(), APART))
    assert len(pieces) > APART + (MANY * 0.8 - APART) / 8 and max(pieces) <= MANY // 16


@given(
    names=st.lists(st.sampled_from([*"abcdefgh", OTHER]), unique=True),
    limit=st.integers(0, 10),
    order=st.permutations([*"abcdefgh", OTHER]),
)
def test_each_tenant_is_told_once(names: list[str], limit: int, order: list[str]) -> None:
    own, rest = told_apart(names, order, limit)
    assert sorted(own + rest) == sorted(names) and len(own) <= limit and OTHER not in own
    assert told_apart(names, order, None) == (names, [])


@given(order=st.permutations([*"abcdef"]), limit=st.integers(0, 5))
def test_a_tenant_stays_where_it_is_as_others_come(order: list[str], limit: int) -> None:
    before: set[str] = set()
    for count in range(1, len(order) + 1):
        told = set(told_apart(order[:count], order, limit).own)
        assert before <= told
        before = told
