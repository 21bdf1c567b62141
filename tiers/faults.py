"""A layer of faults between a tier's threads and its medium.

The law of this module: it is a layer, not a mock. The medium below is the real one, and everything
above is too; what comes between is what real media do: refuse, come back short, tear a write, lie,
take their time. A plan says which calls are hit; whatever no fault names passes untouched.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvd.chunk import ChunkHeader
from kvd.tiers.backend import Backend, Found, Refused, Stored, failed
from kvd.tiers.base import NEVER, Answer, Key, Place, ProbeReport, Reason, Recovered, Usage


class Fault(Enum):
    """What happens to a call. Those with a reason refuse it; the others are below."""

    EIO = "eio"
    ENOSPC = "enospc"
    EROFS = "erofs"
    EACCES = "eacces"
    ESTALE = "estale"
    RESET = "reset"
    SLOW_LORIS = "slow_loris"  # nothing but a trickle until the deadline
    SKEW = "skew"
    HTTP_403 = "403"
    HTTP_404 = "404"
    HTTP_409 = "409"
    HTTP_412 = "412"
    HTTP_429 = "429"
    HTTP_500 = "500"
    HTTP_503 = "503"
    SHORT_READ = "short_read"  # half of the payload arrives, then an error
    LATE_ERROR = "late_error"  # the call is carried out, and then refused
    TORN_WRITE = "torn_write"  # the medium says yes, and keeps the first half only
    LOST_WRITE = "lost_write"  # the medium says yes, and keeps nothing
    WRONG_BYTES = "wrong_bytes"  # a bit of what is read is another
    WRONG_RECORD = "wrong_record"  # what is read belongs to another key
    LATENCY = "latency"  # it takes `seconds` longer
    HANG = "hang"  # it does not come back until `Faults.release`


_REFUSALS: dict[Fault, tuple[Answer, Reason, bool]] = {
    Fault.EIO: (Answer.FAILED, Reason.IO, False),
    Fault.ENOSPC: (Answer.NO_SPACE, Reason.SPACE, False),
    Fault.EROFS: (Answer.FAILED, Reason.READ_ONLY, True),
    Fault.EACCES: (Answer.FAILED, Reason.DENIED, False),
    Fault.ESTALE: (Answer.FAILED, Reason.IO, False),
    Fault.RESET: (Answer.FAILED, Reason.IO, False),
    Fault.SKEW: (Answer.FAILED, Reason.SKEW, True),
    Fault.HTTP_403: (Answer.FAILED, Reason.DENIED, True),
    Fault.HTTP_404: (Answer.MISS, Reason.NONE, False),
    Fault.HTTP_409: (Answer.FAILED, Reason.CONFLICT, False),
    Fault.HTTP_412: (Answer.FAILED, Reason.CONFLICT, False),
    Fault.HTTP_429: (Answer.FAILED, Reason.THROTTLED, False),
    Fault.HTTP_500: (Answer.FAILED, Reason.IO, False),
    Fault.HTTP_503: (Answer.FAILED, Reason.THROTTLED, False),
}

Where = Callable[[Key | None], bool]


@dataclass(slots=True)
class Rule:
    """Hits calls of `op` ("put", "get", "delete", "probe", "open") number `first` and after,
    `times` of them (None: for ever), each with `chance`, where `where(key)` holds."""

    op: str
    fault: Fault
    first: int = 0
    times: int | None = None
    chance: float = 1.0
    where: Where = field(default=lambda key: True)
    seconds: float = 0.0
    seen: int = 0
    hits: int = 0


class Faults:
    """A plan, changed at any time from any thread. `seed` makes its chance the same each run."""

    def __init__(self, seed: int = 1) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._released = threading.Event()
        self.rules: list[Rule] = []
        self.calls: dict[str, int] = {}

    def add(self, op: str, fault: Fault, **how: object) -> Rule:
        rule = Rule(op, fault, **how)  # type: ignore[arg-type]
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()

    def release(self) -> None:
        """What hangs goes on; later HANGs pass."""
        self._released.set()

    def pick(self, op: str, key: Key | None) -> Rule | None:
        with self._lock:
            self.calls[op] = self.calls.get(op, 0) + 1
            for rule in self.rules:
                if rule.op != op or not rule.where(key):
                    continue
                rule.seen += 1
                if rule.seen <= rule.first or (rule.times is not None and rule.hits >= rule.times):
                    continue
                if self._random.random() < rule.chance:
                    rule.hits += 1
                    return rule
        return None

    def before(self, rule: Rule | None, deadline: int) -> None:
        """What the fault does before the medium is asked."""
        if rule is None:
            return
        if rule.fault is Fault.LATENCY:
            time.sleep(rule.seconds)
        elif rule.fault is Fault.HANG:
            self._released.wait(60)
        elif rule.fault is Fault.SLOW_LORIS:
            left = rule.seconds if deadline == NEVER else (deadline - time.monotonic_ns()) / 1e9
            time.sleep(max(0.0, left))
            raise Refused(Answer.TIMEOUT, Reason.SLOW, "a byte a second until the deadline")
        elif rule.fault in _REFUSALS:
            answer, reason, permanent = _REFUSALS[rule.fault]
            raise Refused(answer, reason, f"injected {rule.fault.value}", permanent=permanent)

    def after(self, rule: Rule | None) -> None:
        if rule is not None and rule.fault is Fault.LATE_ERROR:
            raise failed(Reason.IO, "injected after the fact")


class FaultyBackend(Backend):
    def __init__(self, below: Backend, faults: Faults) -> None:
        self.below = below
        self.faults = faults
        self.durable = below.durable
        self.by_key = below.by_key
        self.delete_batch = below.delete_batch
        self.attempts = below.attempts

    @property
    def give_way(self) -> Callable[[int], int]:
        return self.below.give_way

    @give_way.setter
    def give_way(self, way: Callable[[int], int]) -> None:
        self.below.give_way = way

    def open(self) -> ProbeReport:
        self.faults.before(self.faults.pick("open", None), NEVER)
        return self.below.open()

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        self.faults.before(self.faults.pick("probe", None), deadline)
        return self.below.probe(deadline, write=write)

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        rule = self.faults.pick("put", key)
        self.faults.before(rule, deadline)
        if rule is not None and rule.fault is Fault.LOST_WRITE:
            return Stored(Place(1 << 62, 1 << 62))
        if rule is not None and rule.fault is Fault.TORN_WRITE:
            half = len(source) // 2
            torn = bytes(source[:half]) + bytes(byte ^ 0x5A for byte in source[half:])
            return self.below.put(key, header, memoryview(torn), deadline)
        stored = self.below.put(key, header, source, deadline)
        if rule is not None and rule.fault is Fault.LATE_ERROR and not stored.existed:
            # What refuses a write leaves nothing of it: that is the backend's duty, so it is ours.
            self.below.delete([(key, stored.place)], NEVER)
        self.faults.after(rule)
        return stored

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        rule = self.faults.pick("get", key)
        self.faults.before(rule, deadline)
        found = self.below.get(key, place, into, deadline)
        if rule is None:
            return found
        if rule.fault is Fault.SHORT_READ:
            into[len(into) // 2 :] = bytes(len(into) - len(into) // 2)
            raise failed(Reason.SHORT, f"{len(into) // 2} of {len(into)} bytes came")
        if rule.fault is Fault.WRONG_BYTES:
            into[len(into) // 3] ^= 0x10
        if rule.fault is Fault.WRONG_RECORD:
            other = bytes(byte ^ 0xFF for byte in found.header.chunk)
            return Found(found.header._replace(chunk=other), found.version)
        self.faults.after(rule)
        return found

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        rule = self.faults.pick("delete", items[0][0])
        self.faults.before(rule, deadline)
        answers = self.below.delete(items, deadline)
        self.faults.after(rule)
        return answers

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        self.below.quarantine(key, place, version)

    def recover(self) -> Iterator[Recovered]:
        return self.below.recover()

    def cost(self, length: int) -> int:
        return self.below.cost(length)

    def room(self, length: int) -> int:
        return self.below.room(length)

    def usage(self) -> Usage:
        return self.below.usage()

    @property
    def untidy(self) -> int:
        return self.below.untidy

    def to_empty(self, length: int) -> tuple[Place, ...]:
        return self.below.to_empty(length)

    def notes(self) -> dict[str, int]:
        return self.below.notes()

    @property
    def engine(self) -> str:
        return self.below.engine

    def close(self) -> None:
        self.below.close()
