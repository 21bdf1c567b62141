"""How an object is written: in one request, or in parts side by side.

The law of this module: an object is written under a condition, whole or not at all; parts of an
upload that failed are given back, as soon as the server lets that be, and those that a killed
daemon left are once they are old: a start looks for them, and then somebody does every six hours.
Of an upload whose begin was not answered there is no id: tiers/s3/unanswered.py looks for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from kvd.chunk import HEADER_BYTES
from kvd.tiers.backend import Refused, Unsure, failed
from kvd.tiers.base import Reason
from kvd.tiers.s3.bucket import Bucket
from kvd.tiers.s3.calls import NotThere, PreconditionFailed, may_have_worked
from kvd.tiers.s3.objects import Body, crc32c
from kvd.tiers.s3.unanswered import Unanswered

_TYPE = "application/octet-stream"
MOST_LOST = 4096
LOST_AT_A_TIME = 8
STALE_EVERY_NS = 6 * 3600 * 1_000_000_000


def told(answer: dict[str, Any], name: str) -> str:
    """What an answer of S3's says; one that does not is none of its, whatever its status."""
    said = answer.get(name)
    if not said:
        raise failed(Reason.IO, f"an answer without {name}")
    return str(said)


class Uploads:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._lost: deque[tuple[str, str]] = deque()  # (name, upload) that could not be aborted
        self._open: set[str] = set()  # ids of uploads that somebody here is at
        self._unanswered = Unanswered(bucket, self._at_work)
        self._stale_at = 0  # CLOCK_MONOTONIC: when to look for old ones

    def send(
        self,
        name: str,
        record: bytes,
        source: memoryview,
        condition: dict[str, str],
        deadline: int,
    ) -> None:
        """Write record and payload as one object. PreconditionFailed if the condition (IfMatch,
        IfNoneMatch) does not hold, or there is nothing to replace; Unsure if it may lie there;
        Refused."""
        length = HEADER_BYTES + len(source)
        if length > self._bucket.config.multipart_bytes:
            self._send_parts(name, record, source, condition, deadline)
            return
        extra: dict[str, Any] = dict(condition)
        checksum = crc32c(record, source)
        if checksum is not None:
            extra["ChecksumCRC32C"] = checksum
        self._finish(
            "PutObject",
            lambda: self._bucket.client.put_object(
                **self._bucket.at(name),
                Body=Body(record, source),
                ContentLength=length,
                ContentType=_TYPE,
                **extra,
            ),
            deadline,
        )

    def _at_work(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._open)

    def _send_parts(
        self,
        name: str,
        record: bytes,
        source: memoryview,
        condition: dict[str, str],
        deadline: int,
    ) -> None:
        bucket, client, at = self._bucket, self._bucket.client, self._bucket.at(name)
        upload = self._begin(name, deadline)
        size = bucket.config.part_bytes
        bodies = [(record, source[: size - HEADER_BYTES])] + [
            (b"", source[begin : begin + size])
            for begin in range(size - HEADER_BYTES, len(source), size)
        ]

        def send(number: int, head: bytes, piece: memoryview) -> dict[str, Any]:
            def upload_part() -> str:
                answer = client.upload_part(
                    **at,
                    UploadId=upload,
                    PartNumber=number,
                    Body=Body(head, piece),
                    ContentLength=len(head) + len(piece),
                )
                return told(answer, "ETag")

            etag = bucket.run(f"UploadPart {number}", upload_part, deadline)
            return {"PartNumber": number, "ETag": etag}

        try:
            parts = bucket.together([partial(send, n, *body) for n, body in enumerate(bodies, 1)])
            self._complete(at, upload, parts, condition, deadline)
        except BaseException:
            self._abort(name, upload, deadline)
            raise
        finally:
            with self._lock:
                self._open.discard(upload)

    def _begin(self, name: str, deadline: int) -> str:
        """The id of a new upload. Refused. Attempts without an answer may have begun others."""
        client, at = self._bucket.client, self._bucket.at(name)
        since = time.monotonic_ns()
        unsure = False

        def attempt() -> str:
            nonlocal unsure
            try:
                begun = client.create_multipart_upload(**at, ContentType=_TYPE)
                upload = told(begun, "UploadId")
            except Exception as error:
                unsure = unsure or may_have_worked(error)
                raise
            with self._lock:
                self._open.add(upload)
            return upload

        try:
            upload: str = self._bucket.run("CreateMultipartUpload", attempt, deadline)
        finally:
            if unsure:
                self._unanswered.add(name, since)
        return upload

    def _complete(
        self,
        at: dict[str, str],
        upload: str,
        parts: list[dict[str, Any]],
        condition: dict[str, str],
        deadline: int,
    ) -> None:
        """Make an object of the parts."""
        client = self._bucket.client
        self._finish(
            "CompleteMultipartUpload",
            lambda: told(
                client.complete_multipart_upload(
                    **at, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
                ),
                "ETag",
            ),
            deadline,
        )

    def _finish(self, what: str, call: Callable[[], Any], deadline: int) -> None:
        """The request that makes the object. Unsure if one of its attempts may have done so, and
        none says that it did. An object or an upload that is not there (any more) may be one that
        an attempt whose answer was lost has used up: as after a 412, what lies there says so."""
        unsure = False

        def attempt() -> None:
            nonlocal unsure
            try:
                call()
            except Exception as error:
                unsure = unsure or may_have_worked(error)
                raise

        try:
            self._bucket.run(what, attempt, deadline)
        except (PreconditionFailed, NotThere) as error:
            raise PreconditionFailed(unsure=unsure) from error
        except Refused as refused:
            if not unsure:
                raise
            raise Unsure.of(refused) from refused

    def _abort(self, name: str, upload: str, deadline: int) -> None:
        """At once while there is time, for somebody waits, and by `tidy` if not."""
        if not self._aborted(name, upload, deadline):
            self._bucket.counted.add("lost_uploads")
            with self._lock:
                if len(self._lost) < MOST_LOST:
                    self._lost.append((name, upload))

    def _aborted(self, name: str, upload: str, deadline: int) -> bool:
        """Whether it is not there any more."""
        bucket = self._bucket
        at = bucket.at(name)

        def abort() -> bool:
            try:
                bucket.client.abort_multipart_upload(**at, UploadId=upload)
            except bucket.client.exceptions.NoSuchUpload:
                return False
            bucket.counted.add("aborted_uploads")
            return True

        return bucket.attempt("AbortMultipartUpload", abort, deadline)

    @property
    def untidy(self) -> int:
        """How much `tidy` would find."""
        with self._lock:
            known = len(self._lost) + (time.monotonic_ns() >= self._stale_at)
        return known + self._unanswered.untidy

    def tidy(self, deadline: int) -> None:
        """Some of those that could not be given back when they failed, and now and then those that
        are old. For when the server works."""
        with self._lock:
            due = time.monotonic_ns() >= self._stale_at
            if due:
                self._stale_at = time.monotonic_ns() + STALE_EVERY_NS
        if due and not self._abort_stale(deadline):
            self._stale_at = 0  # there was no time for all of them
        self._abort_lost(deadline)
        self._unanswered.tidy(self._aborted, deadline)

    def _abort_lost(self, deadline: int) -> None:
        for _ in range(LOST_AT_A_TIME):
            with self._lock:
                if not self._lost or time.monotonic_ns() >= deadline:
                    return
                name, upload = self._lost.popleft()
            if not self._aborted(name, upload, deadline):
                with self._lock:  # after the others, should it be this one's own trouble
                    self._lost.append((name, upload))
                return

    def _abort_stale(self, deadline: int) -> bool:
        """Parts of uploads that nobody finished cost money and are seen by nobody. False: the
        deadline came first."""
        bucket, client, config = self._bucket, self._bucket.client, self._bucket.config

        def abort() -> None:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=config.bucket, Prefix=bucket.folder
            )
            for page in pages:
                for upload in page.get("Uploads", []):
                    started = upload.get("Initiated") or datetime.now(UTC)
                    age = (datetime.now(UTC) - started).total_seconds()
                    if age >= config.stale_upload_s:
                        if time.monotonic_ns() >= deadline:
                            return
                        self._aborted(upload["Key"], upload["UploadId"], deadline)

        bucket.attempt("ListMultipartUploads", abort, deadline)
        return time.monotonic_ns() < deadline
