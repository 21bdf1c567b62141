"""The worker threads: a stuck one is reported and replaced, and nothing waits for it."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvd.server.transfers import Job, Transfers


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    pool = Transfers(2, stuck_s=0.2)
    yield pool
    assert pool.close(5)


def finish(pool: Transfers, count: int, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while count > 0:
        assert time.monotonic() < end
        select.select([pool.wakeup], [], [], 0.1)
        count -= pool.drain()


def test_a_job_runs_in_a_worker_and_is_done_in_the_loop(transfers: Transfers) -> None:
    ran: list[str] = []
    done: list[tuple[str, object]] = []
    job = Job(
        "one",
        lambda: ran.append(threading.current_thread().name) or 7,
        lambda result: done.append((threading.current_thread().name, result)),
    )
    transfers.submit(job)
    finish(transfers, 1)
    assert done == [("MainThread", 7)]
    assert ran[0].startswith("kvd-transfer-")
    assert transfers.pending == 0


def test_a_job_that_raises_is_failed_and_its_worker_goes_on(
    transfers: Transfers, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[object] = []

    def fail() -> None:
        raise OSError("no bytes")

    with caplog.at_level(logging.CRITICAL):
        for _ in range(4):
            transfers.submit(Job("fails", fail, done.append))
        transfers.submit(Job("works", lambda: 1, done.append))
        finish(transfers, 5)
    assert sorted(map(str, done)) == ["1", "None", "None", "None", "None"]
    assert transfers.counters.failed == 4


@pytest.mark.parametrize("background", [True, False])
def test_background_jobs_and_others_do_not_wait_for_each_other(background: bool) -> None:
    pool = Transfers(1, stuck_s=60)
    order: list[str] = []
    gate = threading.Event()
    pool.submit(Job("gate", gate.wait, lambda r: None, background=background))
    pool.submit(
        Job("works", lambda: order.append("works"), lambda r: None, background=not background)
    )
    finish(pool, 1)
    assert order == ["works"]
    gate.set()
    finish(pool, 1)
    assert pool.close(5)


def test_background_jobs_wait_for_a_pause_between_stores_and_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.server.transfers.PAUSE_S", 0.2)
    pool = Transfers(2, stuck_s=60)
    sealed: list[float] = []
    pool.hush()
    begun = time.monotonic()
    for _ in range(3):
        pool.submit(
            Job("seal", lambda: sealed.append(time.monotonic()), lambda r: None, background=True)
        )
    order: list[str] = []
    pool.submit(Job("verify", lambda: order.append("verify"), lambda r: None))
    finish(pool, 4)
    assert order == ["verify"]
    assert len(sealed) == 3 and sealed[0] - begun >= 0.15
    assert pool.pending == 0
    assert pool.close(5)


def sealed_after(pool: Transfers, *, gathers: bool = False) -> float:
    """Seconds until a background job that is submitted now has begun."""
    begun = time.monotonic()
    at: list[float] = []
    pool.submit(
        Job("seal", lambda: at.append(time.monotonic()), lambda r: None, True, gathers=gathers)
    )
    finish(pool, 1)
    return at[0] - begun


@pytest.mark.parametrize(
    "writing, least, most",
    [(0, 0.0, 0.15), (100_000_000, 0.2, 0.35), (1 << 40, 0.4, 10.0)],
    ids=["nothing", "some", "more than a pause is long"],
)
def test_a_pause_between_stores_begins_when_a_copy_of_what_is_being_written_has_had_its_time(
    monkeypatch: pytest.MonkeyPatch, writing: int, least: float, most: float
) -> None:
    monkeypatch.setattr("kvd.server.transfers.PAUSE_S", 0.4)
    monkeypatch.setattr("kvd.server.transfers.COPY_RATE", 500e6)
    pool = Transfers(1, stuck_s=60)
    pool.hush_stores(writing)
    assert least <= sealed_after(pool) < most
    assert pool.close(5)


def test_a_store_does_not_shorten_the_pause_that_a_load_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.server.transfers.PAUSE_S", 0.2)
    pool = Transfers(1, stuck_s=60)
    pool.hush()
    pool.hush_stores(0)
    assert sealed_after(pool) >= 0.15
    assert pool.close(5)


def test_jobs_that_gather_wait_for_others_and_then_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.server.transfers.GATHER_S", 0.2)
    pool = Transfers(1, stuck_s=60)
    ran: list[tuple[int, float]] = []

    def seal(number: int) -> Job:
        return Job(
            f"seal {number}",
            lambda: ran.append((number, time.monotonic())),
            lambda r: None,
            background=True,
            gathers=True,
        )

    begun = time.monotonic()
    pool.submit(seal(0))
    time.sleep(0.1)
    pool.submit(seal(1))
    finish(pool, 2)
    assert [number for number, _ in ran] == [0, 1]
    first, second = (at - begun for _, at in ran)
    assert first >= 0.19 and second - first < 0.09, "the second one did not wait once more"
    assert sealed_after(pool) < 0.15, "what does not gather does not wait"
    assert pool.close(5)


def test_pauses_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.server.transfers.PAUSE_S", 3600.0)
    monkeypatch.setattr("kvd.server.transfers.HOLD_S", 0.1)
    pool = Transfers(2, stuck_s=60)
    running, most = [0], [0]

    def seal() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.005)
        running[0] -= 1

    pool.hush()
    for _ in range(40):
        pool.submit(Job("seal", seal, lambda r: None, background=True))
    finish(pool, 40)
    assert most == [1], "background jobs run one at a time"
    assert pool.close(5)


def test_a_stuck_background_job_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """K99"""
    pool = Transfers(1, stuck_s=0.05)
    gate = threading.Event()
    pool.submit(Job("seal 1", gate.wait, lambda r: None, background=True))
    pool.submit(Job("seal 2", lambda: 2, lambda r: None, background=True))
    with caplog.at_level(logging.ERROR):
        end = time.monotonic() + 10
        while not pool.watch(time.monotonic()):
            assert time.monotonic() < end
            time.sleep(0.02)
    finish(pool, 1)
    gate.set()
    finish(pool, 1)
    assert pool.close(5)


def test_stuck_workers_are_reported_once_and_others_do_their_work(
    transfers: Transfers, caplog: pytest.LogCaptureFixture
) -> None:
    """K99"""
    gate = threading.Event()
    for number in range(2):
        transfers.submit(Job(f"stuck {number}", gate.wait, lambda r: None))
    with caplog.at_level(logging.ERROR):
        end = time.monotonic() + 10
        found: list[str] = []
        while len(found) < 2:
            assert time.monotonic() < end
            found += transfers.watch(time.monotonic())
            time.sleep(0.02)
    assert transfers.stuck == 2
    assert transfers.watch(time.monotonic() + 100) == []
    assert "stuck 0" in caplog.text and "stuck 1" in caplog.text
    done: list[object] = []
    transfers.submit(Job("next", lambda: "served", done.append))
    finish(transfers, 1)
    assert done == ["served"]
    gate.set()
    finish(transfers, 2)
    assert transfers.stuck == 0
    names = [t.name for t in threading.enumerate() if t.name.startswith("kvd-transfer-")]
    assert len(names) <= 4


def test_close_gives_up_on_a_worker_that_does_not_end() -> None:
    pool = Transfers(1, stuck_s=60)
    gate = threading.Event()
    pool.submit(Job("stuck", gate.wait, lambda r: None))
    begun = time.monotonic()
    while pool.pending and not any(w.job for w in pool._workers):
        time.sleep(0.005)
    assert not pool.close(0.1)
    assert time.monotonic() - begun < 5
    gate.set()
    assert pool.close(5)


def test_completions_are_handed_out_in_shares_and_none_is_forgotten(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.server.transfers.SHARE_NS", -1)
    done: list[object] = []
    for number in range(8):
        transfers.submit(Job("one", lambda number=number: number, done.append))  # type: ignore[misc]
    end = time.monotonic() + 10
    while transfers.pending > len(transfers._finished):
        assert time.monotonic() < end
        time.sleep(0.01)
    for taken in range(1, 9):
        assert select.select([transfers.wakeup], [], [], 5)[0]
        assert transfers.drain() == 1
        assert len(done) == taken
    assert sorted(map(str, done)) == [str(number) for number in range(8)]
    assert not select.select([transfers.wakeup], [], [], 0)[0]
