"""One shard on its way up from a tier below.

The law of this module: a fetch is wanted while a transfer that was not cancelled waits for it, or
its time to be read ahead is not over, or the lookup that will load it is being carried out; nobody
else may hold a slot for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.lower import Lower
from kvd.fair import Ticket

if TYPE_CHECKING:
    from kvd.core.transfers import Transfer


class Batch:
    """What one load asked for together."""

    __slots__ = ("landed", "started")

    def __init__(self) -> None:
        self.started = 0
        self.landed = False


class Fetch:
    """One shard on its way up."""

    __slots__ = (
        "ahead", "batch", "beside", "cell", "early", "lower", "record", "row", "tenant", "ticket",
        "transient", "tried", "waiting",
    )  # fmt: skip

    def __init__(self, cell: int, row: int, lower: Lower, batch: Batch, tenant: str) -> None:
        self.cell = cell
        self.row = row
        self.lower = lower
        self.batch = batch
        self.tenant = tenant  # who asked first: it is that one's turn
        self.tried = 0  # bits of tiers that did not have it
        self.record = -1
        self.transient = 0  # bytes counted for it
        self.waiting: list[tuple[Transfer, int]] = []
        self.ahead = 0  # when it is of no use any more, ns; 0: it is not read ahead
        self.early = 0  # when the lookup that will load it came, ns, until it does; else 0
        self.beside = False  # its read under way counts among those that nobody waited for
        self.ticket: Ticket[Fetch] | None = None

    def wanted(self, now: int) -> bool:
        if self.ahead > now or (self.early and self.early == now):
            return True
        return any(not transfer.cancelled for transfer, _ in self.waiting)
