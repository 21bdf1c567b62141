"""The operations of protocol 1.

The law of this module: a number is given once and never again.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from kvd.native import plain_members


@plain_members
class Op(IntEnum):
    """Byte 6 of the header; a reply repeats the number of its request."""

    HELLO = 1
    REGISTER_SPEC = 2
    RESERVE = 3
    COMMIT = 4
    ABORT = 5
    LOOKUP = 6
    LOAD = 7
    WAIT = 8
    CANCEL = 9
    RENEW = 10
    RELEASE = 11
    EVICT = 12
    LIST = 13
    STAT = 14
    HEARTBEAT = 15
    PUT = 16
    GET = 17
    BYE = 18
    TIER = 19  # from 1.1
    HINT = 20  # from 1.2
    PREFETCH = 21  # from 1.3
    TENANT = 22  # from 1.4


@plain_members
class FrameFlag(IntFlag):
    """Byte 7 of the header."""

    NONE = 0
    REPLY = 1
    ERROR = 2  # with REPLY: the body is [code, message]
    RELATIVE = 4  # `deadline` is milliseconds from arrival (tcp), not a time of the daemon's clock


@plain_members
class LookupFlag(IntFlag):
    """What a lookup does besides answering; the same bits as the core's."""

    NONE = 0
    LEASE = 1  # lease the leading run (with EVERY: all hits)
    LOAD = 2  # with LEASE: also start a transfer of what was leased
    RESERVE_MISSES = 4  # also reserve what follows the leading run (needs fingerprints)
    EVERY = 8  # look at every key; without it the keys after the first miss are SKIPPED
    PUBLIC = 16  # from 1.4: keys that are missing may be those of the namespace `public`


class HintKind(IntEnum):
    """What is said of the future of keys; the same numbers as the core's."""

    SESSION_END = 1
    EXPECT_REUSE = 2
    PIN = 3
    PRIORITY = 4


class GetFlag(IntFlag):
    """What an inline get does besides answering."""

    NONE = 0
    EVERY = 8  # deliver every hit; without it only those of the leading run
    PUBLIC = 16  # from 1.4: as for a lookup
