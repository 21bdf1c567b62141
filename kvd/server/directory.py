"""The directory that daemons of one bucket share: asked before a lookup, told afterwards.

The law of this module: it is a hint. A lookup waits for it at most `wait_s`, and only for keys that
are not known here; what it names is taken up like a record that was found in the bucket, so a read
verifies it. What a read does not find there is unsaid, and what is used here stays said: a chunk
that DRAM answers is not read from the bucket, and would be forgotten by the others. What is
forgotten all the same is said again by the daemon that wrote it: it alone knows that it lies there
still. One thread talks to Redis; the loop never waits for it, and while it is away nothing is
asked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvd.chunk import IDENTITY_DTYPE, ChunkHeader, HeaderFlag, State
from kvd.core import events as ev
from kvd.core.lookups import Unknown
from kvd.tiers import base as t

if TYPE_CHECKING:
    from kvd.core import Core
    from kvd.tiers.redis import Directory, Entry

__all__ = ["SharedDirectory"]

log = logging.getLogger(__name__)

NS = 1_000_000_000
FIRST = 4  # keys of a lookup asked first: most that are not known here nobody has
MOST = 256  # keys in one round trip
SLICE = 128  # records handed to the core in one event
WAITING = 512  # lookups that wait at a time; more are not asked for
NEWS = 4096  # entries to be told that are kept while Redis is slow; older ones are dropped
NEWS_BATCH = 128
PROBE_S = 0.2  # between looks at a Redis that is away; its breaker says when it is really asked
CLOSE_S = 2.0
USES = 8  # how often in an entry's life its use is told at most
USED = 16_384  # prompts whose use is known to be told; beyond, it may be told more often
USES_WAITING = 256  # prompts whose use is still to be told; older ones have to come again
LAPSED = 8192  # keys to be said again; older ones have to come again
LAPSED_BATCH = 32  # in one turn of the loop
_LEASE = int(ev.LookupFlag.LEASE)


class _News(NamedTuple):
    """Something to say: `entry` is there, or `key` is not (`heal`: whoever said so)."""

    key: t.Key
    entry: Entry | None
    heal: bool = False


class _Use:
    """What a lookup leased, or tried to."""

    __slots__ = ("_keys",)

    def __init__(self, event: ev.Lookup, unknown: Unknown) -> None:
        self._keys = self._known(event, unknown)

    def next(self) -> list[t.Key]:
        """The keys to tell now; none at the end."""
        return list(islice(self._keys, MOST))

    def _known(self, event: ev.Lookup, unknown: Unknown) -> Iterator[t.Key]:
        """Those that something is known of here."""
        missing = set(unknown.hashes)
        for at in range(0, len(event.hashes), 32):
            chunk = event.hashes[at : at + 32]
            if chunk not in missing:
                for shard in unknown.shards:
                    yield t.Key(event.kind, unknown.namespace_digest, event.spec, chunk, shard)


class _Question:
    """A lookup that waits."""

    __slots__ = ("due", "event", "found", "keys", "run", "shards", "step")

    def __init__(self, event: ev.Lookup, unknown: Unknown, due: int) -> None:
        self.event = event
        self.due = due  # ns: then it goes on without an answer
        self.run = unknown.run
        self.shards = len(unknown.shards)
        self.keys = deque(
            t.Key(event.kind, unknown.namespace_digest, event.spec, chunk, shard)
            for chunk in unknown.hashes
            for shard in unknown.shards
        )
        self.step = FIRST
        self.found: list[ChunkHeader] = []

    def next(self) -> list[t.Key]:
        """The keys to ask now; whole chunks."""
        count = max(1, self.step // self.shards) * self.shards
        self.step = min(MOST, 8 * self.step)
        return [self.keys.popleft() for _ in range(min(count, len(self.keys)))]

    def take(self, entries: Sequence[Entry | None]) -> None:
        """What the directory said; with a gap, a leading run ends."""
        self.found += [e.header for e in entries if e is not None and _holds(e.header)]
        if self.run and None in entries:
            self.keys.clear()


class SharedDirectory:
    """`tier`: the number below DRAM of the tier that it is about; `where`: its address; `owns`:
    whether what lies there under a key is of this daemon."""

    def __init__(
        self,
        directory: Directory,
        tier: int,
        where: str,
        wait_s: float,
        owns: Callable[[t.Key], bool],
    ) -> None:
        self._directory = directory
        self._owns = owns
        self._tier = tier
        self._where = where
        self._wait_ns = int(wait_s * NS)
        self.core: Core  # set by the server, as is `feed`
        self.feed: Callable[[Any], None]
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Condition()
        self._questions: deque[_Question] = deque()
        self._to_tell: deque[_News] = deque(maxlen=NEWS)
        self._to_touch: deque[_Use] = deque(maxlen=USES_WAITING)
        self._lapsed: deque[t.Key] = deque(maxlen=LAPSED)  # in use, ours, and told to nobody
        self._used: set[tuple[bytes, bytes, bytes, int]] = set()  # this while
        self._used_until = 0  # ns
        self._answered: deque[_Question] = deque()
        self._closing = False
        self._waiting: dict[int, _Question] = {}  # of the loop's thread
        self.counters = {"asked": 0, "chunks_found": 0, "given_up": 0, "renewed": 0}
        self._thread = threading.Thread(target=self._work, name="kvd-directory", daemon=True)
        self._thread.start()

    # -- from the loop --------------------------------------------------------------------------

    def ask_first(self, event: ev.Lookup) -> bool:
        """Whether this lookup waits for the directory; it is fed later, exactly once."""
        if not self._directory.available or len(self._waiting) >= WAITING:
            return False
        unknown = self.core.unknown(event, self._tier)
        if unknown is None:
            return False
        if event.flags & _LEASE:
            self._use(event, unknown)
        if not unknown.hashes:
            return False
        question = _Question(event, unknown, time.monotonic_ns() + self._wait_ns)
        self.counters["asked"] += 1
        self._waiting[id(question)] = question
        with self._lock:
            self._questions.append(question)
            self._lock.notify()
        return True

    def _use(self, event: ev.Lookup, unknown: Unknown) -> None:
        """Have it told that these are in use, unless it was a little while ago."""
        now = time.monotonic_ns()
        if now >= self._used_until or len(self._used) >= USED:
            self._used.clear()
            self._used_until = now + self._directory.ttl_ns // USES
        name = unknown.namespace_digest, event.spec, event.hashes[-32:], len(event.hashes)
        if name in self._used:
            return
        self._used.add(name)
        with self._lock:
            self._to_touch.append(_Use(event, unknown))
            self._lock.notify()

    def hear(self) -> None:
        """Take answers, and say again what was forgotten. Called when `news` is readable."""
        try:
            os.eventfd_read(self.news)
        except BlockingIOError:
            pass
        while self._answered:
            question = self._answered.popleft()
            if self._waiting.pop(id(question), None) is not None:
                self._go_on(question)
        self._renew()

    def _renew(self) -> None:
        """Some of what is used here and was forgotten is said again, if it lies there still. Never
        so much that it pushes out other news."""
        if not self._lapsed or len(self._to_tell) > NEWS // 2:
            return
        for _ in range(min(LAPSED_BATCH, len(self._lapsed))):
            key = self._lapsed.popleft()
            space = key.namespace, key.spec, key.kind
            header = self.core.record(self._tier, *space, key.chunk, key.shard)
            if header is not None:
                self.counters["renewed"] += 1
                self._say(_News(key, self._entry(header)))
        if self._lapsed:
            os.eventfd_write(self.news, 1)

    def watch(self, now: float = 0.0) -> None:
        """Let lookups go on whose time is over, and what waited for the thread."""
        self._renew()
        late = time.monotonic_ns()
        for question in [q for q in self._waiting.values() if q.due <= late]:
            del self._waiting[id(question)]
            self.counters["given_up"] += 1
            question.found = []
            self._go_on(question)

    def _go_on(self, question: _Question) -> None:
        found = question.found
        self.counters["chunks_found"] += len(found)
        for begin in range(0, len(found), SLICE):
            rows = b"".join(
                h.pack()[: IDENTITY_DTYPE.itemsize] for h in found[begin : begin + SLICE]
            )
            records = np.frombuffer(rows, IDENTITY_DTYPE)
            none = np.zeros(len(records), np.uint64)
            self.feed(ev.TierRecovered(self._tier, records, none, none, hint=True))
        self.feed(question.event)

    def completed(self, action: Any, done: t.Completion) -> None:
        """A job of some tier came back: what it shows of the bucket is told."""
        if action.tier != self._tier:
            return
        answer, job = done.answer, done.job
        if isinstance(job, t.Write):
            if answer in (t.Answer.OK, t.Answer.EXISTS):
                self._say(_News(t.Key.of(job.header), self._entry(job.header)))
        elif isinstance(job, t.Read):
            if answer is t.Answer.OK and done.header is not None:
                self._say(_News(job.key, self._entry(done.header)))
            elif answer in (t.Answer.MISS, t.Answer.CORRUPT):
                self._say(_News(job.key, None, heal=True))
        elif isinstance(job, t.Delete) and answer is t.Answer.OK:
            self._say(_News(job.key, None))

    def _entry(self, header: ChunkHeader) -> Entry:
        from kvd.tiers.redis import Entry

        return Entry(self._where, header._replace(state=State.READY))

    def _say(self, news: _News) -> None:
        with self._lock:
            self._to_tell.append(news)
            self._lock.notify()

    def stat(self) -> dict[str, Any]:
        """For an administrator: how it is, and what was asked and told."""
        directory = self._directory
        return {
            "state": "ok" if directory.available else "degraded",
            "last_error": directory.last_error,
            **self.counters,
            **directory.counters,
        }

    def close(self) -> None:
        """What waits is given up: nobody is there for it any more."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join(CLOSE_S)
        self._directory.close()
        os.close(self.news)
        self.news = -1

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        use: _Use | None = None
        while True:
            available = self._directory.available
            with self._lock:
                waits = self._to_tell or self._to_touch or use
                if not (self._questions or self._closing or (available and waits)):
                    self._lock.wait(None if available else PROBE_S)
                if self._closing and not (available and self._to_tell):
                    return
                asked = list(self._questions)
                self._questions.clear()
                batch = min(NEWS_BATCH, len(self._to_tell)) if available and not asked else 0
                news = [self._to_tell.popleft() for _ in range(batch)]
                if not available:
                    use = None
                elif use is None and self._to_touch:
                    use = self._to_touch.popleft()
            try:
                if not available:
                    self._look_again()
                self._answer(asked)
                self._tell(news)
                if use is not None and not asked and not news and not self._touch(use):
                    use = None
            except Exception:  # the boundary of a thread: whoever waits goes on without it
                log.exception("the directory went wrong")
                use = None
            if news and not self._directory.available:
                self._keep(news)
            for question in asked:
                self._answered.append(question)
            if asked and self.news >= 0:
                os.eventfd_write(self.news, 1)

    def _look_again(self) -> None:
        """Is it back? Then it may have forgotten everything, so every use is told anew."""
        if self._directory.ping():
            self._used_until = 0

    def _touch(self, use: _Use) -> bool:
        """Tell some of a use. Whether there may be more."""
        keys = use.next()
        lapsed = [key for key in self._directory.touch(keys) if self._owns(key)]
        self._lapsed.extend(lapsed)
        if lapsed and self.news >= 0:
            os.eventfd_write(self.news, 1)
        return bool(keys)

    def _keep(self, news: list[_News]) -> None:
        """They could not be told now: when it is back."""
        with self._lock:
            if len(self._to_tell) + len(news) <= NEWS:
                self._to_tell.extendleft(reversed(news))

    def _answer(self, asked: list[_Question]) -> None:
        """All questions that are there, together."""
        while True:
            now = time.monotonic_ns()
            parts = [(one, one.next()) for one in asked if one.keys and one.due > now]
            keys = [key for _, part in parts for key in part]
            if not keys:
                return
            entries = self._directory.find(keys, self._where)
            at = 0
            for one, part in parts:
                one.take(entries[at : at + len(part)])
                at += len(part)

    def _tell(self, news: list[_News]) -> None:
        """In the order of what happened, where it is about one key: the last word counts."""
        last = {one.key: one for one in news}
        entries = [one.entry for one in last.values() if one.entry is not None]
        if entries:
            self._directory.tell(entries)
        self._directory.heal([key for key, one in last.items() if one.heal])
        gone = [key for key, one in last.items() if one.entry is None and not one.heal]
        self._directory.forget(gone)


def _holds(header: ChunkHeader) -> bool:
    """Whether a record is of a chunk that can be read."""
    return header.state == State.READY and bool(header.flags & HeaderFlag.SEALED)
