"""Every size limit of protocol 1, and what is told about them at hello.

The law of this module: there is no limit that a client can run into and could not have read in
the reply to its hello. A request beyond one is answered `LIMIT`, naming the limit; it is never cut.
Both sides check before they unpack or allocate.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.errors import LimitExceeded, ProtocolError

SECOND_NS = 1_000_000_000
MIB = 1 << 20

# Not told at hello, because they are needed before it.
ATTACH_BYTES = 4096  # one attach message
GROUP_BYTES = 256  # a group's secret
TOKEN_BYTES = 4096 // 2  # a namespace token


class Limits(NamedTuple):
    """The limits of one daemon. On the wire: a map from these names to integers."""

    keys: int = 4096  # chunk keys a request
    results: int = 16384  # keys x shards a request
    shards: int = 4096  # shards named in a request
    body: int = MIB  # bytes of a msgpack body
    frames: int = 4096  # payload frames a message
    inline: int = 64 * MIB  # payload bytes a message
    spec: int = 64 * 1024  # bytes of an encoded KVSpec
    client_name: int = 256  # UTF-8 bytes
    name: int = 128  # UTF-8 bytes of a namespace or instance
    nesting: int = 16  # levels of msgpack arrays and maps
    inflight: int = 256  # unanswered requests a session
    cached: int = 256  # replies kept for a retry, a session
    list_rows: int = 1000  # rows a page of list, chunks a slice of evict
    lease_default_ns: int = 30 * SECOND_NS
    lease_max_ns: int = 600 * SECOND_NS
    ttl_default_ns: int = 30 * SECOND_NS  # of an unfinished write
    ttl_max_ns: int = 600 * SECOND_NS
    wait_max_ns: int = 60 * SECOND_NS  # one long poll
    chunk_bytes: int = 0  # largest payload of one shard; 0: not known yet

    def to_wire(self) -> dict[str, int]:
        """The map that hello tells."""
        return self._asdict()


DEFAULT_LIMITS = Limits()


def limits_from_wire(value: object) -> Limits:
    """Limits told by a daemon. Names that this code does not know are left out, because a newer
    minor may add limits; a missing or senseless one is a ProtocolError."""
    if type(value) is not dict:
        raise ProtocolError(f"limits: a map is due, not {type(value).__name__}")
    told: list[int] = []
    for name in Limits._fields:
        number = value.get(name)
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ProtocolError(f"limits: {name!r} must be an integer, not {number!r}")
        told.append(number)
    return Limits._make(told)


def over(what: str, size: int, limit: int, way_out: str) -> LimitExceeded:
    """The error for one limit, in one form: the thing, the limit, the way out."""
    return LimitExceeded(f"{what}: {size}, at most {limit} allowed; {way_out}")
