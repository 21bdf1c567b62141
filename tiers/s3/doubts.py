"""What may have been written, and is no chunk that anybody knows of: it is taken back.

The law of this module: what lies there goes only if it is ours, and only that very object, by its
ETag; it is settled only by an answer that says what lies there, or that nothing does. One that
can't be settled keeps no other from its turn.
"""

from __future__ import annotations

import logging
import time

from kvd.tiers.backend import Refused
from kvd.tiers.base import Reason
from kvd.tiers.mine import Mine
from kvd.tiers.s3.bucket import Bucket
from kvd.tiers.s3.calls import AWAY, NotThere, PreconditionFailed
from kvd.tiers.s3.downloads import Downloads

log = logging.getLogger(__name__)

TIDIED = 16  # looked for at a time
SETTLED_NS = 5_000_000_000  # a request that was given up may still be carried out for so long


class Doubts:
    def __init__(self, bucket: Bucket, downloads: Downloads, mine: Mine[str], owner: bytes) -> None:
        self._bucket = bucket
        self._downloads = downloads
        self._mine = mine
        self._owner = owner
        self._by_etag = True  # until the server says that it can't delete so

    @property
    def untidy(self) -> int:
        """How many `tidy` would look for."""
        return self._mine.unsettled(time.monotonic_ns() - SETTLED_NS)

    def tidy(self, deadline: int) -> None:
        """Settle some, the oldest first. For when the server works."""
        before = time.monotonic_ns() - SETTLED_NS
        for _ in range(TIDIED):
            if time.monotonic_ns() >= deadline or (found := self._mine.look_for(before)) is None:
                return
            name, nbytes = found
            gone = False
            try:
                self._take_back(name, nbytes, deadline)
                gone = True
            except Refused as refused:
                log.info("tier s3: what became of a write is not known yet: %s", refused.detail)
                if refused.reason in AWAY:
                    return
            finally:
                self._mine.looked(name, gone=gone)

    def _take_back(self, name: str, nbytes: int, deadline: int) -> None:
        """Refused if it could not be asked, or not be deleted."""
        there = self._downloads.lies(name, nbytes, deadline)
        if there is not None and there.header.session == self._owner:
            try:
                self._delete(name, there.etag, deadline)
            except (PreconditionFailed, NotThere):
                return  # what is not there any more, or was replaced since, is not ours
            self._bucket.counted.add("taken_back")

    def _delete(self, name: str, etag: str | None, deadline: int) -> None:
        at, client = self._bucket.at(name), self._bucket.client
        how = {"IfMatch": etag} if etag and self._by_etag else {}
        try:
            self._bucket.run("DeleteObject", lambda: client.delete_object(**at, **how), deadline)
        except Refused as refused:
            if not how or refused.reason is not Reason.OTHER:
                raise
            log.info("tier s3: deletes by ETag are not to be had here: %s", refused.detail)
            self._by_etag = False
            self._delete(name, etag, deadline)
