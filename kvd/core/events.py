"""What can happen to the core: the only way in.

The core is a state machine, `Core.handle(event, now) -> list[Action]`. Each event is a NamedTuple
of plain values: no sockets, no bytes of a payload, no clock. Times are nanoseconds of
CLOCK_MONOTONIC; `now` is passed beside the event. `session` is the number under which the server
opened the session; `request` is handed back unchanged in the reply, and means nothing to the core.

Packed binary fields: `hashes` 32 bytes a key, `fingerprints` 16 bytes a key, `digests` 16 bytes a
shard, `items` little-endian u32, `tokens` u32 a key, `pos0` u64 a key. Results that name shards
are chunk-major: index = key * len(shards) + position in `shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag, StrEnum
from typing import Any, NamedTuple

from numpy.typing import NDArray

from kvd.chunk import ChunkHeader, KVSpec
from kvd.core.shares import TenantRules
from kvd.native import plain_members

HASH_BYTES = 32
FINGERPRINT_BYTES = 16
DIGEST_BYTES = 16
NO_PARENT = bytes(HASH_BYTES)


@plain_members
class LookupFlag(IntFlag):
    """What a lookup does besides answering."""

    NONE = 0
    LEASE = 1  # lease the leading run (with EVERY: all hits)
    LOAD = 2  # with LEASE: also start a transfer of what was leased, as Load would
    RESERVE_MISSES = 4  # also reserve what follows the leading run (needs fingerprints)
    EVERY = 8  # look at every key; without it the keys after the first miss are SKIPPED
    PUBLIC = 16  # keys that are missing may be those of the namespace `public`


# -- sessions -----------------------------------------------------------------------------------


class OpenSession(NamedTuple):
    session: int
    public_id: bytes  # 16 bytes, stands in records of unfinished writes; not the secret token
    namespace: str
    group: bytes  # sessions with equal (namespace, group) share leases; unique if none was given
    admin: bool
    name: str
    maps_memory: bool  # False: inline only, so a dead writer can't still be copying


class CloseSession(NamedTuple):
    """The session is over. Leases and transfers end now; unfinished writes become condemned, or,
    if `stopped` (its lock is free or it maps no memory), are reclaimed at once."""

    session: int
    stopped: bool


class LockFreed(NamedTuple):
    """No process can hold that session's mapping any more: its condemned slots are reclaimed.
    Also sent for sessions of an earlier life of the daemon (see Adoption)."""

    public_id: bytes


class SetTenant(NamedTuple):
    """What a tenant may have, from now on; None: what one has without rules."""

    namespace: str
    rules: TenantRules | None


# -- requests -----------------------------------------------------------------------------------


class RegisterSpec(NamedTuple):
    session: int
    request: object
    spec: KVSpec


class Reserve(NamedTuple):
    session: int
    request: object
    spec: bytes  # digest of a registered spec
    kind: int
    shards: tuple[int, ...]  # indices into the spec's shard table
    hashes: bytes
    parent: bytes  # hash of the chunk before the first (NO_PARENT at a root); content: NO_PARENT
    index0: int  # position of the first key in its chain, in chunks
    fingerprints: bytes
    tokens: bytes | None  # None: spec.chunk_tokens each
    pos0: bytes | None  # None: (index0 + i) * spec.chunk_tokens
    flags: int  # header flags to keep (e.g. K rotated)
    ttl: int  # ns until an unfinished write is condemned


class Commit(NamedTuple):
    session: int
    request: object
    write: int
    items: bytes | None  # which results of the reserve; None: all granted
    digests: bytes | None  # the client's digest of each item (integrity=at_store): sealed at once


class Abort(NamedTuple):
    """Give writes back. The sender promises that it copies no more into them, so a condemned slot
    is reclaimed too."""

    session: int
    request: object
    write: int
    items: bytes | None


class Lookup(NamedTuple):
    session: int
    request: object
    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    fingerprints: bytes | None  # None: not compared
    flags: int  # LookupFlag
    lease_ns: int
    parent: bytes  # only for RESERVE_MISSES
    index0: int
    ttl: int


class Load(NamedTuple):
    """Start the transfer of leased chunks to where the client can copy them."""

    session: int
    request: object
    lease: int
    items: bytes | None  # positions within the lease; None: all
    shards: tuple[int, ...] | None  # None: those of the lookup


class Prefetch(NamedTuple):
    """A hint: these chunks will be asked for within this time. It leases nothing."""

    session: int
    request: object
    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    within: int  # ns


class Wait(NamedTuple):
    """Long poll: answered when more than `after` results of the transfer are known, when it is
    done, or at `deadline`."""

    session: int
    request: object
    transfer: int
    after: int
    deadline: int


class Cancel(NamedTuple):
    session: int
    request: object
    transfer: int


class Renew(NamedTuple):
    session: int
    request: object
    lease: int
    lease_ns: int


class Release(NamedTuple):
    session: int
    request: object
    lease: int


class Selector(NamedTuple):
    """Which chunks: all given conditions hold. None given selects nothing unless `everything`."""

    namespace: str | None = None
    spec: bytes | None = None
    kind: int | None = None
    keys: tuple[bytes, ...] = ()  # exact hashes
    key_prefix: bytes | None = None  # hashes that start with these bytes
    subtree: bytes | None = None  # this hash and all its descendants
    idle_ns: int | None = None  # not touched for at least this long
    state: str | None = None
    tier: str | None = None
    everything: bool = False


class Evict(NamedTuple):
    """One slice of an eviction: goes on from `cursor`, and answers with where it got to."""

    session: int
    request: object
    selector: Selector
    dry_run: bool
    cursor: int
    limit: int  # chunks removed (or, dry, named) at most


class List(NamedTuple):
    """One page. `level`: namespaces, specs, prefixes or chunks. A page may be shorter than
    `limit`; only a cursor of None ends the list."""

    session: int
    request: object
    level: str
    selector: Selector
    cursor: int
    limit: int


class Stat(NamedTuple):
    session: int
    request: object


class TierCommand(NamedTuple):
    """An operator's wish. drain: write there what DRAM holds and the tier does not, hottest first.
    scrub: read all of it, to see whether it holds."""

    session: int
    request: object
    tier: str
    command: str


# -- what workers report ------------------------------------------------------------------------


class Sealed(NamedTuple):
    """Digest of a ready slot's payload, computed in the background; empty if that failed."""

    record: int
    generation: int
    digest: bytes


class SealedMany(NamedTuple):
    """Several that came together."""

    seals: Sequence[Sealed]


class Verified(NamedTuple):
    """Answer to a Verify action."""

    record: int
    generation: int
    ok: bool


class Copied(NamedTuple):
    """Answer to a Copy action."""

    copy: int
    ok: bool


@plain_members
class TierAnswer(StrEnum):
    """How a job of a tier ended: what the tiers' contract answers, by the same names."""

    OK = "ok"
    EXISTS = "exists"
    MISS = "miss"
    CORRUPT = "corrupt"
    NO_SPACE = "no_space"
    TOO_LARGE = "too_large"
    TIMEOUT = "timeout"
    FAILED = "failed"
    OFF = "off"


class TierState(NamedTuple):
    """A tier's health has changed."""

    tier: int  # its position below DRAM, from 0
    readable: bool
    writable: bool


class TierWritten(NamedTuple):
    """Answer to a TierWrite action."""

    job: int
    answer: TierAnswer
    at: int = 0  # where it lies, if OK or EXISTS
    generation: int = 0
    room: int = -1  # how many more of this length the tier has room for; -1: not known
    empty: tuple[int, ...] = ()  # with NO_SPACE: places whose deletion would make room


class TierReadDone(NamedTuple):
    """Answer to a TierRead or TierScrub action. `header`: the record that lies there, if OK."""

    job: int
    answer: TierAnswer
    header: ChunkHeader | None = None


class TierDeleted(NamedTuple):
    """Answer to a TierDelete action."""

    job: int
    answer: TierAnswer


class TierScrubbedTo(NamedTuple):
    """How far an earlier life's scrub had got."""

    tier: int
    part: int


class TierRecovered(NamedTuple):
    """What an earlier life, or another daemon, left in a tier: records (IDENTITY_DTYPE) that hold,
    and the place of each. `hint`: hearsay, so what does not fit is passed over and not deleted."""

    tier: int
    records: NDArray[Any]
    at: NDArray[Any]
    generation: NDArray[Any]
    hint: bool = False


class HintKind(IntEnum):
    SESSION_END = 1  # these keys' session is over: what it shares with none goes first
    EXPECT_REUSE = 2  # asked for again in about that time: spared until then
    PIN = 3  # no victim for that long; no time: a pin ends
    PRIORITY = 4  # level 0: goes first; 1: like others; 2: spared for that long


class Hint(NamedTuple):
    """Something said of the future of keys, in the order of their chain."""

    session: int
    request: object
    spec: bytes
    kind: int
    hashes: bytes
    hint: int  # HintKind
    level: int
    within_ns: int


# -- time ---------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """Time has passed: expire what is due. Also the next slice of long work, see Core.busy."""


class Remember(NamedTuple):
    """Tell what policies know, in actions Remembered, a part at a time. Nothing if that is under
    way already."""


class Drain(NamedTuple):
    """Shutdown has begun: no more stores; loads go on."""
