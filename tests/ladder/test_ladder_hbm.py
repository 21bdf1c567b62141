"""A real daemon with device memory as its nearest tier: on CPU tensors, which need no device."""

from __future__ import annotations

import importlib.util

import pytest
from remote_kit import (
    OK,
    SIZE,
    chain,
    daemon,
    drain,
    empty,
    flags,
    load,
    refused,
    spec,
    store,
    tier,
    until,
)

from kvd.client import Client

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def on_cpu(**more: object) -> list[str]:
    return flags(hbm_device="cpu", hbm_limit="64MiB", **more)


def test_what_the_device_has_comes_back_bit_by_bit_and_ends_with_the_daemon() -> None:
    with daemon(*on_cpu()) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("a", 8))
        drain(client, "hbm")
        there = tier(client, "hbm")
        assert (there["engine"], there["chunks"], there["state"]) == ("torch cpu", 8, "ok")
        assert there["used_bytes"] == 8 * SIZE <= there["held_bytes"] <= there["limit_bytes"]
        empty(client, "dram")
        assert set(client.lookup(handle, chain("a", 8), lease=False).tiers) == {1}
        assert load(client, handle, chain("a", 8)) == [OK] * 8
        assert tier(client, "hbm")["bytes_read"] == 8 * SIZE
        empty(client, "dram")
        process.kill()
        process.start()
        handle = client.register(spec())
        assert tier(client, "hbm")["chunks"] == 0
        assert client.lookup(handle, chain("a", 8), lease=False).leading == 0


def test_by_default_it_has_what_was_hit_twice() -> None:
    with daemon(*on_cpu()) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("b", 4))
        for _ in range(2):
            load(client, handle, chain("b", 2))
        until(lambda: tier(client, "hbm")["chunks"] == 2)
        empty(client, "hbm")
        until(lambda: tier(client, "hbm")["used_bytes"] == 0)
        assert load(client, handle, chain("b", 4)) == [OK] * 4


def test_a_device_that_can_not_be_used_stops_the_start() -> None:
    assert "give cuda:N, or cpu" in refused(*flags(hbm_device="abacus", hbm_limit="64MiB"))
    said = refused(*flags(hbm_device="cuda:99", hbm_limit="64MiB"))
    assert "no CUDA device" in said or "not there" in said
    assert "tiers.hbm.limit" in refused(*flags(hbm_device="cpu", hbm_limit="5"))
