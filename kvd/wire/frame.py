"""Frame 0 of every message: a 96-byte header, then the body.

The law of this module: nothing behind the header is looked at before the header holds, and the
first 32 bytes mean the same in every version, so that even a peer that is refused can be told why.
Little-endian, no padding but the three bytes named here; docs/protocol.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from kvd.errors import ProtocolError
from kvd.native import named
from kvd.wire.limits import DEFAULT_LIMITS, Limits, over
from kvd.wire.versions import MAJOR, MINOR, check_version

MAGIC = b"KVD1"
HEADER = Struct("<4sBBBB16sQQQQ16s8sB3sIII")
HEADER_BYTES = 96
SESSION_BYTES = 16
NO_SESSION = bytes(SESSION_BYTES)
_PAD = b"\0\0\0"
_FIXED = Struct("<4sBBBB16sQ")  # the part that every version shares

assert HEADER.size == HEADER_BYTES


class Trace(NamedTuple):
    """W3C trace context: 16 and 8 bytes, bit 0 of flags is `sampled`."""

    trace_id: bytes
    span_id: bytes
    flags: int


NO_TRACE = Trace(bytes(16), bytes(8), 0)


class Frame(NamedTuple):
    """A header that held, and the bytes of its body (not looked at yet)."""

    minor: int
    op: int
    flags: int
    session: bytes
    request: int
    ack: int  # all replies with request <= ack were received by the sender
    epoch: int
    deadline: int  # 0: none; ns of the daemon's CLOCK_MONOTONIC, or ms with FrameFlag.RELATIVE
    trace_id: bytes
    span_id: bytes
    trace_flags: int
    frames: int  # payload frames that follow
    body: bytes

    @property
    def newer(self) -> bool:
        """The sender's minor is newer: unknown trailing fields of the body are to be ignored."""
        return self.minor > MINOR


class Address(NamedTuple):
    """What every version has in the same place: enough to answer a message one can't read."""

    major: int
    minor: int
    op: int
    flags: int
    session: bytes
    request: int


def encode_frame(
    op: int,
    body: bytes,
    *,
    flags: int = 0,
    session: bytes = NO_SESSION,
    request: int = 0,
    ack: int = 0,
    epoch: int = 0,
    deadline: int = 0,
    trace: Trace = NO_TRACE,
    frames: int = 0,
) -> bytes:
    """Header and body as the bytes of frame 0. `frames`: payload frames that will follow."""
    return (
        HEADER.pack(
            MAGIC,
            MAJOR,
            MINOR,
            op,
            flags,
            session,
            request,
            ack,
            epoch,
            deadline,
            trace[0],
            trace[1],
            trace[2],
            _PAD,
            frames,
            len(body),
            0,
        )
        + body
    )


def address_of(data: bytes | memoryview) -> Address | None:
    """Whom to answer, for a message that could not be read; None if not even that is there."""
    if len(data) < _FIXED.size:
        return None
    magic, major, minor, op, flags, session, request = _FIXED.unpack_from(data)
    if magic != MAGIC:
        return None
    return Address(major, minor, op, flags, session, request)


def decode_frame(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Frame:
    """Check and take apart frame 0.

    ProtocolError on anything that is no header of ours, VersionError on another major,
    LimitExceeded on a body or a number of frames beyond `limits`.
    """
    size = len(data)
    if size < HEADER_BYTES:
        found = address_of(data)
        if found is not None:  # an other major may well have a shorter header
            check_version(found.major, found.minor)
        raise ProtocolError(f"frame 0 has {size} bytes; the header alone has {HEADER_BYTES}")
    (
        magic,
        major,
        minor,
        op,
        flags,
        session,
        request,
        ack,
        epoch,
        deadline,
        trace_id,
        span_id,
        trace_flags,
        pad,
        frames,
        body_len,
        reserved,
    ) = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("frame 0 does not begin with the magic of kvd's protocol")
    if major != MAJOR:
        check_version(major, minor)
    if body_len != size - HEADER_BYTES:
        raise ProtocolError(
            f"header claims a body of {body_len} bytes, frame 0 has {size - HEADER_BYTES}"
        )
    if body_len > limits.body:
        raise over("bytes of a body", body_len, limits.body, "split the request")
    if frames > limits.frames:
        raise over("payload frames", frames, limits.frames, "split the request")
    if minor <= MINOR and (reserved or flags & ~7 or pad != _PAD):
        raise ProtocolError("reserved bits of the header are set")
    if ack > request and not flags & 1:
        raise ProtocolError(f"request {request} acknowledges a later one, {ack}")
    values = (
        minor,
        op,
        flags,
        session,
        request,
        ack,
        epoch,
        deadline,
        trace_id,
        span_id,
        trace_flags,
        frames,
        data[HEADER_BYTES:],
    )
    return named(Frame, values)


def check_payload(frame: Frame, sizes: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> None:
    """The payload frames (their sizes in bytes) are those that the header announced.

    ProtocolError on another number, LimitExceeded on too many bytes.
    """
    if len(sizes) != frame.frames:
        raise ProtocolError(f"header announces {frame.frames} payload frames, {len(sizes)} came")
    total = sum(sizes)
    if total > limits.inline:
        raise over("inline payload bytes", total, limits.inline, "send fewer chunks a request")
