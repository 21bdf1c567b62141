"""A medium, as one thread sees it: blocking calls that tell the truth or raise Refused.

The law of this module: a backend moves bytes and keeps its own accounting; it does not queue, does
not time, does not judge payloads. PooledTier around it (tiers/pool.py) makes a Tier of it: threads,
deadlines, breakers, verification and counters are written once, for all media. So a fault layer
between the two (tiers/faults.py) stands *under* the verification, where real faults come from.

Methods are called from several threads at once, never two at a time for one key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvd.chunk import ChunkHeader
from kvd.tiers.base import Answer, Key, Place, ProbeReport, Reason, Recovered, Usage


class Refused(Exception):
    """What a backend raises, and all that it raises, for what can happen. `permanent`: no retry
    mends it, so the breaker opens at once. The detail is for people and never holds a secret."""

    def __init__(
        self,
        answer: Answer,
        reason: Reason = Reason.NONE,
        detail: str = "",
        *,
        permanent: bool = False,
    ) -> None:
        super().__init__(detail or answer.value)
        self.answer = answer
        self.reason = reason
        self.detail = detail
        self.permanent = permanent


class Unsure(Refused):
    """A write that was refused, or not answered, and may have been carried out all the same."""

    @classmethod
    def of(cls, refused: Refused) -> Unsure:
        return cls(refused.answer, refused.reason, refused.detail, permanent=refused.permanent)


def failed(reason: Reason, detail: str, *, permanent: bool = False) -> Refused:
    return Refused(Answer.FAILED, reason, detail, permanent=permanent)


class Stored(NamedTuple):
    place: Place
    existed: bool = False  # the same chunk was there, its record was read and fits


class Found(NamedTuple):
    header: ChunkHeader
    version: object = None  # which of several writes this was; handed to `quarantine`


def _all_of(left: int) -> int:
    return left


class Backend(ABC):
    """`give_way(left)`: set by the pool around it. A backend whose requests slow each other asks
    before it writes, and again after each piece, how many of the bytes `left` to write now: all, or
    a multiple of 4 KiB. It returns once no load is in the way."""

    give_way: Callable[[int], int] = staticmethod(_all_of)
    durable = True
    by_key = False
    delete_batch = 1  # deletes that go into one call
    attempts = 2  # reads that are tried before bytes that do not match are held against the medium

    def check(self) -> None:  # noqa: B027 - most have nothing to look at
        """ConfigError for what an operator must mend and that can be seen before `open`, which
        refuses it, too: nobody is asked, nothing is taken."""

    @abstractmethod
    def open(self) -> ProbeReport:
        """Open and probe. ConfigError for what an operator must mend; Refused for what may heal:
        then it is called again, by another thread."""

    @abstractmethod
    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        """See whether reading (and `write`: writing) works now. Refused if not. What it does
        besides, to tidy up, is over by the deadline, and never makes it fail."""

    @abstractmethod
    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        """Payload first, then its record. Refused: nothing of it will ever be shown."""

    @abstractmethod
    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        """The payload into `into`, and the record that lies with it, which names `len(into)` bytes.
        Refused MISS if nothing lies there, or a record of another length or generation; CORRUPT if
        the record itself does not hold."""

    @abstractmethod
    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        """OK or MISS or FAILED for each; Refused if none could be tried."""

    @abstractmethod
    def quarantine(self, key: Key, place: Place, version: object) -> None:
        """What was read there as `version` does not hold: it is never shown again, also not after
        a restart if the medium lets that be. Never raises; frees what can be freed."""

    @abstractmethod
    def recover(self) -> Iterator[Recovered]: ...

    @abstractmethod
    def cost(self, length: int) -> int: ...

    @abstractmethod
    def room(self, length: int) -> int: ...

    @abstractmethod
    def usage(self) -> Usage: ...

    @property
    def untidy(self) -> int:
        """How much of what was begun, and never ended, could be taken back now: a `probe` with
        `write` takes some of it back. From any thread."""
        return 0

    def to_empty(self, length: int) -> tuple[Place, ...]:
        return ()

    def notes(self) -> dict[str, int]:
        return {}

    @property
    def engine(self) -> str:
        """What moves the bytes now: may change when it had to fall back."""
        return "?"

    @abstractmethod
    def close(self) -> None:
        """Let go. No call is running. Idempotent."""
