"""One request on the scheduler's side: where it stands with kvd.

The law of this module: a phase is left by one way only, and each leaves nothing behind: a lookup
in flight is cancelled, a lease is released, a load that the engine waits for is kept until the
workers have told its end, even if the request is gone by then.

    FRESH -> ASKED -> KNOWN -> LOADING -> SETTLED
      ^________|________|_________________|   (asked again after a preemption)
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

from kvd.client import Call, Lease
from kvd.connectors.vllm.daemon import Daemon
from kvd.connectors.vllm.keys import ChunkKeys

__all__ = ["Entry", "Phase"]


class Phase(Enum):
    FRESH = "not looked up"
    ASKED = "a lookup is in flight"
    KNOWN = "the answer is there, maybe with a lease"
    LOADING = "workers load, the engine waits"
    SETTLED = "scheduled, with or without a load"


class Entry:
    """`keys` is None for a request that kvd does not serve."""

    __slots__ = (
        "call",
        "ended",
        "give_up_ns",
        "holds",
        "job",
        "keys",
        "leading",
        "lease",
        "load_blocks",
        "local",
        "no_load",
        "phase",
        "request",
        "stored",
    )  # fmt: skip

    def __init__(self, request: Any, keys: ChunkKeys | None) -> None:
        self.request = request
        self.keys = keys
        self.phase = Phase.FRESH
        self.call: Call | None = None
        self.give_up_ns = 0
        self.lease: Lease | None = None
        self.leading = 0  # chunks that the daemon has from the beginning on
        self.local = 0  # tokens of vLLM's own hit when it was matched
        self.job = 0
        self.load_blocks: frozenset[int] = frozenset()
        self.holds = 0  # tokens, all of its own, while it holds blocks for a load and does not run
        self.no_load = False  # a load failed: compute it
        self.stored = 0  # chunks that need no store any more
        self.ended = False

    @property
    def holds_match(self) -> bool:
        return self.phase is Phase.ASKED or self.lease is not None

    def lease_good_for(self, seconds: float) -> bool:
        lease = self.lease
        return lease is not None and lease.expiry_ns - time.monotonic_ns() > seconds * 1e9

    def let_go(self, daemon: Daemon) -> bool:
        """Give the lookup up, release the lease; whether there was a lease."""
        call, self.call = self.call, None
        if call is not None:
            daemon.give_up(call)
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        return lease is not None

    def restart(self, daemon: Daemon) -> None:
        """A new life after a preemption or a failed load."""
        self.let_go(daemon)
        self.phase = Phase.FRESH
        self.leading = self.local = 0
        self.stored = 0  # what was stored answers EXISTS
