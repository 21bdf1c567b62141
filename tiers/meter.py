"""What a tier counts about itself.

The law of this module: counters only grow, and one completion is counted once. Bandwidth is bytes
over the time in which at least one job was in the medium, so that idle time does not lower it and
jobs side by side do not inflate it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from kvd.tiers.base import Answer, Completion, Reason

_WINDOW_NS = 200_000_000


class Meter:
    """From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Counter[str]] = {}
        self._reasons: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.last_error = ""
        self.last_error_unix_ns = 0
        self._active = 0
        self._since = 0
        self._busy_ns = 0
        self._window: Counter[str] = Counter()
        self._gbps: dict[str, float] = {}
        self.pending = 0  # handed over, and not completed

    def handed_over(self, jobs: int) -> None:
        with self._lock:
            self.pending += jobs

    def begin(self, now: int) -> None:
        with self._lock:
            if self._active == 0:
                self._since = now
            self._active += 1

    def end(self, now: int) -> None:
        with self._lock:
            self._active -= 1
            self._busy_ns += now - self._since
            self._since = now
            if self._busy_ns >= _WINDOW_NS:
                for kind, nbytes in self._window.items():
                    rate = nbytes / self._busy_ns
                    old = self._gbps.get(kind, rate)
                    self._gbps[kind] = 0.7 * old + 0.3 * rate
                self._window.clear()
                self._busy_ns = 0

    def done(self, kind: str, done: Completion) -> None:
        with self._lock:
            self.pending -= 1
            self._answers.setdefault(kind, Counter())[done.answer.value] += 1
            if done.nbytes:
                self.nbytes[kind] += done.nbytes
                self._window[kind] += done.nbytes
        if done.answer is Answer.FAILED or done.reason is not Reason.NONE:
            self.error(done.reason, done.detail)

    def error(self, reason: Reason, detail: str) -> None:
        with self._lock:
            self._reasons[reason.value] += 1
            self.last_error = detail
            self.last_error_unix_ns = time.time_ns()

    def count(self, note: str, by: int = 1) -> None:
        with self._lock:
            self._notes[note] += by

    def gbps(self, kind: str) -> float:
        """Lately, GB/s; 0 when nothing moved yet."""
        return self._gbps.get(kind, 0.0)

    def answers(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {kind: dict(counts) for kind, counts in self._answers.items()}

    def reasons(self) -> dict[str, int]:
        with self._lock:
            return dict(self._reasons)

    def notes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._notes)
