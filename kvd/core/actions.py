"""What the core wants done: the only way out.

The server carries actions out in the order given. A record action is a write of 512 bytes or less
into the record table and happens before any later Reply of the same list is sent, so that what a
client is told is already true in shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvd.chunk import ChunkHeader
from kvd.errors import ErrorCode

# -- replies ------------------------------------------------------------------------------------


class Reply(NamedTuple):
    session: int
    request: object
    result: Result


class Fail(NamedTuple):
    session: int
    request: object
    code: ErrorCode
    message: str
    retry_ns: int = 0  # with BUSY: when to ask again


class SpecResult(NamedTuple):
    digest: bytes


class ReserveResult(NamedTuple):
    """`outcomes`: one byte a shard. `refs`: 32 bytes for each GRANTED one, in order. `write` is 0
    when nothing was granted. A grant is a leading run: after the first key that can't be
    granted for lack of room, all are NO_SPACE or OVER_QUOTA. EXISTS and BUSY do not end it."""

    write: int
    outcomes: bytes
    refs: bytes
    deadline: int  # ns, when unfinished slots become condemned


class OutcomesResult(NamedTuple):
    """Commit and Abort: one byte an item."""

    outcomes: bytes


class LoadResult(NamedTuple):
    """`outcomes`: one byte a shard; FAILED where not known yet. `refs`: 32 bytes for each OK, in
    order. `transfer` is 0 when everything is known (done)."""

    transfer: int
    outcomes: bytes
    refs: bytes
    done: bool


class LookupResult(NamedTuple):
    outcomes: bytes  # one byte a key
    leading: int  # keys of the leading run
    lease: int  # 0: none
    expiry: int  # ns
    load: LoadResult | None
    reserved: ReserveResult | None  # for the keys from `leading` on
    tiers: bytes = b""  # where hits lie, one byte a key: 0 DRAM, n the n-th below; empty: all DRAM


class WaitResult(NamedTuple):
    items: bytes  # u32: which results of the load became known, in order of completion
    outcomes: bytes
    refs: bytes  # 32 bytes for each OK
    known: int  # pass as `after` next time
    done: bool


class LeaseResult(NamedTuple):
    """Renew: the new expiry. Release: expiry 0, and how many chunks were let go."""

    expiry: int
    chunks: int


class EvictResult(NamedTuple):
    """Counts of this slice; `cursor` None when there is no more to visit."""

    matched: int
    evicted: int
    leased: int  # matched, but somebody holds them
    writing: int  # matched while being written: their commit will answer EVICTED
    bytes: int  # payload bytes freed (dry run: that would be)
    named: list[dict[str, Any]]  # dry run: what would go, as List rows
    cursor: int | None


class ListResult(NamedTuple):
    rows: list[dict[str, Any]]
    cursor: int | None


class StatResult(NamedTuple):
    stat: dict[str, Any]


class TierResult(NamedTuple):
    """`chunks`: how many a drain will write, or a scrub will read."""

    ok: bool
    detail: str
    chunks: int


class HintResult(NamedTuple):
    """Chunks: the hint was taken, they are not here, a cap on what is pinned and spared is reached.
    `within_ns`: how long it holds."""

    taken: int
    absent: int
    over: int
    within_ns: int


class DoneResult(NamedTuple):
    """Cancel and other requests that have nothing to say."""


Result = (
    SpecResult
    | ReserveResult
    | OutcomesResult
    | LoadResult
    | LookupResult
    | WaitResult
    | LeaseResult
    | EvictResult
    | ListResult
    | StatResult
    | TierResult
    | HintResult
    | DoneResult
)

# -- shared memory ------------------------------------------------------------------------------


class AssignSlab(NamedTuple):
    """Slab `slab` now holds slots of `slot_size` bytes (0: unassigned); its records are cleared."""

    slab: int
    slot_size: int


class WriteRecord(NamedTuple):
    """Write a whole record."""

    record: int
    header: ChunkHeader


class PatchRecord(NamedTuple):
    """Change fields of a record that is there, and its check sum. None: leave as it is."""

    record: int
    state: int | None = None
    generation: int | None = None
    flags: int | None = None
    digest: bytes | None = None


class LeaseHorizon(NamedTuple):
    """No lease given so far lasts beyond this time (ns): kept in the superblock for adoption."""

    until: int


# -- work for the transfer threads --------------------------------------------------------------


class Seal(NamedTuple):
    """Compute the digest of a slot in the background; answer with Sealed. `urgent`: somebody waits
    for it, so it is not put off."""

    record: int
    generation: int
    offset: int
    length: int
    urgent: bool = False


class Verify(NamedTuple):
    """Compare a slot's payload with its digest before its first load; answer with Verified."""

    record: int
    generation: int
    offset: int
    length: int
    digest: bytes


class Copy(NamedTuple):
    """Copy a payload within the arena (a slot that moves); answer with Copied. `source` and
    `target` are bytes from the arena's start."""

    copy: int
    source: int
    target: int
    length: int


# -- work for the tiers below -------------------------------------------------------------------


class TierWrite(NamedTuple):
    """Put a sealed slot's payload into a tier; answer with TierWritten. The slot's bytes are the
    tier's to read until then. `deadline`: ns. `kept`: not a slot's payload, but what that job read
    into memory of the server's own, which is free afterwards."""

    job: int
    tier: int
    header: ChunkHeader
    offset: int
    length: int
    deadline: int
    kept: int = 0


class TierRead(NamedTuple):
    """Fill a slot, which is nobody else's until then, from a tier; answer with TierReadDone."""

    job: int
    tier: int
    kind: int
    namespace: bytes  # digest
    spec: bytes
    chunk: bytes
    shard: int
    at: int
    generation: int
    offset: int
    length: int
    deadline: int
    ahead: bool = False  # nobody waits for it
    tenant: bytes = b""  # digest of the namespace that asked, and pays; empty: `namespace`


class TierScrub(NamedTuple):
    """Read a payload to see whether it holds, into memory of the server's own; answer with
    TierReadDone. `keep`: if it does, the bytes are kept for a TierWrite among the actions that
    follow the answer at once."""

    job: int
    tier: int
    kind: int
    namespace: bytes
    spec: bytes
    chunk: bytes
    shard: int
    at: int
    generation: int
    length: int
    deadline: int
    keep: bool = False


class TierDelete(NamedTuple):
    """Forget a shard in a tier; answer with TierDeleted."""

    job: int
    tier: int
    kind: int
    namespace: bytes
    spec: bytes
    chunk: bytes
    shard: int
    at: int
    generation: int
    deadline: int


class ScrubCursor(NamedTuple):
    """A scrub has got to this part of all keys: kept, so that a later life goes on there."""

    tier: int
    part: int


# -- about policies ------------------------------------------------------------------------------


class Remembered(NamedTuple):
    """A part of what policies know, to be kept for the next life; None: that was all."""

    part: dict[str, Any] | None


class PolicyFailed(NamedTuple):
    """The eviction policy of a tier raised; it has no say until the next start."""

    tier: str
    error: str  # one line: where and what
    fault: BaseException


Action = (
    Reply
    | Fail
    | AssignSlab
    | WriteRecord
    | PatchRecord
    | LeaseHorizon
    | Seal
    | Verify
    | Copy
    | TierWrite
    | TierRead
    | TierScrub
    | TierDelete
    | ScrubCursor
    | Remembered
    | PolicyFailed
)
