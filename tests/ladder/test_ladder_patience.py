"""A tier that keeps everybody waiting: who waits for it, who does not, and until when."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from fake_s3 import FakeS3, Request
from remote_kit import (
    MISS,
    OK,
    SIZE,
    chain,
    counters,
    daemon,
    drain,
    empty,
    flags,
    load,
    on_fake,
    payload,
    spec,
    store,
    tier,
    until,
)

from kvd.chunk import Outcome
from kvd.client import Client

SENTINEL = 0x5A

SLOW = {"s3_write": "through", "s3_read_s": 60}


class Gate:
    """Reads of these chunks from S3 stop here until `fake.stalled` is set."""

    def __init__(self, fake: FakeS3, hashes: Sequence[bytes]) -> None:
        self.waiting = 0
        self._fake = fake
        self._hashes = hashes
        fake.hook = self._stop

    def _stop(self, request: Request) -> None:
        if request.method != "GET":
            return
        record = self._fake.objects.get(request.key, b"")
        if any(hash_ in record for hash_ in self._hashes):
            self.waiting += 1
            self._fake.stalled.wait(60)


def test_neither_health_nor_lookups_wait_behind_those_who_wait_for_a_slow_tier(
    fake: FakeS3,
) -> None:
    """K154: 64 clients have asked for chunks from an S3 that does not answer, and some of them
    load from disk; pings, lookups and loads from DRAM are all answered before S3 says a word, and
    no session is taken for dead."""
    disk = tempfile.mkdtemp(prefix="kvd-nvme-", dir="/tmp")
    limits = flags(nvme_path=f"{disk}/tier", nvme_limit="64MiB", nvme_reserve=0)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, disk)
        process = stack.enter_context(daemon(*on_fake(fake, **SLOW), *limits))
        client = stack.enter_context(Client(process.socket, timeout_s=20))
        handle = client.register(spec())
        store(client, handle, chain("remote", 16))
        until(lambda: tier(client, "s3")["chunks"] == 16)
        empty(client, "dram", "nvme")
        store(client, handle, chain("disk", 8))
        drain(client, "nvme")
        empty(client, "dram")
        store(client, handle, chain("memory", 8))
        until(lambda: not counters(client)["moving"])
        gate = Gate(fake, chain("remote", 16))
        others = [stack.enter_context(Client(process.socket, timeout_s=60)) for _ in range(64)]
        for n, other in enumerate(others):
            again = other.register(spec())
            other.prefetch(again, chain("remote", 16)[n % 16 :], within_s=60)
        pool = stack.enter_context(ThreadPoolExecutor(16))
        stack.callback(fake.stalled.set)  # before the pool is waited for
        slow = [
            pool.submit(load, other, other.register(spec()), chain("remote", 16)[n:], timeout_s=60)
            for n, other in enumerate(others[:8])
        ]
        until(lambda: gate.waiting > 0)
        near = [
            pool.submit(load, other, other.register(spec()), chain("disk", 8))
            for other in others[8:16]
        ]
        for _ in range(100):
            client.ping()
            assert client.lookup(handle, chain("memory", 8), lease=False).leading == 8
            assert load(client, handle, chain("memory", 8)) == [OK] * 8
        for loaded in near:
            assert loaded.result(60) == [OK] * 8
        assert not any(one.done() for one in slow)  # S3 has not said a word
        assert client.stat()["sessions"] == 65
        fake.stalled.set()
        for n, one in enumerate(slow):
            assert one.result(60) == [OK] * (16 - n)
        for other in others:
            other.ping()


def test_a_load_ends_at_its_deadline_with_what_came_and_what_comes_later_harms_nobody(
    fake: FakeS3,
) -> None:
    """K156: of 16 chunks five come in time. The rest are no hits; nothing is written into the
    caller's buffers afterwards; what comes late is a hit of the next load."""
    with daemon(*on_fake(fake, **SLOW)) as process, Client(process.socket) as client:
        handle = client.register(spec())
        hashes = chain("slow", 16)
        store(client, handle, hashes)
        until(lambda: tier(client, "s3")["chunks"] == 16)
        empty(client, "dram")
        Gate(fake, hashes[5:])
        buffers = [np.full(SIZE, SENTINEL, np.uint8) for _ in hashes]
        outcomes = client.load_chunks(handle, hashes, buffers, batch=16, timeout_s=2)
        assert not fake.stalled.is_set()  # it waited for no more
        came = [n for n, outcome in enumerate(outcomes) if outcome is OK]
        assert came == list(range(5))
        assert not {OK, MISS} & set(outcomes[5:])
        before = [buffer.tobytes() for buffer in buffers]
        for n in came:
            assert before[n] == payload(hashes[n]).tobytes()
        fake.stalled.set()
        until(lambda: not counters(client)["active_leases"])
        found: list[Outcome] = []

        def whole() -> bool:
            found[:] = load(client, handle, hashes)
            return found == [OK] * 16

        until(whole)
        time.sleep(0.1)
        assert [buffer.tobytes() for buffer in buffers] == before
