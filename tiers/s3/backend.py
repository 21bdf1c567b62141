"""S3Backend: put if absent, get with proof, delete only what is ours.

The law of this module: a 412 says that *something* lies there; it counts as present only after its
record was read and names the same chunk. An object that does not hold is deleted or replaced by its
ETag, so that a good one that somebody wrote meanwhile is not hit; another installation's is left
where it is and remembered as bad.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvd.chunk import HEADER_BYTES, IDENTITY_DTYPE, ChunkHeader, HeaderFlag, State
from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Found, Refused, Stored, failed
from kvd.tiers.base import (
    NEVER,
    NOWHERE,
    Answer,
    Key,
    Place,
    ProbeReport,
    Reason,
    Recovered,
    Usage,
)
from kvd.tiers.s3.calls import Calls, NotThere, PreconditionFailed
from kvd.tiers.s3.config import S3Config, check, make_client
from kvd.tiers.s3.guard import Guard
from kvd.tiers.s3.objects import Body, crc32c, expected, folder, name_of, owner_of, receive

log = logging.getLogger(__name__)

START_NS = 8_000_000_000
LARGEST = 5 << 40  # of an object
MOST_BAD = 4096
PAGE = 1000
TOLD = 256  # records in a batch of a recovery
_AWAY = {
    Reason.CREDENTIALS,
    Reason.NOT_FOUND,
    Reason.SKEW,
    Reason.SLOW,
    Reason.THROTTLED,
    Reason.UNREACHABLE,
}


class _Mine(NamedTuple):
    nbytes: int
    written: float  # Unix seconds


class _Broken(Exception):
    """An object that can't be what it should: its ETag says which, `length` how long it came."""

    def __init__(self, etag: str | None, length: int, why: str) -> None:
        super().__init__(why)
        self.etag = etag
        self.length = length


class S3Backend(Backend):
    by_key = True
    delete_batch = 500

    def __init__(self, config: S3Config) -> None:
        check(config)
        self._config = config
        self._stall_ns = int(config.read_timeout_s * 1e9)
        self._folder = folder(config.prefix)
        self._owner = owner_of(config.installation)
        self._guard = Guard(4 * self._stall_ns)
        self._calls = Calls(config.attempts, self._guard)
        self._client: Any = None
        self._parts: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._mine: OrderedDict[str, _Mine] = OrderedDict()  # name -> what we wrote, oldest first
        self._used = 0
        self._bad: OrderedDict[str, str] = OrderedDict()  # name -> ETag that does not hold
        self._gone: set[str] | None = None  # deleted while a recovery lists

    @property
    def engine(self) -> str:
        return "boto3"

    # -- opening --------------------------------------------------------------------------------

    def check(self) -> None:
        make_client(self._config, anonymous=True).close()

    def open(self) -> ProbeReport:
        self._calls.closed.clear()
        if self._client is None:
            self._client = make_client(self._config)
            self._guard = Guard(4 * self._stall_ns)
            self._calls.guard = self._guard
            self._guard.install(self._client)
            self._parts = ThreadPoolExecutor(self._config.concurrency, "kvd-tier-s3-part")
        try:
            report = self._probe(time.monotonic_ns() + START_NS, write=True)
        except Refused as refused:
            if refused.permanent:
                self.close()
                raise ConfigError(
                    f"tier s3: bucket {self._config.bucket}: {refused.detail}"
                ) from refused
            raise
        self._abort_stale()
        return report

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        return self._probe(deadline, write=write)

    def _probe(self, deadline: int, *, write: bool) -> ProbeReport:
        """Each right by itself, so that a refusal names the one that is missing."""
        client, bucket = self._client, self._config.bucket
        began = time.perf_counter()
        self._run("ListBucket", lambda: self._list_one(), deadline)
        if write:
            name = f"{self._folder}probe-{self._owner.hex()}"
            data = time.time_ns().to_bytes(8, "little") * 8
            self._run(
                "PutObject", lambda: client.put_object(Bucket=bucket, Key=name, Body=data), deadline
            )
            back = self._run(
                "GetObject",
                lambda: client.get_object(Bucket=bucket, Key=name)["Body"].read(),
                deadline,
            )
            if back != data:
                raise failed(Reason.IO, "what was put is not what was got")
            self._run(
                "DeleteObject", lambda: client.delete_object(Bucket=bucket, Key=name), deadline
            )
        took = (time.perf_counter() - began) * 1000
        where = self._config.endpoint or "AWS"
        return ProbeReport(
            self.engine,
            f"bucket {bucket} at {where}, prefix {self._folder}, probed in {took:.0f} ms",
        )

    def _list_one(self) -> Any:
        answer = self._client.list_objects_v2(
            Bucket=self._config.bucket, Prefix=self._folder, MaxKeys=1
        )
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region")
        if region and self._config.region and region != self._config.region:
            raise failed(
                Reason.REGION,
                f"the bucket is in region {region}, not {self._config.region}",
                permanent=True,
            )
        return answer

    def _abort_stale(self) -> None:
        """Parts of uploads that nobody finished cost money and are seen by nobody."""
        client, bucket = self._client, self._config.bucket

        def abort() -> None:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=self._folder
            )
            for page in pages:
                for upload in page.get("Uploads", []):
                    started = upload.get("Initiated") or datetime.now(UTC)
                    age = (datetime.now(UTC) - started).total_seconds()
                    if age >= self._config.stale_upload_s:
                        client.abort_multipart_upload(
                            Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        self._calls.notes["aborted_uploads"] += 1

        self._try("ListMultipartUploads", abort)

    def _try(self, what: str, call: Callable[[], Any]) -> bool:
        """Whether it worked, for what is not worth failing for."""
        try:
            self._run(what, call, time.monotonic_ns() + START_NS)
        except (Refused, PreconditionFailed) as error:
            log.warning("tier s3: %s", error)
            return False
        return True

    def _run(self, what: str, call: Callable[[], Any], deadline: int = NEVER) -> Any:
        if self._client is None:
            raise failed(Reason.OTHER, "not open")
        return self._calls.run(what, call, deadline)

    # -- put ------------------------------------------------------------------------------------

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        self._expire()
        name = name_of(self._config.prefix, key)
        nbytes = self.cost(len(source))
        with self._lock:
            known = self._mine.get(name)
            if known is None and self._used + nbytes > self._config.limit_bytes:
                raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
            if known is None:
                self._used += nbytes
        record = header._replace(session=self._owner, generation=1, epoch=0).pack()
        written = False
        try:
            written = self._put_absent(name, key, header, record, source, deadline)
        finally:
            with self._lock:
                if known is None and not written:
                    self._used -= nbytes
                elif known is None:
                    self._mine[name] = _Mine(nbytes, time.time())
        return Stored(NOWHERE, existed=not written)

    def _put_absent(
        self,
        name: str,
        key: Key,
        header: ChunkHeader,
        record: bytes,
        source: memoryview,
        deadline: int,
    ) -> bool:
        """True: written by us, now or by an attempt whose answer was lost. False: somebody else's
        lies there and is the same chunk."""
        bad = self._bad.get(name)
        for condition in (
            [{"IfMatch": bad}, {"IfNoneMatch": "*"}] if bad else [{"IfNoneMatch": "*"}]
        ):
            try:
                self._send(name, record, source, condition, deadline)
            except PreconditionFailed:
                continue
            except Refused as refused:
                if refused.answer is Answer.MISS and bad:
                    continue  # nothing to replace any more
                raise
            self._bad.pop(name, None)
            return True
        there = self._record(name, deadline)
        same = (
            Key.of(there) == key
            and there.length == header.length
            and there.tokens == header.tokens
            and there.fingerprint == header.fingerprint
        )
        if not same:
            raise failed(Reason.CONFLICT, "an object of another content lies there")
        return there.session == self._owner

    def _send(
        self,
        name: str,
        record: bytes,
        source: memoryview,
        condition: dict[str, str],
        deadline: int,
    ) -> None:
        length = HEADER_BYTES + len(source)
        if length > self._config.multipart_bytes:
            self._send_parts(name, record, source, condition, deadline)
            return
        extra: dict[str, Any] = dict(condition)
        checksum = crc32c(record, source)
        if checksum is not None:
            extra["ChecksumCRC32C"] = checksum
        self._run(
            "PutObject",
            lambda: self._client.put_object(
                Bucket=self._config.bucket,
                Key=name,
                Body=Body(record, source),
                ContentLength=length,
                ContentType="application/octet-stream",
                **extra,
            ),
            deadline,
        )

    def _send_parts(
        self,
        name: str,
        record: bytes,
        source: memoryview,
        condition: dict[str, str],
        deadline: int,
    ) -> None:
        client, at = self._client, {"Bucket": self._config.bucket, "Key": name}
        upload = self._run(
            "CreateMultipartUpload",
            lambda: client.create_multipart_upload(**at, ContentType="application/octet-stream"),
            deadline,
        )["UploadId"]
        size = self._config.part_bytes
        bodies = [(record, source[: size - HEADER_BYTES])] + [
            (b"", source[begin : begin + size])
            for begin in range(size - HEADER_BYTES, len(source), size)
        ]

        def send(number: int, head: bytes, piece: memoryview) -> dict[str, Any]:
            answer = self._run(
                f"UploadPart {number}",
                lambda: client.upload_part(
                    **at,
                    UploadId=upload,
                    PartNumber=number,
                    Body=Body(head, piece),
                    ContentLength=len(head) + len(piece),
                ),
                deadline,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = self._together([partial(send, n, *body) for n, body in enumerate(bodies, 1)])
            self._run(
                "CompleteMultipartUpload",
                lambda: client.complete_multipart_upload(
                    **at, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
                ),
                deadline,
            )
        except BaseException:
            self._abort(name, upload)
            raise

    def _abort(self, name: str, upload: str) -> None:
        done = self._try(
            "AbortMultipartUpload",
            lambda: self._client.abort_multipart_upload(
                Bucket=self._config.bucket, Key=name, UploadId=upload
            ),
        )
        self._calls.notes["aborted_uploads" if done else "lost_uploads"] += 1

    def _together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Run them side by side; their results in order, or the first error. Whatever happens,
        none of them runs any more when this returns: they use the caller's memory."""
        assert self._parts is not None
        futures: list[Future[Any]] = [self._parts.submit(call) for call in calls]
        wait(futures, return_when="FIRST_EXCEPTION")
        for future in futures:
            future.cancel()
        wait(futures)
        for future in futures:
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        if any(future.cancelled() for future in futures):
            raise failed(Reason.OTHER, "the tier is closing")
        return [future.result() for future in futures]

    # -- get ------------------------------------------------------------------------------------

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        name = name_of(self._config.prefix, key)
        seen: str | None = None
        why = "an answer that is none of S3's"
        for _ in range(2):
            try:
                if self.cost(len(into)) > self._config.multipart_bytes:
                    found = self._get_ranges(name, into, deadline)
                else:
                    found = self._run(
                        "GetObject", lambda: self._get_whole(name, into, deadline), deadline
                    )
                return found
            except NotThere:  # deleted behind our back: our accounts follow
                self._vanished(name)
                raise
            except PreconditionFailed:
                continue  # it was replaced while its ranges came
            except _Broken as broken:
                why = str(broken)
                if broken.etag == seen and self._is_so(name, broken, deadline):
                    self.quarantine(key, place, broken.etag)
                    raise Refused(Answer.CORRUPT, detail=why) from broken
                seen = broken.etag
        raise failed(Reason.IO, why)

    def _get_whole(self, name: str, into: memoryview, deadline: int) -> Found:
        answer = self._client.get_object(Bucket=self._config.bucket, Key=name)
        etag = answer.get("ETag")
        body = answer["Body"]
        try:
            self._refuse_known(name, etag, answer)
            length = answer.get("ContentLength")
            head = bytearray(HEADER_BYTES)
            if length is not None and length != HEADER_BYTES + len(into):
                if length < HEADER_BYTES:
                    raise _Broken(etag, length, f"an object of {length} bytes")
                head[:] = _exactly(body._raw_stream, HEADER_BYTES)
                self._other_length(head, length, etag)
            expected(answer, HEADER_BYTES + len(into))
        except BaseException:
            body.close()
            raise
        receive(body, head, into, deadline, self._stall_ns)
        return Found(_parse(head, etag, HEADER_BYTES + len(into)), etag)

    def _other_length(self, head: bytearray, length: int, etag: str | None) -> None:
        header = _parse(head, etag, length)
        if HEADER_BYTES + header.length == length:
            raise Refused(Answer.MISS, detail="a chunk of another length lies there")
        why = f"{length} bytes where its record says {HEADER_BYTES + header.length}"
        raise _Broken(etag, length, why)

    def _get_ranges(self, name: str, into: memoryview, deadline: int) -> Found:
        client, bucket = self._client, self._config.bucket
        head_of = self._run(
            "HeadObject", lambda: client.head_object(Bucket=bucket, Key=name), deadline
        )
        etag = head_of.get("ETag")
        self._refuse_known(name, etag, head_of)
        length = HEADER_BYTES + len(into)
        if head_of.get("ContentLength") != length:
            record = bytearray(self._record_bytes(name, deadline))
            self._other_length(record, int(head_of.get("ContentLength") or 0), etag)
        size, head = self._config.part_bytes, bytearray(HEADER_BYTES)

        def fetch(begin: int, end: int) -> None:
            first = begin == 0
            answer = client.get_object(
                Bucket=bucket, Key=name, Range=f"bytes={begin}-{end - 1}", IfMatch=etag
            )
            try:
                expected(answer, end - begin)
            except BaseException:
                answer["Body"].close()
                raise
            view = into[max(0, begin - HEADER_BYTES) : end - HEADER_BYTES]
            receive(answer["Body"], head if first else bytearray(), view, deadline, self._stall_ns)

        def ranged(begin: int) -> Callable[[], None]:
            end = min(begin + size, length)
            return lambda: self._run("GetObject", lambda: fetch(begin, end), deadline)

        self._together([ranged(begin) for begin in range(0, length, size)])
        return Found(_parse(head, etag, HEADER_BYTES + len(into)), etag)

    def _is_so(self, name: str, broken: _Broken, deadline: int) -> bool:
        """Whether the server agrees that the object is what came: if not, it was the way here."""
        if broken.etag is None:
            return False
        there = self._run(
            "HeadObject",
            lambda: self._client.head_object(Bucket=self._config.bucket, Key=name),
            deadline,
        )
        return bool((there.get("ETag"), there.get("ContentLength")) == (broken.etag, broken.length))

    def _refuse_known(self, name: str, etag: str | None, answer: dict[str, Any]) -> None:
        """What is known to be bad, and what is too old, is not there."""
        bad = self._bad.get(name)
        if bad is not None and bad == etag:
            raise Refused(Answer.MISS, detail="quarantined")
        modified = answer.get("LastModified")
        if self._config.ttl_s and modified is not None:
            if (datetime.now(UTC) - modified).total_seconds() > self._config.ttl_s:
                raise Refused(Answer.MISS, detail="its time is over")

    def _record(self, name: str, deadline: int) -> ChunkHeader:
        try:
            return ChunkHeader.unpack(self._record_bytes(name, deadline))
        except ValueError as error:
            raise failed(Reason.CONFLICT, f"what lies there has no record: {error}") from error
        except Refused as refused:
            if refused.answer is Answer.MISS:  # it was there a moment ago
                raise failed(Reason.CONFLICT, "it comes and goes") from refused
            if refused.reason in (Reason.SHORT, Reason.OTHER):
                raise failed(Reason.CONFLICT, "what lies there is no chunk") from refused
            raise

    def _record_bytes(self, name: str, deadline: int) -> bytes:
        def fetch() -> bytes:
            answer = self._client.get_object(
                Bucket=self._config.bucket, Key=name, Range=f"bytes=0-{HEADER_BYTES - 1}"
            )
            head = bytearray(HEADER_BYTES)
            try:
                expected(answer, HEADER_BYTES)
            except BaseException:
                answer["Body"].close()
                raise
            receive(answer["Body"], head, memoryview(b""), deadline, self._stall_ns)
            return bytes(head)

        found: bytes = self._run("GetObject", fetch, deadline)
        return found

    # -- delete ---------------------------------------------------------------------------------

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        names = [name_of(self._config.prefix, key) for key, _ in items]
        with self._lock:
            ours = [name for name in names if name in self._mine]
        refused = self._delete_names(ours, deadline) if ours else set()
        mine = set(ours)
        return [
            Answer.MISS if n not in mine else Answer.FAILED if n in refused else Answer.OK
            for n in names
        ]

    def _delete_names(self, names: list[str], deadline: int) -> set[str]:
        """Which could not be deleted; the others are gone, also from the accounts."""
        answer = self._run(
            "DeleteObjects",
            lambda: self._client.delete_objects(
                Bucket=self._config.bucket,
                Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
            ),
            deadline,
        )
        refused = {error.get("Key", "") for error in answer.get("Errors", [])}
        with self._lock:
            for name in names:
                if name not in refused:
                    self._forget(name)
        return refused

    def owns(self, key: Key) -> bool:
        """Whether this installation wrote the object and has not deleted it. From any thread."""
        name = name_of(self._config.prefix, key)
        with self._lock:
            return name in self._mine

    def _vanished(self, name: str) -> None:
        with self._lock:
            if name in self._mine:
                self._forget(name)
                self._calls.notes["vanished"] += 1

    def _forget(self, name: str) -> None:
        if self._gone is not None:
            self._gone.add(name)
        mine = self._mine.pop(name, None)
        if mine is not None:
            self._used -= mine.nbytes

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        name = name_of(self._config.prefix, key)
        etag = str(version) if version else ""
        if not etag:
            return
        with self._lock:
            self._bad[name] = etag
            if len(self._bad) > MOST_BAD:
                self._bad.popitem(last=False)
            ours = name in self._mine
        if not ours:
            return  # its owner finds out by itself; here it is a miss, until somebody replaces it
        if not self._try(
            "DeleteObject",
            lambda: self._client.delete_object(Bucket=self._config.bucket, Key=name, IfMatch=etag),
        ):
            return
        with self._lock:
            self._forget(name)
            self._bad.pop(name, None)

    def _expire(self) -> None:
        """Delete some of ours whose time is over."""
        if not self._config.ttl_s:
            return
        over = time.time() - self._config.ttl_s
        with self._lock:
            old: list[str] = []
            for name, mine in self._mine.items():
                if mine.written > over or len(old) >= 100:
                    break
                old.append(name)
        if old:
            try:
                self._delete_names(old, time.monotonic_ns() + START_NS)
                self._calls.notes["expired"] += len(old)
            except Refused as refused:
                log.info("tier s3: old objects could not be deleted: %s", refused.detail)

    # -- recovery -------------------------------------------------------------------------------

    def recover(self) -> Iterator[Recovered]:
        """Pages of names, and of each object its record: no payload."""
        with self._lock:
            self._gone = set()
        try:
            yield from self._listed()
        finally:
            self._gone = None

    def _listed(self) -> Iterator[Recovered]:
        left = self._config.most_recovered
        token: str | None = None
        while left > 0:
            page = self._run("ListBucket", partial(self._page, token))
            there = [o for o in page.get("Contents", []) if "/probe-" not in o["Key"]][:left]
            left -= len(there)
            for begin in range(0, len(there), TOLD):
                batch = self._together(
                    [partial(self._look, o) for o in there[begin : begin + TOLD]]
                )
                rows = b"".join(raw[: IDENTITY_DTYPE.itemsize] for raw in batch if raw)
                if rows:
                    records = np.frombuffer(rows, IDENTITY_DTYPE)
                    none = np.zeros(len(records), np.uint64)
                    yield Recovered(records, none, none)
            token = page.get("NextContinuationToken")
            if not token:
                return

    def _page(self, token: str | None) -> dict[str, Any]:
        more = {"ContinuationToken": token} if token else {}
        page: dict[str, Any] = self._client.list_objects_v2(
            Bucket=self._config.bucket, Prefix=self._folder, MaxKeys=PAGE, **more
        )
        return page

    def _look(self, listed: dict[str, Any]) -> bytes | None:
        """The record of a listed object; None if it does not hold, or is too old."""
        name, size = listed["Key"], int(listed["Size"])
        try:
            raw = self._record_bytes(name, NEVER)
            header = ChunkHeader.unpack(raw)
        except (Refused, ValueError) as error:
            if isinstance(error, Refused) and error.reason in _AWAY:
                raise  # of the server, not of this object: the recovery is begun again later
            self._calls.notes["bad_records"] += 1
            return None
        if (
            name_of(self._config.prefix, Key.of(header)) != name
            or header.length + HEADER_BYTES != size
            or header.state != State.READY
            or not header.flags & HeaderFlag.SEALED
        ):
            self._calls.notes["bad_records"] += 1
            return None
        modified = listed["LastModified"]
        with self._lock:
            if self._gone is not None and name in self._gone:
                return None
            if header.session == self._owner:
                if name not in self._mine:
                    self._mine[name] = _Mine(size, modified.timestamp())
                    self._used += size
        if self._config.ttl_s:
            if (datetime.now(UTC) - modified).total_seconds() > self._config.ttl_s:
                return None
        return raw

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return length + HEADER_BYTES

    def room(self, length: int) -> int:
        cost = self.cost(length)
        if cost > min(self._config.limit_bytes, LARGEST):
            return -1
        with self._lock:
            return max(0, self._config.limit_bytes - self._used) // cost

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._config.limit_bytes, self._used, self._used, len(self._mine))

    def notes(self) -> dict[str, int]:
        return {**self._calls.notes, "ended_exchanges": self._guard.ended}

    def close(self) -> None:
        self._calls.closed.set()
        if self._parts is not None:
            self._parts.shutdown(wait=True, cancel_futures=True)
            self._parts = None
        if self._client is not None:
            self._client.close()
            self._client = None
            self._guard.close()


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
        raise _Broken(etag, length, str(error)) from error
