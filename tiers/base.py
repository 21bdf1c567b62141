"""The contract of a tier: where chunks lie that are not in DRAM.

The law of this module: a tier keeps bytes and tells the truth about them. It decides nothing: what
is written, kept, promoted or deleted is its caller's business, and so is single-flight (one job at
a time for one key). Nothing here blocks the caller: a job is handed over and answered by exactly
one Completion, come what may. Three rules hold for every tier, on every medium, under every fault:

  1. OK of a read means: the record that lies there names the key that was asked, and the digest of
     the very bytes that are now in the caller's buffer is the record's. Anything else is not OK.
  2. OK of a write means: a read that begins afterwards finds it, also after SIGKILL (where the
     tier is `durable`). Any other answer means: no read and no recovery will ever show it, or
     show it whole.
  3. A buffer belongs to the tier from `submit` until the completion is taken, and not one moment
     longer. A deadline shortens a job as far as the medium lets it; it never breaks this rule.

Times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import ChunkHeader

Buffer = bytes | bytearray | memoryview

NEVER = (1 << 63) - 1  # the deadline of a job that has none


class Key(NamedTuple):
    """What a chunk's shard is called in a tier: the identity in its record."""

    kind: int
    namespace: bytes  # digest, 32 bytes
    spec: bytes  # digest, 32 bytes
    chunk: bytes  # hash, 32 bytes
    shard: int

    @classmethod
    def of(cls, header: ChunkHeader) -> Key:
        return cls(header.kind, header.namespace_digest, header.spec, header.chunk, header.shard)

    def pack(self) -> bytes:
        """101 bytes, the same for the same key for ever: what storage names are made of."""
        return (
            bytes((self.kind,))
            + self.namespace
            + self.spec
            + self.chunk
            + self.shard.to_bytes(4, "little")
        )


class Place(NamedTuple):
    """Where a tier put a shard. Means nothing to anybody else; both fit an unsigned 64-bit column.
    A place that was deleted, or given to another chunk since, has another generation: a read
    through a stale one is a MISS."""

    at: int
    generation: int


NOWHERE = Place(0, 0)  # for tiers that find by key alone


class Answer(Enum):
    """How one job ended. Only OK and EXISTS say that the chunk is there."""

    OK = "ok"
    EXISTS = "exists"  # write: the same chunk was there already, and its record was read and fits
    MISS = "miss"  # read: not there, or something else is; delete: was not there (no error)
    CORRUPT = "corrupt"  # read: bytes or record do not hold, and it will not be shown again
    #                      write: the source does not match its own digest; nothing was written
    NO_SPACE = "no_space"  # write: within the limit, but there is no room now; delete something
    TOO_LARGE = "too_large"  # write: can never fit here; nothing should be deleted for it
    TIMEOUT = "timeout"  # the deadline passed first
    FAILED = "failed"  # the medium refused: see `reason` and `detail`
    OFF = "off"  # not tried: the breaker is open, or the tier is closed


class Reason(Enum):
    """Why a medium refused: the label of error counters, short and fixed."""

    NONE = "none"
    IO = "io"  # EIO, a reset connection, a 5xx that would not end
    SHORT = "short"  # fewer bytes than there should be
    SPACE = "space"  # ENOSPC, EDQUOT, the reserve, Redis' maxmemory
    READ_ONLY = "read_only"  # EROFS, or a key without the right to put
    DENIED = "denied"  # EACCES, 401, 403
    CREDENTIALS = "credentials"  # none, or unknown ones, or a wrong signature
    SKEW = "clock_skew"  # the server's clock and ours differ too much
    NOT_FOUND = "not_found"  # the bucket or directory itself is gone
    REGION = "region"  # the bucket lives elsewhere
    THROTTLED = "throttled"  # 429, SlowDown
    UNREACHABLE = "unreachable"  # refused, no route, no name
    SLOW = "slow"  # a timeout of the medium
    CONFLICT = "conflict"  # somebody else's object lies there, or keeps being written
    FOREIGN = "foreign"  # what lies there was not written by this installation
    OTHER = "other"


class State(Enum):
    READY = "ready"
    DEGRADED = "degraded"  # refuses reads or writes for now, tries again by itself
    OFF = "off"  # not started, or closed


# -- jobs ---------------------------------------------------------------------------------------


class Use(Enum):
    """What a read is for. Within one tier, the first goes first."""

    LOAD = "load"  # an engine waits for it
    MOVE = "move"  # to be written to another tier; goes with writes
    SCRUB = "scrub"  # to see whether it holds
    PREFETCH = "prefetch"  # somebody may ask for it


class Write(NamedTuple):
    """Put a chunk's shard down. Pre: `header` is SEALED and READY with `length` = len(source);
    the source does not change until the completion; nothing is known here under this key.
    Answers OK (`place` says where), EXISTS (likewise), CORRUPT, NO_SPACE, TOO_LARGE, TIMEOUT,
    FAILED, OFF."""

    token: object  # handed back, means nothing here
    header: ChunkHeader
    source: Buffer
    deadline: int = NEVER
    tenant: bytes = b""  # whose share of the bandwidth it takes; empty: the key's namespace


class Read(NamedTuple):
    """Fill `into` (writable, exactly the payload's length). Answers OK (`header` is the record as
    it lies there), MISS, CORRUPT, TIMEOUT, FAILED, OFF; unless OK, `into` may hold anything."""

    token: object
    key: Key
    place: Place
    into: Buffer
    deadline: int = NEVER
    tenant: bytes = b""
    use: Use = Use.LOAD


class Delete(NamedTuple):
    """Forget it, and free its bytes. Idempotent: MISS if it was not there. Answers OK, MISS,
    TIMEOUT, FAILED, OFF. A chunk whose deletion failed may come back by `recover`."""

    token: object
    key: Key
    place: Place
    deadline: int = NEVER
    tenant: bytes = b""


class Probe(NamedTuple):
    """See whether the medium works now, by writing and reading. OK: `detail` is the ProbeReport's
    line, and the breakers are closed, unless it only looks after something else (`heals`): that a
    small object goes through does not say that chunks do. Answers OK, TIMEOUT, FAILED."""

    token: object
    deadline: int = NEVER
    heals: bool = True


Job = Write | Read | Delete | Probe


class Completion(NamedTuple):
    """The one answer to a job."""

    job: Job
    answer: Answer
    place: Place = NOWHERE  # of a write
    header: ChunkHeader | None = None  # the record: of a read that is OK
    reason: Reason = Reason.NONE
    detail: str = ""  # for people; never holds a secret
    nbytes: int = 0  # payload bytes moved
    elapsed_ns: int = 0  # in the medium, without waiting in the queue
    room: int = -1  # of a write that is OK, EXISTS or NO_SPACE: what `Tier.room` says after it
    empty: tuple[Place, ...] = ()  # of one with NO_SPACE: what `Tier.to_empty` says


class Completions:
    """Where workers put completions and the loop takes them. One may serve many tiers.

    `fileno()` becomes readable when there is something to take."""

    def __init__(self) -> None:
        self._done: deque[Completion] = deque()
        self._told = False  # the loop was, and has not come yet
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def put(self, completion: Completion) -> None:
        """From any thread; never blocks, and drops nothing unless closed."""
        self._done.append(completion)
        if not self._told:  # each time it is a system call, and the interpreter is another's
            self.again()

    def take(self) -> list[Completion]:
        """All that is there, oldest first. From one thread."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        self._told = False  # before the first is taken: who puts one from here on tells again
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def again(self) -> None:
        """Not all that was taken was dealt with: be readable once more."""
        if self._fd >= 0:
            self._told = True
            try:
                os.eventfd_write(self._fd, 1)
            except BlockingIOError:  # the counter is full, so it is readable
                pass

    def close(self) -> None:
        """After all tiers that use it are closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# -- what a tier tells --------------------------------------------------------------------------


class ProbeReport(NamedTuple):
    """What a start found out about the medium."""

    engine: str  # "cufile", "kvikio-posix", "o_direct", "buffered", "boto3+crt", …
    detail: str  # one line for the start block: where, how fast, what was fallen back from
    write_gbps: float = 0.0  # measured, 0 if not
    read_gbps: float = 0.0


class Usage(NamedTuple):
    """Bytes are what counts against the limit: rounded up, with records, as the medium counts."""

    limit_bytes: int
    used_bytes: int  # taken by chunks, written or being written
    held_bytes: int  # taken from the medium, used or not: what `du` shows; <= limit_bytes
    chunks: int


class Recovered(NamedTuple):
    """A batch of what an earlier life left here. Each key appears once over all batches."""

    records: NDArray[np.void]  # IDENTITY_DTYPE: READY, SEALED, checked
    at: NDArray[np.uint64]  # Place.at of each
    generation: NDArray[np.uint64]  # Place.generation of each

    def key(self, i: int) -> Key:
        r = self.records[i]
        return Key(
            int(r["kind"]),
            r["namespace_digest"].tobytes(),
            r["spec"].tobytes(),
            r["chunk"].tobytes(),
            int(r["shard"]),
        )

    def place(self, i: int) -> Place:
        return Place(int(self.at[i]), int(self.generation[i]))


class TierStat(NamedTuple):
    """What `kvd-cli status` shows of a tier. All counters only grow."""

    name: str
    state: State
    engine: str
    usage: Usage
    pending: int  # jobs handed over and not completed
    overdue: int  # of these, running beyond their deadline: the medium hangs
    last_error: str
    last_error_unix_ns: int
    write_gbps: float  # as probed, then as moved lately
    read_gbps: float
    answers: dict[str, dict[str, int]]  # operation -> answer -> count
    reasons: dict[str, int]  # failures by reason
    bytes_written: int
    bytes_read: int
    notes: dict[str, int]  # what only this medium counts: fallbacks, foreign files, retries


class Tier(ABC):
    """One place for chunks. Made with its configuration and a Completions; `start`, then
    `recover`, then jobs. All methods are for one thread, save where said; none blocks but `start`,
    `recover` and `close`."""

    name: str
    durable: bool = True  # what was written survives the daemon
    by_key: bool = False  # finds by key alone: places are NOWHERE, others may have written it

    @abstractmethod
    def start(self) -> ProbeReport:
        """Open and probe the medium. Blocks, for at most ~10 s. Raises ConfigError, saying what to
        change, for what only an operator can mend (wrong secret, no such bucket, another daemon's
        directory); a medium that is merely away gives a tier that is DEGRADED and heals."""

    @abstractmethod
    def recover(self) -> Iterator[Recovered]:
        """What lies here, in batches. Pre: started, and no write yet. May be consumed in another
        thread; for tiers that must ask a server it may go on while jobs run, and then tells
        nothing that was deleted since. Reads no payload. Post: `usage` counts what was told;
        what does not hold was forgotten, and counted in `notes`. Never raises for a bad record."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand jobs over: each gets exactly one completion, later or at once. Loads go first,
        then deletes, writes, scrubs and prefetches, but none starves; among tenants by weight;
        jobs of one kind and tenant start in the order given. Deletes that stand together may be
        carried out together. Never raises, whatever the tier's state."""

    def asked(self) -> None:  # noqa: B027 - most need not care
        """An engine looks something up now, in whatever tier, and waits: what nobody waits for is
        not to be in its way. From the loop; never blocks."""

    @abstractmethod
    def give_way(self, within_s: float) -> None:
        """Let a load that was submitted be begun, if somebody is free to: the caller waits for it,
        and no longer than `within_s`. A hint, for one that has to begin at once."""

    @abstractmethod
    def set_weight(self, tenant: bytes, weight: float) -> None:
        """A tenant's share of the tier's bandwidth, against the others that want some; 1 until it
        is set. `tenant`: the digest of its namespace. Pre: weight > 0."""

    @abstractmethod
    def cost(self, length: int) -> int:
        """Bytes of the limit that a payload of this length takes."""

    @abstractmethod
    def room(self, length: int) -> int:
        """How many more payloads of this length can be written now, for all that the tier knows;
        -1 if it can never hold one (TOO_LARGE)."""

    def to_empty(self, length: int) -> tuple[Place, ...]:
        """When `room(length)` is 0 although other lengths have some: places whose deletion would
        make room. Advice; empty when deleting any chunk of about this length does."""
        return ()

    @abstractmethod
    def usage(self) -> Usage: ...

    @property
    def untidy(self) -> int:
        """How much of what was begun here, and never ended, could be taken back now: some of it is
        by each Probe. From any thread."""
        return 0

    @abstractmethod
    def stat(self) -> TierStat: ...

    @property
    @abstractmethod
    def state(self) -> State: ...

    @property
    def readable(self) -> bool:
        """Whether a read handed over now would be tried. From any thread."""
        return self.state is State.READY

    @property
    def writable(self) -> bool:
        """Whether a write would be."""
        return self.state is State.READY

    @abstractmethod
    def close(self) -> None:
        """Finish what is running, answer what is queued with OFF, let go of the medium. Blocks
        for at most ~5 s unless the medium hangs (then its threads are left behind, counted as
        overdue). Idempotent."""
