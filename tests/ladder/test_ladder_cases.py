"""Reported failures of tiers, each behind a real daemon: what a client and an operator see."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DaemonProcess
from fake_s3 import FakeS3, Request, Response, error
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
    on_fake,
    payload,
    spec,
    store,
    tier,
    until,
)

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client, Selector

HAD = Outcome.EXISTS


@pytest.fixture
def through(fake: FakeS3) -> Iterator[DaemonProcess]:
    """Every chunk goes to S3 as soon as it is sealed."""
    with daemon(*on_fake(fake, s3_write="through")) as process:
        yield process


def is_chunk(request: Request) -> bool:
    return "/c1/" in f"/{request.key}"


def of(fake: FakeS3, hash_: bytes) -> str:
    """The object that holds this chunk."""
    wanted = payload(hash_).tobytes()
    return next(key for key, data in fake.objects.items() if data[512:] == wanted)


def settled(client: Client) -> None:
    until(lambda: not counters(client)["moving"], 40)


# -- what was not written is not there ------------------------------------------------------------


def test_a_write_that_fails_below_leaves_no_trace_of_that_chunk(
    fake: FakeS3, through: DaemonProcess
) -> None:
    """K25: one write of twenty is refused; a lookup ends before that chunk, it is never data, and a
    new store is whole."""
    hashes = chain("doc", 20)
    wanted = payload(hashes[7]).tobytes()
    fake.hook = lambda r: (
        error(500, "InternalError") if r.method == "PUT" and r.body[512:] == wanted else None
    )
    with Client(through.socket) as client:
        handle = client.register(spec())
        assert store(client, handle, hashes) == [OK] * 20
        until(lambda: tier(client, "s3")["chunks"] == 19, 40)
        settled(client)
        fake.hook = lambda r: None
        healed(client, "s3")
        empty(client, "dram")
        assert client.lookup(handle, hashes, lease=False).leading == 7
        every = client.lookup(handle, hashes, lease=False, every=True).outcomes
        assert [n for n, outcome in enumerate(every) if outcome is not OK] == [7]
        assert load(client, handle, hashes)[7] is not OK
        assert store(client, handle, hashes)[7] is OK
        until(lambda: tier(client, "s3")["chunks"] == 20)
        empty(client, "dram")
        assert load(client, handle, hashes) == [OK] * 20


def test_presence_follows_each_write_and_the_second_try_writes_the_rest(
    fake: FakeS3, through: DaemonProcess
) -> None:
    """K30: of forty writes the tier takes sixteen."""
    hashes = chain("half", 40)
    first = {payload(h).tobytes() for h in hashes[:16]}
    fake.hook = lambda r: (
        error(403, "AccessDenied")
        if r.method == "PUT" and is_chunk(r) and r.body[512:] not in first
        else None
    )
    with Client(through.socket) as client:
        handle = client.register(spec())
        assert store(client, handle, hashes[:16]) == [OK] * 16
        until(lambda: tier(client, "s3")["chunks"] == 16)
        assert store(client, handle, hashes) == [HAD] * 16 + [OK] * 24
        until(lambda: tier(client, "s3")["state"] == "degraded", 40)
        settled(client)
        assert tier(client, "s3")["chunks"] == 16 == len(fake.objects)
        fake.hook = lambda r: None
        healed(client, "s3")
        empty(client, "dram")
        assert client.lookup(handle, hashes, lease=False).leading == 16
        assert store(client, handle, hashes) == [HAD] * 16 + [OK] * 24
        until(lambda: tier(client, "s3")["chunks"] == 40, 40)
        empty(client, "dram")
        assert load(client, handle, hashes) == [OK] * 40


def test_every_hit_loads_although_three_in_ten_writes_below_fail(fake: FakeS3) -> None:
    """K46: DRAM of sixty chunks, two hundred are stored: what was dropped without a copy below is
    a plain miss, and the counters add up."""
    turn, lock = [0], threading.Lock()

    def refuse(request: Request) -> Response | None:
        if request.method != "PUT" or not is_chunk(request):
            return None
        with lock:
            turn[0] += 1
            return error(400, "BadDigest") if turn[0] % 10 in (2, 5, 8) else None

    fake.hook = refuse
    with daemon(*on_fake(fake)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        singles = [chain(n, 1) for n in range(200)]
        for single in singles:
            assert store(client, handle, single) == [OK]
            settled(client)
        fake.hook = lambda r: None
        healed(client, "s3")
        there = [client.lookup(handle, single, lease=False).leading for single in singles]
        assert 40 < sum(there) < 200, "some were lost, and not all"
        for single, hit in zip(singles, there, strict=True):
            assert load(client, handle, single) == [OK if hit else Outcome.MISS]
        said = counters(client)
        lost = sum(said["chunks_evicted"][why] for why in ("undemoted", "capacity"))
        assert lost == 200 - sum(there)
        assert said["demotions"]["written"] == len(fake.objects)


# -- what was not read is not there ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "half", "appended", "xml"])
def test_exactly_the_chunks_whose_read_failed_are_named(fake: FakeS3, how: str) -> None:
    """K26: reads of 3 and 7 of 10 fail, in every way; no other one does, and none is other
    bytes."""
    args = on_fake(fake, s3_write="through", s3_read_s=3)
    with daemon(*args) as process, Client(process.socket) as client:
        handle = client.register(spec())
        hashes = [h for n in range(10) for h in chain(f"alone {n}", 1)]
        for hash_ in hashes:
            store(client, handle, [hash_])
        until(lambda: tier(client, "s3")["chunks"] == 10)
        bad = {of(fake, hashes[n]) for n in (3, 7)}
        empty(client, "dram")
        fake.hook = lambda r: how if r.method == "GET" and r.key in bad else None
        buffers = {n: bytes(SIZE) for n in range(10)}

        def take(result: int, view: memoryview) -> None:
            buffers[result] = bytes(view)

        outcomes = client.load_chunks(handle, hashes, take, timeout_s=30, every=True)
        assert [n for n, outcome in enumerate(outcomes) if outcome is not OK] == [3, 7]
        for n, hash_ in enumerate(hashes):
            assert buffers[n] == (bytes(SIZE) if n in (3, 7) else payload(hash_).tobytes())


def _flip(at: int) -> Any:
    return lambda a, b: (a[:at] + bytes([a[at] ^ 1]) + a[at + 1 :], b)


ROT = {
    "a byte of the payload": _flip(5000),
    "a byte of the record": _flip(90),
    "a byte of its check": _flip(505),
    "a byte of the digest": _flip(241),
    "one another's": lambda a, b: (b, a),
    "the other's payload": lambda a, b: (a[:512] + b[512:], b),
    "one byte more": lambda a, b: (a + b"x", b),
    "one byte less": lambda a, b: (a[:-1], b),
}


@pytest.mark.parametrize("what", ROT)
def test_what_lies_below_and_does_not_hold_is_a_counted_miss_and_heals(
    fake: FakeS3, through: DaemonProcess, what: str
) -> None:
    """K35"""
    with Client(through.socket) as client:
        handle = client.register(spec())
        a, b = chain("a", 1), chain("b", 1)
        for one in (a, b):
            store(client, handle, one)
        until(lambda: tier(client, "s3")["chunks"] == 2)
        at = [of(fake, one[0]) for one in (a, b)]
        before = [fake.objects[key] for key in at]
        after = ROT[what](*before)
        fake.objects.update(zip(at, after, strict=True))
        wrong = [old != new for old, new in zip(before, after, strict=True)]
        empty(client, "dram")
        got = [load(client, handle, one)[0] for one in (a, b)]  # which compares every byte
        assert [outcome is not OK for outcome in got] == wrong
        fetched = counters(client)["shards_fetched"]
        assert fetched["ok"] == wrong.count(False)
        assert tier(client, "s3")["notes"]["quarantined"] == wrong.count(True)
        for one in (a, b):
            store(client, handle, one)
        until(lambda: tier(client, "s3")["chunks"] == 2)
        empty(client, "dram")
        assert [load(client, handle, one) for one in (a, b)] == [[OK], [OK]]


@pytest.mark.parametrize("how", ["reset", "denied", "half"])
def test_a_prefetch_that_meets_an_error_ends_and_the_next_one_works(fake: FakeS3, how: str) -> None:
    """K64: the read of chunk 3 of 8 fails; the two before it are there, what can be read again is
    used again, and the workers live."""
    args = on_fake(fake, s3_write="through", s3_read_s=3, tiers_transient_share=0.5)
    with daemon(*args) as process, Client(process.socket) as client:
        handle = client.register(spec())
        hashes = chain("ahead", 8)
        store(client, handle, hashes)
        until(lambda: tier(client, "s3")["chunks"] == 8)
        bad = of(fake, hashes[2])
        empty(client, "dram")
        wrong = error(403, "AccessDenied") if how == "denied" else how
        fake.hook = lambda r: wrong if r.method == "GET" and r.key == bad else None
        assert client.prefetch(handle, hashes, within_s=30) == [OK] * 8

        def in_dram() -> list[bool]:
            rows = client.rows("chunks", Selector(keys=tuple(hashes)))
            at = {row["hash"]: row["tiers"] for row in rows}
            return ["dram" in at.get(h.hex(), ()) for h in hashes]

        until(lambda: in_dram()[:3] == [True, True, False] and not counters(client)["moving"])
        found = client.lookup(handle, hashes[:2], lease=False)
        assert found.leading == 2 and not any(found.tiers)
        fake.hook = lambda r: None
        healed(client, "s3")
        store(client, handle, hashes)  # whatever was held against it
        until(lambda: tier(client, "s3")["chunks"] == 8)
        empty(client, "dram")
        assert client.prefetch(handle, hashes, within_s=30) == [OK] * 8
        until(lambda: all(in_dram()))
        assert load(client, handle, hashes) == [OK] * 8


def test_a_prefetch_beyond_its_budget_is_told_and_counted_and_comes_later(
    fake: FakeS3, through: DaemonProcess
) -> None:
    """K157: eight prompts, and room for hints for less than three: each key that is not read ahead
    is told so, and all of it can be read when its turn has come."""
    with Client(through.socket) as client:
        handle = client.register(spec())
        prompts = [chain(n, 2) for n in range(8)]
        for prompt in prompts:
            store(client, handle, prompt)
        until(lambda: tier(client, "s3")["chunks"] == 16)
        empty(client, "dram")
        told = [client.prefetch(handle, prompt, within_s=30) for prompt in prompts]
        flat = [outcome for one in told for outcome in one]
        assert told[0] == [OK, OK] and told[-1] == [Outcome.NO_SPACE, Outcome.SKIPPED]
        assert set(flat) == {OK, Outcome.NO_SPACE, Outcome.SKIPPED}
        said = counters(client)["chunks_prefetched"]
        assert said["coming"] == flat.count(OK)
        assert said["no_space"] == flat.count(Outcome.NO_SPACE)
        assert said["skipped"] == flat.count(Outcome.SKIPPED)
        until(lambda: counters(client)["shards_promoted"]["ahead"] == flat.count(OK))
        for prompt in prompts:  # whoever comes for one leaves its room to the next
            until(lambda p=prompt: client.prefetch(handle, p, within_s=30) == [OK, OK])
            assert load(client, handle, prompt) == [OK, OK]


# -- what is told -----------------------------------------------------------------------------


def test_a_load_from_below_is_one_hit_and_its_retry_and_promotion_are_counted_apart(
    fake: FakeS3, tmp_path: Path
) -> None:
    """K134: from DRAM; from disk, with promotion; from S3, with one retry; by four ranks."""
    shards = tuple(ShardSpec(0, rank, 0, 0, 0, 1, rank, rank + 1, 65536) for rank in range(4))
    ranks = KVSpec("ranks", "", "w", "test", "bf16", "", "raw", 16, 1, 4, 1, (), (), shards)
    disk = flags(nvme_path=tmp_path / "tier", nvme_limit="64MiB", nvme_reserve=0)
    with daemon(*disk, *on_fake(fake)) as process, Client(process.socket) as client:
        handle = client.register(spec())

        def counted(act: Any) -> dict[str, int]:
            """What rose, and by how much."""
            before, retried = counters(client), tier(client, "s3")["notes"].get("retries", 0)
            act()
            after = counters(client)
            rose = {
                name: after[name] - before[name]
                for name in ("chunks_hit", "chunks_delivered", "chunks_failed")
            }
            for name in ("shards_loaded", "shards_fetched", "shards_promoted"):
                rose[name] = sum(after[name].values()) - sum(before[name].values())
            rose["retries"] = tier(client, "s3")["notes"].get("retries", 0) - retried
            return rose

        one = chain("one", 1)
        plain = {"chunks_hit": 1, "chunks_delivered": 1, "chunks_failed": 0, "shards_loaded": 1,
                 "shards_fetched": 0, "shards_promoted": 0, "retries": 0}  # fmt: skip
        store(client, handle, one)
        assert counted(lambda: load(client, handle, one)) == plain
        drain(client, "nvme")
        empty(client, "dram")
        fetched = {**plain, "shards_fetched": 1, "shards_promoted": 1}
        assert counted(lambda: load(client, handle, one)) == fetched  # for one lease
        until(lambda: client.stat()["tiers"][0]["transient_bytes"] == 0)
        assert counted(lambda: load(client, handle, one)) == fetched  # to stay
        assert counters(client)["shards_promoted"]["stays"] == 1
        drain(client, "s3")
        empty(client, "dram", "nvme")
        turn = iter([error(503, "SlowDown")])
        fake.hook = lambda r: next(turn, None) if r.method == "GET" and is_chunk(r) else None
        assert counted(lambda: load(client, handle, one)) == {**fetched, "retries": 1}
        wide = client.register(ranks)
        prints = [h[:16] for h in chain("wide", 1)]
        for rank in range(4):
            data = [payload(bytes([rank]) * 32, 65536)]
            assert client.store_chunks(wide, chain("wide", 1), prints, data, shards=(rank,)) == [OK]

        def by_ranks() -> None:
            with client.lookup(wide, chain("wide", 1), shards=(0, 1, 2, 3)) as found:
                assert found.leading == 1 and found.lease is not None
                for rank in range(4):
                    assert len(list(found.lease.load(shards=(rank,)))) == 1

        assert counted(by_ranks) == {**plain, "shards_loaded": 4}


def cli(process: DaemonProcess, *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvd.tools.cli", *words, "--socket", process.socket, "--json"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def test_evict_tells_what_went_from_each_tier_and_what_did_not(
    fake: FakeS3, tmp_path: Path
) -> None:
    """K126: over DRAM, disk and S3; with leased ones; with S3 down; dry."""
    disk = flags(nvme_path=tmp_path / "tier", nvme_limit="64MiB", nvme_reserve=0)
    both = [*disk, *on_fake(fake, nvme_write="through", s3_write="through")]
    with daemon(*both) as process, Client(process.socket) as client:
        handle = client.register(spec())
        hashes = chain("gone", 8)
        store(client, handle, hashes)
        names = ("dram", "nvme", "s3")
        until(lambda: [tier(client, name)["chunks"] for name in names] == [8] * 3)

        def there() -> list[int]:
            return [tier(client, name)["chunks"] for name in names]

        code, said = cli(process, "evict", "--tier", "nvme", "--dry-run")
        assert (code, said["matched"], said["evicted"]) == (0, 8, 0) and there() == [8] * 3
        code, said = cli(process, "evict", "--tier", "nvme", "--yes")
        assert (code, said["evicted"]) == (0, 8) and there() == [8, 0, 8]
        code, said = cli(process, "evict", "--tier", "dram", "--yes")
        assert (code, said["evicted"]) == (0, 8) and there() == [0, 0, 8]
        assert client.lookup(handle, hashes, lease=False).leading == 8
        store(client, handle, hashes)
        with client.lookup(handle, hashes[:3]):
            code, said = cli(process, "evict", "--all", "--yes")
            assert code == 1 and said["leased"] == 3 and said["evicted"] == 5
            assert client.lookup(handle, hashes, lease=False).leading == 3
        fake.hook = lambda r: "reset"
        code, said = cli(process, "evict", "--all", "--yes")
        assert said["evicted"] == 3
        assert client.lookup(handle, hashes, lease=False).leading == 0
        fake.hook = lambda r: None
        healed(client, "s3")
        until(lambda: not fake.objects and there() == [0] * 3, 40)
