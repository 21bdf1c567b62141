"""Between the core and the tiers below: actions become jobs, completions become events.

The law of this module: a slot's bytes are handed to a tier as they lie in the arena, and belong to
it until its completion is taken; the loop never waits for a tier. What a tier says of itself is
passed on as it is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvd.chunk import namespace_digest
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.shares import TierShare
from kvd.server.files import open_file
from kvd.server.loop import SHARE_NS
from kvd.server.owed import UNPAID, Owed
from kvd.server.tiers import TierPlan
from kvd.server.transfers import Job, Transfers
from kvd.tiers import base as t
from kvd.tiers.backend import Refused

__all__ = ["RECOVER_AGAIN_S", "Ladder"]

log = logging.getLogger(__name__)

NS = 1_000_000_000
RECOVER_S = 0.2  # between looks at a tier that is away and has still to tell what lies there
RECOVER_AGAIN_S = 5.0
JOIN_S = 2.0
GIVE_WAY_S = 0.0005  # at most, for a worker to begin what it was given
LOOK_NS = NS  # between looks at what a tier has to take back, while that helps
LOOK_MOST_NS = 30 * NS
LOOK_WITHIN_S = 6.0
WATCH_S = 0.2  # how late a tier's change of health is noticed where no completion tells of it


def _awaited(done: t.Completion) -> bool:
    """Whether an engine waits for it now."""
    return isinstance(done.job, t.Read) and done.job.use is t.Use.LOAD


class Ladder:
    """All tiers below DRAM. `feed` takes an event for the core; `beside`: the arena's file, whose
    neighbours are what has to outlive the daemon. For the loop's thread."""

    def __init__(
        self,
        plans: Sequence[TierPlan],
        view: memoryview,
        beside: Path,
        recover_again_s: float = RECOVER_AGAIN_S,
    ) -> None:
        """`recover_again_s`: the pause after a medium failed while it told what lies there."""
        self.completions = t.Completions()
        self.handed_over = False  # jobs, since the loop waited last
        self._loaded: deque[t.Completion] = deque()  # taken, and not dealt with yet
        self._taken: deque[t.Completion] = deque()  # likewise, what no engine waits for
        self.plans = plans
        self.tiers: list[t.Tier] = []
        self.reports: list[t.ProbeReport] = []
        self.feed: Callable[[Any], None] = lambda event: None
        self.completed: Callable[[Any, t.Completion], None] | None = None  # told before the core
        self._view = view
        self._recover_again_s = recover_again_s
        self._cursors = [
            plan.cursor or beside.with_name(f"{beside.name}.scrub-{plan.config.name}")
            for plan in plans
        ]
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._askers: list[threading.Thread] = []
        self._news: deque[tuple[int, t.Recovered]] = deque()
        self._transfers: Transfers | None = None
        self._jobs: list[list[t.Job]] = [[] for _ in plans]
        self._told: list[tuple[bool, bool] | None] = [None for _ in plans]
        self._kept: dict[int, t.Buffer] = {}  # by job: payloads on their way to another tier
        self._probes: dict[object, Callable[[t.Completion], None]] = {}
        self._owed: list[Owed] = []
        self._look_at = [0 for _ in plans]  # when to see what a tier has to take back
        self._look_ns = [LOOK_NS for _ in plans]

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Make and start all tiers. ConfigError for what only an operator can mend."""
        for plan in self.plans:
            tier = plan.make(self.completions)
            self.tiers.append(tier)
            self._owed.append(Owed(by_key=tier.by_key))
            self.reports.append(tier.start())

    def recover(self, core: Any, carry: Callable[[list[Any]], None], transfers: Transfers) -> None:
        """Tell the core what lies in each tier: of local media at once, of others beside
        everything else."""
        self._transfers = transfers
        self._resume_scrubs()
        for number, tier in enumerate(self.tiers):
            if tier.by_key:
                self._recover_later(number)
                continue
            begun = time.monotonic()
            batches = list(tier.recover())
            if not batches:
                continue
            records = np.concatenate([batch.records for batch in batches])
            at = np.concatenate([batch.at for batch in batches])
            generation = np.concatenate([batch.generation for batch in batches])
            carry(core.recover(number, records, at, generation, time.monotonic_ns()))
            log.info(
                "tier %s: %d records taken up in %.2f s",
                tier.name, len(at), time.monotonic() - begun,
            )  # fmt: skip
        if self.tiers:
            core.recovered()

    def _recover_later(self, number: int) -> None:
        """A thread of its own asks, for a server may take its time: again and again until it has
        told everything, for it may be away now. What it tells twice is known the second time."""
        tier = self.tiers[number]

        def ask() -> None:
            while not self._closing.is_set():
                if not tier.readable:
                    self._closing.wait(RECOVER_S)
                    continue
                try:
                    told = 0
                    for batch in tier.recover():
                        told += len(batch.at)
                        self._tell(number, batch)
                        if self._closing.is_set():
                            return
                except Refused as refused:
                    log.warning("tier %s: what lies there is not known yet: %s", tier.name, refused)
                    self._closing.wait(self._recover_again_s)
                except Exception:  # the boundary of a thread: the tier serves without the rest
                    log.exception("tier %s: what lies there is not known in full", tier.name)
                    return
                else:
                    log.info("tier %s: %d records told", tier.name, told)
                    return

        thread = threading.Thread(target=ask, name=f"kvd-recover-{tier.name}", daemon=True)
        self._askers.append(thread)
        thread.start()

    def _tell(self, number: int, batch: t.Recovered) -> None:
        self._news.append((number, batch))
        try:
            os.eventfd_write(self.news, 1)
        except BlockingIOError:  # the counter is full, so it is readable
            pass

    def hear(self) -> None:
        """Take what was recovered meanwhile. Called when `news` is readable."""
        try:
            os.eventfd_read(self.news)
        except BlockingIOError:
            pass
        while self._news:
            number, batch = self._news.popleft()
            self.feed(ev.TierRecovered(number, batch.records, batch.at, batch.generation))

    def close(self) -> None:
        """Let go of all media; what was under way is answered, to nobody."""
        self._closing.set()
        for tier in self.tiers:
            tier.close()
        self._loaded.clear()
        self._taken.clear()
        self.completions.take()  # they hold views of the arena
        self.completions.close()
        for thread in self._askers:
            thread.join(JOIN_S)
        os.close(self.news)
        self.news = -1

    def weigh(self, namespace: str, shares: Mapping[str, TierShare]) -> None:
        """A tenant has the bandwidth of each tier by its weight there. Pre: started."""
        for tier in self.tiers:
            weight = shares[tier.name].weight if tier.name in shares else 1.0
            tier.set_weight(namespace_digest(namespace), weight)

    # -- from the core --------------------------------------------------------------------------

    def add(self, action: Any) -> None:
        """Take an action; `flush` hands it over."""
        job = self._job(action)
        if isinstance(job, t.Write) and self._owed[action.tier].holds(job):
            return
        self._jobs[action.tier].append(job)

    def _job(self, action: Any) -> t.Job:
        if isinstance(action, ac.TierWrite) and action.kept:
            return t.Write(action, action.header, self._kept.pop(action.kept), action.deadline)
        if isinstance(action, ac.TierWrite):
            source = self._view[action.offset : action.offset + action.length]
            return t.Write(action, action.header, source, action.deadline)
        key = t.Key(action.kind, action.namespace, action.spec, action.chunk, action.shard)
        place = t.Place(action.at, action.generation)
        if isinstance(action, ac.TierDelete):
            return t.Delete(action, key, place, action.deadline)
        if isinstance(action, ac.TierScrub):
            memory = bytearray(action.length)
            use = t.Use.MOVE if action.keep else t.Use.SCRUB
            return t.Read(action, key, place, memory, action.deadline, use=use)
        into = self._view[action.offset : action.offset + action.length]
        use = t.Use.PREFETCH if action.ahead else t.Use.LOAD
        return t.Read(action, key, place, into, action.deadline, action.tenant, use)

    def scrubbed_to(self, action: ac.ScrubCursor) -> None:
        """Keep how far a scrub has got: beside what it reads, or, of media that are elsewhere,
        beside the arena."""
        if self._transfers is None:
            return
        path = self._cursors[action.tier]
        text = f"{action.part}\n"
        job = Job(f"note {path}", lambda: path.write_text(text), lambda done: None)
        self._transfers.submit(job)

    def _resume_scrubs(self) -> None:
        for number, path in enumerate(self._cursors):
            try:
                with open_file(path, follow=False) as file:
                    part = int(file.read(64))
            except (OSError, ValueError):  # none yet, or of no use: from the beginning
                continue
            if 0 <= part < 1 << 32:
                self.feed(ev.TierScrubbedTo(number, part))

    def flush(self) -> None:
        for tier, jobs in zip(self.tiers, self._jobs, strict=True):
            if jobs:
                self.handed_over = True
                tier.submit(jobs)
                jobs.clear()

    def asked(self) -> None:
        """An engine looks something up, and waits."""
        for tier in self.tiers:
            tier.asked()

    def give_way(self) -> None:
        """Let a worker that was given a load begin it, if one is free: it needs the interpreter for
        that, which else it would be handed when the loop waits next."""
        for tier in self.tiers:
            tier.give_way(GIVE_WAY_S)

    # -- from the tiers -------------------------------------------------------------------------

    def drain(self) -> None:
        """Take what has been completed, loads first, as much as has its place in a turn of the
        loop. Called when `completions` is readable."""
        for done in self.completions.take():
            (self._loaded if _awaited(done) else self._taken).append(done)
        end = time.monotonic_ns() + SHARE_NS
        while self._loaded or self._taken:
            self._take((self._loaded or self._taken).popleft())
            if time.monotonic_ns() > end:
                if self._loaded and self._taken:  # loads without an end hold nothing up for ever
                    self._take(self._taken.popleft())
                if self._loaded or self._taken:
                    self.completions.again()
                break
        self.watch()

    def _take(self, done: t.Completion) -> None:
        token = done.job.token
        if isinstance(done.job, t.Delete):
            self._deleted(done)
        elif isinstance(done.job, t.Probe):
            asked = self._probes.pop(token, None)
            if asked is not None:
                asked(done)
        elif isinstance(token, ac.TierScrub) and token.keep and done.answer is t.Answer.OK:
            assert isinstance(done.job, t.Read)
            self._kept[token.job] = done.job.into
            self.feed(self._event(token, done))
            self._kept.pop(token.job, None)  # not wanted any more
        else:
            if isinstance(token, ac.TierWrite) and self._owed[token.tier].any:
                there = done.answer in (t.Answer.OK, t.Answer.EXISTS)
                self._owed[token.tier].written(t.Key.of(token.header), there=there)
            if self.completed is not None:
                self.completed(token, done)
            self.feed(self._event(token, done))

    def _deleted(self, done: t.Completion) -> None:
        action = done.job.token
        if not isinstance(action, ac.TierDelete):
            assert isinstance(action, tuple)
            held = action[0].answered(done, time.monotonic_ns())
            if held:
                self.tiers[self._owed.index(action[0])].submit(held)
            return
        if done.answer in UNPAID:
            assert isinstance(done.job, t.Delete)
            self._owed[action.tier].add(done.job)
        if self.completed is not None:
            self.completed(action, done)
        self.feed(ev.TierDeleted(action.job, ev.TierAnswer(done.answer.value)))

    def _event(self, action: Any, done: t.Completion) -> Any:
        answer = ev.TierAnswer(done.answer.value)
        if not isinstance(action, ac.TierWrite):
            return ev.TierReadDone(action.job, answer, done.header)
        empty = tuple(place.at for place in done.empty)
        return ev.TierWritten(action.job, answer, *done.place, done.room, empty)

    def watch(self, now: float = 0.0) -> None:
        """Tell the core whose health has changed, and have done what is left to do."""
        at = time.monotonic_ns()
        for number, tier in enumerate(self.tiers):
            told = (tier.readable, tier.writable)
            if told != self._told[number]:
                if self._told[number] is not None:
                    log.warning(
                        "tier %s: %s", tier.name, "healthy again" if all(told) else "degraded"
                    )
                self._told[number] = told
                self.feed(ev.TierState(number, *told))
            if tier.writable and self._look_at[number] <= at:
                self._look(number, at)
            if tier.writable and self._owed[number]:
                within = self.plans[number].config.write_ns
                due = self._owed[number].due(at, within)
                if due:
                    tier.submit(due)
            if self._owed[number].any:
                for job in self._owed[number].late(at):
                    detail = "its deadline passed before a deletion that is owed was over"
                    self.completions.put(t.Completion(job, t.Answer.TIMEOUT, detail=detail))

    def _look(self, number: int, now: int) -> None:
        """Media that are elsewhere may have carried out what they did not answer, and nobody knows
        of it. A probe has it taken back: again and again, until nothing is left."""
        tier = self.tiers[number]
        left = tier.untidy
        if not left:
            self._look_at[number] = now + LOOK_NS
            self._look_ns[number] = LOOK_NS
            return

        def looked(done: t.Completion) -> None:
            helped = done.answer is t.Answer.OK and tier.untidy < left
            pause = LOOK_NS if helped else min(2 * self._look_ns[number], LOOK_MOST_NS)
            self._look_ns[number] = pause
            self._look_at[number] = time.monotonic_ns() + pause

        self._look_at[number] = t.NEVER
        self.probe(number, looked, LOOK_WITHIN_S, heals=False)

    # -- for operators --------------------------------------------------------------------------

    def number(self, name: str) -> int | None:
        return next((n for n, tier in enumerate(self.tiers) if tier.name == name), None)

    def probe(
        self,
        number: int,
        done: Callable[[t.Completion], None],
        within_s: float,
        *,
        heals: bool = True,
    ) -> None:
        """See whether a tier works now; its breakers close if it does and this `heals`."""
        token = object()
        self._probes[token] = done
        deadline = time.monotonic_ns() + int(within_s * NS)
        self.tiers[number].submit([t.Probe(token, deadline, heals)])

    def stat(self, rows: list[dict[str, Any]], *, admin: bool) -> list[dict[str, Any]]:
        """The core's rows of tiers, with what the tiers say of themselves: to who is no
        administrator, how full they are and no more."""
        found = list(rows[:1])
        for row, tier, owed in zip(rows[1:], self.tiers, self._owed, strict=True):
            said = tier.stat()
            if not admin:
                full = {
                    "limit_bytes": said.usage.limit_bytes,
                    "used_bytes": said.usage.used_bytes,
                }
                found.append({**row, **full})
                continue
            found.append(
                {
                    **row,
                    "state": "ok" if said.state is t.State.READY else said.state.value,
                    "engine": said.engine,
                    "limit_bytes": said.usage.limit_bytes,
                    "used_bytes": said.usage.used_bytes,
                    "held_bytes": said.usage.held_bytes,
                    "stored": said.usage.chunks,
                    "pending": said.pending,
                    "overdue": said.overdue,
                    "write_gbps": round(said.write_gbps, 3),
                    "read_gbps": round(said.read_gbps, 3),
                    "bytes_written": said.bytes_written,
                    "bytes_read": said.bytes_read,
                    "last_error": said.last_error,
                    "last_error_unix_ns": said.last_error_unix_ns,
                    "answers": said.answers,
                    "reasons": said.reasons,
                    "notes": {**said.notes, **owed.notes()},
                }
            )
        return found
