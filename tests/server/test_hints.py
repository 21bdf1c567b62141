"""Hints through a real client to a real daemon."""

from __future__ import annotations

import hashlib
import json

import pytest
from daemon import DaemonProcess

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.errors import BadKey, LimitExceeded, SpecError
from tests.tools.cli import kvd_cli

SIZE = 256 * 1024
SLOTS = 64  # of a 16 MiB arena


def spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec("hints", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def chain(name: object, count: int = 8) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def store(client: Client, name: object) -> None:
    hashes = chain(name)
    prints = [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]
    done = client.store_chunks(client.register(spec()), hashes, prints, [bytes(SIZE)] * 8)
    assert set(done) <= {Outcome.OK, Outcome.EXISTS}


def there(client: Client, name: object) -> int:
    return int(client.lookup(spec(), chain(name), lease=False).leading)


def test_hints_decide_who_goes() -> None:
    with DaemonProcess(arena_size="16MiB", args=("--limits-pin-share", "0.125")) as daemon:
        with Client(daemon.socket) as client:
            for name in range(SLOTS // 8):
                store(client, name)
            assert client.pin(spec(), chain(0), 60.0)[:3] == (8, 0, 0)
            assert client.pin(spec(), chain(1), 60.0).over == 8
            assert client.session_end(spec(), chain(7)).taken == 8
            assert client.priority(spec(), chain(6), 0).taken == 8
            store(client, "a")
            store(client, "b")
            # one more went ahead of the next store
            assert [there(client, name) for name in (0, 1, 6, 7)] == [8, 7, 0, 0]
            store(client, 1)
            assert client.pin(spec(), chain(0), 0.0).taken == 8
            assert client.expect_reuse(spec(), chain(1), 30.0)[:3] == (8, 0, 0)
            store(client, "c")
            assert [there(client, name) for name in (0, 1)] == [0, 8]
            told = client.stat()["counters"]
            assert told["chunks_hinted"]["session_end"] == 8
            assert told["hints_over_cap"] == 8
            rows = kvd_cli("inspect", "chunks", "--json", "--socket", daemon.socket).json["rows"]
            assert sum("spared_s" in row for row in rows) == 8
            status = " ".join(kvd_cli("status", "--socket", daemon.socket).out.split())
            assert "hints" in status and "over the cap: 8" in status, json.dumps(status)


def test_a_hint_that_makes_no_sense_is_a_typed_error() -> None:
    with DaemonProcess(arena_size="16MiB") as daemon, Client(daemon.socket) as client:
        client.register(spec())
        with pytest.raises(BadKey):
            client.priority(spec(), chain(0), 7)
        with pytest.raises(BadKey):
            client.priority(spec(), chain(0), -1)
        with pytest.raises(LimitExceeded):
            client.pin(spec(), chain(0), -1.0)
        with pytest.raises(SpecError):
            client.session_end(b"\x01" * 32, chain(0))
