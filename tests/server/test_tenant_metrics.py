"""Figures by tenant stay few, however many tenants there are."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from daemon import DaemonProcess
from hypothesis import given

from kvd.client import Client
from kvd.telemetry.tenants import OTHER, capped


def row(count: int) -> dict[str, Any]:
    return {"chunks": count, "counters": {"missed": {"absent": count}}, "tiers": {"dram": None}}


@given(
    counts=st.dictionaries(st.sampled_from([*"abcdefgh", OTHER]), st.integers(0, 9)),
    limit=st.integers(0, 10),
    order=st.permutations([*"abcdefgh", OTHER]),
)
def test_few_rows_and_the_same_sum(counts: dict[str, int], limit: int, order: list[str]) -> None:
    told = capped({name: row(n) for name, n in counts.items()}, order, limit)
    assert len(told) <= limit + 1
    assert sum(r["chunks"] for r in told.values()) == sum(counts.values())
    missed = sum(r["counters"]["missed"]["absent"] for r in told.values())
    assert missed == sum(counts.values())


@given(order=st.permutations([*"abcdef"]), limit=st.integers(0, 5))
def test_a_tenant_stays_where_it_is_as_others_come(order: list[str], limit: int) -> None:
    before: set[str] = set()
    for count in range(1, len(order) + 1):
        told = set(capped({name: row(1) for name in order[:count]}, order, limit))
        assert before - {OTHER} <= told
        before = told


def test_stat_tells_so_many_apart_and_the_list_all() -> None:
    tenants = "".join(f"[tenants.t{n:03}]\nuids = [{50_000 + n}]\n" for n in range(150))
    config = tenants + "[tenancy]\nmetrics = 5\n"
    with DaemonProcess(arena_size="16MiB", config=config) as daemon:
        with Client(daemon.socket, map_memory=False) as client:
            told = client.stat()["tenants"]
            assert sorted(told) == [OTHER, *(f"t{n:03}" for n in range(5))]
            names = [row["name"] for row in client.tenants()]
            assert len(names) >= 150 and names == sorted(names) and "t149" in names
