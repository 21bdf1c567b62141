"""What an operator's tools ask through a client.

The law of this module: looking in touches no recency and takes no lease; pages are followed to
their end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kvd.client.base import ClientBase
from kvd.wire import messages as m


class Looking(ClientBase):
    """evict, list, rows, stat, heartbeat, ping."""

    def evict(
        self,
        selector: m.Selector,
        *,
        dry_run: bool = False,
        step: int = 1000,
        timeout_s: float | None = None,
    ) -> m.EvictReply:
        """Evict (or, dry, name) all that the selector matches, in slices of `step` chunks; the
        sums over all slices. AuthError for other namespaces without the admin role."""
        deadline_ns = self.deadline_ns(timeout_s)
        total = m.EvictReply(0, 0, 0, 0, 0, [], None)
        cursor: int | None = 0
        while cursor is not None:
            message = m.Evict(selector, dry_run, cursor, step)
            reply = self._reply(self.submit_at(message, deadline_ns), m.EvictReply)
            total = m.EvictReply(
                total.matched + reply.matched,
                total.evicted + reply.evicted,
                total.leased + reply.leased,
                total.writing + reply.writing,
                total.bytes + reply.bytes,
                total.named + reply.named,
                None,
            )
            cursor = reply.cursor
        return total

    def list(
        self,
        level: str,
        selector: m.Selector | None = None,
        *,
        limit: int = 100,
        cursor: int = 0,
        timeout_s: float | None = None,
    ) -> m.ListReply:
        """One page of namespaces, specs, prefixes or chunks; goes on from `cursor`."""
        message = m.List(level, selector or m.Selector(everything=True), cursor, limit)
        return self._ask(message, m.ListReply, timeout_s)

    def rows(
        self, level: str, selector: m.Selector | None = None, *, page: int = 500
    ) -> Iterator[dict[str, Any]]:
        """All rows of list(), page by page."""
        cursor: int | None = 0
        while cursor is not None:
            reply = self.list(level, selector, limit=page, cursor=cursor)
            yield from reply.rows
            cursor = reply.cursor

    def stat(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the daemon counts and holds."""
        return self._ask(m.Stat(), m.StatReply, timeout_s).stat

    def tier(self, name: str, command: str, *, timeout_s: float | None = None) -> m.TierReply:
        """probe, drain or scrub a tier below DRAM; for administrators."""
        return self._ask(m.Tier(name, command), m.TierReply, timeout_s)

    def tenant(
        self,
        command: str,
        name: str = "",
        settings: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> m.TenantReply:
        """list, show, add, set, rotate or remove tenants; for administrators. Of its own tenant a
        session may ask without."""
        return self._ask(m.Tenant(command, name, settings or {}), m.TenantReply, timeout_s)

    def tenants(self) -> Iterator[dict[str, Any]]:
        """All tenants by name, page by page."""
        after = ""
        while rows := self.tenant("list", "", {"after": after}).rows:
            yield from rows
            after = rows[-1]["name"]

    def heartbeat(self, *, timeout_s: float | None = None) -> None:
        """Say that this session lives (needed over tcp only, where there is no end-of-file)."""
        self._ask(m.Heartbeat(), m.DoneReply, timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Seconds of one round trip over an open session."""
        self.info(timeout_s)
        begin = time.perf_counter()
        self.heartbeat(timeout_s=timeout_s)
        return time.perf_counter() - begin
