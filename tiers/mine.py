"""What this installation has on a medium that others write to as well: its account.

The law of this module: what is written counts from before it is, so that many writers together
stay within the limit, until it is known not to lie there; what may have been written counts, too,
until somebody has looked, whatever a later write of it came to. What was deleted while a recovery
lists is not taken up again from a page that was read before.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Answer, Reason, Usage

Name = TypeVar("Name", str, bytes)

_STALE = 1024  # ages that are out of date, beside twice as many as there are objects


class _Object(NamedTuple):
    nbytes: int
    written: float  # Unix seconds


class _Unsure(NamedTuple):
    nbytes: int
    since: int  # CLOCK_MONOTONIC


class Mine(Generic[Name]):
    """Objects by name. `aged`: their age will be asked for. From any thread; never two writes of
    one name at a time."""

    def __init__(self, limit_bytes: int, *, aged: bool = False) -> None:
        self._limit = limit_bytes
        self._aged = aged
        self._lock = threading.Lock()
        self._objects: dict[Name, _Object] = {}
        self._ages: list[tuple[float, Name]] = []  # heap of (when written, name), some out of date
        self._leaving: set[Name] = set()  # told by `older`, and being deleted
        self._unsure: OrderedDict[Name, _Unsure] = OrderedDict()  # may be there, oldest doubt first
        self._again: dict[Name, _Unsure] = {}  # of those, the ones that are written again now
        self._looked_at: dict[Name, _Unsure] = {}  # and the ones that somebody asks for now
        self._used = 0
        self._gone: set[Name] | None = None  # deleted while a recovery lists

    def __contains__(self, name: Name) -> bool:
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

    def begin(self, name: Name, nbytes: int) -> bool:
        """Room for an object that is about to be written, until `end`, `failed` or `unsure`.
        False: it is ours already, and counted. Refused if the limit is reached."""
        with self._lock:
            if name in self._looked_at:
                raise failed(Reason.CONFLICT, "an earlier write of it is being taken back")
            if name in self._leaving:
                raise failed(Reason.CONFLICT, "its time is over, and it is being deleted")
            if name in self._objects:
                return False
            earlier = self._unsure.get(name)
            more = nbytes - (earlier.nbytes if earlier else 0)
            if self._used + more > self._limit:
                raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
            if earlier:
                self._again[name] = self._unsure.pop(name)
            self._used += more
            return True

    def end(self, name: Name, nbytes: int, *, ours: bool) -> None:
        """It is known what lies there: what was begun, or somebody else's."""
        with self._lock:
            self._again.pop(name, None)
            if not ours or name in self._objects:  # a recovery has found, and counted, it
                self._used -= nbytes
            if ours:
                self._put(name, _Object(nbytes, time.time()))

    def failed(self, name: Name, nbytes: int) -> None:
        """What was begun was not written. Whether an earlier write of it was is no clearer."""
        with self._lock:
            self._used -= nbytes
            earlier = self._again.pop(name, None)
            if earlier and name not in self._objects:
                self._used += earlier.nbytes
                self._doubt(name, earlier.nbytes)

    def renewed(self, name: Name, nbytes: int) -> None:
        """What was ours already, so that nothing was begun, has been written anew."""
        with self._lock:
            before = self._objects.get(name)
            self._used += nbytes - (before.nbytes if before else 0)
            self._put(name, _Object(nbytes, time.time()))

    def _put(self, name: Name, mine: _Object) -> None:
        self._objects[name] = mine
        if self._aged:
            heapq.heappush(self._ages, (mine.written, name))

    # -- what may have been written -------------------------------------------------------------

    def unsure(self, name: Name, nbytes: int) -> None:
        """What was begun may have been written: it counts, and is to be looked for."""
        with self._lock:
            self._again.pop(name, None)
            if name in self._objects:  # a recovery has found it
                self._used -= nbytes
            else:
                self._doubt(name, nbytes)

    def _doubt(self, name: Name, nbytes: int) -> None:
        """From now on, so that the oldest stay first."""
        self._unsure[name] = _Unsure(nbytes, time.monotonic_ns())

    def unsettled(self, before: int) -> int:
        """How many of these there are since `before` (CLOCK_MONOTONIC), or longer."""
        with self._lock:
            count = 0
            for unsure in self._unsure.values():
                if unsure.since > before:
                    break
                count += 1
            return count

    def look_for(self, before: int) -> tuple[Name, int] | None:
        """The name and the bytes of the oldest of these; until `looked` nobody else gets it, and
        it can't be written."""
        with self._lock:
            name = next(iter(self._unsure), None)
            if name is None or self._unsure[name].since > before:
                return None
            unsure = self._looked_at[name] = self._unsure.pop(name)
            return name, unsure.nbytes

    def looked(self, name: Name, *, gone: bool) -> None:
        """It does not lie there as ours, now; or that could not be found out: then it is the turn
        of the others first."""
        with self._lock:
            unsure = self._looked_at.pop(name)
            if not gone:
                self._doubt(name, unsure.nbytes)
                return
            self._used -= unsure.nbytes
            if self._gone is not None:
                self._gone.add(name)

    # -- deletion -------------------------------------------------------------------------------

    def among(self, names: Iterable[Name]) -> list[Name]:
        """Those that are ours."""
        with self._lock:
            return [name for name in names if name in self._objects]

    def older(self, unix_s: float, most: int) -> list[Name]:
        """Objects that were written before; the oldest, and not more than `most`. Until `deleted`
        nobody else gets them, and they can't be written."""
        with self._lock:
            old: list[Name] = []
            while self._ages and self._ages[0][0] < unix_s and len(old) < most:
                written, name = heapq.heappop(self._ages)
                mine = self._objects.get(name)
                if mine is None or mine.written != written or name in self._leaving:
                    continue
                old.append(name)
                self._leaving.add(name)
            return old

    def deleted(self, names: Iterable[Name]) -> None:
        """What `older` told was to be deleted. What was not forgotten is told again."""
        with self._lock:
            for name in names:
                self._leaving.discard(name)
                mine = self._objects.get(name)
                if mine is not None:
                    heapq.heappush(self._ages, (mine.written, name))

    def forget(self, names: Iterable[Name]) -> None:
        """They are deleted."""
        with self._lock:
            for name in names:
                self._forget(name)

    def vanished(self, name: Name) -> bool:
        """It is not there; whether it should have been."""
        with self._lock:
            if name not in self._objects:
                return False
            self._forget(name)
            return True

    def _forget(self, name: Name) -> None:
        if self._gone is not None:
            self._gone.add(name)
        mine = self._objects.pop(name, None)
        if mine is not None:
            self._used -= mine.nbytes
        if len(self._ages) > 2 * len(self._objects) + _STALE:
            self._ages = [(mine.written, name) for name, mine in self._objects.items()]
            heapq.heapify(self._ages)

    # -- recovery -------------------------------------------------------------------------------

    @contextmanager
    def listing(self) -> Iterator[None]:
        """While a recovery lists what lies there."""
        with self._lock:
            self._gone = set()
        try:
            yield
        finally:
            self._gone = None

    def listed(self, name: Name, nbytes: int, written: float, *, ours: bool) -> bool:
        """An object was found there. False if it has been deleted since, or is about to be."""
        with self._lock:
            if (self._gone is not None and name in self._gone) or name in self._looked_at:
                return False
            if ours and name not in self._objects:
                unsure = self._unsure.pop(name, None)
                self._used += nbytes - (unsure.nbytes if unsure else 0)
                self._put(name, _Object(nbytes, written))
            return True
