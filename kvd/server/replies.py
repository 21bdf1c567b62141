"""Exactly once: which requests of a session were taken on, and what was answered.

The law of this module: a request id is carried out at most once. While it is being carried out a
retry waits for the same reply; afterwards it gets the same bytes again, until the client says that
it has them or the bound is reached. An id whose reply is gone is refused, never carried out anew.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum
from typing import NamedTuple

from kvd.native import plain_members

__all__ = ["IdSet", "ReplyCache", "Seen", "Taken"]

MAX_GAPS = 4096  # ids that were passed over; a client's ids increase by one
MAX_BYTES = 4 << 20  # of kept replies, a session


@plain_members
class Seen(Enum):
    """What a request id is to us."""

    NEW = 1  # now in flight: carry it out
    IN_FLIGHT = 2  # a retry of one that is being carried out: its reply will come
    ANSWERED = 3  # a retry: send the kept reply again
    GONE = 4  # carried out before, its reply is not kept any more
    TOO_MANY = 5  # the cap on requests in flight; nothing was noted
    TOO_SPARSE = 6  # the ids leave too many gaps; nothing was noted


class Taken(NamedTuple):
    seen: Seen
    reply: list[bytes] | None  # with ANSWERED


_NEW = Taken(Seen.NEW, None)


class IdSet:
    """Positive integers that come nearly in order: kept as runs, so that the set stays small."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # inclusive

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number <= self._ends[at]

    def __len__(self) -> int:
        """Runs, not members."""
        return len(self._starts)

    def add(self, number: int) -> None:
        starts, ends = self._starts, self._ends
        if ends and number == ends[-1] + 1:  # by far the most common
            ends[-1] = number
            return
        at = bisect_right(starts, number) - 1
        if at >= 0 and number <= ends[at]:
            return
        joins_left = at >= 0 and ends[at] + 1 == number
        joins_right = at + 1 < len(starts) and starts[at + 1] == number + 1
        if joins_left and joins_right:
            ends[at] = ends.pop(at + 1)
            del starts[at + 1]
        elif joins_left:
            ends[at] = number
        elif joins_right:
            starts[at + 1] = number
        else:
            starts.insert(at + 1, number)
            ends.insert(at + 1, number)


class ReplyCache:
    """One session's requests in flight and kept replies."""

    __slots__ = ("_acked", "_bytes", "_inflight", "_max_inflight", "_max_kept", "_replies", "_seen")

    def __init__(self, max_inflight: int, max_kept: int) -> None:
        self._max_inflight = max_inflight
        self._max_kept = max_kept
        self._seen = IdSet()
        self._inflight: set[int] = set()
        self._replies: dict[int, list[bytes]] = {}  # in order of completion
        self._bytes = 0
        self._acked = 0

    @property
    def inflight(self) -> int:
        return len(self._inflight)

    @property
    def kept(self) -> int:
        return len(self._replies)

    def take(self, request: int, ack: int, *, repeatable: bool = False) -> Taken:
        """A request has come. Only with NEW does the caller carry it out, and then calls `finish`
        exactly once for it. `repeatable`: it changes nothing, so instead of GONE it is NEW."""
        if ack > self._acked:
            self._acknowledge(ack)
        if request in self._inflight:
            return Taken(Seen.IN_FLIGHT, None)
        reply = self._replies.get(request)
        if reply is not None:
            return Taken(Seen.ANSWERED, reply)
        if request in self._seen and not repeatable:
            return Taken(Seen.GONE, None)
        if len(self._inflight) >= self._max_inflight:
            return Taken(Seen.TOO_MANY, None)
        if len(self._seen) >= MAX_GAPS:
            return Taken(Seen.TOO_SPARSE, None)
        self._seen.add(request)
        self._inflight.add(request)
        return _NEW

    def finish(self, request: int, reply: list[bytes], *, keep: bool = True) -> None:
        """The request was answered with these frames; they are kept for a retry, or not."""
        self._inflight.discard(request)
        if not keep or request <= self._acked:
            return
        size = sum(map(len, reply))
        self._replies[request] = reply
        self._bytes += size
        while len(self._replies) > self._max_kept or self._bytes > MAX_BYTES:
            self._forget(next(iter(self._replies)))

    def _acknowledge(self, ack: int) -> None:
        before, self._acked = self._acked, ack
        if ack - before <= len(self._replies):  # mostly: one or a few more than last time
            for request in range(before + 1, ack + 1):
                if request in self._replies:
                    self._forget(request)
        else:
            for request in [known for known in self._replies if known <= ack]:
                self._forget(request)

    def _forget(self, request: int) -> None:
        self._bytes -= sum(map(len, self._replies.pop(request)))
