"""What the server counts beside the core: by declared name, or by name and reason.

The law of this module: only what stands in kvd.telemetry.server can be counted. A reason that is
not declared is `other`. Only the loop's thread counts, so nothing waits.
"""

from __future__ import annotations

from kvd.telemetry.server import SERVER_METRICS

__all__ = ["Counters"]


class Counters:
    """Plain integers. `snapshot` is what `stat` shows: {name: value or {reason: value}}."""

    __slots__ = ("_labelled", "_plain")

    def __init__(self) -> None:
        self._plain = {m.name: 0 for m in SERVER_METRICS.values() if not m.values}
        self._labelled = {
            m.name: dict.fromkeys(m.values, 0) for m in SERVER_METRICS.values() if m.values
        }

    def add(self, name: str, count: int = 1) -> None:
        """KeyError for a name that is not declared."""
        self._plain[name] += count

    def reason(self, name: str, reason: str, count: int = 1) -> None:
        """KeyError for a name that is not declared, or a reason where there is no `other`."""
        reasons = self._labelled[name]
        reasons[reason if reason in reasons else "other"] += count

    def of(self, name: str) -> int:
        """The value, or the sum over its reasons."""
        found = self._plain.get(name)
        return found if found is not None else sum(self._labelled[name].values())

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        return {**self._plain, **{name: dict(by) for name, by in self._labelled.items()}}
