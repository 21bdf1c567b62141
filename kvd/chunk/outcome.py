"""What happened to one chunk (or one shard of it) in a request.

The law of this module: the default of every result is FAILED. Only the checked completion of
that very chunk's work makes it OK. A miss, an error and a hit are different numbers. The numbers
are part of protocol 1 and of nothing on disk; they are never reused.
"""

from __future__ import annotations

from enum import IntEnum

from kvd.native import plain_members


@plain_members
class Outcome(IntEnum):
    """One byte per chunk in a reply."""

    FAILED = 0  # not done, reason unknown or the work never completed
    OK = 1  # lookup: a hit; commit and put: stored and readable now; load and get: delivered
    MISS = 2  # not there (or not yours: the two look alike)
    GRANTED = 3  # reserve: a slot is yours to fill until the write's deadline
    EXISTS = 4  # reserve: ready already, nothing to do
    BUSY = 5  # reserve: another write of the same shard is unfinished
    NO_SPACE = 6  # nothing could be evicted for it now
    TOO_LARGE = 7  # larger than the largest slot, told at hello
    OVER_QUOTA = 8  # a cap on the session's unfinished writes or leases, or the tenant's limit
    EVICTED = 9  # commit: an evict named the chunk while it was being written
    EXPIRED = 10  # commit: the write's deadline had passed; the slot is free again
    LEASED = 11  # evict: skipped, somebody holds it
    MISMATCH = 12  # same hash but another fingerprint, parent or length: counted, refused
    CORRUPT = 13  # the payload's digest does not hold; the chunk is quarantined
    PARTIAL = 14  # lookup: some of the asked shards are absent
    STALE = 15  # the handle is of an earlier epoch or generation
    CANCELLED = 16  # the transfer or write was cancelled or aborted
    DEADLINE = 17  # not finished by the request's deadline
    DRAINING = 18  # the daemon takes no stores any more
    SKIPPED = 19  # not looked at, because the leading run had ended before it
    ABORTED = 20  # abort: given back


@plain_members
class Kind(IntEnum):
    """How the chunk hash was made, and so where a chunk may be reused."""

    PREFIX = 1  # chained: depends on every token before it
    CONTENT = 2  # the chunk's own tokens only: for blending at any position
