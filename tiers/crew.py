"""The crew of a pool: who works, on what, and who hangs.

The law of this module: as many workers as were asked for serve, and one more beside each that the
medium holds, up to a number; a spare goes when nobody hangs any more. A worker hangs a second after
the deadline of its task, or when it has had it for too long. What runs is counted from the moment
in which a worker has a task until that has ended.

Pre of all methods: the lock is held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvd.tiers.base import NEVER, Job
from kvd.tiers.healing import Heal
from kvd.tiers.meter import Meter
from kvd.tiers.waiting import BEHIND, Line, line_of

__all__ = ["Crew", "Task", "Worker"]

log = logging.getLogger(__name__)

SECOND = 1_000_000_000

Task = list[Job] | Heal  # jobs of one kind that run in one call


class Worker:
    __slots__ = ("behind", "deadline", "jobs", "loads", "since", "task", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.task: Task | None = None
        self.jobs: list[Job] = []  # of the task
        self.behind = 0  # of them, behind loads
        self.loads = 0  # of them, loads
        self.since = 0
        self.deadline = NEVER


class Crew:
    """`serve`: what a worker does, in its own thread, until it goes. `stuck_ns`: a task without a
    deadline that takes longer is held by the medium."""

    def __init__(
        self,
        name: str,
        serve: Callable[[Worker], None],
        meter: Meter,
        *,
        workers: int,
        spares: int,
        stuck_ns: int,
    ) -> None:
        self._name = name
        self._serve = serve
        self._meter = meter
        self._usual = workers
        self._spares = spares
        self._stuck_ns = stuck_ns
        self._number = 0
        self.workers: list[Worker] = []
        self.running = 0  # jobs
        self.behind = 0  # of them, those that run although they are behind loads
        self.loading = 0  # of them, loads

    @property
    def free(self) -> bool:
        """Whether somebody is there who has no task."""
        return any(worker.task is None for worker in self.workers)

    # -- who is there ---------------------------------------------------------------------------

    def hire(self) -> None:
        """All that are usual."""
        for _ in range(self._usual):
            self._hire()

    def hire_spares(self, now: int) -> None:
        """As many as hang."""
        stuck = self.stuck(now)
        lacking = self._usual + min(stuck, self._spares) - len(self.workers)
        if lacking > 0:
            log.warning(
                "tier %s: %d workers hang; spare ones are put beside: %d",
                self._name,
                stuck,
                lacking,
            )
        for _ in range(lacking):
            self._meter.count("stuck_workers")
            self._hire()

    def _hire(self) -> None:
        self._number += 1
        thread = threading.Thread(name=f"kvd-tier-{self._name}-{self._number}", daemon=True)
        worker = Worker(thread)
        thread.run = lambda: self._serve(worker)  # type: ignore[method-assign]
        self.workers.append(worker)
        thread.start()

    def dismiss(self, worker: Worker, now: int) -> bool:
        """Whether it is a spare that is not needed any more; then it is none of these."""
        if len(self.workers) <= self._usual or self.stuck(now):
            return False
        self.workers.remove(worker)
        return True

    def stuck(self, now: int) -> int:
        """Workers that the medium holds beyond their deadline."""
        return sum(
            worker.task is not None
            and now > min(worker.deadline + SECOND, worker.since + self._stuck_ns)
            for worker in self.workers
        )

    # -- what they do ---------------------------------------------------------------------------

    def begin(self, worker: Worker, task: Task, now: int) -> None:
        worker.jobs = jobs = [] if isinstance(task, Heal) else task
        worker.behind = sum(line_of(job) in BEHIND for job in jobs)
        worker.loads = sum(line_of(job) is Line.LOAD for job in jobs)
        worker.since = now
        worker.deadline = min((job.deadline for job in jobs), default=NEVER)
        worker.task = task
        self.running += len(jobs)
        self.behind += worker.behind
        self.loading += worker.loads

    def end(self, worker: Worker) -> None:
        """The task has ended; the worker has it until it asks for the next one."""
        self.running -= len(worker.jobs)
        self.behind -= worker.behind
        self.loading -= worker.loads
