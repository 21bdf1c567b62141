"""What this installation has in the bucket: its account.

The law of this module: an object counts from before it is written, so that many writers together
stay within the limit, until it is known to be deleted. What was deleted while a recovery lists is
not taken up again from a page that was read before.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvd.tiers.backend import Refused
from kvd.tiers.base import Answer, Reason, Usage


class _Object(NamedTuple):
    nbytes: int
    written: float  # Unix seconds


class Mine:
    """Objects by name, oldest first. From any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, _Object] = OrderedDict()
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
            if self._used + nbytes > self._limit:
                raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
            self._used += nbytes
            return True

    def end(self, name: str, nbytes: int, *, written: bool) -> None:
        """What was begun is ours, or was not written."""
        with self._lock:
            if written:
                self._objects[name] = _Object(nbytes, time.time())
            else:
                self._used -= nbytes

    # -- deletion -------------------------------------------------------------------------------

    def among(self, names: Iterable[str]) -> list[str]:
        """Those that are ours."""
        with self._lock:
            return [name for name in names if name in self._objects]

    def older(self, unix_s: float, most: int) -> list[str]:
        """Objects that were written before; the oldest, and not more than `most`."""
        with self._lock:
            old: list[str] = []
            for name, mine in self._objects.items():
                if mine.written > unix_s or len(old) >= most:
                    break
                old.append(name)
            return old

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
        mine = self._objects.pop(name, None)
        if mine is not None:
            self._used -= mine.nbytes

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
            if self._gone is not None and name in self._gone:
                return False
            if ours and name not in self._objects:
                self._objects[name] = _Object(nbytes, written)
                self._used += nbytes
            return True
