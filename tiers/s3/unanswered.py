"""Uploads that the server may have begun without saying so: they have no id here.

The law of this module: one is aborted only if it can be none of another daemon's: it is of exactly
the object's name, has begun no earlier than we asked and stood longer than a write lasts, has no
part, and is none that this daemon is at. By the server's clock alone. What is unclear is left, for
the day that old uploads get.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Reason
from kvd.tiers.s3.bucket import START_NS, Bucket
from kvd.tiers.s3.calls import AWAY, NotThere, PreconditionFailed

__all__ = ["LEFT_NS", "Abort", "Unanswered"]

log = logging.getLogger(__name__)

LEFT_NS = 60_000_000_000  # longer than a write has: whoever is at an upload has sent a part by then
MOST = 4096
LOOKS = 4  # that find only what is too young to tell
AT_A_TIME = 8
ROUNDED_S = 2.0  # clocks tell whole seconds

Abort = Callable[[str, str, int], bool]  # (name, upload, deadline): whether it is not there now


class _Asked(NamedTuple):
    since: int  # CLOCK_MONOTONIC: nothing was asked before
    due: int  # when what it left can be told from what others are at
    looks: int = 0


class Unanswered:
    """From any thread. `at_work()`: ids of the uploads that this daemon is at."""

    def __init__(self, bucket: Bucket, at_work: Callable[[], Collection[str]]) -> None:
        self._bucket = bucket
        self._at_work = at_work
        self._lock = threading.Lock()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()  # by the object's name; oldest first

    def add(self, name: str, since: int) -> None:
        """Some attempt to begin an upload of it, since `since`, was not answered."""
        with self._lock:
            known = self._asked.pop(name, None)
            if len(self._asked) < MOST:
                since = since if known is None else min(since, known.since)
                self._asked[name] = _Asked(since, time.monotonic_ns() + LEFT_NS)
        self._bucket.counted.add("lost_uploads")

    @property
    def untidy(self) -> int:
        """How many `tidy` would look for."""
        now = time.monotonic_ns()
        with self._lock:
            return sum(asked.due <= now for asked in self._asked.values())

    def tidy(self, abort: Abort, deadline: int) -> None:
        """Look for some. For when the server works."""
        for _ in range(AT_A_TIME):
            now = time.monotonic_ns()
            with self._lock:
                due = (name for name, asked in self._asked.items() if asked.due <= now)
                name = next(due, None)
                if name is None or now >= deadline:
                    return
                asked = self._asked.pop(name)
            try:
                clear = self._look(name, asked, abort, deadline)
            except Refused as refused:
                log.info("tier s3: an upload without an answer: %s", refused.detail)
                if refused.reason in AWAY:
                    self._again(name, asked)  # after the others, and as soon
                    return
                clear = False
            if not clear and asked.looks + 1 < LOOKS:
                due_at = time.monotonic_ns() + LEFT_NS
                self._again(name, asked._replace(due=due_at, looks=asked.looks + 1))

    def _again(self, name: str, asked: _Asked) -> None:
        with self._lock:
            newer = self._asked.pop(name, None)
            self._asked[name] = asked if newer is None else newer._replace(since=asked.since)

    def _look(self, name: str, asked: _Asked, abort: Abort, deadline: int) -> bool:
        """Whether nothing of ours can be there any more. Refused."""
        clear = True
        for upload, age_s in self._there(name, deadline):
            ours_s = (time.monotonic_ns() - asked.since) / 1e9 + ROUNDED_S
            if upload in self._at_work() or age_s > ours_s:
                continue
            if age_s < LEFT_NS / 1e9:
                clear = False  # the server may have taken its time
            elif self._has_no_part(name, upload, deadline):
                clear = abort(name, upload, deadline) and clear
        return clear

    def _there(self, name: str, deadline: int) -> list[tuple[str, float]]:
        """Open uploads of that object, and how old the server says that they are. Nothing of one
        that does not say it."""
        listed = self._run(
            "ListMultipartUploads",
            lambda client: client.list_multipart_uploads(
                Bucket=self._bucket.config.bucket, Prefix=name
            ),
            deadline,
        )
        date = listed.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date is None:
            return []
        now: datetime = parsedate_to_datetime(date)
        return [
            (upload["UploadId"], (now - upload["Initiated"]).total_seconds())
            for upload in listed.get("Uploads", [])
            if upload["Key"] == name and "Initiated" in upload
        ]

    def _has_no_part(self, name: str, upload: str, deadline: int) -> bool:
        """Who knows its id has sent one, and we never knew it."""
        try:
            listed = self._run(
                "ListParts",
                lambda client: client.list_parts(
                    **self._bucket.at(name), UploadId=upload, MaxParts=1
                ),
                deadline,
            )
        except NotThere:
            return False
        return not listed.get("Parts")

    def _run(self, what: str, call: Callable[[Any], Any], deadline: int) -> dict[str, Any]:
        bucket = self._bucket
        within = min(deadline, time.monotonic_ns() + START_NS)
        try:
            answer: dict[str, Any] = bucket.run(what, lambda: call(bucket.client), within)
        except PreconditionFailed as error:  # it was asked under none
            raise failed(Reason.OTHER, f"{what}: 412") from error
        return answer
