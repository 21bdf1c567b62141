"""The demo's part that needs no model: servers of its own, and memory emptied above each tier."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from servers import Redis, Seaweed

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client
from kvd.tools.demo import app
from kvd.tools.demo.daemon import Daemon, DaemonFailed
from kvd.tools.demo.services import BUCKET, services

SIZE = 64 * 1024
SPEC = KVSpec(
    "demo", "", "w", "test", "bf16", "", "raw", 16, 1, 1, 1, (), (),
    (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),),
)  # fmt: skip
KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(4)]


def test_each_tier_answers_after_everything_above_it_was_emptied(
    seaweed: Seaweed, redis_server: Redis
) -> None:
    tiers = ("nvme", "redis", "s3")
    data = [np.full(SIZE, n, np.uint8) for n in range(4)]
    said: list[str] = []
    with services(tiers, said.append, {"PATH": "/usr/bin:/bin"}) as environ:
        folders = [path for path in Path("/tmp").glob("kvd-demo-*") if path.is_dir()]
        assert len(said) == 2 and environ["KVD_S3_BUCKET"] == BUCKET
        with Daemon("16MiB", tiers, environ) as daemon:
            daemon.start()
            with Client(daemon.socket) as client:
                handle = client.register(SPEC)
                client.store_chunks(handle, KEYS, None, data)
                daemon.write_down()
                for tier in tiers:
                    assert daemon.leave_only(tier) == 4
                    assert daemon.bytes_read(tier) == 0
                    got: dict[int, bytes] = {}
                    outcomes = client.load_chunks(
                        handle, KEYS, lambda n, view, got=got: got.update({n: bytes(view)})
                    )
                    assert outcomes == [Outcome.OK] * 4
                    assert [got[n] for n in range(4)] == [one.tobytes() for one in data]
                    assert daemon.bytes_read(tier) == 4 * SIZE
            with pytest.raises(DaemonFailed, match="no tier tape"):
                daemon.leave_only("tape")
    assert not [path for path in folders if path.exists() and "s3" in path.name]


def test_servers_that_the_caller_names_are_used_as_they_are() -> None:
    said: list[str] = []
    given = {
        "KVD_S3_BUCKET": "mine", "KVD_REDIS_URL": "redis://there", "AWS_PROFILE": "p",
        "KVD_ARENA_SIZE": "1GiB", "PATH": "/bin",
    }  # fmt: skip
    with services(("s3", "redis"), said.append, given) as environ:
        assert environ == {k: v for k, v in given.items() if k != "KVD_ARENA_SIZE"}
    with services((), said.append, given) as environ:
        assert set(environ) == {"AWS_PROFILE", "PATH"}
    assert not said


def test_the_figures_name_each_tier() -> None:
    def answer(ttft_s: float, reused: int) -> app.Answer:
        return app.Answer("Who?", "She.", [1], 2000, reused, ttft_s, ttft_s, {})

    runs = [answer(t, 0 if t == 4.0 else 1984) for t in (4.0, 0.25, 0.2, 0.3, 0.5)]
    told = app.Outcome(runs, runs, ("nvme", "s3")).to_json()
    assert told["ttft_from_s"] == {"dram": 0.25, "nvme": 0.3, "s3": 0.5}
    assert told["reused_from"] == {"dram": 1984, "nvme": 1984, "s3": 1984}
