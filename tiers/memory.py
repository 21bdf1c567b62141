"""A tier in plain memory: the oracle that the others are held against.

The law of this module: it is naive. A dict, copies of bytes, one lock; what the contract says and
nothing else. It is no tier for production: what it holds is gone with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from kvd.chunk import HEADER_BYTES, IDENTITY_DTYPE, ChunkHeader
from kvd.tiers.backend import Backend, Found, Refused, Stored
from kvd.tiers.base import Answer, Key, Place, ProbeReport, Reason, Recovered, Usage


class MemoryBackend(Backend):
    durable = False

    def __init__(self, limit_bytes: int, *, largest: int | None = None) -> None:
        self._limit = limit_bytes
        self._largest = limit_bytes if largest is None else min(largest, limit_bytes)
        self._lock = threading.Lock()
        self._there: dict[int, tuple[bytes, bytes]] = {}  # at -> record, payload
        self._used = 0
        self._next = 1

    @property
    def engine(self) -> str:
        return "memory"

    def open(self) -> ProbeReport:
        return ProbeReport(self.engine, f"{self._limit} bytes of plain memory")

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        return self.open()

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        with self._lock:
            cost = self.cost(len(source))
            if self._used + cost > self._limit:
                raise Refused(Answer.NO_SPACE, Reason.SPACE, "the limit is reached")
            at = self._next
            self._next += 1
            self._there[at] = (header._replace(generation=at).pack(), bytes(source))
            self._used += cost
            return Stored(Place(at, at))

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        there = self._there.get(place.at)
        if there is None or place.at != place.generation or len(there[1]) != len(into):
            raise Refused(Answer.MISS)
        record, payload = there
        into[:] = payload
        return Found(ChunkHeader.unpack(record), place.at)

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        return [Answer.OK if self._drop(place) else Answer.MISS for _, place in items]

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        self._drop(place)

    def _drop(self, place: Place) -> bool:
        with self._lock:
            if place.at != place.generation or place.at not in self._there:
                return False
            _, payload = self._there.pop(place.at)
            self._used -= self.cost(len(payload))
            return True

    def recover(self) -> Iterator[Recovered]:
        if self._there:
            at = np.fromiter(self._there, np.uint64)
            raw = b"".join(record[: IDENTITY_DTYPE.itemsize] for record, _ in self._there.values())
            yield Recovered(np.frombuffer(raw, IDENTITY_DTYPE), at, at)

    def cost(self, length: int) -> int:
        return length + HEADER_BYTES

    def room(self, length: int) -> int:
        if self.cost(length) > self._largest:
            return -1
        return (self._limit - self._used) // self.cost(length)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._limit, self._used, self._used, len(self._there))

    def close(self) -> None:
        self._there.clear()
        self._used = 0
