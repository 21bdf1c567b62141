"""Who works in a pool, and what is said of those that hang."""

from __future__ import annotations

import threading

import pytest

from kvd.tiers.crew import Crew, Worker
from kvd.tiers.meter import Meter


def test_workers_that_hang_at_once_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def serve(worker: Worker) -> None:
        over.wait(30)

    crew = Crew("s3", serve, Meter(), workers=8, spares=8, stuck_ns=10)
    crew.hire()
    for hang, now in (((0, 5), 5), ((5, 5), 100), ((5, 5), 101), ((5, 8), 101), ((8, 8), 200)):
        for worker in crew.workers[slice(*hang)]:
            crew.begin(worker, [], now - 1)
        crew.hire_spares(now)
    over.set()
    for worker in crew.workers:
        worker.thread.join(10)
    assert caplog.messages == [
        "tier s3: 5 workers hang; spare ones are put beside: 5",
        "tier s3: 8 workers hang; spare ones are put beside: 3",
    ]
    assert len(crew.workers) == 16
