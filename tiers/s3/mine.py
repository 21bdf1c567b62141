"""What this installation has in the bucket: its account.

The law of this module: an object counts from before it is written, so that many writers together
stay within the limit, until it is known to be deleted; one that may have been written counts, too,
until somebody has looked. What was deleted while a recovery lists is not taken up again from a page
that was read before.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Answer, Reason, Usage

_STALE = 1024  # ages that are out of date, beside twice as many as there are objects


class _Object(NamedTuple):
    nbytes: int
    written: float  # Unix seconds


class _Unsure(NamedTuple):
    nbytes: int
    since: int  # CLOCK_MONOTONIC


class Mine:
    """Objects by name. `aged`: their age will be asked for. From any thread."""

    def __init__(self, limit_bytes: int, *, aged: bool = True) -> None:
        self._limit = limit_bytes
        self._aged = aged
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._ages: list[tuple[float, str]] = []  # heap of (when written, name), some out of date
        self._unsure: OrderedDict[str, _Unsure] = OrderedDict()  # may have been written
        self._looked_at: dict[str, _Unsure] = {}  # of those, the ones that somebody asks for now
        self._used = 0
        self._gone: set[str] | None = None  # deleted while a recovery lists

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._objects

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._limit, self._used, self._used, len(self._objects))

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return max(0, self._limit - self._used)

    # -- writing --------------------------------------------------------------------------------

    def begin(self, name: str, nbytes: int) -> bool:
        """Room for an object that is about to be written, until `end`. False: it is ours already,
        and counted. Refused if the limit is reached."""
        with self._lock:
            if name in self._objects:
                return False
            if name in self._looked_at:
                raise failed(Reason.CONFLICT, "an earlier write of it is being taken back")
            self._sure(name)
            if self._used + nbytes > self._limit:
                raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
            self._used += nbytes
            return True

    def end(self, name: str, nbytes: int, *, written: bool) -> None:
        """What was begun is ours, or was not written."""
        with self._lock:
            if not written or name in self._objects:  # a recovery has found, and counted, it
                self._used -= nbytes
            if written:
                self._put(name, _Object(nbytes, time.time()))

    def _put(self, name: str, mine: _Object) -> None:
        self._objects[name] = mine
        if self._aged:
            heapq.heappush(self._ages, (mine.written, name))

    # -- what may have been written -------------------------------------------------------------

    def unsure(self, name: str, nbytes: int) -> None:
        """What was begun may have been written: it counts, and is to be looked for."""
        with self._lock:
            if name in self._objects:  # a recovery has found it
                self._used -= nbytes
            else:
                self._unsure[name] = _Unsure(nbytes, time.monotonic_ns())

    def look_for(self, age_ns: int) -> str | None:
        """The oldest of these, if it is so old; until `looked` nobody else gets it, and it can't be
        written."""
        with self._lock:
            name = next(iter(self._unsure), None)
            if name is None or self._unsure[name].since > time.monotonic_ns() - age_ns:
                return None
            self._looked_at[name] = self._unsure.pop(name)
            return name

    def looked(self, name: str, *, gone: bool) -> None:
        """It does not lie there as ours, now; or that could not be found out."""
        with self._lock:
            unsure = self._looked_at.pop(name)
            if gone:
                self._used -= unsure.nbytes
                if self._gone is not None:
                    self._gone.add(name)
            else:
                self._unsure[name] = unsure
                self._unsure.move_to_end(name, last=False)

    def _sure(self, name: str) -> None:
        """It is known now what became of it."""
        unsure = self._unsure.pop(name, None)
        if unsure is not None:
            self._used -= unsure.nbytes

    # -- deletion -------------------------------------------------------------------------------

    def among(self, names: Iterable[str]) -> list[str]:
        """Those that are ours."""
        with self._lock:
            return [name for name in names if name in self._objects]

    def older(self, unix_s: float, most: int) -> list[str]:
        """Objects that were written before; the oldest, and not more than `most`. They are told
        once: `keep` those that were not deleted."""
        with self._lock:
            old: list[str] = []
            while self._ages and self._ages[0][0] < unix_s and len(old) < most:
                written, name = heapq.heappop(self._ages)
                mine = self._objects.get(name)
                if mine is not None and mine.written == written:
                    old.append(name)
            return old

    def keep(self, names: Iterable[str]) -> None:
        """Of those that `older` told, these are still there."""
        with self._lock:
            for name in names:
                mine = self._objects.get(name)
                if mine is not None:
                    heapq.heappush(self._ages, (mine.written, name))

    def forget(self, names: Iterable[str]) -> None:
        """They are deleted."""
        with self._lock:
            for name in names:
                self._forget(name)

    def vanished(self, name: str) -> bool:
        """It is not there; whether it should have been."""
        with self._lock:
            if name not in self._objects:
                return False
            self._forget(name)
            return True

    def _forget(self, name: str) -> None:
        if self._gone is not None:
            self._gone.add(name)
        self._sure(name)
        mine = self._objects.pop(name, None)
        if mine is not None:
            self._used -= mine.nbytes
        if len(self._ages) > 2 * len(self._objects) + _STALE:
            self._ages = [(mine.written, name) for name, mine in self._objects.items()]
            heapq.heapify(self._ages)

    # -- recovery -------------------------------------------------------------------------------

    @contextmanager
    def listing(self) -> Iterator[None]:
        """While a recovery lists the bucket."""
        with self._lock:
            self._gone = set()
        try:
            yield
        finally:
            self._gone = None

    def listed(self, name: str, nbytes: int, written: float, *, ours: bool) -> bool:
        """An object was found there. False if it has been deleted since."""
        with self._lock:
            if (self._gone is not None and name in self._gone) or name in self._looked_at:
                return False
            if ours and name not in self._objects:
                self._sure(name)
                self._put(name, _Object(nbytes, written))
                self._used += nbytes
            return True
