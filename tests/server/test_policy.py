"""The eviction policy of a real daemon: chosen by name, shown, and never the daemon's end."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from daemon import DaemonProcess

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from tests.tools.cli import kvd_cli

SIZE = 256 * 1024
SLOTS = 64  # of a 16 MiB arena

OWN = """
from kvd.eviction.lru import Lru

class Careless(Lru):
    name = "careless"
    asked = 0

    def victims(self, queue, now):
        Careless.asked += 1
        if Careless.asked > 20:
            raise ZeroDivisionError("one look too many")
        return super().victims(queue, now)

class Broken(Lru):
    def __init__(self):
        raise OSError("no disk")
"""


def spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec("policy", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def chain(name: object, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def store(client: Client, name: object, count: int) -> list[Outcome]:
    handle = client.register(spec())
    hashes = chain(name, count)
    prints = [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]
    return client.store_chunks(handle, hashes, prints, [bytes(SIZE)] * count)


def daemon(*flags: str, path: Path | None = None) -> DaemonProcess:
    env = {"PYTHONPATH": str(path)} if path is not None else {}
    return DaemonProcess(arena_size="16MiB", args=flags, env=env, start=False)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("lrru", ("did you mean 'lru'", "flag --eviction-policy")),
        ("lru:half_life_s=3", ("half_life_s",)),
        ("crf:half_life_s=x", ("option=number",)),
        ("no.such.Policy", ("can't be imported",)),
        ("json.JSONEncoder", ("no class that fulfils Policy",)),
        ("kvd_own.Broken", ("no disk",)),
    ],
)
def test_a_policy_that_can_not_be_had_is_refused_in_one_line(
    policy: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "kvd_own.py").write_text(OWN)
    with daemon("--eviction-policy", policy, path=tmp_path) as process:
        process.spawn()
        assert process.wait() == 2
        said = process.log
        assert said.startswith("kvd: eviction.policy") and said.count("\n") == 1
        for word in words:
            assert word in said


def test_the_policy_is_chosen_in_the_file_and_shown() -> None:
    process = DaemonProcess(arena_size="16MiB", config='[eviction]\npolicy = "s3fifo"\n')
    with process, Client(process.socket) as client:
        assert client.stat()["tiers"][0]["eviction"]["policy"] == "s3fifo"
        assert "eviction  s3fifo" in process.out
    with DaemonProcess(arena_size="16MiB") as process:
        status = kvd_cli("status", "--socket", process.socket)
        assert "policy" in status.out and "reuse" in status.out


def test_a_policy_of_ones_own_that_raises_is_not_the_daemons_end(tmp_path: Path) -> None:
    """K39: stores go on at the limit; status and log say what happened."""
    (tmp_path / "kvd_own.py").write_text(OWN)
    with daemon("--eviction-policy", "kvd_own.Careless", path=tmp_path) as process:
        process.start()
        with Client(process.socket) as client:
            for n in range(4 * SLOTS // 8):
                assert store(client, n, 8) == [Outcome.OK] * 8
            told = client.stat()
            assert told["tiers"][0]["state"] == "degraded"
            assert told["counters"]["policy_errors"] == 1
            assert told["tiers"][0]["chunks"] > SLOTS * 0.8
        status = " ".join(kvd_cli("status", "--socket", process.socket).out.split())
        assert "careless; failed in dram, LRU decides until the next start" in status
        assert "ZeroDivisionError: one look too many" in process.log
        assert process.stop() == 0
