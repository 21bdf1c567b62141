"""An arena that can't be adopted: it is said at the start and afterwards that it was, and why."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
from daemon import DaemonProcess

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client

SIZE = 4096
KEYS = [hashlib.sha256(b"%d" % n).digest() for n in range(50)]
SPEC = KVSpec(
    *("m", "", "w", "e", "bf16", "", "c", 16, 1, 1, 1, (), ()),
    (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),),
)


def status(daemon: DaemonProcess, *flags: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "kvd.tools.cli", "--socket", daemon.socket, "status", *flags],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def told(daemon: DaemonProcess) -> dict[str, Any]:
    arena: dict[str, Any] = json.loads(status(daemon, "--json"))["arena"]
    return arena


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("size", "had 64 MiB, not 65 MiB"),
        ("table", "had a table that does not hold (superblock magic is b'garbageX'"),
    ],
)
def test_an_arena_that_is_replaced_is_told_with_the_reason(change: str, why: str) -> None:
    with DaemonProcess(arena_size="64MiB", env={"COLUMNS": "200"}) as daemon:
        assert told(daemon) == {"origin": "new", "replaced": ""}
        with Client(daemon.socket) as client:
            done = client.store_chunks(SPEC, KEYS, None, [bytes(SIZE)] * 50)
            assert done == [Outcome.OK] * 50
        daemon.restart(hard=False)
        assert told(daemon) == {"origin": "adopted", "replaced": ""}
        assert "discarded" not in daemon.log
        assert "eviction goes on where it was in: dram" in daemon.log

        assert daemon.stop() == 0
        before = len(daemon.log)
        if change == "size":
            daemon.args[daemon.args.index("64MiB")] = "65MiB"
        else:
            with daemon.arena_base.with_name(daemon.arena_base.name + ".table").open("r+b") as file:
                file.write(b"garbageX")
        daemon.start()
        log = daemon.log[before:]
        warnings = [line for line in log.splitlines() if "WARNING" in line]
        assert len(warnings) == 1, log
        assert f"discarded the arena {daemon.arena_base} with all chunks: it {why}" in warnings[0]
        assert "eviction goes on where it was" not in log
        assert "eviction keeps what it learned, and evicted keys" in log
        assert f"new, in place of one that {why}" in daemon.out
        assert told(daemon)["origin"] == "replaced" and told(daemon)["replaced"].startswith(why)
        shown = " ".join(status(daemon).split())
        assert f"restart nothing adopted: the arena that was there {why[:20]}" in shown
        with Client(daemon.socket) as client:
            assert client.lookup(SPEC, KEYS).leading == 0
        assert daemon.stop() == 0
