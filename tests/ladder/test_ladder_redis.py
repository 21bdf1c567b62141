"""A real daemon over a real Redis as its lowest tier."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_kit import (
    OK,
    SIZE,
    chain,
    counters,
    daemon,
    drain,
    empty,
    flags,
    healed,
    load,
    refused,
    spec,
    store,
    tier,
    until,
)
from servers import Redis

from kvd.client import Client, Selector


def on(server: Redis, **more: object) -> list[str]:
    return flags(redis_url=server.url, redis_prefix=f"t{uuid.uuid4().hex}", **more)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


def test_what_left_dram_comes_back_from_redis_and_after_a_restart(redis_server: Redis) -> None:
    with daemon(*on(redis_server, redis_write="on-demote")) as process:
        with Client(process.socket) as client:
            handle = client.register(spec())
            store(client, handle, chain("a", 8))
            drain(client, "redis")
            there = tier(client, "redis")
            assert (there["chunks"], there["used_bytes"]) == (8, 8 * (SIZE + 512))
            empty(client, "dram")
            assert load(client, handle, chain("a", 8)) == [OK] * 8
            empty(client, "dram")
            process.kill()
            process.start()
            handle = client.register(spec())
            until(lambda: tier(client, "redis")["chunks"] == 8)
            assert load(client, handle, chain("a", 8)) == [OK] * 8


def test_only_what_was_hit_twice_is_written_by_default(redis_server: Redis) -> None:
    with daemon(*on(redis_server)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("b", 4))
        load(client, handle, chain("b", 2))
        load(client, handle, chain("b", 2))
        until(lambda: tier(client, "redis")["chunks"] == 2)


def test_a_flush_is_misses_and_the_tier_goes_on(own: Redis) -> None:
    with daemon(*on(own, redis_write="through")) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("f", 4))
        until(lambda: tier(client, "redis")["chunks"] == 4)
        own.stop()
        own.start()  # nothing was saved: as after a flush
        empty(client, "dram")
        outcomes = load(client, handle, chain("f", 4))
        assert OK not in outcomes
        healed(client, "redis")
        until(lambda: OK not in load(client, handle, chain("f", 4)))
        assert client.lookup(handle, chain("f", 4), lease=False).leading == 0
        store(client, handle, chain("f", 4))
        until(lambda: tier(client, "redis")["used_bytes"] == 4 * (SIZE + 512))
        empty(client, "dram")
        assert load(client, handle, chain("f", 4)) == [OK] * 4


def test_a_full_server_refuses_writes_and_serves_reads(tmp_path: Path) -> None:
    full = Redis(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    try:
        with daemon(*on(full, redis_write="through")) as process, Client(process.socket) as client:
            handle = client.register(spec())
            store(client, handle, chain("first", 4))
            until(lambda: tier(client, "redis")["chunks"] == 4)
            for n in range(8):
                assert set(store(client, handle, chain(n, 5))) == {OK}
            until(lambda: tier(client, "redis")["answers"]["write"].get("no_space", 0) > 0)
            until(lambda: not counters(client)["moving"])
            assert tier(client, "redis")["state"] == "ok"
            there = [r["hash"] for r in client.rows("chunks") if "redis" in r["tiers"]]
            empty(client, "dram")
            for n in ("first", *range(8)):
                hashes = chain(n, 5 if n != "first" else 4)
                upto = next((i for i, h in enumerate(hashes) if h.hex() not in there), len(hashes))
                assert load(client, handle, hashes)[:upto] == [OK] * upto
    finally:
        full.stop()


def test_a_server_that_goes_away_is_degraded_and_heals(own: Redis) -> None:
    with daemon(*on(own, redis_write="through")) as process, Client(process.socket) as client:
        handle = client.register(spec())
        own.stop()
        begun = time.monotonic()
        store(client, handle, chain("away", 8))
        until(lambda: tier(client, "redis")["state"] == "degraded")
        assert "can't be reached" in tier(client, "redis")["last_error"]
        assert load(client, handle, chain("away", 8)) == [OK] * 8
        assert time.monotonic() - begun < 15
        own.start()
        healed(client, "redis")
        store(client, handle, chain("back", 4))
        until(lambda: tier(client, "redis")["chunks"] >= 4)


def notes(client: Client) -> dict[str, int]:
    found: dict[str, int] = tier(client, "redis")["notes"]
    return found


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_evicted_while_the_server_was_away_is_deleted_when_it_is_back(
    own: Redis, kept: bool
) -> None:
    """Its bytes count against the limit until then, and the next start would bring it back."""
    flags = on(own, redis_write="through", redis_read_s=0.5, redis_write_s=0.5, tiers_retry_s=1)
    with daemon(*flags) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("gone", 8))
        store(client, handle, chain("again", 4))
        until(lambda: tier(client, "redis")["chunks"] == 12)
        server = own._process.process
        if kept:  # it hangs, and has all of it afterwards
            server.send_signal(signal.SIGSTOP)
        else:
            own.stop()
        try:
            client.evict(Selector(everything=True))
            store(client, handle, chain("unwritten", 8))
            until(lambda: tier(client, "redis")["state"] == "degraded")
            until(lambda: notes(client).get("deletes_owed") == 12)
            assert (tier(client, "redis")["chunks"], tier(client, "redis")["stored"]) == (0, 12)
        finally:
            server.send_signal(signal.SIGCONT) if kept else own.start()
        healed(client, "redis")
        store(client, handle, chain("again", 4))
        until(lambda: tier(client, "redis")["chunks"] >= 4)
        until(lambda: not counters(client)["moving"] and "deletes_owed" not in notes(client))
        until(lambda: tier(client, "redis")["pending"] == 0)
        there = tier(client, "redis")
        assert there["stored"] == there["chunks"]
        until(lambda: tier(client, "redis")["used_bytes"] == there["chunks"] * (SIZE + 512))
        process.kill()
        process.start()
        handle = client.register(spec())
        until(lambda: tier(client, "redis")["chunks"] >= 4)
        assert load(client, handle, chain("again", 4)) == [OK] * 4
        assert OK not in load(client, handle, chain("gone", 8))


def test_what_was_written_too_late_goes_without_being_asked_for(own: Redis) -> None:
    """The server stood still, and carried it out later: nobody knows of it, or writes anything."""
    import redis

    flags = on(own, redis_write="through", redis_read_s=0.5, redis_write_s=0.5, tiers_retry_s=1)
    with (
        daemon(*flags) as process,
        Client(process.socket) as client,
        redis.Redis.from_url(own.url) as there,
    ):
        handle = client.register(spec(16384))
        server = own._process.process
        server.send_signal(signal.SIGSTOP)
        try:
            store(client, handle, chain("late", 2), 16384)  # small: the kernel takes all of it
            until(lambda: counters(client)["demotions"]["failed"])
            until(lambda: not counters(client)["moving"])
            client.evict(Selector(everything=True))
        finally:
            server.send_signal(signal.SIGCONT)
        until(lambda: list(there.scan_iter("*:c1:*")))
        until(lambda: not list(there.scan_iter("*:c1:*")))
        until(lambda: tier(client, "redis")["used_bytes"] == 0)
        assert notes(client)["taken_back"] > 0


def test_a_start_is_refused_with_the_reason(tmp_path: Path) -> None:
    """K72"""
    server = Redis(tmp_path, "--requirepass", "right")
    try:
        said = refused(*flags(redis_url=server.url))
        assert "tier redis: " in said and "asks for a password" in said
        wrong = server.url.replace("//", "//:wrongpass@")
        said = refused(*flags(redis_url=wrong))
        assert "not accepted" in said and "wrongpass" not in said
        assert "password_file" in refused(
            *flags(redis_url=server.url, redis_password_file=tmp_path / "none")
        )
        assert "give redis://" in refused(*flags(redis_url="http://127.0.0.1"))
        file = tmp_path / "password"
        file.write_text("right\n")
        args = flags(redis_url=server.url, redis_password_file=file)
        with daemon(*args) as process, Client(process.socket) as client:
            assert tier(client, "redis")["state"] == "ok"
    finally:
        server.stop()
