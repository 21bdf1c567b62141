"""What an object is: its name, its bytes, and how they are moved without a copy.

The law of this module: an object is the 512-byte record and then the payload, nothing else. Bytes
of a payload go from and to the caller's memory; what comes is read as it comes, so that a server
that trickles meets the deadline and not a timeout that each byte starts anew.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from typing import Any

from kvd.chunk import HEADER_BYTES
from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Answer, Key, Reason

FORMAT = "c1"
READ_BYTES = 256 << 10
TRICKLE = 16 << 10


def name_of(prefix: str, key: Key) -> str:
    """`<prefix>/c1/<2 hex>/<62 hex>`: the same for the same key in every daemon."""
    digest = hashlib.sha256(b"kvd-object-1" + key.pack()).hexdigest()
    return f"{folder(prefix)}{digest[:2]}/{digest[2:]}"


def folder(prefix: str) -> str:
    return f"{prefix.strip('/')}/{FORMAT}/" if prefix.strip("/") else f"{FORMAT}/"


def owner_of(installation: str) -> bytes:
    """16 bytes that stand in the records of objects that this installation wrote."""
    return hashlib.sha256(b"kvd-installation-1" + installation.encode()).digest()[:16]


class Body(io.RawIOBase):
    """Several buffers as one file to read: a body that is sent without being joined."""

    def __init__(self, *parts: bytes | memoryview) -> None:
        self._parts = [memoryview(part) for part in parts if len(part)]
        self._size = sum(map(len, self._parts))
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {0: 0, 1: self._at, 2: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        pieces, begin = [], 0
        for part in self._parts:
            low, high = max(self._at - begin, 0), min(end - begin, len(part))
            if low < high:
                pieces.append(part[low:high])
            begin += len(part)
        self._at = max(self._at, end)
        return b"".join(pieces)


def crc32c(*parts: bytes | memoryview) -> str | None:
    """What the server is told to compare, base64; None without the C library."""
    try:
        from awscrt import checksums
    except ImportError:
        return None
    value = 0
    for part in parts:
        value = checksums.crc32c(part, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def receive(body: Any, head: bytearray, into: memoryview, deadline: int, stall_ns: int) -> None:
    """A response's body: first into `head`, then into `into`. Refused when it is shorter, longer,
    or too slow: later than the deadline, or less than TRICKLE bytes in `stall_ns`. The connection
    goes back to its pool if all was read, and is closed if not."""
    raw = body._raw_stream
    whole = False
    since, came = time.monotonic_ns(), 0
    try:
        for view in (memoryview(head), into):
            while view:
                piece = raw.read1(min(READ_BYTES, len(view)), decode_content=False)
                if not piece:
                    raise failed(Reason.SHORT, "the body ended early")
                view[: len(piece)] = piece
                view = view[len(piece) :]
                now = time.monotonic_ns()
                if now >= deadline:
                    raise Refused(Answer.TIMEOUT, Reason.SLOW, "its deadline passed")
                came += len(piece)
                if now - since >= stall_ns:
                    if came < TRICKLE:
                        raise failed(Reason.SLOW, f"{came} bytes in {(now - since) / 1e9:.1f} s")
                    since, came = now, 0
        whole = not raw.read1(1, decode_content=False)
        if not whole:
            raise failed(Reason.SHORT, "the body is longer than it said")
    finally:
        if not whole:
            raw.close()
        raw.release_conn()


def expected(response: dict[str, Any], length: int) -> None:
    """Refuse a response that is not, byte for byte, `length` bytes of an object."""
    if response.get("ContentEncoding"):
        raise failed(Reason.SHORT, f"somebody encoded it: {response['ContentEncoding']}")
    got = response.get("ContentLength")
    if got is None:
        raise failed(Reason.SHORT, "an answer without its length")
    if got != length:
        raise failed(Reason.SHORT, f"{got} bytes where {length} should be")


assert HEADER_BYTES == 512
