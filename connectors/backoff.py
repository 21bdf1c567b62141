"""When to ask a daemon again that didn't answer.

The law of this module: a daemon that is away costs its deadline once, not once a request. After
a failure nothing is asked for a while; then one trial decides. Time comes in as an argument.
"""

from __future__ import annotations

__all__ = ["Backoff"]


class Backoff:
    """Seconds of silence after each failure in a row: `first_s`, doubling up to `most_s`."""

    def __init__(self, first_s: float = 1.0, most_s: float = 30.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._pause_s, self._until = first_s, float("-inf")

    def may_try(self, now: float) -> bool:
        """Whether the daemon may be asked at `now`, seconds of a monotonic clock."""
        return now >= self._until

    def failed(self, now: float) -> float:
        """Note a failure; returns the seconds until the next trial."""
        pause = self._pause_s
        self._until = now + pause
        self._pause_s = min(2 * pause, self._most_s)
        return pause

    def worked(self) -> None:
        """Note an answer: whatever failed before is forgotten."""
        self._pause_s, self._until = self._first_s, float("-inf")
