"""PooledTier: a Tier made of a blocking Backend and a few threads.

The law of this module: each job is completed exactly once, by whoever takes it out of what waits,
and never while a backend may still touch its buffer. One lock guards what waits, who works and how
the medium fares; it is not held while the medium is asked for something.

Which job is next is decided in tiers/waiting.py, who works on it in tiers/crew.py, what its bytes
are worth in tiers/crossing.py. What must happen although all workers hang is done by the watch
(tiers/watch.py); how a medium that failed is tried again says tiers/healing.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvd.errors import ConfigError
from kvd.native import mypyc_attr
from kvd.tiers.backend import Backend, Refused, failed
from kvd.tiers.base import (
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
from kvd.tiers.breaker import BreakerState
from kvd.tiers.crew import Crew, Task, Worker
from kvd.tiers.crossing import Crossing
from kvd.tiers.healing import Heal, Healing
from kvd.tiers.health import Health
from kvd.tiers.meter import Meter
from kvd.tiers.pieces import Pieces
from kvd.tiers.poolconfig import DEFAULT, PoolConfig
from kvd.tiers.quiet import Quiet
from kvd.tiers.seats import Seats
from kvd.tiers.waiting import Waiting
from kvd.tiers.waking import Waking
from kvd.tiers.watch import Watch

log = logging.getLogger(__name__)

SECOND = 1_000_000_000


_ROOM = frozenset({Answer.OK, Answer.EXISTS, Answer.NO_SPACE})
# How a job may end, by its kind (tiers/base.py): whoever handed it over can deal with nothing else.
_MAY_END: dict[type, frozenset[Answer]] = {
    Write: frozenset(Answer) - {Answer.MISS},
    Read: frozenset(Answer) - {Answer.EXISTS, Answer.NO_SPACE, Answer.TOO_LARGE},
    Delete: frozenset({Answer.OK, Answer.TIMEOUT, Answer.FAILED, Answer.OFF}),
}
_KINDS: dict[type, str] = {Write: "write", Read: "read", Delete: "delete", Probe: "probe"}


@mypyc_attr(allow_interpreted_subclasses=True)
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
        self._lock = lock = threading.Lock()
        self._waking = Waking(lock)
        self._taken = threading.Condition(lock)
        self._giving_way = False  # somebody waits until a worker has taken a job
        self._started = self._closed = False
        self.meter = Meter()
        self._waiting = Waiting(backend.delete_batch)
        self._crew = Crew(
            name,
            self._serve,
            self.meter,
            workers=config.workers,
            spares=config.spares,
            stuck_ns=config.stuck_ns,
        )
        self._quiet = Quiet(config.quiet_ns, config.writers)
        self._pieces = Pieces(
            lock, self._quiet.lasts, lambda: bool(self._crew.loading or self._waiting.loads), clock
        )
        backend.give_way = self._pieces.next
        self._health = Health(config.breaker)
        self._healing = Healing(
            name,
            backend,
            self._health,
            self.meter,
            lock,
            clock,
            again=lambda: self._watch.tell(),
            probe_ns=config.probe_ns,
        )
        self._watch = Watch(
            name,
            lock,
            clock,
            self._waiting,
            self._crew,
            self._healing,
            wake=self._wake,
            late=self._late,
        )
        self._crossing = Crossing(
            name, backend, self.meter, clock, config.verify_source, Seats(config.depth)
        )

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> ProbeReport:
        if self._started:
            raise ConfigError(f"tier {self.name} is started already")
        self._healing.start()
        self._started = True
        with self._lock:
            if not self._healing.open:
                self._health.trip(self._clock())
            self._crew.hire()
            self._watch.start()
        return self._healing.report

    def recover(self) -> Iterator[Recovered]:
        if self._healing.open:
            yield from self.backend.recover()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = self._waiting.drop()
            self._healing.drop()
            self._waking.wake_all()
            self._watch.stop()
        for job in left:
            self._complete(job, Answer.OFF, detail=f"tier {self.name} is closed")
        end = time.monotonic_ns() + self._config.close_ns
        threads = [worker.thread for worker in self._crew.workers]
        for thread in [*threads, self._watch.thread]:
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
            self._watch.stir()
        for job in refused:
            self._complete(job, Answer.OFF, detail=self._why_off(type(job)))

    def give_way(self, within_s: float) -> None:
        """Python's interpreter is one thread's at a time: a worker that was woken would get it when
        the caller waits next, or after milliseconds. It takes the job and keeps the interpreter
        until it is in the medium."""
        with self._lock:
            if self._waiting.loads and self._crew.free:
                self._giving_way = True
                self._taken.wait(within_s)
                self._giving_way = False

    def asked(self) -> None:
        self._quiet.asked(self._clock())

    def set_weight(self, tenant: bytes, weight: float) -> None:
        with self._lock:
            self._waiting.set_weight(tenant, weight)

    def _may(self, kind: type, now: int) -> bool:
        """Whether a job of this kind may be queued: one that would be answered OFF later need not
        wait for that."""
        if kind is Probe:
            return True
        breaker = self._health.of(kind)
        return breaker.state is BreakerState.CLOSED or (self._healing.open and breaker.due(now))

    def _why_off(self, kind: type) -> str:
        if self._closed or not self._started:
            return f"tier {self.name} is off"
        return f"tier {self.name} is degraded: {self.meter.last_error}"

    # -- workers --------------------------------------------------------------------------------

    def _serve(self, worker: Worker) -> None:
        while True:
            with self._lock:
                worker.task = None
                if self._crew.dismiss(worker, self._clock()):
                    self._wake()
                    return
                task = self._next()
                while task is None:
                    if self._closed:
                        return
                    self._waking.sleep(self._rest_s())
                    task = self._next()
                self._crew.begin(worker, task, self._clock())
                self.meter.begin(worker.since)
                self._wake()
                if self._giving_way:
                    self._giving_way = False
                    self._taken.notify()
            try:
                if isinstance(task, Heal):
                    self._healing.carry_out(task)
                else:
                    self._run(task)
            finally:
                with self._lock:
                    self._crew.end(worker)
                    self.meter.end(self._clock())
                    if worker.behind:
                        since = worker.since + self._pieces.take_waited()
                        self._quiet.ended(worker.jobs, since, self._clock())
                    if worker.loads:
                        self._pieces.through()

    def _next(self) -> Task | None:
        """Pre: the lock is held."""
        heal = self._healing.take()
        if heal is not None:
            return heal
        now = self._clock()
        jobs = self._waiting.take(behind=self._crew.behind < self._quiet.most(now))
        self._quiet.begun(jobs, now)
        return jobs or None

    def _wake(self) -> None:
        """After something was queued or taken: for what else there is. Pre: the lock is held."""
        behind = self._crew.behind < self._quiet.most(self._clock())
        more = self._healing.waits or self._waiting.ready(behind=behind)
        self._waking.wake(more=more, held=not more and self._rest_s() is not None)

    def _rest_s(self) -> float | None:
        """How long to sleep if nobody wakes who sleeps. Pre: the lock is held."""
        held = self._waiting and not self._crew.behind
        left = self._quiet.left_ns(self._clock()) if held else None
        return None if left is None else left / SECOND

    def _run(self, jobs: list[Job]) -> None:
        now = self._clock()
        ready = []
        kind = type(jobs[0])
        for job in jobs:
            if job.deadline <= now:
                self._late(job)
            else:
                ready.append(job)
        if not ready:
            return
        first = ready[0]
        if isinstance(first, Probe):
            self._finish(self._healing.probe(first))
            return
        with self._lock:
            allowed = self._healing.open and self._health.of(kind).allow(now)
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
        completions = [self._with_room(done._replace(elapsed_ns=elapsed)) for done in completions]
        for done in completions:  # who sees that the tier is degraded sees why
            self.meter.done(_KINDS[kind], done)
        self._judge(kind, completions)
        for done in completions:
            self._completions.put(done)

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

    def _judge(self, kind: type, completions: list[Completion]) -> None:
        """Tell the breaker how an attempt ended."""
        with self._lock:
            if not self._health.judge(kind, completions, self._clock()):
                return
            opened = self._waiting.drop(*((Read,) if kind is Read else (Write, Delete)))
            self._watch.tell()
        log.warning("tier %s: %ss pause: %s", self.name, _KINDS[kind], self._detail(completions))
        for job in opened:
            self._complete(job, Answer.OFF, detail=self._why_off(type(job)))

    @staticmethod
    def _detail(completions: list[Completion]) -> str:
        return next((done.detail for done in completions if done.detail), "no detail")

    # -- completions ----------------------------------------------------------------------------

    def _refusal(self, job: Job, refused: Refused) -> Completion:
        if refused.answer is Answer.CORRUPT:
            self.meter.count("quarantined")
        answer, reason = refused.answer, refused.reason
        if answer not in _MAY_END[type(job)]:  # a server may say anything to anything
            answer = Answer.FAILED
            reason = Reason.OTHER if reason is Reason.NONE else reason
        return Completion(job, answer, reason=reason, detail=refused.detail)

    def _complete(self, job: Job, answer: Answer, *, detail: str) -> None:
        self._finish(Completion(job, answer, detail=detail))

    def _late(self, job: Job) -> None:
        self._complete(job, Answer.TIMEOUT, detail="its deadline passed in the queue")

    def _finish(self, done: Completion) -> None:
        self.meter.done(_KINDS[type(done.job)], done)
        self._completions.put(done)

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return self.backend.cost(length)

    def room(self, length: int) -> int:
        return self.backend.room(length)

    def to_empty(self, length: int) -> tuple[Place, ...]:
        return self.backend.to_empty(length)

    def usage(self) -> Usage:
        return self.backend.usage()

    @property
    def untidy(self) -> int:
        return self.backend.untidy

    def stat(self) -> TierStat:
        meter, report = self.meter, self._healing.report
        with self._lock:
            overdue = self._crew.stuck(self._clock())
        return TierStat(
            name=self.name,
            state=self.state,
            engine=self.backend.engine if self._healing.open else "?",
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


__all__ = ["NOWHERE", "PoolConfig", "PooledTier"]
