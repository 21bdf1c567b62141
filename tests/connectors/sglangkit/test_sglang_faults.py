"""The daemon dies, hangs, is full, is another one; engines go on and come back."""

from __future__ import annotations

import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_sglang as fake
from daemon import LOW_LIMITS, DaemonProcess
from sglang_kit import content, fill, hashes

MHA = fake.MHATokenToKVPoolHost
SHORT = {
    "lookup_deadline_s": 0.3,
    "load_deadline_s": 0.3,
    "store_deadline_s": 0.3,
    "start_deadline_s": 0.3,
}


def filled(seed: int = 1, **more: Any) -> Any:
    pool = MHA(**more)
    fill(pool, seed)
    return pool


def test_a_killed_daemon_is_a_miss_and_a_restarted_one_has_kept_the_pages(make, eventually) -> None:
    """K92: misses while it is away, hits soon after it is back, the spec registered again."""
    with DaemonProcess() as daemon:
        pool = filled()
        backend = make(pool, {"socket": daemon.socket, **SHORT})
        keys, at, to = hashes(4), pool.alloc(64), pool.alloc(64)
        assert all(backend.batch_set_v1(keys, at))
        daemon.kill()
        begin = time.monotonic()
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, to) == [False] * 4
        assert backend.batch_set_v1(keys, at) == [False] * 4
        assert backend.batch_get(keys) == [None] * 4
        assert time.monotonic() - begin < 3
        daemon.start()
        eventually(lambda: backend.batch_exists(keys) == 4)
        assert backend.batch_get_v1(keys, to) == [True] * 4
        assert content(pool, to) == content(pool, at)


def test_a_stopped_daemon_costs_one_deadline_and_is_found_again(make, eventually, caplog) -> None:
    """A rank never waits longer than its deadline, and waits for it once."""
    with DaemonProcess() as daemon:
        pool = filled()
        backend = make(pool, {"socket": daemon.socket, **SHORT})
        keys, at = hashes(4), pool.alloc(64)
        assert all(backend.batch_set_v1(keys, at))
        daemon.signal(signal.SIGSTOP)
        with caplog.at_level(logging.WARNING):
            begin = time.monotonic()
            for _ in range(50):
                assert backend.batch_exists(keys) == 0
                assert backend.batch_set_v1(keys, at) == [False] * 4
            assert time.monotonic() - begin < 3
        assert backend.stats["lookup.silent"] + backend.stats["store.silent"] > 90
        assert sum("going on without it" in r.message for r in caplog.records) == 1
        daemon.signal(signal.SIGCONT)
        eventually(lambda: backend.batch_exists(keys) == 4)


def test_an_engine_may_start_before_its_daemon(make, eventually) -> None:
    with DaemonProcess(start=False) as daemon:
        pool = filled()
        begin = time.monotonic()
        backend = make(pool, {"socket": daemon.socket, **SHORT})
        assert time.monotonic() - begin < 3
        assert not backend.refused
        keys, at = hashes(4), pool.alloc(64)
        assert backend.batch_set_v1(keys, at) == [False] * 4
        daemon.start()
        eventually(lambda: all(backend.batch_set_v1(keys, at)))
        assert backend.batch_exists(keys) == 4


def test_a_full_arena_stores_what_fits_and_says_so_page_by_page(make) -> None:
    """K30: each page has its own answer; what is missing can be stored later."""
    with DaemonProcess(arena_size="2MiB") as daemon:
        pool = filled(pages=128, layers=4, heads=8, dim=32)  # 64 KiB a page
        backend = make(pool, {"socket": daemon.socket})
        keys, at = hashes(64), pool.alloc(64 * 16)
        stored = backend.batch_set_v1(keys, at)
        assert 0 < sum(stored)
        there = backend.batch_exists(keys)
        to = pool.alloc(64 * 16)
        got = backend.batch_get_v1(keys, to)
        assert got == [True] * there + [False] * (64 - there)
        assert content(pool, to)[:there] == content(pool, at)[:there]


def test_pages_that_do_not_fit_at_all_are_refused_and_the_next_model_works(make) -> None:
    """K43: too large is an answer, not an error."""
    with DaemonProcess(arena_size="2MiB") as daemon:
        pool = filled(pages=2, layers=8, heads=8, dim=256)
        backend = make(pool, {"socket": daemon.socket})
        assert backend.batch_set_v1(hashes(1), pool.alloc(16)) == [False]
        assert backend.stats["store.too_large"] == 1
        small = filled()
        assert all(make(small, {"socket": daemon.socket}).batch_set_v1(hashes(1), small.alloc(16)))


def test_a_daemon_with_low_limits_is_used_all_the_same(make) -> None:
    with DaemonProcess(args=LOW_LIMITS) as low:
        pool = filled()
        backend = make(pool, {"socket": low.socket})
        keys, at, to = hashes(8), pool.alloc(128), pool.alloc(128)
        assert all(backend.batch_set_v1(keys, at))
        assert backend.batch_exists(keys) == 8
        assert backend.batch_get_v1(keys, to) == [True] * 8
        assert content(pool, to) == content(pool, at)


def test_the_wrong_daemon_or_namespace_is_not_used(make, model: str) -> None:
    """K98: an engine can tell which daemon it reached, and in which namespace."""
    keys = hashes(2)
    for wrong in ({"instance": "other"}, {"namespace": "tenant-a"}):
        pool = filled()
        backend = make(pool, {**SHORT, **wrong}, model=model)
        assert backend.batch_set_v1(keys, pool.alloc(32)) == [False] * 2
        assert backend.batch_exists(keys) == 0
    pool = filled()
    assert all(make(pool, {"namespace": "default"}, model=model).batch_set_v1(keys, pool.alloc(32)))


def test_threads_share_a_backend(make, model: str) -> None:
    """K104: SGLang's prefetch, input/output and backup threads use one backend at once."""
    pool = filled(pages=512)
    backend = make(pool, model=model)
    jobs = [(hashes(8, str(n)), pool.alloc(128), pool.alloc(128)) for n in range(24)]

    def job(work: Any) -> bool:
        keys, at, to = work
        good = all(backend.batch_set_v1(keys, at)) and backend.batch_exists(keys) == 8
        return good and all(backend.batch_get_v1(keys, to))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(job, jobs))
    for _, at, to in jobs:
        assert content(pool, to) == content(pool, at)


def test_close_in_the_middle_of_work_ends_it(make, model: str) -> None:
    pool = filled(pages=512)
    backend = make(pool, model=model)
    keys, at = hashes(64), pool.alloc(1024)

    def work(_: int) -> None:
        for _ in range(50):
            backend.batch_set_v1(keys, at)
            backend.batch_get_v1(keys, at)

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(work, n) for n in range(3)]
        time.sleep(0.05)
        backend.close()
        for future in running:
            future.result(20)
    assert backend.batch_exists(keys) == 0
