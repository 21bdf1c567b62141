"""How an object comes: whole, or in ranges side by side, into the caller's memory.

The law of this module: what comes is of one object or none, by its ETag; and an object that can't
be what it should is told from an answer that went wrong on its way (`is_so`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from kvd.chunk import HEADER_BYTES, ChunkHeader
from kvd.tiers.backend import Found, Refused, failed
from kvd.tiers.base import Answer, Reason
from kvd.tiers.s3.bucket import Bucket
from kvd.tiers.s3.calls import NotThere
from kvd.tiers.s3.objects import expected, receive

Refuse = Callable[[str, str | None, dict[str, Any]], None]


class Broken(Exception):
    """An object that can't be what it should: its ETag says which, `length` how long it came."""

    def __init__(self, etag: str | None, length: int, why: str) -> None:
        super().__init__(why)
        self.etag = etag
        self.length = length


class There(NamedTuple):
    """An object that lies there already."""

    header: ChunkHeader
    etag: str | None
    modified: datetime | None


class Downloads:
    """`refuse(name, etag, answer)` raises Refused for an object that is none for us."""

    def __init__(self, bucket: Bucket, refuse: Refuse) -> None:
        self._bucket = bucket
        self._refuse = refuse

    def fetch(self, name: str, into: memoryview, deadline: int) -> Found:
        """The payload into memory of its length, and its record. Broken; PreconditionFailed if the
        object was replaced while its ranges came; Refused."""
        if HEADER_BYTES + len(into) > self._bucket.config.multipart_bytes:
            return self._ranges(name, into, deadline)
        found: Found = self._bucket.run(
            "GetObject", lambda: self._whole(name, into, deadline), deadline
        )
        return found

    def _whole(self, name: str, into: memoryview, deadline: int) -> Found:
        answer = self._bucket.client.get_object(**self._bucket.at(name))
        etag = answer.get("ETag")
        body = answer["Body"]
        try:
            self._refuse(name, etag, answer)
            length = answer.get("ContentLength")
            head = bytearray(HEADER_BYTES)
            if length is not None and length != HEADER_BYTES + len(into):
                if length < HEADER_BYTES:
                    raise Broken(etag, length, f"an object of {length} bytes")
                head[:] = _exactly(body._raw_stream, HEADER_BYTES)
                self._other_length(head, length, etag)
            expected(answer, HEADER_BYTES + len(into))
        except BaseException:
            body.close()
            raise
        receive(body, head, into, deadline, self._bucket.stall_ns)
        return Found(_parse(head, etag, HEADER_BYTES + len(into)), etag)

    def _other_length(self, head: bytearray, length: int, etag: str | None) -> None:
        header = _parse(head, etag, length)
        if HEADER_BYTES + header.length == length:
            raise Refused(Answer.MISS, detail="a chunk of another length lies there")
        why = f"{length} bytes where its record says {HEADER_BYTES + header.length}"
        raise Broken(etag, length, why)

    def _ranges(self, name: str, into: memoryview, deadline: int) -> Found:
        bucket, client, at = self._bucket, self._bucket.client, self._bucket.at(name)
        head_of = bucket.run("HeadObject", lambda: client.head_object(**at), deadline)
        etag = head_of.get("ETag")
        self._refuse(name, etag, head_of)
        length = HEADER_BYTES + len(into)
        if head_of.get("ContentLength") != length:
            record = bytearray(self.record_bytes(name, deadline))
            self._other_length(record, int(head_of.get("ContentLength") or 0), etag)
        size, head = bucket.config.part_bytes, bytearray(HEADER_BYTES)

        def fetch(begin: int, end: int) -> None:
            first = begin == 0
            answer = client.get_object(**at, Range=f"bytes={begin}-{end - 1}", IfMatch=etag)
            try:
                expected(answer, end - begin)
            except BaseException:
                answer["Body"].close()
                raise
            view = into[max(0, begin - HEADER_BYTES) : end - HEADER_BYTES]
            receive(answer["Body"], head if first else bytearray(), view, deadline, bucket.stall_ns)

        def ranged(begin: int) -> Callable[[], None]:
            end = min(begin + size, length)
            return lambda: bucket.run("GetObject", lambda: fetch(begin, end), deadline)

        bucket.together([ranged(begin) for begin in range(0, length, size)])
        return Found(_parse(head, etag, HEADER_BYTES + len(into)), etag)

    def is_so(self, name: str, broken: Broken, deadline: int) -> bool:
        """Whether the server agrees that the object is what came: if not, it was the way here."""
        if broken.etag is None:
            return False
        there = self._bucket.run(
            "HeadObject",
            lambda: self._bucket.client.head_object(**self._bucket.at(name)),
            deadline,
        )
        return bool((there.get("ETag"), there.get("ContentLength")) == (broken.etag, broken.length))

    def there(self, name: str, deadline: int) -> There:
        """What lies there, as was just said. Refused CONFLICT if that is no chunk."""
        try:
            raw, answer = self._head(name, deadline)
            return There(ChunkHeader.unpack(raw), answer.get("ETag"), answer.get("LastModified"))
        except ValueError as error:
            raise failed(Reason.CONFLICT, f"what lies there has no record: {error}") from error
        except Refused as refused:
            if refused.answer is Answer.MISS:  # it was there a moment ago
                raise failed(Reason.CONFLICT, "it comes and goes") from refused
            if refused.reason in (Reason.SHORT, Reason.OTHER):
                raise failed(Reason.CONFLICT, "what lies there is no chunk") from refused
            raise

    def lies(self, name: str, nbytes: int, deadline: int) -> There | None:
        """What lies there; None if that is nothing, or no chunk, or no object of `nbytes` bytes.
        Refused if it can't be found out: what comes may be broken on its way, each time."""
        try:
            raw, answer = self._head(name, deadline)
            return There(ChunkHeader.unpack(raw), answer.get("ETag"), answer.get("LastModified"))
        except ValueError:
            return None
        except Refused as refused:
            if refused.answer is Answer.MISS:
                return None
            if refused.reason not in (Reason.SHORT, Reason.OTHER):
                raise
            if self._head_of(name, deadline).get("ContentLength") == nbytes:
                raise
            return None

    def _head_of(self, name: str, deadline: int) -> dict[str, Any]:
        """What is said of an object, without it; nothing of one that is not there."""
        client, at = self._bucket.client, self._bucket.at(name)
        try:
            said: dict[str, Any] = self._bucket.run(
                "HeadObject", lambda: client.head_object(**at), deadline
            )
            return said
        except NotThere:
            return {}

    def record_bytes(self, name: str, deadline: int) -> bytes:
        """The first 512 bytes of an object."""
        return self._head(name, deadline)[0]

    def _head(self, name: str, deadline: int) -> tuple[bytes, dict[str, Any]]:
        """These, and what was said of the object."""

        def fetch() -> tuple[bytes, dict[str, Any]]:
            answer = self._bucket.client.get_object(
                **self._bucket.at(name), Range=f"bytes=0-{HEADER_BYTES - 1}"
            )
            head = bytearray(HEADER_BYTES)
            try:
                expected(answer, HEADER_BYTES)
            except BaseException:
                answer["Body"].close()
                raise
            receive(answer["Body"], head, memoryview(b""), deadline, self._bucket.stall_ns)
            return bytes(head), answer

        found: tuple[bytes, dict[str, Any]] = self._bucket.run("GetObject", fetch, deadline)
        return found


def _exactly(raw: Any, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = raw.read1(length - len(data), decode_content=False)
        if not piece:
            raise failed(Reason.SHORT, "the body ended early")
        data += piece
    return bytes(data)


def _parse(head: bytes | bytearray, etag: str | None, length: int) -> ChunkHeader:
    try:
        return ChunkHeader.unpack(head)
    except ValueError as error:
        raise Broken(etag, length, str(error)) from error
