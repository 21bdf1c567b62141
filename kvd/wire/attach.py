"""The two messages of attach, on the SOCK_SEQPACKET socket beside the ZMQ one.

The law of this module: pure bytes in and out, one message each way. Descriptors travel beside the
answer as SCM_RIGHTS, in the order arena (read-write), record table (read-only), session lock, once
for each arena that is told; a client that maps no memory gets none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvd.errors import KvdError, ProtocolError, error_from_wire
from kvd.wire import codec as c
from kvd.wire.limits import ATTACH_BYTES, DEFAULT_LIMITS, GROUP_BYTES, TOKEN_BYTES, over
from kvd.wire.replies import MAX_MESSAGE
from kvd.wire.versions import MAJOR, MINOR, check_version

MAGIC = "kvd-attach"
FDS_PER_ARENA = 2  # arena and table; one lock more for the session
MAX_ARENAS = 16
_FIELDS = 10


class AttachRequest(NamedTuple):
    """["kvd-attach", major, minor, name, pid, group_secret, token, expected_instance, maps], and
    from 1.4 a namespace behind it"""

    major: int
    minor: int
    name: str
    pid: int  # what the client believes; the daemon trusts SO_PEERCRED
    group_secret: bytes | None
    token: bytes | None  # content of a namespace's token file
    expected_instance: str | None
    maps_memory: bool = True
    namespace: str | None = None  # from 1.4: `public`, for who may write there


class ArenaTold(NamedTuple):
    number: int
    arena_id: bytes
    size: int  # bytes
    slab_size: int  # bytes


class AttachReply(NamedTuple):
    """["ok", token, public_id, instance, epoch, namespace, admin, arenas, clock_ns]"""

    session: bytes  # 16 bytes, secret: every request carries it
    public_id: bytes  # 16 bytes, stands in records
    instance: str
    epoch: int
    namespace: str
    admin: bool
    arenas: tuple[ArenaTold, ...]
    clock_ns: int


def encode_attach(request: AttachRequest) -> bytes:
    """One datagram. LimitExceeded if it is too long."""
    said = request if request.namespace is not None else request[:-1]  # as 1.0 says it
    return c.pack((MAGIC, *said), ATTACH_BYTES)


def decode_attach(data: bytes) -> AttachRequest:
    """VersionError on another major (whatever follows), ProtocolError, LimitExceeded."""
    if len(data) > ATTACH_BYTES:
        raise over("bytes of an attach message", len(data), ATTACH_BYTES, "shorten the name")
    f = c.unpack(data)
    if len(f) < 3 or f[0] != MAGIC:
        raise ProtocolError("not an attach message of kvd")
    major, minor = c.uint(f[1], "major", 256), c.uint(f[2], "minor", 256)
    newer = check_version(major, minor, peer="the client")
    if len(f) == _FIELDS - 1:
        f.append(None)
    f = c.fields(f, _FIELDS, "attach", newer)
    return AttachRequest(
        major,
        minor,
        c.text(f[3], "name", DEFAULT_LIMITS.client_name),
        c.uint(f[4], "pid", 1 << 31),
        c.optional_blob(f[5], "group_secret", GROUP_BYTES),
        c.optional_blob(f[6], "token", TOKEN_BYTES),
        c.optional_text(f[7], "expected_instance", DEFAULT_LIMITS.name),
        c.boolean(f[8], "maps_memory"),
        c.optional_text(f[9], "namespace", DEFAULT_LIMITS.name),
    )


def encode_attach_reply(reply: AttachReply) -> bytes:
    return c.pack(("ok", *reply), ATTACH_BYTES)


def encode_attach_error(code: int, message: str) -> bytes:
    clean = message.encode("utf-8", "replace")[:2048].decode("utf-8", "ignore")
    return c.pack(("error", int(code), clean), ATTACH_BYTES)


def decode_attach_reply(data: bytes) -> AttachReply:
    """The daemon's answer; raises the typed error if it was one. Fields behind the known ones are
    a newer minor's and are left alone."""
    f = c.unpack(data)
    if len(f) >= 3 and f[0] == "error":
        raise _told(f)
    if not f or f[0] != "ok":
        raise ProtocolError("not an answer to an attach")
    f = c.fields(f, 9, "attach", True)
    return AttachReply(
        c.exactly(f[1], "session", 16),
        c.exactly(f[2], "public_id", 16),
        c.text(f[3], "instance", 1024),
        c.uint(f[4], "epoch"),
        c.text(f[5], "namespace", 1024),
        c.boolean(f[6], "admin"),
        _arenas(f[7]),
        c.uint(f[8], "clock_ns"),
    )


def _told(f: list[Any]) -> KvdError:
    return error_from_wire(c.uint(f[1], "code", c.U32), c.text(f[2], "message", MAX_MESSAGE))


def _arenas(value: Any) -> tuple[ArenaTold, ...]:
    if type(value) is not list or len(value) > MAX_ARENAS:
        raise c.wrong("arenas", f"an array of at most {MAX_ARENAS} arenas", value)
    told = []
    for item in value:
        if type(item) is not list:
            raise c.wrong("arenas", "arrays of four", item)
        f = c.fields(item, 4, "arena", True)
        told.append(
            ArenaTold(
                c.uint(f[0], "number", c.U32),
                c.exactly(f[1], "arena_id", 16),
                c.uint(f[2], "size", 1 << 63),
                c.uint(f[3], "slab_size", 1 << 63),
            )
        )
    return tuple(told)


def this_version() -> tuple[int, int]:
    """(major, minor) to put into an AttachRequest."""
    return MAJOR, MINOR
