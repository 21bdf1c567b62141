"""What the server counts beside the core: by name, or by name and reason.

The law of this module: counting never fails and never waits. Only the loop's thread counts.
"""

from __future__ import annotations

__all__ = ["Counters"]


class Counters:
    """Plain integers. `snapshot` is what `stat` shows: {name: value or {reason: value}}."""

    __slots__ = ("_labelled", "_plain")

    def __init__(self) -> None:
        self._plain: dict[str, int] = dict.fromkeys(
            ("requests", "replies", "replayed", "requests_expired", "sessions_opened"), 0
        )
        self._labelled: dict[str, dict[str, int]] = {
            name: {}
            for name in ("malformed", "refused", "send_failed", "sessions_closed", "faults")
        }

    def add(self, name: str, count: int = 1) -> None:
        self._plain[name] += count

    def reason(self, name: str, reason: str) -> None:
        reasons = self._labelled[name]
        reasons[reason] = reasons.get(reason, 0) + 1

    def of(self, name: str) -> int:
        """The value, or the sum over its reasons."""
        found = self._plain.get(name)
        return found if found is not None else sum(self._labelled[name].values())

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        return {**self._plain, **{name: dict(by) for name, by in self._labelled.items()}}
