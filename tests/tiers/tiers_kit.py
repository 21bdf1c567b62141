"""What tests of tiers share: chunks with records that hold, aligned memory, a rig around a tier."""

from __future__ import annotations

import mmap
import random
import select
import time
from collections.abc import Callable, Iterable, Iterator

from kvd.chunk import ChunkHeader, HeaderFlag, Kind, State, payload_digest
from kvd.tiers.backend import Backend
from kvd.tiers.base import (
    NEVER,
    NOWHERE,
    Completion,
    Completions,
    Delete,
    Job,
    Key,
    Place,
    Probe,
    Read,
    Write,
)
from kvd.tiers.breaker import BreakerConfig
from kvd.tiers.faults import Faults, FaultyBackend
from kvd.tiers.pool import PoolConfig, PooledTier

MS = 1_000_000
SECOND = 1_000 * MS
WAIT_S = 30.0

# Quick to open, quick to heal: a test need not wait for what an operator would.
CONFIG = PoolConfig(
    workers=3,
    writers=2,
    stuck_ns=2 * SECOND,
    breaker=BreakerConfig(failures=3, pause_ns=50 * MS, max_pause_ns=200 * MS),
)


def in_(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


class Chunk:
    """A chunk with content of its own: `number` decides key and bytes."""

    def __init__(
        self, number: int, length: int = 10_000, *, shard: int = 0, **fields: object
    ) -> None:
        self.number = number
        seed = random.Random(number * 1_000_003 + length + shard)
        self.memory = aligned(length)
        self.memory[:] = seed.randbytes(length)
        self.header = ChunkHeader(
            kind=Kind.PREFIX,
            state=State.READY,
            namespace_digest=number.to_bytes(4, "little") * 8,
            spec=b"s" * 32,
            chunk=seed.randbytes(32),
            parent=bytes(32),
            shard=shard,
            shard_count=1,
            index=number,
            tokens=256,
            fingerprint=seed.randbytes(16),
            flags=HeaderFlag.SEALED,
            length=length,
            generation=77,
            epoch=5,
            session=bytes(16),
            created_unix_ns=1_700_000_000 * SECOND + number,
            digest=payload_digest(self.memory),
        )._replace(**fields)

    @property
    def key(self) -> Key:
        return Key.of(self.header)

    @property
    def length(self) -> int:
        return self.header.length

    def write(self, deadline: int = NEVER) -> Write:
        return Write(self, self.header, self.memory, deadline)

    def read(
        self, place: Place = NOWHERE, into: memoryview | None = None, deadline: int = NEVER
    ) -> Read:
        return Read(self, self.key, place, aligned(self.length) if into is None else into, deadline)

    def delete(self, place: Place = NOWHERE, deadline: int = NEVER) -> Delete:
        return Delete(self, self.key, place, deadline)


def aligned(length: int) -> memoryview:
    """Writable memory at a page's start, with the rest of its last page behind, as a slot has."""
    return memoryview(mmap.mmap(-1, max(4096, -(-length // 4096) * 4096)))[:length]


class Rig:
    """A tier over a medium, with a fault layer that is empty at first."""

    def __init__(self, backend: Backend, name: str = "t", config: PoolConfig = CONFIG) -> None:
        self.faults = Faults()
        self.completions = Completions()
        self.tier = PooledTier(name, FaultyBackend(backend, self.faults), self.completions, config)
        self.taken: list[Completion] = []

    def start(self) -> Rig:
        self.report = self.tier.start()
        return self

    def recovered(self) -> dict[Key, Place]:
        found: dict[Key, Place] = {}
        for batch in self.tier.recover():
            for i in range(len(batch.records)):
                assert batch.key(i) not in found, "a key is told once"
                found[batch.key(i)] = batch.place(i)
        return found

    def close(self) -> None:
        self.faults.release()
        self.tier.close()
        self.completions.close()

    def do(self, jobs: Job | Iterable[Job], within_s: float = WAIT_S) -> list[Completion]:
        """Hand over and wait for all of them; in the order of the jobs."""
        todo = [jobs] if isinstance(jobs, Write | Read | Delete | Probe) else list(jobs)
        self.tier.submit(todo)
        return self.wait(todo, within_s)

    def wait(self, todo: list[Job], within_s: float = WAIT_S) -> list[Completion]:
        end = time.monotonic() + within_s
        answers: dict[int, Completion] = {}
        wanted = {id(job) for job in todo}
        while len(answers) < len(todo):
            for done in [*self.taken, *self.completions.take()]:
                assert id(done.job) not in answers, "a job is completed once"
                if id(done.job) in wanted:
                    answers[id(done.job)] = done
            self.taken = []
            left = end - time.monotonic()
            assert left > 0, f"{len(todo) - len(answers)} of {len(todo)} jobs were not completed"
            if len(answers) < len(todo):
                select.select([self.completions], [], [], min(left, 1.0))
        return [answers[id(job)] for job in todo]

    def one(self, job: Job, within_s: float = WAIT_S) -> Completion:
        return self.do(job, within_s)[0]

    def until(self, condition: Callable[[], object], within_s: float = 15.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, "did not come true in time"
            time.sleep(0.01)


def chunks(count: int, length: int = 10_000, first: int = 1) -> Iterator[Chunk]:
    return (Chunk(n, length) for n in range(first, first + count))
