"""The worker threads: everything that touches the bytes of a payload.

The law of this module: a worker touches payload bytes and nothing else. It gets a job, runs it and
puts the job's completion into one queue that the loop drains; an eventfd wakes the loop. A job
always completes, with a result or as failed: whatever it raises is logged and is its failure.
A worker that is stuck in one job is reported once and a spare one takes its place, so that one
stuck call (a page that can't be read, a driver that hangs) stops neither the loop nor other jobs.

Background jobs (sealing) read whole payloads, and memory bandwidth is what a client's own copy
lives on: they have one thread of their own and run in the pauses between stores and loads. A pause
begins when the copies that may be under way have had their time: a hash beside a copy takes half as
long again as one in a pause. What a few stores bring is gathered, for a thread that is woken thirty
times a second finds nothing in its caches. Pauses that do not come are not waited for longer than
HOLD_S; then what has gathered is done in one go.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd import slices
from kvd.server.loop import SHARE_NS

__all__ = ["Job", "Transfers"]

log = logging.getLogger(__name__)

PAUSE_S = 0.03  # without stores and loads: then background jobs may run
LEAST_PAUSE_S = 0.005  # where nothing is being written: the next batch may be on its way
COPY_RATE = 4e9  # bytes a second: what a client copies faster, as a rule
HOLD_S = 1.0  # how long they are held back at most
GATHER_S = 0.1  # how long jobs that gather wait for more of their kind
TOGETHER = 4  # completions of background jobs that wake the loop once


@dataclass(slots=True, eq=False)
class Job:
    """`run` is called in a worker; `done(result)` in the loop, with None if `run` failed."""

    what: str  # for people: "seal record 17"
    run: Callable[[], Any]
    done: Callable[[Any], None]
    background: bool = False  # waits for a pause
    gathers: bool = False  # nobody needs it soon, and many at a time cost less: waits for others
    result: Any = None
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    thread: threading.Thread
    background: bool = False  # which jobs it does
    job: Job | None = None
    since: float = 0.0
    reported: bool = False
    retire: bool = False


@dataclass(slots=True)
class TransferCounters:
    done: int = 0
    failed: int = 0
    stuck: int = 0  # workers that were reported
    jobs: dict[str, int] = field(default_factory=dict)


class Transfers:
    """A small pool with a queue each way. All methods are for the loop's thread."""

    def __init__(self, workers: int, *, stuck_s: float) -> None:
        self._wanted = workers
        self._stuck_s = stuck_s
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._pause = threading.Condition(self._lock)  # for the thread of background jobs
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._loaded_at = 0.0  # monotonic s: from then on there is a pause between loads
        self._stored_at = 0.0  # the same between stores
        self._held_since = 0.0  # when the first of the background jobs that wait came
        self._forced = False  # they were held back for too long: on, until none waits
        self._unsaid = 0  # completions of background jobs that the loop was not woken for
        self._finished: deque[Job] = deque()  # appended by workers, popped by the loop
        self._workers: list[_Worker] = []
        self._closed = False
        self._number = 0
        self.counters = TransferCounters()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for _ in range(workers):
            self._start()
        self._start(background=True)

    def submit(self, job: Job) -> None:
        with self._lock:
            if job.background:
                if not self._background:
                    self._held_since = time.monotonic()
                    self._pause.notify()
                self._background.append(job)
            else:
                self._urgent.append(job)
                self._ready.notify()

    def hush(self) -> None:
        """A load is under way: a client copies now. Background jobs wait for a pause."""
        self._loaded_at = time.monotonic() + PAUSE_S

    def hush_stores(self, writing: int) -> None:
        """A store goes on: clients may be copying so many bytes now. As `hush`, but no longer than
        such a copy takes."""
        pause = min(PAUSE_S, LEAST_PAUSE_S + writing / COPY_RATE)
        self._stored_at = time.monotonic() + pause

    @property
    def pending(self) -> int:
        """Jobs that are queued or running, background ones too."""
        running = sum(worker.job is not None for worker in self._workers)
        return len(self._urgent) + len(self._background) + running + len(self._finished)

    def drain(self) -> int:
        """Hand finished jobs to their `done`, as many as have their place in a turn of the loop;
        how many. Called when `wakeup` is readable."""
        try:
            os.eventfd_read(self.wakeup)
        except BlockingIOError:
            pass
        count = 0
        end = time.monotonic_ns() + SHARE_NS
        while self._finished:
            if count and time.monotonic_ns() > end:
                os.eventfd_write(self.wakeup, 1)
                break
            job = self._finished.popleft()
            count += 1
            if job.failed:
                self.counters.failed += 1
            else:
                self.counters.done += 1
            try:
                job.done(job.result)
            except Exception:  # one bad completion must not keep back the ones behind it
                log.exception("completion failed: %s", job.what)
                self.counters.failed += 1
        return count

    def watch(self, now_s: float) -> list[str]:
        """Report and replace workers that are stuck; what they do. Call about once a second."""
        found: list[str] = []
        for worker in list(self._workers):
            job, since = worker.job, worker.since
            if job is None or worker.reported or now_s - since < self._stuck_s:
                continue
            worker.reported = True
            self.counters.stuck += 1
            found.append(f"{worker.thread.name} in {job.what} for {now_s - since:.1f} s")
            log.error("worker stuck: %s; a spare one takes its place", found[-1])
            if len(self._workers) < 4 * self._wanted + 2:
                self._start(background=worker.background)
        return found

    @property
    def stuck(self) -> int:
        """Workers that are stuck now."""
        return sum(worker.reported for worker in self._workers)

    def close(self, timeout_s: float) -> bool:
        """Stop: jobs that run may finish within the time, queued ones are dropped. Whether all
        workers ended; those that didn't are daemon threads and end with the process."""
        with self._lock:
            self._closed = True
            self._urgent.clear()
            self._background.clear()
            self._ready.notify_all()
            self._pause.notify_all()
        deadline = time.monotonic() + timeout_s
        for worker in list(self._workers):
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(worker.thread.is_alive() for worker in self._workers)
        if ended:
            os.close(self.wakeup)
            self.wakeup = -1
        return ended

    # -- workers --------------------------------------------------------------------------------

    def _start(self, *, background: bool = False) -> None:
        self._number += 1
        name = f"kvd-{'seal' if background else 'transfer'}-{self._number}"
        worker = _Worker(threading.Thread(name=name, daemon=True), background)
        worker.thread.run = lambda: self._work(worker)  # type: ignore[method-assign]
        self._workers.append(worker)
        worker.thread.start()

    def _next(self, worker: _Worker) -> Job | None:
        with self._lock:
            while not self._closed and not worker.retire:
                now = time.monotonic()
                if not worker.background:
                    if self._urgent:
                        worker.since = now
                        worker.job = self._urgent.popleft()
                        return worker.job
                    self._ready.wait()
                    continue
                wait = self._background_wait(now)
                if wait == 0:
                    worker.since = now
                    worker.job = self._background.popleft()
                    return worker.job
                self._pause.wait(wait)
            return None

    def _background_wait(self, now: float) -> float | None:
        """Seconds until a background job may run: 0 now, None when there is nothing to wait for."""
        if not self._background:
            return None
        forced_at = self._held_since + HOLD_S
        pause_at = max(self._loaded_at, self._stored_at)
        if self._background[0].gathers:
            pause_at = max(pause_at, self._held_since + GATHER_S)
        if self._forced or now >= pause_at or now >= forced_at:
            self._forced = self._forced or now < pause_at
            return 0
        return max(1e-4, min(pause_at, forced_at) - now)

    def _work(self, worker: _Worker) -> None:
        if worker.background:
            slices.set_ns(0)
        while (job := self._next(worker)) is not None:
            try:
                job.result = job.run()
            except Exception:  # the boundary of a job: its failure must not end the worker
                log.exception("transfer failed: %s", job.what)
                job.failed = True
            with self._lock:
                worker.job = None
                self._finished.append(job)
                if worker.reported:  # its spare is there: one of the two is too many
                    worker.reported = False
                    worker.retire = True
                    self._workers.remove(worker)
                said = True
                if job.background:
                    if self._background:
                        self._unsaid += 1
                        said = self._unsaid >= TOGETHER
                    else:
                        self._forced = False
                if said:
                    self._unsaid = 0
                    if self.wakeup >= 0:
                        os.eventfd_write(self.wakeup, 1)
