"""Requests recorded for the simulator: what was asked, and nothing that says what it was."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from daemon import DaemonProcess

from kvd.chunk import Kind, KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.server.recording import MOST_WAITING, Recorder
from kvd.tools.simulate.trace import read_trace
from kvd.wire import messages as m
from tests.tools.cli import kvd_cli

SIZE = 64 * 1024


def spec(model: str = "recorded") -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    return KVSpec(model, "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def chain(name: object, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(count)]


def lookup(
    name: object, count: int, *, flags: int = 1, index0: int = 0, kind: int = 1, spec: bytes = b"s"
) -> m.Lookup:
    hashes = b"".join(chain(name, count))
    return m.Lookup(spec, kind, (0,), hashes, None, flags, 1, bytes(32), index0, 1)


class Made:
    """A recorder over a file, and what it counted."""

    def __init__(self, path: Path, limit: int = 1 << 20) -> None:
        self.counted: Counter[str] = Counter()

        def count(what: str) -> None:
            self.counted[what] += 1

        self.recorder = Recorder(path, limit, lambda spec: 16, count)

    def end(self) -> Counter[str]:
        self.recorder.close()
        self.counted.update(self.recorder._results)
        return self.counted


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_a_line_without_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made = Made(path)
    made.recorder.note("tenant name", lookup("a", 3))
    made.recorder.note("tenant name", lookup("a", 2))
    made.recorder.note("other", lookup("a", 1))
    made.recorder.note("tenant name", lookup("a", 1, spec=b"t"))
    assert made.end() == {"written": 4}
    first, second, other, model = rows(path)
    assert list(first) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert first["input_length"] == 48 and first["output_length"] == 0
    ids = first["hash_ids"]
    assert isinstance(ids, list) and len(set(ids)) == 3
    assert second["hash_ids"] == ids[:2]
    assert other["hash_ids"] != ids[:1] and model["hash_ids"] != ids[:1]
    text = path.read_text()
    for key in chain("a", 3):
        assert key.hex() not in text
        assert not set(ids) & {int.from_bytes(key[n : n + 8], "little") for n in range(25)}
    assert "tenant" not in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_lives_have_nothing_in_common(tmp_path: Path) -> None:
    """Who knows a prompt can't look for it in the record."""
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        made = Made(path)
        made.recorder.note("a", lookup("a", 3))
        made.end()
    before = rows(path.with_name(path.name + ".1"))
    assert len(before) == 1 and before[0]["hash_ids"] != rows(path)[0]["hash_ids"]


@pytest.mark.parametrize(
    ("message", "counted"),
    [
        (lookup("a", 3, flags=0), {}),
        (lookup("a", 3, kind=Kind.CONTENT), {}),
        (lookup("a", 3, index0=5), {"partial": 1}),
        (m.Get(b"s", 1, (0,), b"".join(chain("a", 2)), None, 0), {"written": 1}),
    ],
)
def test_what_is_a_request_of_an_engine(
    message: m.Lookup | m.Get, counted: dict[str, int], tmp_path: Path
) -> None:
    made = Made(tmp_path / "trace.jsonl")
    made.recorder.note("a", message)
    assert made.end() == counted


def test_the_record_stays_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made = Made(path, 20_000)
    for n in range(400):
        made.recorder.note("a", lookup(n, 10))
        time.sleep(0.0005)
    assert sum(made.end().values()) == 400
    both = [path, path.with_name(path.name + ".1")]
    assert sorted(tmp_path.iterdir()) == sorted(both)
    line = len(path.read_text().splitlines()[0]) + 40
    assert all(10_000 - line < file.stat().st_size < 10_000 + line for file in both[1:])
    assert path.stat().st_size < 10_000 + line
    for file in both:
        assert read_trace(file).requests


def test_what_comes_too_fast_is_left_out_and_counted(tmp_path: Path) -> None:
    made = Made(tmp_path / "trace.jsonl")
    with made.recorder._ready:  # the thread stands still
        made.recorder._blocks = MOST_WAITING - 5
        made.recorder.note("a", lookup("a", 6))
        made.recorder.note("a", lookup("b", 5))
        made.recorder._blocks -= MOST_WAITING - 5
    assert made.end() == {"dropped": 1, "written": 1}


def test_a_disk_that_refuses_costs_the_record_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trace.jsonl"
    path.parent.mkdir()
    made = Made(path, 100)
    made.recorder.note("a", lookup("a", 5))
    while not made.recorder._results:
        time.sleep(0.005)
    path.unlink()
    path.parent.rmdir()
    for n in range(3):
        made.recorder.note("a", lookup(n, 5))
    counted = made.end()
    assert counted["failed"] == 3 and counted["written"] == 1


@pytest.mark.parametrize("name", ["trace", "trace.1"])
@pytest.mark.parametrize("what", ["a directory", "a link", "a pipe", "a text"])
def test_what_is_no_record_is_neither_moved_nor_replaced(
    tmp_path: Path, name: str, what: str
) -> None:
    there = tmp_path / name
    if what == "a directory":
        there.mkdir()
    elif what == "a link":
        there.symlink_to("/nowhere")
    elif what == "a pipe":
        os.mkfifo(there)
    else:
        there.write_text("root:x:0:0")
    before = there.lstat()
    with pytest.raises(FileExistsError, match=f"{name} is there and is no record"):
        Made(tmp_path / "trace")
    assert there.lstat() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_daemon_records_what_the_simulator_reads(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    flags = ("--trace-record", str(path))
    with DaemonProcess(arena_size="16MiB", args=flags) as process:
        with Client(process.socket) as client:
            handle = client.register(spec())
            for n in range(30):
                hashes = chain("shared", 2) + chain(n % 5, 4)
                looked = client.lookup(handle, hashes)
                if looked.lease:
                    looked.lease.release()
                prints = [hashlib.blake2b(h, digest_size=16).digest() for h in hashes]
                stored = client.store_chunks(handle, hashes, prints, [bytes(SIZE)] * 6)
                assert set(stored) <= {Outcome.OK, Outcome.EXISTS}
                client.lookup(handle, hashes, lease=False)
        assert process.stop() == 0
        trace = read_trace(path, block_tokens=16)
        assert len(trace.requests) == 30 and trace.unique_blocks == 2 + 5 * 4
        done = kvd_cli("simulate", str(path), "-p", "lru", "-c", "100", "--json")
        assert done.code == 0, done.err
        assert done.json["cells"][0]["block_hit_pct"] == pytest.approx(
            100 * (180 - 22) / 180, abs=0.1
        )


def test_a_record_that_can_not_be_written_is_refused_at_start(tmp_path: Path) -> None:
    flags = ("--trace-record", str(tmp_path / "no" / "such" / "day.jsonl"))
    with DaemonProcess(arena_size="16MiB", args=flags, start=False) as process:
        process.spawn()
        assert process.wait() == 2
        assert "trace.record" in process.log and process.log.count("\n") == 1
