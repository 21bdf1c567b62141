"""A thread that moves chunks, one job after the other.

The law of this module: every job that is taken comes to exactly one end, whatever happens in it,
and says so once; a job that waited too long is given up rather than done late. The thread begins
with the first job and ends with `close`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Mover"]

log = logging.getLogger("vllm.kvd")

_J = TypeVar("_J")


class Mover(Generic[_J]):
    """`work(job)` does a job; `broken(job, error)` ends one whose work raised."""

    def __init__(
        self, name: str, work: Callable[[_J], None], broken: Callable[[_J, BaseException], None]
    ) -> None:
        self._name, self._work, self._broken = name, work, broken
        self._jobs: deque[_J] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    def put(self, job: _J) -> bool:
        """Take a job; False when the mover is closed (the job is then the caller's to end)."""
        with self._change:
            if self._closed:
                return False
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._change.notify_all()
            return True

    def waiting(self) -> list[_J]:
        """Jobs that were not begun."""
        with self._change:
            return list(self._jobs)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; False when `timeout_s` was not enough."""
        with self._change:
            return self._change.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> list[_J]:
        """End the thread after the job it is at; what was not begun."""
        with self._change:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._change.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return left

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._work(job)
            except Exception as error:  # whatever it was, the engine waits for this job's end
                log.debug("kvd: %s: a job failed", self._name, exc_info=True)
                self._broken(job, error)
            finally:
                with self._change:
                    self._busy = False
                    self._change.notify_all()
