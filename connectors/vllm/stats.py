"""What the connector counts, declared once.

The law of this module: every name that is ever counted stands in COUNTERS, so that whatever
arrives at vLLM's metrics is registered there; counts only rise and are handed over as differences.
"""

from __future__ import annotations

import threading

__all__ = ["COUNTERS", "Counts"]

# name -> what it counts
COUNTERS: dict[str, str] = {
    "lookups": "Lookups that were sent",
    "lookup_timeouts": "Lookups given up at their deadline",
    "lookup_errors": "Lookups answered by an error",
    "matched_tokens": "Tokens that a lookup found beyond vLLM's own prefix cache",
    "unused_matches": "Matches that were given back unused",
    "loads": "Loads that were planned, one a request",
    "loaded_chunks": "Chunks loaded, checked after their last byte, one a rank",
    "loaded_bytes": "Bytes of loaded chunks",
    "load_seconds": "Time in loads",
    "failed_loads": "Loads of which a chunk could not be had, one a rank",
    "failed_chunks": "Chunks that could not be loaded, one a rank",
    "stored_chunks": "Chunks stored, acknowledged, one a rank",
    "stored_bytes": "Bytes of stored chunks",
    "store_seconds": "Time in stores",
    "known_chunks": "Chunks that were there already or were being written by others",
    "unstored_chunks": "Chunks that found no room or were refused by the daemon",
    "fenced_chunks": "Chunks given up because their blocks were needed at once",
    "dropped_chunks": "Chunks not stored because too many waited or the daemon was away",
    "failed_stores": "Stores that ended with an error",
    "bypassed": "Requests that kvd does not serve",
    "hook_cpu_seconds": "CPU time in hooks and transfer threads, with the option `measure`",
    "errors": "Unexpected errors inside the connector",
}


class Counts:
    """Counters of one side of one process; handed over as what was added since the last time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self.total: dict[str, float] = {}

    def add(self, name: str, number: float = 1) -> None:
        """KeyError for a name that is not declared."""
        COUNTERS[name]
        with self._lock:  # hooks and transfer threads count here
            self._since[name] = self._since.get(name, 0) + number
            self.total[name] = self.total.get(name, 0) + number

    def take(self) -> dict[str, float]:
        """What was added since the last call."""
        with self._lock:
            taken, self._since = self._since, {}
        return taken
