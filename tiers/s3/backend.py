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
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from kvd.chunk import HEADER_BYTES, IDENTITY_DTYPE, ChunkHeader, HeaderFlag, State
from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Found, Refused, Stored, Unsure, failed
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
from kvd.tiers.mine import Mine
from kvd.tiers.s3.bucket import START_NS, Bucket
from kvd.tiers.s3.calls import AWAY, NotThere, PreconditionFailed
from kvd.tiers.s3.config import S3Config, check, make_client
from kvd.tiers.s3.doubts import Doubts
from kvd.tiers.s3.downloads import Broken, Downloads, There
from kvd.tiers.s3.objects import name_of, owner_of
from kvd.tiers.s3.uploads import Uploads

log = logging.getLogger(__name__)

LARGEST = 5 << 40  # of an object
MOST_BAD = 4096
PAGE = 1000
TOLD = 256  # records in a batch of a recovery
EXPIRED = 100  # deleted at a time
TIDY_NS = 5_000_000_000  # of a probe, at most


class _Lies(Enum):
    """What lies there after a put that went well."""

    NEW = "new"  # what was written now
    OURS = "ours"  # what was written before, or by an attempt whose answer was lost
    THEIRS = "theirs"


class _Write:
    """What is put, and whether some attempt may have worked although none says so."""

    def __init__(self, name: str, record: bytes, source: memoryview, deadline: int) -> None:
        self.name = name
        self.record = record
        self.source = source
        self.deadline = deadline
        self.unsure = False


class S3Backend(Backend):
    by_key = True
    delete_batch = 500

    def __init__(self, config: S3Config) -> None:
        check(config)
        self._config = config
        self._owner = owner_of(config.installation)
        self._bucket = Bucket(config)
        self._uploads = Uploads(self._bucket)
        self._downloads = Downloads(self._bucket, self._refuse_known)
        self._probing = threading.Lock()
        self._mine: Mine[str] = Mine(config.limit_bytes, aged=bool(config.ttl_s))
        self._doubts = Doubts(self._bucket, self._downloads, self._mine, self._owner)
        self._lock = threading.Lock()
        self._bad: OrderedDict[str, str] = OrderedDict()  # name -> ETag that does not hold

    @property
    def engine(self) -> str:
        return "boto3"

    # -- opening --------------------------------------------------------------------------------

    def check(self) -> None:
        make_client(self._config, anonymous=True).close()

    def open(self) -> ProbeReport:
        self._bucket.open()
        try:
            report = self.probe(time.monotonic_ns() + START_NS, write=True)
        except Refused as refused:
            if refused.permanent:
                self.close()
                raise ConfigError(
                    f"tier s3: bucket {self._config.bucket}: {refused.detail}"
                ) from refused
            raise
        return report

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        """Each right by itself, so that a refusal names the one that is missing."""
        bucket = self._bucket
        began = time.perf_counter()
        bucket.run("ListBucket", self._list_one, deadline)
        if write:
            with self._probing:  # of one name: what a probe left behind is the next one's
                self._probe_writing(deadline)
            self._tidy(deadline)
        took = (time.perf_counter() - began) * 1000
        where = self._config.endpoint or "AWS"
        return ProbeReport(
            self.engine,
            f"bucket {self._config.bucket} at {where}, prefix {bucket.folder}, "
            f"probed in {took:.0f} ms",
        )

    def _probe_writing(self, deadline: int) -> None:
        bucket, client = self._bucket, self._bucket.client
        at = bucket.at(f"{bucket.folder}probe-{self._owner.hex()}")
        data = time.time_ns().to_bytes(8, "little") * 8
        bucket.run("PutObject", lambda: client.put_object(**at, Body=data), deadline)
        back = bucket.run("GetObject", lambda: client.get_object(**at)["Body"].read(), deadline)
        if back != data:
            raise failed(Reason.IO, "what was put is not what was got")
        bucket.run("DeleteObject", lambda: client.delete_object(**at), deadline)

    def _list_one(self) -> Any:
        answer = self._bucket.client.list_objects_v2(
            Bucket=self._config.bucket, Prefix=self._bucket.folder, MaxKeys=1
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

    # -- put ------------------------------------------------------------------------------------

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        self._expire(deadline)
        name, nbytes = self._name(key), self.cost(len(source))
        begun = self._mine.begin(name, nbytes)
        record = header._replace(session=self._owner, generation=1, epoch=0).pack()
        write = _Write(name, record, source, deadline)
        try:
            lies = self._put_absent(write, key, header)
        except BaseException as error:
            if begun:
                told = isinstance(error, Refused) and not isinstance(error, Unsure)
                sure = told and not write.unsure
                (self._mine.failed if sure else self._mine.unsure)(name, nbytes)
            raise
        if begun:
            self._mine.end(name, nbytes, ours=lies is not _Lies.THEIRS)
        elif lies is _Lies.THEIRS:  # it is not ours any more: not to be deleted either
            if self._mine.vanished(name):
                self._bucket.counted.add("vanished")
        elif lies is _Lies.NEW or write.unsure:
            self._mine.renewed(name, nbytes)
        return Stored(NOWHERE, existed=lies is _Lies.THEIRS)

    def _put_absent(self, write: _Write, key: Key, header: ChunkHeader) -> _Lies:
        """What lies there now, and is this chunk. What is too old to be read is replaced."""
        bad = self._bad.get(write.name)
        for condition in (
            [{"IfMatch": bad}, {"IfNoneMatch": "*"}] if bad else [{"IfNoneMatch": "*"}]
        ):
            if self._sent(write, condition):
                return _Lies.NEW
        for _ in range(2):
            there = self._there(write.name, write.deadline)
            lies = there.header
            if not (
                Key.of(lies) == key
                and lies.length == header.length
                and lies.tokens == header.tokens
                and lies.fingerprint == header.fingerprint
            ):
                raise failed(Reason.CONFLICT, "an object of another content lies there")
            if there.etag is None or there.modified is None or not self._too_old(there.modified):
                return _Lies.OURS if lies.session == self._owner else _Lies.THEIRS
            if self._sent(write, {"IfMatch": there.etag}):
                return _Lies.NEW
        raise failed(Reason.CONFLICT, "what lies there is too old, and can't be replaced")

    def _sent(self, write: _Write, how: dict[str, str]) -> bool:
        """Whether the condition held. Refused."""
        try:
            self._uploads.send(write.name, write.record, write.source, how, write.deadline)
        except PreconditionFailed as untrue:
            write.unsure = write.unsure or untrue.unsure
            return False
        self._bad.pop(write.name, None)
        return True

    def _there(self, name: str, deadline: int) -> There:
        """What lies there. Unsure if that can't be asked: it may be ours."""
        try:
            return self._downloads.there(name, deadline)
        except Refused as refused:
            if refused.reason is Reason.CONFLICT:
                raise
            raise Unsure.of(refused) from refused

    def _tidy(self, deadline: int) -> None:
        """The server works: take back what was begun while it did not. Whether it works does not
        hang on that, nor does whoever waits for it wait much longer."""
        deadline = min(deadline, time.monotonic_ns() + TIDY_NS)
        try:
            self._uploads.tidy(deadline)
            self._doubts.tidy(deadline)
        except Exception:
            log.exception("tier s3: what was begun can't be taken back")

    # -- get ------------------------------------------------------------------------------------

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        name = self._name(key)
        seen: str | None = None
        why = "an answer that is none of S3's"
        for _ in range(2):
            try:
                return self._downloads.fetch(name, into, deadline)
            except NotThere:  # deleted behind our back: our accounts follow
                if self._mine.vanished(name):
                    self._bucket.counted.add("vanished")
                raise
            except PreconditionFailed:
                continue  # it was replaced while its ranges came
            except Broken as broken:
                why = str(broken)
                if broken.etag == seen and self._downloads.is_so(name, broken, deadline):
                    self.quarantine(key, place, broken.etag)
                    raise Refused(Answer.CORRUPT, detail=why) from broken
                seen = broken.etag
        raise failed(Reason.IO, why)

    def _refuse_known(self, name: str, etag: str | None, answer: dict[str, Any]) -> None:
        """What is known to be bad, and what is too old, is not there."""
        bad = self._bad.get(name)
        if bad is not None and bad == etag:
            raise Refused(Answer.MISS, detail="quarantined")
        modified = answer.get("LastModified")
        if modified is not None and self._too_old(modified):
            raise Refused(Answer.MISS, detail="its time is over")

    def _too_old(self, modified: datetime) -> bool:
        ttl_s = self._config.ttl_s
        return bool(ttl_s) and (datetime.now(UTC) - modified).total_seconds() > ttl_s

    # -- delete ---------------------------------------------------------------------------------

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        names = [self._name(key) for key, _ in items]
        ours = self._mine.among(names)
        refused = self._delete_names(ours, deadline) if ours else set()
        mine = set(ours)
        return [
            Answer.MISS if n not in mine else Answer.FAILED if n in refused else Answer.OK
            for n in names
        ]

    def _delete_names(self, names: list[str], deadline: int) -> set[str]:
        """Which could not be deleted; the others are gone, also from the accounts."""
        answer = self._bucket.run(
            "DeleteObjects",
            lambda: self._bucket.client.delete_objects(
                Bucket=self._config.bucket,
                Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
            ),
            deadline,
        )
        refused = {error.get("Key", "") for error in answer.get("Errors", [])}
        self._mine.forget(name for name in names if name not in refused)
        return refused

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        name = self._name(key)
        etag = str(version) if version else ""
        if not etag:
            return
        with self._lock:
            self._bad[name] = etag
            if len(self._bad) > MOST_BAD:
                self._bad.popitem(last=False)
        if name not in self._mine:
            return  # its owner finds out by itself; here it is a miss, until somebody replaces it
        if not self._bucket.attempt(
            "DeleteObject",
            lambda: self._bucket.client.delete_object(**self._bucket.at(name), IfMatch=etag),
        ):
            return
        self._mine.forget([name])
        with self._lock:
            self._bad.pop(name, None)

    def _expire(self, deadline: int) -> None:
        """Delete some of ours whose time is over."""
        if not self._config.ttl_s:
            return
        old = self._mine.older(time.time() - self._config.ttl_s, EXPIRED)
        if old:
            try:
                left = self._delete_names(old, min(deadline, time.monotonic_ns() + START_NS))
                self._bucket.counted.add("expired", len(old) - len(left))
            except Refused as refused:
                log.info("tier s3: old objects could not be deleted: %s", refused.detail)
            finally:
                self._mine.deleted(old)

    # -- recovery -------------------------------------------------------------------------------

    def recover(self) -> Iterator[Recovered]:
        """Pages of names, and of each object its record: no payload."""
        with self._mine.listing():
            yield from self._listed()

    def _listed(self) -> Iterator[Recovered]:
        left = self._config.most_recovered
        token: str | None = None
        while left > 0:
            page = self._bucket.run("ListBucket", partial(self._page, token))
            there = [o for o in page.get("Contents", []) if "/probe-" not in o["Key"]][:left]
            left -= len(there)
            for begin in range(0, len(there), TOLD):
                batch = self._bucket.together(
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
        page: dict[str, Any] = self._bucket.client.list_objects_v2(
            Bucket=self._config.bucket, Prefix=self._bucket.folder, MaxKeys=PAGE, **more
        )
        return page

    def _look(self, listed: dict[str, Any]) -> bytes | None:
        """The record of a listed object; None if it does not hold, or is too old."""
        name, size = listed["Key"], int(listed["Size"])
        try:
            raw = self._downloads.record_bytes(name, NEVER)
            header = ChunkHeader.unpack(raw)
        except (Refused, ValueError) as error:
            if isinstance(error, Refused) and error.reason in AWAY:
                raise  # of the server, not of this object: the recovery is begun again later
            self._bucket.counted.add("bad_records")
            return None
        if (
            self._name(Key.of(header)) != name
            or header.length + HEADER_BYTES != size
            or header.state != State.READY
            or not header.flags & HeaderFlag.SEALED
        ):
            self._bucket.counted.add("bad_records")
            return None
        modified = listed["LastModified"]
        ours = header.session == self._owner
        if not self._mine.listed(name, size, modified.timestamp(), ours=ours):
            return None
        return None if self._too_old(modified) else raw

    # -- telling --------------------------------------------------------------------------------

    def _name(self, key: Key) -> str:
        return name_of(self._config.prefix, key)

    def owns(self, key: Key) -> bool:
        """Whether this installation wrote the object and has not deleted it. From any thread."""
        return self._name(key) in self._mine

    def cost(self, length: int) -> int:
        return length + HEADER_BYTES

    def room(self, length: int) -> int:
        cost = self.cost(length)
        if cost > min(self._config.limit_bytes, LARGEST):
            return -1
        return self._mine.free_bytes // cost

    def usage(self) -> Usage:
        return self._mine.usage()

    @property
    def untidy(self) -> int:
        return self._doubts.untidy + self._uploads.untidy

    def notes(self) -> dict[str, int]:
        return self._bucket.notes()

    def close(self) -> None:
        self._bucket.close()
