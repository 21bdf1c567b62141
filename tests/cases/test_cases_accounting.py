"""Reported failures of accounting, end to end: leases, room and counters of a real daemon.

Each test is a case of docs/cases.md, named in its docstring.
"""

from __future__ import annotations

import random
import time

from cases_kit import (
    OK,
    SIZE,
    SLOTS,
    Prompt,
    blank,
    in_threads,
    make_spec,
    soon,
    tier,
)
from daemon import DaemonProcess

from kvd.chunk import Outcome
from kvd.client import Client, Selector

# -- memory accounting --------------------------------------------------------------------------


def test_leases_that_nobody_used_end_too(client: Client) -> None:
    """K109: a third is loaded, a third released, a third forgotten; after the lease's time nothing
    is held and the whole arena can go."""
    handle = client.register(make_spec(4096))
    prompt = Prompt(1, 10, 4096)
    prompt.store(client, handle)
    kept = []
    for number in range(300):
        found = client.lookup(handle, prompt.hashes, lease_s=1.0)
        assert found.leading == 10 and found.lease is not None
        if number % 3 == 0:
            found.lease.load().check()
            found.lease.release()
        elif number % 3 == 1:
            found.lease.release()
        else:
            kept.append(found)
    soon(lambda: client.stat()["counters"]["active_leases"] == 0, 5)
    assert tier(client)["leased_chunks"] == 0
    ended = client.stat()["counters"]["leases_ended"]
    assert ended["released"] == 200 and ended["expired"] == 100
    gone = client.evict(Selector(everything=True))
    assert (gone.evicted, gone.leased) == (10, 0)
    assert tier(client)["used_bytes"] == 0


def test_at_rest_the_books_balance(daemon: DaemonProcess) -> None:
    """K110: after everything that can happen, at several times the capacity, what is used is the
    sum of what is there, and nothing is held."""
    end = time.monotonic() + 4

    def work(number: int) -> None:
        dice = random.Random(number)
        with Client(daemon.socket, timeout_s=20) as client:
            handle = client.register(make_spec())
            while time.monotonic() < end:
                prompt = Prompt(dice.randrange(60), 24)
                what = dice.randrange(7)
                if what < 3:
                    prompt.store(client, handle)
                elif what == 3:
                    client.load_chunks(handle, prompt.hashes, blank(24))
                elif what == 4:
                    client.lookup(handle, prompt.hashes, lease_s=0.1)  # forgotten
                elif what == 5:
                    client.reserve(handle, prompt.hashes, prompt.prints).abort()
                else:
                    client.evict(Selector(subtree=prompt.hashes[dice.randrange(24)]))

    in_threads(4, work)
    with Client(daemon.socket, timeout_s=20) as client:
        soon(lambda: tier(client)["leased_chunks"] == 0)
        soon(lambda: tier(client)["writing_bytes"] + tier(client)["condemned_bytes"] == 0)
        rows = list(client.rows("chunks"))
        assert tier(client)["used_bytes"] == sum(row["bytes"] for row in rows) == len(rows) * SIZE
        assert tier(client)["chunks"] == len(rows) > SLOTS // 2
        counters = client.stat()["counters"]
        assert counters["active_leases"] == counters["active_writes"] == 0
        assert client.evict(Selector(everything=True)).evicted == len(rows)
        assert tier(client)["used_bytes"] == 0


def test_a_reserve_that_finds_no_room_says_so_and_gives_back_what_it_had(
    daemon: DaemonProcess, client: Client
) -> None:
    """K114: with everything leased there is nothing to wait for."""
    handle = client.register(make_spec())
    prompts = [Prompt(number, 64) for number in range(4)]
    for prompt in prompts:
        prompt.store(client, handle)
    with Client(daemon.socket) as other:
        other.register(make_spec())
        leases = []
        for index, prompt in enumerate(prompts):
            found = (client, other)[index % 2].lookup(handle, prompt.hashes)
            leases.append(found.lease)
        held = tier(client)["leased_chunks"]
        assert held > SLOTS * 0.9
        begun = time.monotonic()
        said = Prompt(9, 40).store(client, handle)
        assert time.monotonic() - begun < 5
        assert said.count(OK) == SLOTS - held
        assert set(said[SLOTS - held :]) == {Outcome.NO_SPACE}
        assert tier(client)["writing_bytes"] == 0
        for lease in leases:
            assert lease is not None
            lease.release(wait=True)
    assert Prompt(10, 40).store(client, handle) == [OK] * 40


# -- counters -----------------------------------------------------------------------------------


def test_asked_hit_missed_and_delivered_are_counted_apart(client: Client) -> None:
    """K131"""
    handle = client.register(make_spec(4096))
    prompt = Prompt(1, 10, 4096)
    assert prompt.store(client, handle, 0, 4) == [OK] * 4
    for number in range(100):
        found = client.lookup(handle, prompt.hashes)
        assert found.leading == 4 and found.lease is not None
        if number < 30:
            for _ in found.lease.load([0, 1]):
                pass
        found.lease.release(wait=True)
    stat = client.stat()
    counters = stat["counters"]
    assert counters["lookups"] == 100
    assert counters["chunks_asked"] == 1000
    assert counters["chunks_hit"] == 400
    assert sum(counters["chunks_missed"].values()) == 600
    assert counters["chunks_delivered"] == 60 and counters["chunks_failed"] == 0
    assert counters["chunks_delivered"] <= counters["chunks_hit"] <= counters["chunks_asked"]
    for name in ("lookups", "chunks_asked", "chunks_hit", "chunks_delivered"):
        told = (tenant["counters"][name] for tenant in stat["tenants"].values())
        assert sum(told) == counters[name]


def test_counters_rise_only_with_events(daemon: DaemonProcess, client: Client) -> None:
    """K132: two scrapers change nothing but the counts of their own requests."""
    handle = client.register(make_spec(4096))
    prompt = Prompt(1, 10, 4096)
    prompt.store(client, handle)
    client.load_chunks(handle, prompt.hashes, blank(10, 4096))
    soon(lambda: sum(client.stat()["counters"]["shards_sealed"].values()) == 10)
    soon(lambda: client.stat()["counters"]["active_leases"] == 0)
    with Client(daemon.socket) as other:
        other.ping()
        before = client.stat()["counters"]
        for _ in range(100):
            client.stat()
            other.stat()
        after = client.stat()["counters"]
    scraping = {"requests", "replies"}
    assert {k: v for k, v in after.items() if k not in scraping} == {
        k: v for k, v in before.items() if k not in scraping
    }
    assert after["requests"] - before["requests"] == 201
