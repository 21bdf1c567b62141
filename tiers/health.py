"""Health: whether a tier's reads and writes are tried, by how the last ones ended.

The law of this module: reads and writes have a breaker each, for a disk that is full or read-only
still reads. What an answer says of a chunk says nothing of the medium. An error that no second
attempt mends opens at once; others by their number. One instance, one lock (its owner's).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.tiers.base import Answer, Completion, Read, Reason
from kvd.tiers.breaker import Breaker, BreakerConfig, BreakerState

__all__ = ["Health"]

# Answers that say something about the medium's health, and which.
_HEALTHY = {Answer.OK, Answer.EXISTS, Answer.MISS, Answer.CORRUPT, Answer.NO_SPACE}
_ILL = {Answer.FAILED, Answer.TIMEOUT}
# What lies there, not whether the medium works.
_HARMLESS = {Reason.CONFLICT, Reason.FOREIGN}
_PERMANENT = {
    Reason.CREDENTIALS,
    Reason.DENIED,
    Reason.NOT_FOUND,
    Reason.READ_ONLY,
    Reason.REGION,
    Reason.SKEW,
}


class Health:
    """`kind`: the type of a job; deletes go with writes."""

    def __init__(self, config: BreakerConfig) -> None:
        self.reads = Breaker(config)
        self.writes = Breaker(config)

    def of(self, kind: type) -> Breaker:
        return self.reads if kind is Read else self.writes

    @property
    def readable(self) -> bool:
        return self.reads.state is BreakerState.CLOSED

    @property
    def writable(self) -> bool:
        return self.writes.state is BreakerState.CLOSED

    def trip(self, now: int) -> None:
        """The medium is away."""
        self.reads.trip(now)
        self.writes.trip(now)

    def reset(self) -> None:
        """The medium was seen to work."""
        self.reads.reset()
        self.writes.reset()

    def judge(self, kind: type, completions: Sequence[Completion], now: int) -> bool:
        """Tell the breaker how an attempt ended; whether that opened it."""
        breaker = self.of(kind)
        before = breaker.opened
        answers = {done.answer for done in completions}
        if any(done.answer in _ILL and done.reason not in _HARMLESS for done in completions):
            if any(done.reason in _PERMANENT for done in completions):
                breaker.trip(now)
            else:
                breaker.failure(now)
        elif answers & (_HEALTHY | _ILL):
            breaker.success()
        else:
            breaker.abandon()
        return breaker.opened > before

    def next(self) -> int | None:
        """When an open breaker's pause is over, ns; None if none is open."""
        return min(
            (b.until for b in (self.reads, self.writes) if b.state is BreakerState.OPEN),
            default=None,
        )
