"""What policies know, kept beside the arena: whole, or a cold policy."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
from daemon import DaemonProcess

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.server.remembering import MAGIC, read_memory, write_memory

SIZE = 256 * 1024
SLOTS = 64  # of a 16 MiB arena

PARTS = [
    {"tier": "dram", "policy": "crf", "state": {"time": 7, "peak": 2}, "width": 3},
    {
        "digests": np.arange(2, dtype="<u8").tobytes(),
        "last": np.arange(2, dtype="<i8").tobytes(),
        "memory": np.arange(6, dtype="<f8").tobytes(),
    },
    {"ghosts": np.arange(3, dtype="<u8").tobytes(), "values": np.arange(6, dtype="<f8").tobytes()},
    {"tier": "nvme", "policy": "crf", "state": {}, "width": 0},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.policy"


def test_what_is_written_is_read(path: Path) -> None:
    write_memory(path, "one", PARTS)
    known = read_memory(path, "one")
    assert set(known) == {"dram", "nvme"}
    dram = known["dram"]
    assert dram.policy == "crf" and dram.state == {"time": 7, "peak": 2}
    assert dram.memory.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dram.ghost_values.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(known["nvme"].digests) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_missing_file_is_nothing_to_speak_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_memory(path, "one") == {}
    assert not caplog.records


def test_another_instances_file_is_not_believed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_memory(path, "one", PARTS)
    assert read_memory(path, "other") == {}
    assert "of instance 'one', this is 'other'" in caplog.text


def test_every_byte_that_changes_and_every_cut_is_noticed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_memory(path, "one", PARTS)
    whole = path.read_bytes()
    caplog.set_level(logging.CRITICAL)
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1 + at % 255
        path.write_bytes(broken)
        assert read_memory(path, "one") == {}, at
        path.write_bytes(whole[:at])
        assert read_memory(path, "one") == {}, at
    path.write_bytes(whole + b"\0")
    assert read_memory(path, "one") == {}


@pytest.mark.parametrize(
    "values",
    [
        [],
        [None],
        [{"version": 2, "instance": "one"}, None],
        [{"version": 1, "instance": "one"}],
        [{"version": 1, "instance": "one"}, 7, None],
        [{"version": 1, "instance": "one"}, {"digests": b""}, None],
        [{"version": 1, "instance": "one"}, {**PARTS[0], "width": -1}, None],
        [{"version": 1, "instance": "one"}, {**PARTS[0], "width": 1 << 40}, PARTS[1], None],
        [{"version": 1, "instance": "one"}, {**PARTS[0], "state": 9}, None],
        [{"version": 1, "instance": "one"}, PARTS[0], {"digests": bytes(12)}, None],
        [{"version": 1, "instance": "one"}, PARTS[0], {"digests": "text"}, None],
    ],
)
def test_a_file_that_means_nothing_is_not_believed(
    values: list[object], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its check sum holds."""
    import zlib

    body = MAGIC + b"".join(msgpack.packb(value) for value in values)
    path.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    assert read_memory(path, "one") == {}
    assert "eviction starts cold" in caplog.text


def test_a_write_that_fails_leaves_what_was_there(path: Path) -> None:
    write_memory(path, "one", PARTS)
    before = path.read_bytes()

    def broken() -> object:
        yield PARTS[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_memory(path, "one", broken())  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# -- a real daemon --------------------------------------------------------------------------------


def spec() -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec("kept", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def chain(name: object, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def store(client: Client, name: object, count: int = 8) -> None:
    hashes = chain(name, count)
    prints = [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]
    handle = client.register(spec())
    done = client.store_chunks(handle, hashes, prints, [bytes(SIZE)] * count)
    assert done == [Outcome.OK] * count


def there(client: Client, name: object, *, use: bool = False) -> int:
    looked = client.lookup(client.register(spec()), chain(name, 8), lease=use)
    if looked.lease:
        looked.lease.release()
    return int(looked.leading)


def first_ones_used(client: Client) -> None:
    """Eight prompts fill the arena; the two oldest are used afterwards."""
    for name in range(SLOTS // 8):
        store(client, name)
    time.sleep(0.01)
    for name in (0, 1):
        assert there(client, name, use=True) == 8


def the_used_ones_stay(client: Client) -> None:
    for n in range(4):
        store(client, ("new", n))
    assert [there(client, name) for name in (0, 1)] == [8, 8]
    assert sum(there(client, name) for name in range(2, 6)) == 0


@pytest.mark.parametrize("policy", ["lru", "crf", "default"])
def test_a_stop_and_a_start_keep_the_order(policy: str) -> None:
    flags = ("--eviction-policy", policy)
    with DaemonProcess(arena_size="16MiB", args=flags) as process:
        with Client(process.socket) as client:
            first_ones_used(client)
        assert process.stop() == 0
        assert process.arena_base.with_name(process.arena_base.name + ".policy").exists()
        process.start()
        assert "eviction goes on where it was in: dram" in process.log
        with Client(process.socket) as client:
            the_used_ones_stay(client)


def test_sigkill_costs_what_came_after_the_last_time_it_was_kept() -> None:
    flags = ("--eviction-policy", "lru", "--eviction-keep-s", "0.2")
    with DaemonProcess(arena_size="16MiB", args=flags) as process:
        file = process.arena_base.with_name(process.arena_base.name + ".policy")
        with Client(process.socket) as client:
            first_ones_used(client)
            used = time.time_ns()
            for _ in range(200):
                if file.exists() and file.stat().st_mtime_ns > used + 500_000_000:
                    break
                time.sleep(0.05)
            process.kill()
        process.start()
        with Client(process.socket) as client:
            the_used_ones_stay(client)


@pytest.mark.parametrize("damage", ["none", "empty", "cut", "garbage", "folder"])
def test_a_damaged_file_is_a_cold_start_and_no_refusal(damage: str) -> None:
    with DaemonProcess(arena_size="16MiB") as process:
        file = process.arena_base.with_name(process.arena_base.name + ".policy")
        with Client(process.socket) as client:
            store(client, "kept")
        assert process.stop() == 0
        whole = file.read_bytes()
        file.unlink()
        if damage == "folder":
            file.mkdir()
        elif damage != "none":
            file.write_bytes({"empty": b"", "cut": whole[:-9], "garbage": bytes(5000)}[damage])
        process.start()
        with Client(process.socket) as client:
            assert there(client, "kept") == 8
            for n in range(12):
                store(client, n)
            assert client.stat()["counters"]["policy_errors"] == 0
        assert process.stop() == 0
