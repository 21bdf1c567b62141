"""The counters of a stat, as `kvd-cli status` reads them.

The law of this module: what this version has no line for is not lost. The book notes what was read,
and names the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from kvd.tools.cli.units import clean, format_bytes, format_count

__all__ = ["Book", "Counter", "reasons", "total"]

Counter = int | float | Mapping[str, int | float]


class Book:
    """The counters and gauges of a stat, and which of them have been shown."""

    def __init__(self, stat: Mapping[str, Any]) -> None:
        self.stat = stat
        self._counters: dict[str, Counter] = {**stat.get("gauges", {}), **stat.get("counters", {})}
        self._read: set[str] = set()

    def get(self, name: str) -> Counter:
        self._read.add(name)
        return self._counters.get(name, 0)

    def total(self, *names: str) -> float:
        """The sum of these counters over all their labels."""
        return sum(total(self.get(name)) for name in names)

    def count(self, *names: str) -> str:
        return format_count(self.total(*names))

    def size(self, name: str) -> str:
        return format_bytes(self.total(name))

    def reasons(self, name: str, *besides: str) -> str:
        """Labels that occurred, without those named."""
        counter = self.get(name)
        if isinstance(counter, Mapping):
            counter = {label: n for label, n in counter.items() if label not in besides}
        return reasons(counter)

    def unread(self) -> Text | None:
        """What a newer daemon counts and this version has no line for."""
        rest = sorted(set(self._counters) - self._read)
        said = [
            f"{clean(name)} {format_count(total(self._counters[name]))}"
            for name in rest
            if total(self._counters[name])
        ]
        return Text("also counted: " + ", ".join(said), style="dim") if said else None


def total(counter: Counter) -> float:
    """A counter, or the sum over its reasons."""
    return sum(counter.values()) if isinstance(counter, Mapping) else counter


def reasons(counter: Counter) -> str:
    """'12 no_space, 3 leased': the reasons that occurred, the most frequent first."""
    if not isinstance(counter, Mapping):
        return ""
    named = sorted(((count, name) for name, count in counter.items() if count), reverse=True)
    return ", ".join(f"{format_count(count)} {clean(name)}" for count, name in named)
