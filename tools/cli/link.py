"""The connection of one command to its daemon.

The law of this module: everything that kvd-cli asks goes through here, so that no other module
knows the client. Asking takes no lease and touches no recency: only stat, list, heartbeat and
evict are used, and no memory is mapped.
"""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvd.errors import AuthError, Unavailable
from kvd.wire import messages
from kvd.wire.messages import Selector
from kvd.wire.paths import attach_path, default_socket, short_address

if TYPE_CHECKING:
    from kvd.client import Client, Info

Row = dict[str, Any]
Conditions = dict[str, Any]
_PAGE = 256


class Page(NamedTuple):
    """Rows, and the cursor that goes on after them (None: that was all)."""

    rows: list[Row]
    cursor: int | None


class Evicted(NamedTuple):
    """What one eviction did, summed over its slices; `named` only for a dry run."""

    matched: int = 0
    evicted: int = 0
    leased: int = 0
    writing: int = 0
    bytes: int = 0
    named: tuple[Row, ...] = ()

    def plus(self, other: Evicted) -> Evicted:
        return Evicted(
            self.matched + other.matched,
            self.evicted + other.evicted,
            self.leased + other.leased,
            self.writing + other.writing,
            self.bytes + other.bytes,
            self.named + other.named,
        )


class Link:
    """A client, opened when first needed."""

    def __init__(self, socket: str | None, timeout_s: float, token: bytes | None = None) -> None:
        self.socket = socket or str(default_socket())
        self.timeout_s = timeout_s
        self._token = token
        self._client: Client | None = None

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def client(self) -> Client:
        if self._client is None:
            _knock(self.socket)
            from kvd.client import Client  # not before somebody is there: it takes its time

            self._client = Client(
                self.socket,
                timeout_s=self.timeout_s,
                name="kvd-cli",
                token=self._token,
                map_memory=False,
            )
        return self._client

    def info(self) -> Info:
        """Who answered, as told at hello."""
        return self.client.info()

    def stat(self) -> dict[str, Any]:
        return dict(self.client.stat())

    def ping(self) -> float:
        """One round trip through the daemon's loop, in seconds."""
        return self.client.ping()

    def page(self, level: str, conditions: Conditions, limit: int, cursor: int) -> Page:
        """Up to `limit` rows (0: all) from `cursor` on, over as many daemon pages as it takes."""
        rows: list[Row] = []
        at: int | None = cursor
        while at is not None and (not limit or len(rows) < limit):
            part = self._list(level, conditions, limit - len(rows) if limit else _PAGE, at)
            rows.extend(part.rows)
            at = part.cursor
        return Page(rows, at)

    def rows(self, level: str, conditions: Conditions) -> Iterator[Row]:
        """Every row of a level, page by page."""
        at: int | None = 0
        while at is not None:
            part = self._list(level, conditions, _PAGE, at)
            yield from part.rows
            at = part.cursor

    def _list(self, level: str, conditions: Conditions, limit: int, cursor: int) -> Page:
        # a selector without conditions selects nothing, unless it says so
        selector = Selector(**conditions) if conditions else Selector(everything=True)
        reply = self.client.list(level, selector, limit=min(limit, _PAGE), cursor=cursor)
        return Page(list(reply.rows), reply.cursor)

    def evict(self, conditions: Conditions, *, dry_run: bool) -> Iterator[Evicted]:
        """Evict slice by slice; each slice is yielded as it is done, so that what has really gone
        is known even when a later one fails."""
        at: int | None = 0
        while at is not None:
            message = messages.Evict(Selector(**conditions), dry_run, at, _PAGE)
            deadline_ns = self.client.deadline_ns(self.timeout_s)
            reply = self.client.submit_at(message, deadline_ns).result()
            assert isinstance(reply, messages.EvictReply)
            yield Evicted(
                reply.matched,
                reply.evicted,
                reply.leased,
                reply.writing,
                reply.bytes,
                tuple(reply.named),
            )
            at = reply.cursor


def _knock(path: str) -> None:
    """Unavailable if nobody listens at this socket now, AuthError if we may not connect.

    A client waits for a daemon that may only be restarting; an operator wants to be told at once.
    """
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            with short_address(attach_path(path)) as address:
                probe.connect(address)
    except BlockingIOError:  # a queue of others before us: somebody listens
        return
    except PermissionError:
        raise AuthError(
            f"no permission to connect to {path}: its group may, see docs/operations.md"
        ) from None
    except OSError as error:
        raise Unavailable(f"no daemon at {path}: {error.strerror or error}") from None
