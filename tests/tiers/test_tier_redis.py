"""The Redis tier keeps the contract on a real server, and survives what a Redis goes through."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import Conformance, Medium
from servers import Redis
from tiers_kit import CONFIG, Chunk, Rig, chunks, in_

from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Refused, Unsure
from kvd.tiers.base import NOWHERE, Answer, Key, Probe, State
from kvd.tiers.redis import Directory, Entry, RedisBackend, RedisConfig
from kvd.tiers.redis.config import connect

MIB = 1 << 20


class OnRedis:
    limit = 8 * MIB

    def __init__(self, server: Redis) -> None:
        self.config = RedisConfig(server.url, "one", self.limit, prefix=f"t{uuid.uuid4().hex}")

    def backend(self) -> Backend:
        return RedisBackend(self.config)


class TestRedis(Conformance):
    """The conformance suite: K25, K26, K30, K35, K43, K64."""

    @pytest.fixture
    def medium(self, redis_server: Redis) -> Medium:
        return OnRedis(redis_server)


@pytest.fixture
def config(redis_server: Redis) -> RedisConfig:
    return RedisConfig(redis_server.url, "one", 8 * MIB, prefix=f"t{uuid.uuid4().hex}")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


def rig(config: RedisConfig) -> Rig:
    return Rig(RedisBackend(config), "redis", CONFIG).start()


# -- the tier -----------------------------------------------------------------------------------


def test_a_flush_is_misses_and_the_accounts_follow(config: RedisConfig) -> None:
    import redis

    it = rig(config)
    many = list(chunks(6))
    it.do([c.write() for c in many])
    client = redis.Redis.from_url(config.url)
    for name in client.scan_iter(f"{config.prefix}:*"):
        client.delete(name)
    client.close()
    assert {d.answer for d in it.do([c.read() for c in many])} == {Answer.MISS}
    assert it.tier.usage().used_bytes == 0 and it.tier.state is State.READY
    assert {d.answer for d in it.do([c.write() for c in many])} == {Answer.OK}
    it.close()


def test_a_full_server_refuses_stores_and_reads_on(tmp_path: Path) -> None:
    server = Redis(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    it = rig(RedisConfig(server.url, "one", 64 * MIB))
    many = list(chunks(40, 200_000))
    answers = [it.one(c.write()).answer for c in many]
    assert set(answers) == {Answer.OK, Answer.NO_SPACE} and it.tier.state is State.READY
    assert it.one(many[0].read()).answer is Answer.OK
    assert it.one(many[0].delete()).answer is Answer.OK
    it.close()
    server.stop()


def test_a_server_that_goes_away_is_degraded_and_heals_without_wrong_hits(own: Redis) -> None:
    it = rig(RedisConfig(own.url, "one", 8 * MIB, timeout_s=0.5))
    chunk = Chunk(1)
    it.one(chunk.write())
    own.stop()
    began = time.monotonic()
    answers = {it.one(chunk.read()).answer for _ in range(5)}
    assert answers == {Answer.FAILED, Answer.OFF} and time.monotonic() - began < 5
    own.start()  # empty: nothing was saved
    it.until(lambda: it.tier.state is State.READY)
    assert it.one(chunk.read()).answer is Answer.MISS
    assert it.one(chunk.write()).answer is Answer.OK
    it.close()


@pytest.mark.parametrize("again", [False, True])
def test_what_was_set_and_not_answered_counts_and_is_taken_back(
    own: Redis, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A server that stands still carries it out later: nobody knows that it is there, and the next
    start would show it, although it was evicted here."""
    import redis

    monkeypatch.setattr("kvd.tiers.redis.backend.SETTLED_NS", 0)
    it = rig(RedisConfig(own.url, "one", 8 * MIB, timeout_s=0.5))
    client = redis.Redis.from_url(own.url)
    chunk = Chunk(1)
    os.kill(own._process.process.pid, signal.SIGSTOP)
    try:
        assert it.one(chunk.write()).answer is Answer.FAILED
    finally:
        os.kill(own._process.process.pid, signal.SIGCONT)
    usage = it.tier.usage()
    assert (usage.chunks, usage.used_bytes) == (0, 10_512)
    it.until(lambda: list(client.scan_iter("kvd:c1:*")))
    if again:
        assert it.one(chunk.write()).answer is Answer.OK
    assert it.one(Probe(None)).answer is Answer.OK
    usage, left = it.tier.usage(), 1 if again else 0
    assert (usage.chunks, usage.used_bytes) == (left, left * 10_512)
    assert len(list(client.scan_iter("kvd:c1:*"))) == left
    assert it.tier.stat().notes["taken_back"] == 1 - left
    client.close()
    it.close()


@pytest.fixture
def hung(own: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A tier with a chunk that was set and not answered, on a server that works again."""
    import redis

    monkeypatch.setattr("kvd.tiers.redis.backend.SETTLED_NS", 0)
    it = rig(RedisConfig(own.url, "one", 8 * MIB, timeout_s=0.5))
    os.kill(own._process.process.pid, signal.SIGSTOP)
    try:
        assert it.one(Chunk(1).write()).answer is Answer.FAILED
    finally:
        os.kill(own._process.process.pid, signal.SIGCONT)
    with redis.Redis.from_url(own.url) as client:
        it.until(lambda: list(client.scan_iter("kvd:c1:*")))
    assert it.tier.usage().used_bytes == 10_512
    yield it
    it.close()


def below(it: Rig) -> RedisBackend:
    backend = it.tier.backend.below  # type: ignore[attr-defined]
    assert isinstance(backend, RedisBackend)
    return backend


@pytest.mark.parametrize("how", ["full", "no room"])
def test_a_write_that_surely_failed_says_nothing_of_one_that_may_not_have(
    hung: Rig, own: Redis, how: str
) -> None:
    """Else the first would lie there, uncounted, and not be taken back."""
    import redis

    with redis.Redis.from_url(own.url) as client:
        if how == "full":
            client.config_set("maxmemory", 1)
        else:
            below(hung)._mine._limit = 10_511
        assert hung.one(Chunk(1).write()).answer is Answer.NO_SPACE
        client.config_set("maxmemory", 0)
        assert hung.tier.usage().used_bytes == 10_512 and hung.tier.untidy == 1
        assert hung.one(Probe(None)).answer is Answer.OK
        assert not list(client.scan_iter("kvd:c1:*")) and hung.tier.usage().used_bytes == 0


def test_two_that_take_back_at_once_do_not_take_what_was_stored_in_between(hung: Rig) -> None:
    """The first has freed its name, it is stored anew, and then the second would delete it."""
    backend, chunk = below(hung), Chunk(1)
    delete, asked, go_on = backend._delete_names, [], threading.Event()

    def slow(names: list[bytes]) -> list[int]:
        asked.append(names)
        if len(asked) == 1:
            entered.set()
            assert first.wait(20)
        elif names == asked[0]:
            assert go_on.wait(20)
        return delete(names)

    entered, first = threading.Event(), threading.Event()
    backend._delete_names = slow  # type: ignore[method-assign]
    one, two = (threading.Thread(target=backend._tidy) for _ in range(2))
    one.start()
    assert entered.wait(20)
    two.start()
    hung.until(lambda: len(asked) == 2 or not two.is_alive())
    first.set()
    one.join()
    assert hung.one(chunk.write()).answer is Answer.OK
    go_on.set()
    two.join()
    backend._delete_names = delete  # type: ignore[method-assign]
    assert hung.one(chunk.read()).answer is Answer.OK and hung.tier.usage().chunks == 1


@pytest.mark.parametrize("by", ["tidy", "delete"])
def test_what_is_deleted_while_a_recovery_looks_is_not_told(hung: Rig, by: str) -> None:
    backend, chunk = below(hung), Chunk(1)
    if by == "delete":
        assert hung.one(chunk.write()).answer is Answer.OK
    records = backend._records

    def then(names: list[bytes]) -> Any:
        found = records(names)
        if by == "delete":
            backend.delete([(chunk.key, NOWHERE)], 0)
        else:
            backend._tidy()
        return found

    backend._records = then  # type: ignore[method-assign]
    assert not hung.recovered()
    assert (hung.tier.usage().chunks, hung.tier.usage().used_bytes) == (0, 0)


def test_what_lies_there_and_can_not_be_asked_may_be_ours(config: RedisConfig) -> None:
    """It was set by an attempt whose answer was lost, and the next one says that it is there."""

    class Half(RedisBackend):
        def _set_absent(self, *args: Any) -> bool:
            assert super()._set_absent(*args)
            self._client.getrange = self._refuse
            try:
                return super()._set_absent(*args)
            finally:
                del self._client.getrange

        @staticmethod
        def _refuse(*args: Any) -> bytes:
            import redis

            raise redis.ResponseError("NOPERM this user has no permissions to run 'getrange'")

    it = Rig(Half(config), "redis", CONFIG).start()
    assert it.one(Chunk(1).write()).answer is Answer.FAILED
    assert it.tier.usage().used_bytes == 10_512
    it.close()


def test_what_a_recovery_finds_while_it_is_written_counts_once(config: RedisConfig) -> None:
    class Found(RedisBackend):
        def _set_absent(self, *args: Any) -> bool:
            written = super()._set_absent(*args)
            assert sum(len(batch.records) for batch in self.recover()) == 1
            return written

    it = Rig(Found(config), "redis", CONFIG).start()
    assert it.one(Chunk(1).write()).answer is Answer.OK
    assert (it.tier.usage().chunks, it.tier.usage().used_bytes) == (1, 10_512)
    assert it.one(Chunk(1).delete()).answer is Answer.OK and it.tier.usage().used_bytes == 0
    it.close()


def test_what_expires_or_is_evicted_leaves_nothing_behind(config: RedisConfig) -> None:
    """Redis has its chunks and nothing else of ours: not what is said of them either, which would
    grow for ever beside chunks that come and go."""
    import redis

    client = redis.Redis.from_url(config.url)
    client.hset(f"{config.prefix}:m1:{RedisBackend(config)._owner.hex()}", "of an older kvd", 1)
    it = rig(config._replace(ttl_s=0.2))
    assert {d.answer for d in it.do([c.write() for c in chunks(20)])} == {Answer.OK}
    time.sleep(0.3)
    left = [name for name in client.scan_iter(f"{config.prefix}:*") if b":probe:" not in name]
    assert left == []
    client.close()
    it.close()


def test_bytes_that_do_not_hold_are_deleted_and_heal(config: RedisConfig) -> None:
    """K35"""
    import redis

    it, client = rig(config), redis.Redis.from_url(config.url)
    chunk = Chunk(1)
    for at in (5_000, 100, 508):
        it.one(chunk.write())
        (name,) = client.scan_iter(f"{config.prefix}:c1:*")
        old = client.getrange(name, at, at)
        client.setrange(name, at, bytes((old[0] ^ 1,)))
        assert it.one(chunk.read()).answer is Answer.CORRUPT
        assert it.one(chunk.read()).answer is Answer.MISS and not client.exists(name)
    it.one(chunk.write())
    client.append(name, b"x")
    assert it.one(chunk.read()).answer is Answer.CORRUPT
    client.set(name, b"short")
    assert it.one(chunk.read()).answer is Answer.CORRUPT
    assert it.one(chunk.write()).answer is Answer.OK
    client.close()
    it.close()


def test_only_what_this_installation_wrote_is_deleted(config: RedisConfig) -> None:
    one, two = rig(config), rig(config._replace(installation="two"))
    chunk = Chunk(1)
    one.one(chunk.write())
    assert two.one(chunk.write()).answer is Answer.EXISTS and two.tier.usage().chunks == 0
    assert two.one(chunk.delete()).answer is Answer.MISS
    assert two.one(chunk.read()).answer is Answer.OK
    assert one.one(chunk.delete()).answer is Answer.OK
    assert two.one(chunk.read()).answer is Answer.MISS
    one.close()
    two.close()


def test_a_wrong_password_is_refused_at_start_without_telling_it(tmp_path: Path) -> None:
    """K72"""
    server = Redis(tmp_path, "--requirepass", "right")
    url = f"redis://127.0.0.1:{server.port}/0"
    for wrong in (url, url.replace("//", "//:wrongpass@")):
        with pytest.raises(ConfigError, match=r"tier redis: redis://127") as refused:
            RedisBackend(RedisConfig(wrong, "one", 8 * MIB)).open()
        assert "wrongpass" not in str(refused.value)
    (tmp_path / "password").write_text("right\n")
    backend = RedisBackend(
        RedisConfig(url, "one", 8 * MIB, password_file=str(tmp_path / "password"))
    )
    backend.open()
    backend.close()
    server.stop()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"url": "http://x"}, "give redis://"), ({"limit_bytes": 1}, "too small"),
        ({"installation": ""}, "empty"), ({"password_file": "/no"}, "password_file"),
    ],
)  # fmt: skip
def test_settings_are_checked(how: dict[str, object], says: str) -> None:
    config = RedisConfig("redis://127.0.0.1:1/0", "one", 8 * MIB)
    with pytest.raises(ConfigError, match=f"tier redis: .*{says}"):
        RedisBackend(config._replace(**how)).open()  # type: ignore[arg-type]


def test_without_redis_py_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from kvd.tiers.redis import RedisBackend, RedisConfig\n"
        "from kvd.errors import ConfigError\n"
        "try: RedisBackend(RedisConfig('redis://h', 'one', 1 << 23)).open()\n"
        "except ConfigError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvd[redis]'" in done.stdout


# -- the directory ------------------------------------------------------------------------------


def entry(chunk: Chunk, where: str = "s3://bucket/kvd") -> Entry:
    return Entry(where, chunk.header)


def test_what_one_daemon_told_another_finds(config: RedisConfig) -> None:
    a, b = Directory(config), Directory(config._replace(installation="two"))
    many = list(chunks(5))
    assert a.tell([entry(c) for c in many[:3]])
    found = b.find([c.key for c in many])
    assert found == [entry(c) for c in many[:3]] + [None, None]
    b.tell([entry(many[0], "s3://other/kvd")])
    assert a.find([many[0].key])[0].where == "s3://other/kvd"  # type: ignore[union-attr]
    a.forget([many[0].key, many[1].key])
    assert [e is not None for e in b.find([c.key for c in many])] == [
        True,
        False,
        True,
        False,
        False,
    ]
    b.heal([many[2].key])
    assert a.find([many[2].key]) == [None]
    assert b.counters["hits"] == 5 and b.counters["healed"] == 1
    a.close()
    b.close()


def test_entries_end_unless_they_are_told_again_or_used(config: RedisConfig) -> None:
    """A daemon that was killed is forgotten."""
    import redis

    client = redis.Redis.from_url(config.url)
    it = Directory(config._replace(ttl_s=1000))
    one, two, three, nobody = chunks(4)
    it.tell([entry(chunk) for chunk in (one, two, three)])
    names = [it._name(chunk.key) for chunk in (one, two, three)]
    assert all(900_000 < client.pttl(name) <= 1_000_000 for name in names)
    for name in names:  # as if the time had passed
        client.pexpire(name, 500_000)
    it.tell([entry(two)])
    assert it.touch([three.key, nobody.key]) == [nobody.key] and it.touch([]) == []
    left = [client.pttl(name) > 900_000 for name in names]
    assert left == [False, True, True] and it.counters["touched"] == 1
    assert it.find([nobody.key]) == [None], "what nobody told stays unknown"
    client.pexpire(names[0], 1)
    end = time.monotonic() + 10
    while client.exists(names[0]):
        assert time.monotonic() < end
    assert [e is not None for e in it.find([one.key, two.key])] == [False, True]
    it.close()
    client.close()


def test_nonsense_in_the_directory_is_no_hit(config: RedisConfig) -> None:
    import redis

    it, client = Directory(config), redis.Redis.from_url(config.url)
    chunk, other = chunks(2)
    it.tell([entry(chunk)])
    (name,) = client.scan_iter(f"{config.prefix}:d1:*")
    (field,) = client.hkeys(name)
    good = entry(chunk).pack()
    for bad in (
        b"",
        b"x",
        good[:-1],
        good + b"x",
        good[:40] + bytes((good[40] ^ 1,)) + good[41:],
        entry(other).pack(),
    ):
        client.hset(name, field, bad)
        assert it.find([chunk.key]) == [None]
    assert it.counters["bad"] == 6
    client.close()
    it.close()


def test_a_directory_that_is_away_says_not_known_at_once_and_comes_back(own: Redis) -> None:
    it = Directory(RedisConfig(own.url, "one", 8 * MIB, timeout_s=0.3))
    chunk = Chunk(1)
    assert it.tell([entry(chunk)])
    own.stop()
    began = time.monotonic()
    for _ in range(200):
        assert it.find([chunk.key]) == [None]
        assert not it.tell([entry(chunk)])
    it.heal([chunk.key])
    it.forget([chunk.key])
    assert time.monotonic() - began < 2 and not it.available and it.last_error
    own.start()
    end = time.monotonic() + 10
    while not it.tell([entry(chunk)]):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert it.find([chunk.key]) == [entry(chunk)] and it.available
    it.close()


def test_a_write_that_is_refused_the_second_time_may_have_been_carried_out_the_first(
    tmp_path: Path,
) -> None:
    """The client sends again by itself what a broken connection took with it."""
    path, asked = str(tmp_path / "s"), []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while got := connection.recv(1 << 16):
                    if b"SET\r\n" not in got or b"SETINFO" in got:
                        connection.sendall(b"+OK\r\n" * got.count(b"*"))
                        continue
                    asked.append(got)
                    if len(asked) == 1:
                        break
                    connection.sendall(b"-OOM command not allowed\r\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        config = RedisConfig(f"unix://{path}?protocol=2", "one", 8 * MIB, timeout_s=2)
        backend = RedisBackend(config)
        backend._client = connect(config)
        chunk = Chunk(1, 100)
        for sent in (2, 3):  # the second put is refused at once: its first attempt is answered
            with pytest.raises(Refused) as refused:
                backend.put(
                    Key.of(chunk.header), chunk.header, memoryview(chunk.memory), in_(10)
                )
            assert refused.value.answer is Answer.NO_SPACE
            assert isinstance(refused.value, Unsure) is (sent == 2)
            assert len(asked) == sent and backend.usage().used_bytes > 0
        listener.shutdown(socket.SHUT_RDWR)
