"""PooledTier: a Tier made of a blocking Backend and a few threads.

The law of this module: each job is completed exactly once, by whoever takes it out of `_live`, and
never while a backend may still touch its buffer. Workers run jobs; one watch thread does what must
happen although all workers hang: it expires what is queued, puts spare workers beside stuck ones,
and sends a probe when an open breaker's pause is over, so that a tier heals without traffic.

Which job is next is decided in tiers/waiting.py, what its bytes are worth in tiers/crossing.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Refused, failed
from kvd.tiers.base import (
    NEVER,
    NOWHERE,
    Answer,
    Completion,
    Completions,
    Delete,
    Job,
    Place,
    Probe,
    ProbeReport,
    Read,
    Reason,
    Recovered,
    State,
    Tier,
    TierStat,
    Usage,
    Write,
)
from kvd.tiers.breaker import BreakerConfig, BreakerState
from kvd.tiers.crossing import Crossing
from kvd.tiers.health import Health
from kvd.tiers.meter import Meter
from kvd.tiers.pieces import Pieces
from kvd.tiers.quiet import Quiet
from kvd.tiers.waiting import BEHIND, Line, Waiting, line_of
from kvd.tiers.waking import Waking

log = logging.getLogger(__name__)

MS = 1_000_000
SECOND = 1_000 * MS


class PoolConfig(NamedTuple):
    """`workers` jobs run at a time; `writers` of them at most are writes, scrubs or prefetches, so
    that a load never waits behind a whole batch of demotions; fewer for `quiet_ns` after a load
    (tiers/quiet.py)."""

    workers: int = 4
    writers: int = 3
    quiet_ns: int = 0
    spares: int = 4  # workers beyond, while others are stuck
    stuck_ns: int = 10 * SECOND  # without a deadline, a job that runs longer is stuck
    probe_ns: int = 10 * SECOND  # a probe's own deadline
    close_ns: int = 5 * SECOND
    verify_source: bool = True
    breaker: BreakerConfig = BreakerConfig()


DEFAULT = PoolConfig()


class _Heal(NamedTuple):
    """The watch's own job: nobody waits for it."""

    write: bool


_Task = list[Job] | _Heal  # jobs of one kind that run in one call

_ROOM = frozenset({Answer.OK, Answer.EXISTS, Answer.NO_SPACE})
_KINDS: dict[type, str] = {Write: "write", Read: "read", Delete: "delete", Probe: "probe"}


class _Worker:
    __slots__ = ("deadline", "since", "task", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.task: _Task | None = None
        self.since = 0
        self.deadline = NEVER


class PooledTier(Tier):
    def __init__(
        self,
        name: str,
        backend: Backend,
        completions: Completions,
        config: PoolConfig = DEFAULT,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.name = name
        self.backend = backend
        self.durable = backend.durable
        self.by_key = backend.by_key
        self._completions = completions
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._waking = Waking(self._lock)
        self._watch = threading.Condition(self._lock)
        self._taken = threading.Condition(self._lock)
        self._giving_way = False  # somebody waits until a worker has taken a job
        self._waiting = Waiting(backend.delete_batch)
        self._heals: deque[_Heal] = deque()
        self._workers: list[_Worker] = []
        self._watcher: threading.Thread | None = None
        self._behind = 0  # jobs that run although they are behind loads
        self._quiet = Quiet(config.quiet_ns, config.writers)
        self._running = 0  # jobs
        self._loading = 0  # of them, loads
        self._pieces = Pieces(
            self._lock, self._quiet.lasts, lambda: bool(self._loading or self._waiting.loads), clock
        )
        backend.give_way = self._pieces.next
        self._stirred = self._unwatched = False  # jobs came since the watch looked; it sleeps on
        self._number = 0
        self._started = self._closed = False
        self._open = False  # the backend is; if not, a heal opens it
        self._health = Health(config.breaker)
        self._report = ProbeReport("?", "not started")
        self.meter = Meter()
        self._crossing = Crossing(name, backend, self.meter, clock, config.verify_source)

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> ProbeReport:
        if self._started:
            raise ConfigError(f"tier {self.name} is started already")
        try:
            self._report = self.backend.open()
            self._open = True
        except Refused as refused:
            self._report = ProbeReport("?", f"not available yet: {refused.detail}")
            self._failed(refused)
            log.warning("tier %s is not available yet: %s", self.name, refused.detail)
        self._started = True
        with self._lock:
            if not self._open:
                self._health.trip(self._clock())
            for _ in range(self._config.workers):
                self._hire()
            self._watcher = threading.Thread(
                target=self._watch_over, name=f"kvd-tier-{self.name}-watch", daemon=True
            )
            self._watcher.start()
        return self._report

    def recover(self) -> Iterator[Recovered]:
        if self._open:
            yield from self.backend.recover()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = self._waiting.drop()
            self._heals.clear()
            self._waking.wake_all()
            self._watch.notify_all()
        for job in left:
            self._complete(job, Answer.OFF, detail=f"tier {self.name} is closed")
        end = time.monotonic_ns() + self._config.close_ns
        threads = [worker.thread for worker in self._workers]
        for thread in [*threads, self._watcher]:
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, (end - time.monotonic_ns()) / SECOND))
        hung = [t.name for t in threads if t.is_alive()]
        if hung:  # its descriptors stay open: closed, their numbers would be given to others
            log.error("tier %s: %d threads hang in the medium, left behind", self.name, len(hung))
        else:
            self.backend.close()

    @property
    def state(self) -> State:
        if not self._started or self._closed:
            return State.OFF
        if self._health.readable and self._health.writable:
            return State.READY
        return State.DEGRADED

    @property
    def readable(self) -> bool:
        return self.state is not State.OFF and self._health.readable

    @property
    def writable(self) -> bool:
        return self.state is not State.OFF and self._health.writable

    # -- jobs -----------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        refused: list[Job] = []
        self.meter.handed_over(len(jobs))
        with self._lock:
            now = self._clock()
            for job in jobs:
                if self._closed or not self._started or not self._may(type(job), now):
                    refused.append(job)
                else:
                    self._waiting.put(job)
            self._wake()
            if self._unwatched:
                self._unwatched = False
                self._watch.notify()
            self._stirred = True
        for job in refused:
            self._complete(job, Answer.OFF, detail=self._why_off(type(job)))

    def give_way(self, within_s: float) -> None:
        """Python's interpreter is one thread's at a time: a worker that was woken would get it when
        the caller waits next, or after milliseconds. It takes the job and keeps the interpreter
        until it is in the medium."""
        with self._lock:
            if self._waiting.loads and any(worker.task is None for worker in self._workers):
                self._giving_way = True
                self._taken.wait(within_s)
                self._giving_way = False

    def set_weight(self, tenant: bytes, weight: float) -> None:
        with self._lock:
            self._waiting.set_weight(tenant, weight)

    def _may(self, kind: type, now: int) -> bool:
        """Whether a job of this kind may be queued: one that would be answered OFF later need not
        wait for that."""
        if kind is Probe:
            return True
        breaker = self._health.of(kind)
        return breaker.state is BreakerState.CLOSED or (self._open and breaker.due(now))

    def _why_off(self, kind: type) -> str:
        if self._closed or not self._started:
            return f"tier {self.name} is off"
        return f"tier {self.name} is degraded: {self.meter.last_error}"

    # -- workers --------------------------------------------------------------------------------

    def _hire(self) -> None:
        """Pre: the lock is held."""
        self._number += 1
        thread = threading.Thread(name=f"kvd-tier-{self.name}-{self._number}", daemon=True)
        worker = _Worker(thread)
        thread.run = lambda: self._serve(worker)  # type: ignore[method-assign]
        self._workers.append(worker)
        thread.start()

    def _serve(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                worker.task = None
                if len(self._workers) > self._config.workers and not self._stuck(self._clock()):
                    self._workers.remove(worker)  # a spare is not needed any more
                    self._wake()
                    return
                task = self._next()
                while task is None:
                    if self._closed:
                        return
                    self._waking.sleep(self._rest_s())
                    task = self._next()
                jobs = [] if isinstance(task, _Heal) else task
                behind = sum(line_of(job) in BEHIND for job in jobs)
                loads = sum(line_of(job) is Line.LOAD for job in jobs)
                self._behind += behind
                self._loading += loads
                self._running += len(jobs)
                worker.since = self._clock()
                worker.deadline = min((job.deadline for job in jobs), default=NEVER)
                worker.task = task
                self.meter.begin(worker.since)
                self._wake()
                if self._giving_way:
                    self._giving_way = False
                    self._taken.notify()
            try:
                if isinstance(task, _Heal):
                    self._heal(task)
                else:
                    self._run(task)
            finally:
                with self._lock:
                    self._behind -= behind
                    self._loading -= loads
                    self._running -= len(jobs)
                    self.meter.end(self._clock())
                    if behind:
                        since = worker.since + self._pieces.take_waited()
                        self._quiet.ended(jobs, since, self._clock())
                    if loads:
                        self._pieces.through()

    def _next(self) -> _Task | None:
        """Pre: the lock is held."""
        if self._heals:
            return self._heals.popleft()
        now = self._clock()
        jobs = self._waiting.take(behind=self._behind < self._quiet.most(now))
        self._quiet.begun(jobs, now)
        return jobs or None

    def _wake(self) -> None:
        """After something was queued or taken: for what else there is. Pre: the lock is held."""
        behind = self._behind < self._quiet.most(self._clock())
        more = bool(self._heals) or self._waiting.ready(behind=behind)
        self._waking.wake(more=more, held=not more and self._rest_s() is not None)

    def _rest_s(self) -> float | None:
        """How long to sleep if nobody wakes who sleeps. Pre: the lock is held."""
        left = self._quiet.left_ns(self._clock()) if self._waiting and not self._behind else None
        return None if left is None else left / SECOND

    def _run(self, jobs: list[Job]) -> None:
        now = self._clock()
        ready = []
        kind = type(jobs[0])
        for job in jobs:
            if job.deadline <= now:
                self._complete(job, Answer.TIMEOUT, detail="its deadline passed in the queue")
            else:
                ready.append(job)
        if not ready:
            return
        if kind is Probe:
            self._probe(ready[0])
            return
        with self._lock:
            allowed = self._open and self._health.of(kind).allow(now)
        if not allowed:
            for job in ready:
                self._complete(job, Answer.OFF, detail=self._why_off(kind))
            return
        try:
            completions = self._crossing.carry_out(ready)
        except Refused as refused:
            completions = [self._refusal(job, refused) for job in ready]
        except Exception as error:
            log.exception("tier %s: a %s went wrong", self.name, _KINDS[kind])
            unexpected = failed(Reason.OTHER, f"{type(error).__name__}: {error}")
            completions = [self._refusal(job, unexpected) for job in ready]
        elapsed = self._clock() - now
        self._judge(kind, completions)
        for done in completions:
            self._finish(self._with_room(done._replace(elapsed_ns=elapsed)))

    def _with_room(self, done: Completion) -> Completion:
        """What is asked after each write is told with it: here a lock may be waited for."""
        if not isinstance(done.job, Write) or done.answer not in _ROOM:
            return done
        length = done.job.header.length
        try:
            done = done._replace(room=self.backend.room(length))
            if done.answer is Answer.NO_SPACE:
                done = done._replace(empty=self.backend.to_empty(length))
        except Exception:  # it is advice; the write is what it is, and the worker lives on
            log.exception("tier %s: how much room there is can't be told", self.name)
        return done

    def _probe(self, job: Job) -> None:
        now = self._clock()
        try:
            if not self._open:
                self._reopen()
            self._report = self.backend.probe(
                min(job.deadline, now + self._config.probe_ns), write=True
            )
        except (Refused, ConfigError) as error:
            refused = _as_refused(error)
            self._failed(refused)
            answer = Answer.TIMEOUT if refused.answer is Answer.TIMEOUT else Answer.FAILED
            self._complete(job, answer, reason=refused.reason, detail=refused.detail)
            return
        with self._lock:
            self._health.reset()
        self._complete(job, Answer.OK, detail=self._report.detail)

    # -- health ---------------------------------------------------------------------------------

    def _judge(self, kind: type, completions: list[Completion]) -> None:
        """Tell the breaker how an attempt ended."""
        with self._lock:
            if not self._health.judge(kind, completions, self._clock()):
                return
            opened = self._waiting.drop(*((Read,) if kind is Read else (Write, Delete)))
            self._watch.notify()
        log.warning("tier %s: %ss pause: %s", self.name, _KINDS[kind], self._detail(completions))
        for job in opened:
            self._complete(job, Answer.OFF, detail=self._why_off(type(job)))

    @staticmethod
    def _detail(completions: list[Completion]) -> str:
        return next((done.detail for done in completions if done.detail), "no detail")

    def _heal(self, heal: _Heal) -> None:
        breaker = self._health.writes if heal.write else self._health.reads
        try:
            if not self._open:
                self._reopen()
            self.backend.probe(self._clock() + self._config.probe_ns, write=heal.write)
        except (Refused, ConfigError) as error:
            self._failed(_as_refused(error))
            with self._lock:
                breaker.failure(self._clock())
                self._watch.notify()  # it may wait for nothing: there is a next time now
            return
        except Exception as error:
            log.exception("tier %s: a probe went wrong", self.name)
            self._failed(failed(Reason.OTHER, f"{type(error).__name__}: {error}"))
            with self._lock:
                breaker.failure(self._clock())
                self._watch.notify()  # it may wait for nothing: there is a next time now
            return
        with self._lock:
            breaker.success()
        log.info("tier %s: %s again", self.name, "writes" if heal.write else "reads")

    def _reopen(self) -> None:
        with self._opening:
            if not self._open:
                self._report = self.backend.open()
                self._open = True

    def _stuck(self, now: int) -> int:
        """Workers that the medium holds beyond their deadline. Pre: the lock is held."""
        return sum(
            worker.task is not None
            and now > min(worker.deadline + SECOND, worker.since + self._config.stuck_ns)
            for worker in self._workers
        )

    def _watch_over(self) -> None:
        while True:
            expired: list[Job] = []
            with self._lock:
                if self._closed:
                    return
                self._unwatched = False
                now = self._clock()
                expired += self._waiting.expire(now)
                stuck = self._stuck(now)
                for _ in range(
                    self._config.workers + min(stuck, self._config.spares) - len(self._workers)
                ):
                    log.warning(
                        "tier %s: %d workers hang; a spare one is put beside", self.name, stuck
                    )
                    self.meter.count("stuck_workers")
                    self._hire()
                for breaker, write in ((self._health.reads, False), (self._health.writes, True)):
                    if breaker.due(now) and breaker.allow(now):
                        self._heals.append(_Heal(write))
                        self._wake()
                if not expired:
                    self._watch.wait(self._pause(now))
            for job in expired:
                self._complete(job, Answer.TIMEOUT, detail="its deadline passed in the queue")

    def _pause(self, now: int) -> float | None:
        """Seconds until there is something to watch; None: until told. While the watch looks again
        anyway, who submits need not wake it. Pre: the lock is held."""
        if self._running or self._waiting or self._stirred:
            self._stirred = False
            return 0.05
        self._unwatched = True
        due = self._health.next()
        return None if due is None else max(0.01, (due - now) / SECOND)

    # -- completions ----------------------------------------------------------------------------

    def _refusal(self, job: Job, refused: Refused) -> Completion:
        if refused.answer is Answer.CORRUPT:
            self.meter.count("quarantined")
        return Completion(job, refused.answer, reason=refused.reason, detail=refused.detail)

    def _complete(
        self, job: Job, answer: Answer, *, reason: Reason = Reason.NONE, detail: str = ""
    ) -> None:
        self._finish(Completion(job, answer, reason=reason, detail=detail))

    def _finish(self, done: Completion) -> None:
        self.meter.done(_KINDS[type(done.job)], done)
        self._completions.put(done)

    def _failed(self, refused: Refused) -> None:
        self.meter.error(refused.reason, refused.detail)

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return self.backend.cost(length)

    def room(self, length: int) -> int:
        return self.backend.room(length)

    def to_empty(self, length: int) -> tuple[Place, ...]:
        return self.backend.to_empty(length)

    def usage(self) -> Usage:
        return self.backend.usage()

    def stat(self) -> TierStat:
        meter, report = self.meter, self._report
        with self._lock:
            overdue = self._stuck(self._clock())
        return TierStat(
            name=self.name,
            state=self.state,
            engine=self.backend.engine if self._open else "?",
            usage=self.usage(),
            pending=meter.pending,
            overdue=overdue,
            last_error=meter.last_error,
            last_error_unix_ns=meter.last_error_unix_ns,
            write_gbps=meter.gbps("write") or report.write_gbps,
            read_gbps=meter.gbps("read") or report.read_gbps,
            answers=meter.answers(),
            reasons=meter.reasons(),
            bytes_written=meter.nbytes["write"],
            bytes_read=meter.nbytes["read"],
            notes={**self.backend.notes(), **meter.notes()},
        )


def _as_refused(error: Refused | ConfigError) -> Refused:
    return error if isinstance(error, Refused) else failed(Reason.OTHER, str(error))


__all__ = ["NOWHERE", "PoolConfig", "PooledTier"]
