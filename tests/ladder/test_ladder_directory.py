"""Two real daemons on one bucket, with a real Redis between them: who stored it does not matter."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemon import DaemonProcess
from remote_kit import (
    OK,
    SIZE,
    chain,
    daemon,
    empty,
    flags,
    load,
    refused,
    s3_flags,
    spec,
    store,
    tier,
    until,
)
from servers import Redis, Seaweed

from kvd.client import Client, Selector
from kvd.errors import KvdError
from kvd.server.directory import MOST
from kvd.tiers.base import Key
from kvd.tiers.redis import Directory, Entry, RedisConfig


class Shared(NamedTuple):
    """What both daemons are told."""

    args: list[str]
    redis: Redis
    seaweed: Seaweed
    prefix: str

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.redis.url)

    def told(self) -> int:
        client = self.client()
        count = sum(1 for _ in client.scan_iter(f"{self.prefix}:d1:*"))
        client.close()
        return count


def shared(seaweed: Seaweed, redis: Redis, **more: object) -> Shared:
    prefix = f"t{uuid.uuid4().hex}"
    settings = {"s3_write": "through", "directory_url": redis.url, "directory_prefix": prefix}
    args = s3_flags(seaweed, prefix, **{**settings, "directory_wait_s": 2, **more})
    return Shared(args, redis, seaweed, prefix)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


class Pair(NamedTuple):
    a: DaemonProcess
    b: DaemonProcess


@contextmanager
def pair(both: Shared) -> Iterator[Pair]:
    with daemon(*both.args) as a, daemon(*both.args) as b:
        yield Pair(a, b)


@pytest.fixture
def both(seaweed: Seaweed, redis_server: Redis) -> Shared:
    return shared(seaweed, redis_server)


@pytest.fixture
def two(both: Shared) -> Iterator[Pair]:
    with pair(both) as started:
        yield started


def directory(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.stat()["directory"]
    return found


def asked(client: Client) -> int:
    """Requests that its S3 tier sent."""
    return int(tier(client, "s3")["notes"]["requests"])


def put(client: Client, both: Shared, name: object, count: int) -> Any:
    """Store a chain, and wait until the directory knows all of it."""
    handle = client.register(spec())
    before = both.told()
    assert store(client, handle, chain(name, count)) == [OK] * count
    until(lambda: both.told() == before + count)
    return handle


def test_what_one_daemon_stored_is_a_hit_at_the_other(two: Pair, both: Shared) -> None:
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        put(a, both, "doc", 40)
        handle = b.register(spec())
        quiet = asked(b)
        assert b.lookup(handle, chain("nobody", 40), lease=False).leading == 0
        assert b.lookup(handle, [chain("nobody", 1)[0]], lease=False).leading == 0
        assert asked(b) == quiet, "absent is a miss without asking the bucket"
        found = b.lookup(handle, chain("doc", 40), lease=False)
        assert found.leading == 40 and set(found.tiers) == {1}
        assert asked(b) == quiet
        assert load(b, handle, chain("doc", 40)) == [OK] * 40
        assert tier(b, "s3")["bytes_read"] == 40 * SIZE
        said = directory(b)
        assert said["state"] == "ok" and said["chunks_found"] == 40
        other = b.register(spec(SIZE // 2))
        assert b.lookup(other, chain("doc", 40), lease=False).leading == 0


def test_a_prefix_that_both_have_parts_of_is_one_run(two: Pair, both: Shared) -> None:
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        put(a, both, "part", 20)
        handle = b.register(spec())
        assert store(b, handle, chain("part", 3)) == [OK] * 3
        assert b.lookup(handle, chain("part", 30), lease=False).leading == 20
        assert (
            b.lookup(handle, chain("part", 30), lease=False, every=True).outcomes[:20] == (OK,) * 20
        )
        assert load(b, handle, chain("part", 20)) == [OK] * 20
        assert b.get(handle, chain("part", 20)[0]) is not None


def test_a_daemon_that_was_killed_is_still_of_use_to_the_other(two: Pair, both: Shared) -> None:
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        put(a, both, "last", 10)
        two.a.kill()
        handle = b.register(spec())
        assert load(b, handle, chain("last", 10)) == [OK] * 10


def test_what_was_deleted_is_unsaid_and_a_stale_word_is_one_miss(two: Pair, both: Shared) -> None:
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        put(a, both, "gone", 6)
        handle = b.register(spec())
        empty(a, "s3")
        until(lambda: both.told() == 0)
        quiet = asked(b)
        assert b.lookup(handle, chain("gone", 6), lease=False).leading == 0
        assert asked(b) == quiet

        put(a, both, "stale", 6)
        s3 = both.seaweed.client()
        for listed in s3.list_objects_v2(Bucket="kvd", Prefix=f"{both.prefix}/c1/")["Contents"]:
            s3.delete_object(Bucket="kvd", Key=listed["Key"])
        s3.close()
        assert b.lookup(handle, chain("stale", 6), lease=False).leading == 6
        assert OK not in load(b, handle, chain("stale", 6))
        until(lambda: both.told() == 0)
        assert b.lookup(handle, chain("stale", 6), lease=False).leading == 0
        assert store(b, handle, chain("stale", 6)) == [OK] * 6  # and it heals
        until(lambda: both.told() == 6)
        empty(a, "dram")
        assert load(a, a.register(spec()), chain("stale", 6)) == [OK] * 6


def test_what_one_uses_from_its_memory_stays_known_to_the_other(two: Pair, both: Shared) -> None:
    """It is never read from the bucket, so nothing else tells of it."""
    redis = both.client()
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        handle = put(a, both, "hot", 6)
        names = list(redis.scan_iter(f"{both.prefix}:d1:*"))
        for name in names:  # as if most of a day had passed
            redis.pexpire(name, 100_000)
        assert load(a, handle, chain("hot", 4)) == [OK] * 4
        assert tier(a, "s3")["bytes_read"] == 0
        until(lambda: directory(a)["touched"] == 4)
        ends = sorted(redis.pttl(name) for name in names)
        assert ends[1] <= 100_000 and ends[2] > 80_000_000, "what was not asked for is forgotten"
        assert load(a, handle, chain("hot", 4)) == [OK] * 4
        assert a.lookup(handle, chain("hot", 6), lease=False).leading == 6
        assert b.lookup(b.register(spec()), chain("hot", 6), lease=False).leading == 6
        assert directory(a)["touched"] == 4, "once in a while is enough, and a look is no use"
    redis.close()


def test_what_was_forgotten_while_nobody_used_it_is_known_again_by_its_use(
    two: Pair, both: Shared
) -> None:
    """Its entry ran out, or Redis lost it: the daemon that wrote it tells it again when it uses it
    from its memory, however long the prompt is; and only what lies in the bucket still."""
    redis = both.client()
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        count, size = 2 * MOST + 10, 4096
        handle = a.register(spec(size))
        hashes = chain("long", count)
        assert store(a, handle, hashes, size) == [OK] * count
        until(lambda: both.told() == count, 60)
        for name in redis.scan_iter(f"{both.prefix}:d1:*", count=1000):
            redis.pexpire(name, 1)
        until(lambda: both.told() == 0)
        theirs = b.register(spec(size))
        assert b.lookup(theirs, hashes, lease=False).leading == 0

        gone = chain("long", count + 1)[count - 1 : count]
        a.evict(Selector(tier="s3", keys=tuple(gone)))
        until(lambda: tier(a, "s3")["chunks"] == count - 1)
        assert load(a, handle, hashes, size) == [OK] * count
        assert tier(a, "s3")["bytes_read"] == 0
        until(lambda: both.told() == count - 1)
        assert directory(a)["renewed"] == count - 1
        assert b.lookup(theirs, hashes, lease=False).leading == count - 1
        assert load(b, theirs, hashes[:20], size) == [OK] * 20
        assert load(a, handle, hashes, size) == [OK] * count
        assert directory(a)["renewed"] == count - 1
    redis.close()


def test_what_another_wrote_is_not_told_again_by_who_only_uses_it(two: Pair, both: Shared) -> None:
    """Whether it lies in the bucket still, only its owner knows."""
    redis = both.client()
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        put(a, both, "theirs", 6)
        handle = b.register(spec())
        for _ in range(3):  # what was hit once only is read from the bucket again
            assert load(b, handle, chain("theirs", 6)) == [OK] * 6
        put(b, both, "own", 1)
        read = tier(b, "s3")["bytes_read"]
        redis.flushdb()
        assert load(b, handle, chain("theirs", 5)) == [OK] * 5
        assert load(b, handle, chain("own", 1)) == [OK]
        until(lambda: directory(b)["renewed"] == 1)
        assert tier(b, "s3")["bytes_read"] == read
        assert both.told() == 1, "uses are told in their order: the others were before"
        assert load(a, a.register(spec()), chain("theirs", 5)) == [OK] * 5
        until(lambda: both.told() == 6)
    redis.close()


def test_redis_away_or_flushed_is_misses_and_no_more(seaweed: Seaweed, own: Redis) -> None:
    both = shared(seaweed, own, directory_wait_s=0.5)
    with pair(both) as two:
        with Client(two.a.socket) as a, Client(two.b.socket) as b:
            mine = put(a, both, "before", 5)
            handle = b.register(spec())
            assert load(b, handle, chain("before", 5)) == [OK] * 5
            own.stop()
            assert b.lookup(handle, chain("unheard", 5), lease=False).leading == 0
            until(lambda: directory(b)["state"] == "degraded")
            assert load(b, handle, chain("before", 5)) == [OK] * 5
            assert store(a, mine, chain("meanwhile", 5)) == [OK] * 5
            until(lambda: tier(a, "s3")["chunks"] == 10)
            assert b.lookup(handle, chain("meanwhile", 5), lease=False).leading == 0
            shown = subprocess.run(
                [sys.executable, "-m", "kvd.tools.cli", "status", "--socket", two.b.socket],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert "directory" in shown and "can't be reached" in shown
            own.start()  # empty, as after a flush
            until(lambda: directory(a)["state"] == directory(b)["state"] == "ok", 60)
            meanwhile = chain("meanwhile", 5)  # what could not be told then is told now
            until(lambda: b.lookup(handle, meanwhile, lease=False).leading == 5)
            assert load(b, handle, meanwhile) == [OK] * 5
            client = both.client()
            client.flushall()
            client.close()
            assert b.lookup(handle, chain("unheard", 5), lease=False).leading == 0
            assert load(b, handle, meanwhile) == [OK] * 5
            empty(a, "dram")
            assert load(a, mine, chain("before", 5)) == [OK] * 5
            until(lambda: both.told() >= 5)  # who reads it from the bucket says so again


def test_a_full_redis_tells_nothing_new_and_answers_on(seaweed: Seaweed, tmp_path: Path) -> None:
    full = Redis(tmp_path, "--maxmemory-policy", "noeviction")
    try:
        both = shared(seaweed, full)
        with pair(both) as two:
            with Client(two.a.socket) as a, Client(two.b.socket) as b:
                mine = put(a, both, "fits", 5)
                client = both.client()
                client.config_set("maxmemory", 1)
                client.close()
                assert store(a, mine, chain("full", 5)) == [OK] * 5
                until(lambda: directory(a)["untold"] >= 5)
                handle = b.register(spec())
                assert b.lookup(handle, chain("full", 5), lease=False).leading == 0
                assert load(b, handle, chain("fits", 5)) == [OK] * 5
                assert directory(a)["state"] == directory(b)["state"] == "ok"
    finally:
        full.stop()


def test_a_redis_that_stands_still_holds_no_lookup_for_ever(seaweed: Seaweed, own: Redis) -> None:
    both = shared(seaweed, own, directory_wait_s=0.2)
    with pair(both) as two:
        with Client(two.b.socket, timeout_s=30) as b:
            handle = b.register(spec())
            assert store(b, handle, chain("here", 5)) == [OK] * 5
            own._process.process.send_signal(signal.SIGSTOP)
            try:
                for n in range(5):
                    assert b.lookup(handle, chain(n, 5), lease=False).leading == 0
                    assert load(b, handle, chain("here", 5)) == [OK] * 5
                until(lambda: directory(b)["state"] == "degraded")
            finally:
                own._process.process.send_signal(signal.SIGCONT)
            until(lambda: directory(b)["state"] == "ok", 60)


def test_what_somebody_wrote_into_redis_is_never_a_wrong_hit(two: Pair, both: Shared) -> None:
    """Lies of every kind: another chunk's record, another fingerprint, other bytes, nonsense."""
    with Client(two.a.socket) as a, Client(two.b.socket) as b:
        put(a, both, "true", 5)
        handle = b.register(spec())
        liar = Directory(RedisConfig(both.redis.url, "liar", 0, both.prefix))
        space = {"kind": 1, "namespace": _namespace(b), "spec": spec().digest, "shard": 0}
        keys = [Key(**space, chunk=h) for h in chain("true", 5)]
        entries = liar.find(keys)
        headers = [e.header for e in entries if e is not None]
        assert len(headers) == 5
        lies = [
            headers[0]._replace(fingerprint=bytes(16)),
            headers[1]._replace(digest=bytes(16)),
            headers[2]._replace(tokens=3),
            headers[3]._replace(parent=chain("other", 1)[0]),
            headers[4]._replace(index=7),
        ]
        where = f"s3://kvd/{both.prefix}"
        for key in keys:
            liar.heal([key])
        assert liar.tell([Entry(where, lie._replace(session=bytes(16))) for lie in lies])
        for _ in range(3):
            load(b, handle, chain("true", 5))  # compares the bytes of what is OK
        unsigned = [header._replace(session=bytes(16)) for header in headers]
        for name, place in (("nobody", where), ("elsewhere", "s3://other/bucket")):
            named = zip(unsigned, chain(name, 5), strict=True)
            assert liar.tell([Entry(place, h._replace(chunk=key)) for h, key in named])
            assert OK not in load(b, handle, chain(name, 5))
        assert b.lookup(handle, chain("elsewhere", 5), lease=False).leading == 0
        client = both.client()
        for name in client.scan_iter(f"{both.prefix}:d1:*"):
            for field in client.hkeys(name):
                client.hset(name, field, b"nonsense")
        client.close()
        assert b.lookup(handle, chain("more", 5), lease=False).leading == 0
        assert load(a, a.register(spec()), chain("true", 5)) == [OK] * 5
        assert b.stat()["loop"]["faults"] == 0
        liar.close()


def _namespace(client: Client) -> bytes:
    from kvd.chunk import namespace_digest

    return namespace_digest(client.info().namespace)


def test_one_of_two_is_killed_again_and_again_while_the_other_reads(
    two: Pair, both: Shared
) -> None:
    """What was told lies in the bucket, and is a hit that is right to the byte."""
    stop = threading.Event()
    stored: list[int] = []

    def writes() -> None:
        n = 0
        while not stop.is_set():
            try:
                with Client(two.a.socket, timeout_s=2) as a:
                    handle = a.register(spec())
                    while not stop.is_set():
                        if set(store(a, handle, chain(f"w{n}", 3))) == {OK}:
                            stored.append(n)
                        n += 1
            except (KvdError, OSError):
                stop.wait(0.05)

    writer = threading.Thread(target=writes)
    writer.start()
    hits = 0
    try:
        with Client(two.b.socket, timeout_s=30) as b:
            handle = b.register(spec())
            for life in range(4):
                target = both.told() + 8
                until(lambda target=target: both.told() >= target, 60)
                two.a.kill()
                for n in list(stored):
                    there = b.lookup(handle, chain(f"w{n}", 3), lease=False).leading
                    got = load(b, handle, chain(f"w{n}", there)) if there else []
                    assert got == [OK] * there, "what was told lies in the bucket"
                    hits += there
                assert b.stat()["loop"]["faults"] == 0, life
                two.a.start()
    finally:
        stop.set()
        writer.join()
    assert hits >= 8
    assert "Traceback" not in two.a.log + two.b.log


def test_a_directory_that_can_not_be_used_stops_the_start(seaweed: Seaweed, tmp_path: Path) -> None:
    said = refused(*flags(directory_url="redis://u:secret@127.0.0.1"))
    assert "needs tiers.s3.bucket" in said and "secret" not in said
    server = Redis(tmp_path, "--requirepass", "right")
    try:
        said = refused(*s3_flags(seaweed, directory_url=server.url))
        assert "directory: redis://" in said and "asks for a password" in said
        said = refused(*s3_flags(seaweed, directory_url="http://x"))
        assert "give redis://" in said
        file = tmp_path / "password"
        file.write_text("right\n")
        args = s3_flags(seaweed, directory_url=server.url, directory_password_file=file)
        with daemon(*args) as process, Client(process.socket) as client:
            assert directory(client)["state"] == "ok"
    finally:
        server.stop()
    args = s3_flags(seaweed, directory_url="redis://127.0.0.1:9")
    with daemon(*args) as process, Client(process.socket) as client:
        assert directory(client)["state"] == "degraded"
        handle = client.register(spec())
        assert store(client, handle, chain("x", 3)) == [OK] * 3
        assert load(client, handle, chain("x", 3)) == [OK] * 3
