"""Crossing: one job carried out on a backend, and what came of it judged.

The law of this module: here, and only here, bytes are judged. A read is OK only after its record
named the key and its digest held over the caller's buffer; a write begins only if its source holds
its own digest. What does not hold is quarantined, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvd.chunk import ChunkHeader, HeaderFlag, payload_digest
from kvd.chunk import State as RecordState
from kvd.tiers.backend import Backend, Found, Stored
from kvd.tiers.base import Answer, Completion, Delete, Job, Key, Read, Write
from kvd.tiers.meter import Meter
from kvd.tiers.seats import Seats

__all__ = ["Crossing"]

log = logging.getLogger(__name__)


class Crossing:
    """From any worker's thread. What the backend raises passes through."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        meter: Meter,
        clock: Callable[[], int],
        verify_source: bool,
        seats: Seats,
    ) -> None:
        self._name = name
        self._backend = backend
        self._meter = meter
        self._clock = clock
        self._verify_source = verify_source
        self._seats = seats

    def carry_out(self, jobs: list[Job]) -> list[Completion]:
        """One write or read, or deletes that go together."""
        job = jobs[0]
        if isinstance(job, Write):
            return [self._write(job)]
        if isinstance(job, Read):
            return [self._read(job)]
        deletes = [job for job in jobs if isinstance(job, Delete)]
        answers = self._backend.delete(
            [(job.key, job.place) for job in deletes], min(job.deadline for job in deletes)
        )
        return [Completion(job, answer) for job, answer in zip(deletes, answers, strict=True)]

    def _write(self, job: Write) -> Completion:
        header, source = job.header, memoryview(job.source).cast("B")
        if header.length != len(source) or not header.flags & HeaderFlag.SEALED:
            return Completion(
                job, Answer.CORRUPT, detail="the record is not sealed, or of another length"
            )
        if self._backend.room(header.length) < 0:
            return Completion(
                job,
                Answer.TOO_LARGE,
                detail=f"{header.length} bytes can never fit into {self._name}",
            )
        if self._verify_source and payload_digest(source) != header.digest:
            return Completion(job, Answer.CORRUPT, detail="the source does not match its digest")
        ready = header._replace(state=RecordState.READY)
        stored = self._put(job, ready, source)
        answer = Answer.EXISTS if stored.existed else Answer.OK
        return Completion(job, answer, place=stored.place, nbytes=len(source))

    def _read(self, job: Read) -> Completion:
        into = memoryview(job.into).cast("B")
        problem = ""
        for attempt in range(self._backend.attempts):
            if attempt and self._clock() >= job.deadline:
                break
            found = self._get(job, into)
            problem = mismatch(job.key, found.header, into)
            if not problem:
                if attempt:
                    self._meter.count("mended_reads")
                return Completion(job, Answer.OK, header=found.header, nbytes=len(into))
            self._meter.count("mismatched_reads")
        self._backend.quarantine(job.key, job.place, found.version)
        self._meter.count("quarantined")
        log.error("tier %s: chunk %s is quarantined: %s", self._name, job.key.chunk.hex(), problem)
        return Completion(job, Answer.CORRUPT, detail=problem)

    def _put(self, job: Write, ready: ChunkHeader, source: memoryview) -> Stored:
        seated = self._seats.take(write=True)
        try:
            return self._backend.put(Key.of(ready), ready, source, job.deadline)
        finally:
            if seated:
                self._seats.give_back(write=True)

    def _get(self, job: Read, into: memoryview) -> Found:
        seated = self._seats.take(write=False)
        try:
            return self._backend.get(job.key, job.place, into, job.deadline)
        finally:
            if seated:
                self._seats.give_back(write=False)


def mismatch(key: Key, header: ChunkHeader, into: memoryview) -> str:
    """What does not hold of a chunk that was read; empty if all does."""
    if Key.of(header) != key:
        return "the record that lies there names another chunk"
    if header.state != RecordState.READY or not header.flags & HeaderFlag.SEALED:
        return "the record that lies there is not of a finished chunk"
    if header.length != len(into):
        return f"the record names {header.length} bytes, {len(into)} were asked"
    if payload_digest(into) != header.digest:
        return "the payload does not match its digest"
    return ""
