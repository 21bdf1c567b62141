"""Limits are the daemon's: whatever the number of clients, ranks and models."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DaemonProcess
from diskuse import on_disk

from kvd.chunk import KVSpec, Outcome, ShardSpec
from kvd.client import Client, Selector, SpecHandle

MIB = 1 << 20
RANKS, MODELS = 8, 3
SIZE = 128 * 1024  # of a shard: a chunk is a MiB
CHUNKS = 40  # of each model: together, 120 MiB
DRAM, DISK = 32 * MIB, 48 * MIB


@pytest.fixture
def disk() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-nvme-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def spec(model: int) -> KVSpec:
    shards = tuple(ShardSpec(0, rank, 0, 0, 0, 1, rank, rank + 1, SIZE) for rank in range(RANKS))
    return KVSpec(
        f"model-{model}", "", "w", "test", "bf16", "", "raw", 16, 1, RANKS, 1, (), (), shards
    )


def keys(model: int) -> list[bytes]:
    return [hashlib.sha256(f"{model}/{n}".encode()).digest() for n in range(CHUNKS)]


def at_rest(
    client: Client, handles: list[SpecHandle]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of the specs, and how many chunks are listed of each. The daemon goes on after the last
    store: what is on its way down makes room there, and a chunk that was shown is not listed a
    moment later. So both hold only if the rows are the same before and after."""
    for _ in range(200):
        before = list(client.rows("specs"))
        listed = {
            handle.digest.hex(): len(list(client.rows("chunks", Selector(spec=handle.digest))))
            for handle in handles
        }
        if list(client.rows("specs")) == before:
            return before, listed
    raise AssertionError("the daemon never came to rest")


def test_eight_ranks_of_three_models_stay_within_one_limit_a_tier(disk: Path) -> None:
    """K120: each rank is a client of its own; the sums stay under the daemon's limits at any time,
    which are shown once a tier, with each model's part."""
    tier = disk / "tier"
    flags = ["--nvme-path", str(tier), "--nvme-limit", f"{DISK}", "--nvme-reserve", "0",
             "--nvme-slab-size", "8MiB"]  # fmt: skip
    over: list[str] = []
    done = threading.Event()

    def watch(client: Client) -> None:
        while not done.wait(0.02):
            for row in client.stat()["tiers"]:
                if row["used_bytes"] > row["limit_bytes"]:
                    over.append(f"{row['name']}: {row['used_bytes']} of {row['limit_bytes']}")
            if (now := on_disk(tier)) > DISK:
                over.append(f"du: {now} of {DISK}")

    def rank(number: int) -> set[Outcome]:
        seen: set[Outcome] = set()
        data = np.full(SIZE, number, np.uint8)
        with Client(daemon.socket, timeout_s=30) as client:
            handles = [client.register(spec(model)) for model in range(MODELS)]
            for begin in range(0, CHUNKS, 4):
                for model, handle in enumerate(handles):
                    some = keys(model)[begin : begin + 4]
                    seen |= set(
                        client.store_chunks(
                            handle, some, None, [data] * 4, shards=(number,),
                            parent=keys(model)[begin - 1] if begin else None, index0=begin,
                        )
                    )  # fmt: skip
        return seen

    with DaemonProcess(arena_size=str(DRAM), args=flags) as daemon:
        with Client(daemon.socket, timeout_s=30) as client:
            handles = [client.register(spec(model)) for model in range(MODELS)]
            watcher = threading.Thread(target=watch, args=(client,))
            watcher.start()
            try:
                with ThreadPoolExecutor(RANKS) as pool:
                    outcomes = set().union(*pool.map(rank, range(RANKS)))
            finally:
                done.set()
                watcher.join()
            assert not over, over[:3]
            assert Outcome.OK in outcomes and Outcome.FAILED not in outcomes
            told: dict[str, Any] = {row["name"]: row for row in client.stat()["tiers"]}
            assert {name: row["limit_bytes"] for name, row in told.items()} == {
                "dram": DRAM, "nvme": DISK,
            }  # fmt: skip
            assert on_disk(tier) <= DISK and told["nvme"]["chunks"] > 0
            size = os.stat(daemon.arena_base).st_size
            assert size == DRAM, "eight ranks share one arena"
            shown, listed = at_rest(client, handles)
            assert sorted(row["model"] for row in shown) == [f"model-{n}" for n in range(MODELS)]
            for row in shown:
                assert row["bytes"] <= DRAM + DISK
                assert row["chunks"] == listed[row["spec"]]
