"""The bucket and the connections to it, from `open` to `close`.

The law of this module: every request goes through `run`, so it has a deadline and a number of
attempts, and what it fails for has a reason. What runs side by side uses the caller's memory, so
none of it runs any more when `together` returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import NEVER, Reason
from kvd.tiers.s3.calls import Calls, PreconditionFailed
from kvd.tiers.s3.config import S3Config, make_client
from kvd.tiers.s3.guard import Guard
from kvd.tiers.s3.objects import folder
from kvd.tiers.tally import Tally

log = logging.getLogger(__name__)

START_NS = 8_000_000_000  # for what is tried at the start, or beside everything else


class Bucket:
    """From any thread once it is open. `client` is boto3's."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self.folder = folder(config.prefix)
        self.stall_ns = int(config.read_timeout_s * 1e9)
        self.client: Any = None
        self._guard = Guard(4 * self.stall_ns)
        self._calls = Calls(config.attempts, self._guard)
        self._parts: ThreadPoolExecutor | None = None

    def open(self) -> None:
        self._calls.closed.clear()
        if self.client is None:
            self.client = make_client(self.config)
            self._guard = Guard(4 * self.stall_ns)
            self._calls.guard = self._guard
            self._guard.install(self.client)
            self._parts = ThreadPoolExecutor(self.config.concurrency, "kvd-tier-s3-part")

    def close(self) -> None:
        self._calls.closed.set()
        if self._parts is not None:
            self._parts.shutdown(wait=True, cancel_futures=True)
            self._parts = None
        if self.client is not None:
            self.client.close()
            self.client = None
            self._guard.close()

    @property
    def counted(self) -> Tally:
        """What was done; whoever does something counts it here."""
        return self._calls.notes

    def notes(self) -> dict[str, int]:
        return {**self._calls.notes.counts(), "ended_exchanges": self._guard.ended}

    def at(self, name: str) -> dict[str, str]:
        """Where an object is, as requests say it."""
        return {"Bucket": self.config.bucket, "Key": name}

    def run(self, what: str, call: Callable[[], Any], deadline: int = NEVER) -> Any:
        """The call's result. Refused (MISS for an object that is not there), PreconditionFailed."""
        if self.client is None:
            raise failed(Reason.OTHER, "not open")
        return self._calls.run(what, call, deadline)

    def attempt(self, what: str, call: Callable[[], Any], deadline: int = NEVER) -> bool:
        """Whether it worked, for what is not worth failing for, nor long waiting."""
        try:
            self.run(what, call, min(deadline, time.monotonic_ns() + START_NS))
        except (Refused, PreconditionFailed) as error:
            log.warning("tier s3: %s", error)
            return False
        return True

    def together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Run them side by side; their results in order, or the first error."""
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
