"""The answer to a lookup, and all that came with it.

The law of this module: what came with it is given back with it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvd.chunk import Outcome
from kvd.client.channel import Channel
from kvd.client.handle import Handle
from kvd.client.keys import outcomes as named
from kvd.client.lease import Lease, Transfer
from kvd.client.link import Link
from kvd.client.reservation import Reservation
from kvd.wire import messages as m


class Lookup(Handle):
    """The answer to a lookup. As a context manager it gives back all that came with it."""

    def __init__(
        self, channel: Channel, link: Link | None, reply: m.LookupReply, timeout_s: float
    ) -> None:
        super().__init__(channel, link, timeout_s)
        self.raw = reply.outcomes  # one byte a key
        self.leading = reply.leading  # keys of the leading run
        # where hits lie, one byte a key: 0 DRAM, n the n-th tier below it (as `stat` lists them)
        self.tiers = reply.tiers or bytes(len(reply.outcomes))
        self.lease: Lease | None = None
        self.transfer: Transfer | None = None
        self.reservation: Reservation | None = None  # for the keys from `leading` on
        if reply.lease and link is not None:
            self.lease = Lease(channel, link, reply.lease, reply.expiry, timeout_s)
            if reply.load is not None:
                self.transfer = self.lease.adopt(reply.load)
        if reply.reserved is not None:
            self.reservation = Reservation(channel, link, reply.reserved, timeout_s)

    @classmethod
    def empty(cls, channel: Channel, timeout_s: float) -> Self:
        """Of no keys: nobody was asked."""
        return cls(channel, None, m.LookupReply(b"", 0, 0, 0, None, None), timeout_s)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One a key: OK, MISS, PARTIAL, MISMATCH, SKIPPED, OVER_QUOTA ..."""
        return named(self.raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.reservation is not None:
            self.reservation.abort()
        if self.lease is not None:
            self.lease.__exit__(kind, error, trace)
