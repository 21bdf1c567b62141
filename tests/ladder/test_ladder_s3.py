"""A real daemon over a real S3 server: what leaves DRAM is kept there, and comes back."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import DaemonProcess
from fake_s3 import FakeS3, Request, Response, error
from remote_kit import (
    MIB,
    MISS,
    OK,
    SIZE,
    chain,
    counters,
    daemon,
    drain,
    empty,
    flags,
    healed,
    keys,
    load,
    no_shm,
    on_fake,
    payload,
    refused,
    s3_flags,
    spec,
    store,
    tier,
    until,
)
from servers import Seaweed

from kvd.chunk import Outcome
from kvd.client import Client, Selector


@pytest.fixture
def on_s3(seaweed: Seaweed) -> Iterator[DaemonProcess]:
    """A store waits for demotions as long as they take: a slow machine loses nothing by it."""
    with daemon(*s3_flags(seaweed, tiers_room_wait_s=20)) as process:
        yield process


# -- what is kept ---------------------------------------------------------------------------------


def test_what_dram_can_not_hold_comes_back_from_s3_bit_by_bit(on_s3: DaemonProcess) -> None:
    with Client(on_s3.socket) as client:
        handle = client.register(spec())
        for n in range(24):
            assert set(store(client, handle, chain(n, 5))) == {OK}
            until(lambda: not counters(client)["moving"])
        stat = client.stat()
        assert stat["tiers"][0]["used_bytes"] <= 16 * MIB
        there = tier(client, "s3")
        assert there["state"] == "ok" and there["chunks"] > 50
        assert there["used_bytes"] == there["chunks"] * (SIZE + 512) <= there["limit_bytes"]
        assert set(client.lookup(handle, chain(0, 5), lease=False).tiers) == {1}
        for n in range(24):
            assert load(client, handle, chain(n, 5)) == [OK] * 5
        assert client.get(handle, chain(0, 1)[0]) == payload(chain(0, 1)[0]).tobytes()
        until(lambda: client.stat()["tiers"][0]["transient_bytes"] == 0)


def test_a_killed_daemon_and_a_new_machine_serve_from_s3(on_s3: DaemonProcess) -> None:
    with Client(on_s3.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("a", 8))
        drain(client, "s3")
        assert tier(client, "s3")["chunks"] == 8
        empty(client, "dram")
        on_s3.kill()
        on_s3.start()
        handle = client.register(spec())
        until(lambda: tier(client, "s3")["chunks"] == 8)
        assert tier(client, "s3")["used_bytes"] == 8 * (SIZE + 512)
        assert load(client, handle, chain("a", 8)) == [OK] * 8
    on_s3.kill()
    no_shm(on_s3)
    on_s3.start()
    with Client(on_s3.socket) as client:
        handle = client.register(spec())
        until(lambda: tier(client, "s3")["chunks"] == 8)
        assert load(client, handle, chain("a", 8)) == [OK] * 8


def test_a_large_chunk_goes_in_parts_through_the_daemon(seaweed: Seaweed) -> None:
    nbytes = 17 * MIB
    with daemon(*s3_flags(seaweed), "--arena-slab-size", "20MiB", arena_size="320MiB") as process:
        with Client(process.socket) as client:
            handle = client.register(spec(nbytes))
            store(client, handle, chain("large", 3), nbytes)
            drain(client, "s3")
            empty(client, "dram")
            assert load(client, handle, chain("large", 3), nbytes) == [OK] * 3


@pytest.mark.parametrize("how", ["through", "on-second-hit"])
def test_a_write_policy_says_when_it_is_written(seaweed: Seaweed, how: str) -> None:
    with daemon(*s3_flags(seaweed, s3_write=how)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("p", 4))
        if how == "on-second-hit":
            load(client, handle, chain("p", 2))
            time.sleep(0.5)
            assert tier(client, "s3")["chunks"] == 0
            load(client, handle, chain("p", 2))
        until(lambda: tier(client, "s3")["chunks"] == (4 if how == "through" else 2))


def test_two_tiers_that_are_written_through_both_get_every_chunk(seaweed: Seaweed) -> None:
    disk = tempfile.mkdtemp(prefix="kvd-nvme-", dir="/tmp")
    nvme = flags(nvme_path=f"{disk}/tier", nvme_limit="64MiB", nvme_reserve=0, nvme_write="through")
    try:
        with daemon(*nvme, *s3_flags(seaweed, s3_write="through")) as process:
            with Client(process.socket) as client:
                handle = client.register(spec())
                store(client, handle, chain("both", 8))
                until(lambda: tier(client, "nvme")["chunks"] == 8)
                until(lambda: tier(client, "s3")["chunks"] == 8)
                empty(client, "dram")
                assert load(client, handle, chain("both", 8)) == [OK] * 8
                assert tier(client, "s3")["bytes_read"] == 0
                empty(client, "dram", "nvme")
                assert load(client, handle, chain("both", 8)) == [OK] * 8
                assert tier(client, "s3")["bytes_read"] == 8 * SIZE
    finally:
        shutil.rmtree(disk)


def test_an_object_that_rots_is_a_miss_that_is_counted_and_heals(seaweed: Seaweed) -> None:
    prefix = f"t{uuid.uuid4().hex}"
    with daemon(*s3_flags(seaweed, prefix)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("rot", 4))
        drain(client, "s3")
        s3 = seaweed.client()
        for listed in s3.list_objects_v2(Bucket="kvd", Prefix=f"{prefix}/c1/")["Contents"]:
            data = s3.get_object(Bucket="kvd", Key=listed["Key"])["Body"].read()
            if data[512:] == payload(chain("rot", 1)[0]).tobytes():
                bad = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
                s3.put_object(Bucket="kvd", Key=listed["Key"], Body=bad)
        s3.close()
        empty(client, "dram")
        assert load(client, handle, chain("rot", 4))[0] is Outcome.CORRUPT
        assert counters(client)["shards_fetched"]["corrupt"] == 1
        assert client.lookup(handle, chain("rot", 4), lease=False).leading == 0
        store(client, handle, chain("rot", 1))
        drain(client, "s3")
        empty(client, "dram")
        assert load(client, handle, chain("rot", 4)) == [OK] * 4


def test_the_limit_is_kept_by_deleting_ones_own(seaweed: Seaweed) -> None:
    prefix = f"t{uuid.uuid4().hex}"
    s3 = seaweed.client()
    s3.put_object(Bucket="kvd", Key=f"{prefix}/c1/somebody", Body=b"else's")
    args = [*s3_flags(seaweed, prefix), "--s3-limit", "4MiB"]
    with daemon(*args) as process, Client(process.socket) as client:
        handle = client.register(spec())
        for n in range(30):
            store(client, handle, chain(n, 5))
            until(lambda: not counters(client)["moving"])
            assert tier(client, "s3")["used_bytes"] <= 4 * MIB
        assert tier(client, "s3")["chunks"] >= 10
        until(lambda: not counters(client)["moving"])
        listed = s3.list_objects_v2(Bucket="kvd", Prefix=f"{prefix}/c1/")["Contents"]
        assert sum(one["Size"] for one in listed) <= 4 * MIB + 512 * 1024
        assert f"{prefix}/c1/somebody" in {one["Key"] for one in listed}
    s3.close()


# -- what an operator got wrong -------------------------------------------------------------------


def test_a_start_is_refused_with_the_reason(seaweed: Seaweed, tmp_path: Path) -> None:
    """K72, K73, K75: wrong secret, unknown key, missing right, missing bucket, missing file."""
    right = s3_flags(seaweed)

    def without(name: str, *instead: str) -> list[str]:
        at = right.index(name)
        return [*right[:at], *right[at + 2 :], *instead]

    said = refused(*right, env=keys(secret="not-the-secret"))
    assert "tier s3: bucket kvd: " in said and "credentials are not accepted" in said
    assert "not-the-secret" not in said
    assert "credentials are not accepted" in refused(*right, env=keys("nobody"))
    said = refused(*right, env=keys("readkey", "readsecret"))
    assert "PutObject" in said
    said = refused(*without("--s3-bucket", "--s3-bucket", "no-such-bucket"))
    assert "no-such-bucket" in said and "NoSuchBucket" in said
    said = refused(*right, "--s3-credentials-file", str(tmp_path / "none"))
    assert "credentials_file" in said
    said = refused(*right, "--s3-profile", "nobody")
    assert "nobody" in said
    none = {k: v for k, v in keys().items() if "KEY" not in k}
    assert "no credentials found" in refused(*right, env=none)
    assert "addressing" in refused(*without("--s3-addressing", "--s3-addressing", "sideways"))


def test_credentials_come_from_a_profile_or_a_named_file(seaweed: Seaweed, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    text = "aws_access_key_id = kvdkey\naws_secret_access_key = kvdsecret\n"
    file.write_text(f"[default]\n{text}[work]\n{text}")
    none = {k: v for k, v in keys().items() if "KEY" not in k}
    args = s3_flags(seaweed, s3_credentials_file=file)
    with daemon(*args, env=none) as process, Client(process.socket) as client:
        assert tier(client, "s3")["state"] == "ok"
    args = s3_flags(seaweed, s3_profile="work")
    env = none | {"AWS_SHARED_CREDENTIALS_FILE": str(file)}
    with daemon(*args, env=env) as process, Client(process.socket) as client:
        assert tier(client, "s3")["state"] == "ok"


@pytest.mark.parametrize(("module", "extra"), [("boto3", "s3"), ("redis", "redis")])
def test_an_extra_that_is_missing_is_named(module: str, extra: str) -> None:
    args = flags(s3_bucket="kvd") if extra == "s3" else flags(redis_url="redis://127.0.0.1:1")
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda n, *a: None if n == {module!r} else find(n, *a)\n"
        "from kvd.server.main import run\nsys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--check", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and f"pip install 'kvd[{extra}]'" in done.stderr


# -- trouble later --------------------------------------------------------------------------------


def test_an_endpoint_that_is_away_at_start_is_degraded_and_dram_serves() -> None:
    """K65, K73"""
    args = flags(
        s3_endpoint="http://127.0.0.1:9", s3_bucket="kvd", s3_addressing="path", s3_limit="1GiB"
    )
    with daemon(*args) as process, Client(process.socket) as client:
        there = tier(client, "s3")
        assert there["state"] == "degraded" and "can't be reached" in there["last_error"]
        handle = client.register(spec())
        for n in range(24):
            assert set(store(client, handle, chain(n, 5))) == {OK}
        assert load(client, handle, chain(23, 5)) == [OK] * 5
        done = subprocess.run(
            [sys.executable, "-m", "kvd.tools.cli", "status", "--socket", process.socket, "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        shown = json.loads(done.stdout)["tiers"][1]
        assert shown["state"] == "degraded" and "can't be reached" in shown["last_error"]


def test_what_lay_in_a_bucket_that_was_away_is_known_and_counted_when_it_is_back(
    tmp_path: Path,
) -> None:
    """K73: away at start, away later; no exception at a client, and it heals by itself."""
    own = Seaweed(tmp_path)
    try:
        own.make_bucket("kvd")
        with daemon(*s3_flags(own)) as process:
            with Client(process.socket) as client:
                handle = client.register(spec())
                store(client, handle, chain("kept", 6))
                drain(client, "s3")
            process.kill()
            no_shm(process)
            own.stop()
            process.start()
            with Client(process.socket) as client:
                handle = client.register(spec())
                assert tier(client, "s3")["state"] == "degraded"
                assert client.lookup(handle, chain("kept", 6), lease=False).leading == 0
                own.start()
                until(lambda: tier(client, "s3")["chunks"] == 6, 40)
                assert tier(client, "s3")["used_bytes"] == 6 * (SIZE + 512)
                # A listing answers before the server's volumes do: a read right then is a miss.
                healed(client, "s3")
                assert load(client, handle, chain("kept", 6)) == [OK] * 6
                empty(client, "dram")
                own.stop()
                begun = time.monotonic()
                for _ in range(3):
                    outcomes = load(client, handle, chain("kept", 6), timeout_s=30)
                    assert OK not in outcomes
                assert time.monotonic() - begun < 25
                assert tier(client, "s3")["state"] == "degraded"
                assert store(client, handle, chain("new", 4)) == [OK] * 4
                assert load(client, handle, chain("new", 4)) == [OK] * 4
                own.start()
                healed(client, "s3")
                assert load(client, handle, chain("kept", 6)) == [OK] * 6
    finally:
        own.stop()


def test_all_that_was_written_and_not_answered_goes_without_traffic(fake: FakeS3) -> None:
    """More than one look takes back, and over more time than it waits for."""
    silent = [True]

    def mine(name: str) -> bool:
        return "/c1/" in name and "probe-" not in name

    def some(request: Request) -> str | Response | None:
        if not silent[0] or not mine(request.key) or request.key[-1] > "5":
            return None
        if request.method == "GET":
            return error(503, "SlowDown")
        return "reset" if request.method == "PUT" else None

    fake.hook = some
    with daemon(*on_fake(fake, s3_write="through")) as process, Client(process.socket) as client:
        handle = client.register(spec(4096))
        for n in range(8):
            store(client, handle, chain(n, 8), 4096)
            until(lambda: not counters(client)["moving"])
            if len([name for name in fake.objects if mine(name) and name[-1] <= "5"]) > 16:
                break
            time.sleep(0.4)
            healed(client, "s3")
        client.evict(Selector(everything=True))
        until(lambda: not counters(client)["moving"])
        silent[0] = False
        asked = len([r for r in fake.requests if r.method == "PUT" and mine(r.key)])
        until(lambda: not any(map(mine, list(fake.objects))), 60)
        until(lambda: tier(client, "s3")["used_bytes"] == 0)
        assert tier(client, "s3")["notes"]["taken_back"] > 8
        puts = len([r for r in fake.requests if r.method == "PUT" and mine(r.key)])
        assert puts == asked, "there was no traffic"


PERMANENT = [
    (error(403, "InvalidAccessKeyId"), "the credentials are not accepted"),
    (error(404, "NoSuchBucket"), "NoSuchBucket"),
    (error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), "it is in region eu-west-1"),
    (error(403, "RequestTimeTooSkewed", "<RequestTime>20260101T000000Z</RequestTime>"
           "<ServerTime>2026-01-01T00:20:00Z</ServerTime>"), "clock skew"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "says"), PERMANENT)
def test_what_only_an_operator_mends_is_refused_at_start_shown_later_and_heals(
    fake: FakeS3, answer: Response, says: str
) -> None:
    """K70, K72, K73, K75: wrong keys, no bucket, wrong region, wrong clock."""
    fake.hook = lambda request: answer
    assert says in refused(*on_fake(fake))
    fake.hook = lambda request: None
    with daemon(*on_fake(fake, s3_write="through")) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("a", 3))
        until(lambda: tier(client, "s3")["chunks"] == 3)
        fake.hook = lambda request: answer
        store(client, handle, chain("b", 3))
        until(lambda: tier(client, "s3")["state"] == "degraded")
        assert says in tier(client, "s3")["last_error"]
        assert load(client, handle, chain("a", 3)) == [OK] * 3
        assert load(client, handle, chain("b", 3)) == [OK] * 3
        asked = len(fake.requests)
        time.sleep(0.5)
        assert len(fake.requests) - asked < 10, "no storm"
        fake.hook = lambda request: None
        healed(client, "s3")
        store(client, handle, chain("c", 3))
        until(lambda: tier(client, "s3")["chunks"] == 6)
        empty(client, "dram")
        assert load(client, handle, chain("a", 3)) == [OK] * 3


def test_a_silent_endpoint_slows_neither_memory_nor_disk_nor_health(fake: FakeS3) -> None:
    """K65, K156: a load from it ends at its deadline; beside it everything goes on."""
    disk = tempfile.mkdtemp(prefix="kvd-nvme-", dir="/tmp")
    args = [
        *on_fake(fake, s3_write="through", s3_read_s=1, s3_write_s=1),
        *flags(nvme_path=f"{disk}/tier", nvme_limit="64MiB", nvme_reserve=0),
    ]
    try:
        with daemon(*args) as process, Client(process.socket) as client:
            handle = client.register(spec())
            store(client, handle, chain("remote", 8))
            until(lambda: tier(client, "s3")["chunks"] == 8)
            empty(client, "dram")
            store(client, handle, chain("disk", 4))
            drain(client, "nvme")
            until(lambda: tier(client, "s3")["chunks"] == 12)
            empty(client, "dram")
            store(client, handle, chain("memory", 4))
            until(lambda: not counters(client)["moving"])
            fake.hook = lambda request: "silent"
            with Client(process.socket) as other:
                again = other.register(spec())
                waiting = threading.Thread(
                    target=lambda: outcomes.append(load(other, again, chain("remote", 8)))
                )
                outcomes: list[list[Outcome]] = []
                begun = time.monotonic()
                waiting.start()
                rounds = 0
                while waiting.is_alive():
                    assert load(client, handle, chain("memory", 4)) == [OK] * 4
                    assert load(client, handle, chain("disk", 4)) == [OK] * 4
                    client.ping()
                    rounds += 1
                waiting.join()
                assert time.monotonic() - begun < 10 and rounds >= 3
                assert OK not in outcomes[0]
            until(lambda: tier(client, "s3")["state"] == "degraded")
            fake.stalled.set()
            fake.hook = lambda request: None
            healed(client, "s3")
            empty(client, "dram")
            assert load(client, handle, chain("remote", 8)) == [OK] * 8
    finally:
        shutil.rmtree(disk)


def test_throttling_loses_no_acknowledged_chunk_and_claims_none(fake: FakeS3) -> None:
    """K66: 30 % SlowDown, then nothing but refusals; what is said to lie there lies there."""
    turn = itertools.count()
    with daemon(*on_fake(fake, s3_write="through")) as process, Client(process.socket) as client:
        handle = client.register(spec())
        fake.hook = lambda r: error(503, "SlowDown") if next(turn) % 3 == 0 else None
        store(client, handle, chain("some", 8))
        until(lambda: tier(client, "s3")["chunks"] == 8, 40)
        fake.hook = lambda r: error(503, "SlowDown")
        store(client, handle, chain("none", 8))
        until(lambda: tier(client, "s3")["state"] == "degraded", 60)
        until(lambda: not counters(client)["moving"], 60)
        assert tier(client, "s3")["chunks"] == 8 == len(fake.objects)
        assert load(client, handle, chain("none", 8)) == [OK] * 8
        fake.hook = lambda r: None
        healed(client, "s3")
        store(client, handle, chain("more", 2))
        until(lambda: tier(client, "s3")["chunks"] == 10)


@pytest.mark.parametrize("how", ["half", "longer", "gzip", "xml", "reset"])
def test_a_body_that_is_not_the_object_never_reaches_a_client(fake: FakeS3, how: str) -> None:
    """K68: cut, too long, encoded, an error page: a miss, and DRAM holds nothing of it."""
    with daemon(*on_fake(fake, s3_read_s=3)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        store(client, handle, chain("body", 3))
        drain(client, "s3")
        empty(client, "dram")
        fake.hook = lambda r: how if r.method == "GET" and "/c1/" in f"/{r.key}" else None
        assert OK not in load(client, handle, chain("body", 3))  # which compares every byte
        assert client.stat()["tiers"][0]["chunks"] == 0
        fake.hook = lambda r: None
        healed(client, "s3")
        assert set(load(client, handle, chain("body", 3))) <= {OK, MISS, Outcome.SKIPPED}


def test_sixty_four_reads_at_a_time_keep_their_connections(fake: FakeS3) -> None:
    """K67"""
    args = on_fake(fake, s3_workers=16)
    with daemon(*args, arena_size="64MiB") as process, Client(process.socket) as client:
        handle = client.register(spec(8192))
        for n in range(4):
            store(client, handle, chain(f"many{n}", 64), 8192)
        drain(client, "s3")
        for _ in range(2):
            empty(client, "dram")
            for n in range(4):
                assert load(client, handle, chain(f"many{n}", 64), 8192) == [OK] * 64
        assert fake.accepts <= 2 * 16 + 8
        assert "pool is full" not in process.log
