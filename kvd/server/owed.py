"""Deletions that a tier could not carry out when they were due.

The law of this module: what the core has forgotten is deleted in the end, although its medium was
away: else its bytes would count against the tier's limit until the next start, and that would take
it up again. What is written anew under its name meanwhile stays: it waits for a deletion that is
under way, for nothing else orders the two. Bounded: beyond it the oldest are
given up, and so is what a medium that works has refused several times; `given_up` counts these.
"""

from __future__ import annotations

from kvd.tiers.base import NOWHERE, Answer, Completion, Delete, Key, Place, Write

__all__ = ["UNPAID", "Owed"]

NS = 1_000_000_000
MOST = 65_536
TRIES = 8  # more than the failures in a row by which a medium is known to be away
BATCH = 64
PAUSE_NS = NS // 2  # after a failure, and twice as long after each further one
LONGEST_NS = 30 * NS

# Answers to a deletion after which it may still lie there.
UNPAID = frozenset({Answer.OFF, Answer.FAILED, Answer.TIMEOUT})


class Owed:
    """What one tier is to delete when it can, and the token of these jobs. For the loop's thread.
    `by_key`: a shard lies under its name, wherever it was."""

    def __init__(self, *, by_key: bool, most: int = MOST) -> None:
        self._by_key = by_key
        self._most = most
        self._tries: dict[tuple[Key, Place], int] = {}  # in the order in which they came
        self.given_up = 0
        self._under_way: dict[tuple[Key, Place], list[Write]] = {}  # and what waits for each
        self._anew: dict[Key, int] = {}  # written again, and not answered yet: tries of before
        self._pause = PAUSE_NS
        self._not_before = 0

    def __len__(self) -> int:
        return len(self._tries)

    @property
    def any(self) -> bool:
        """Whether some wait, or are under way, or may come to be owed again."""
        return bool(self._tries or self._under_way or self._anew)

    def add(self, job: Delete, tries: int = 0) -> None:
        self._add((job.key, NOWHERE if self._by_key else job.place), tries)

    def _add(self, what: tuple[Key, Place], tries: int) -> None:
        if len(self._tries) >= self._most:
            del self._tries[next(iter(self._tries))]
            self.given_up += 1
        self._tries[what] = tries

    def notes(self) -> dict[str, int]:
        """What is not 0, for operators."""
        found = {"deletes_owed": len(self), "deletes_given_up": self.given_up}
        return {name: count for name, count in found.items() if count}

    # -- what is written anew -------------------------------------------------------------------

    def holds(self, job: Write) -> bool:
        """It is written again: where a shard lies under its name, that is not to be deleted. True:
        that is under way, and would hit what is written now; the job stays here until `answered` or
        `late` hands it back."""
        if not self._by_key or not (self._tries or self._under_way):
            return False
        what = (Key.of(job.header), NOWHERE)
        tries = self._tries.pop(what, None)
        if tries is not None:
            self._anew[what[0]] = tries
        held = self._under_way.get(what)
        if held is None:
            return False
        held.append(job)
        return True

    def late(self, now: int) -> list[Write]:
        """Of those that stay here, the ones whose deadline has passed: nobody else answers them."""
        found: list[Write] = []
        for held in self._under_way.values():
            late = [job for job in held if job.deadline <= now]
            for job in late:
                held.remove(job)
            found += late
        return found

    def written(self, key: Key, *, there: bool) -> None:
        """A write is answered. If it came to nothing, what was to be deleted may lie there yet."""
        tries = self._anew.pop(key, None)
        if tries is not None and not there:
            self._add((key, NOWHERE), tries)

    # -- what is due ----------------------------------------------------------------------------

    def due(self, now: int, within: int) -> list[Delete]:
        """Some of them, to be handed to the tier, which says that it works; no more before these
        are answered, and after a failure not at once. `within`: their deadline, ns from now on."""
        if self._under_way or now < self._not_before:
            return []
        jobs = [
            Delete((self, self._tries[what]), *what, now + within)
            for what in list(self._tries)[:BATCH]
        ]
        for job in jobs:
            del self._tries[job.key, job.place]
            self._under_way[job.key, job.place] = []
        return jobs

    def answered(self, done: Completion, now: int) -> list[Write]:
        """One of those that were due; the writes that have waited for it."""
        assert isinstance(done.job, Delete) and isinstance(done.job.token, tuple)
        held = self._under_way.pop((done.job.key, done.job.place))
        tries = done.job.token[1] + (done.answer is not Answer.OFF)
        if done.answer not in UNPAID:
            self._pause = PAUSE_NS
        elif held:
            self._anew[done.job.key] = tries
        elif tries < TRIES:
            self.add(done.job, tries)
        else:
            self.given_up += 1
        if not self._under_way and done.answer in UNPAID:
            self._not_before = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_NS)
        return held
