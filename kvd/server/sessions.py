"""The sessions: who is there, and how to find one by its token.

The law of this module: a session is known by a random secret that each request carries, never by
a ZMQ routing id or a name. A client that comes back under the same name is somebody else. Once a
session is closed its token means nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvd.server.access import Grant, Peer
from kvd.server.replies import ReplyCache

if TYPE_CHECKING:
    import zmq

    from kvd.server.attach import Connection

__all__ = ["Route", "Session", "Sessions"]


class Route(NamedTuple):
    """Where a message came from: the reply goes back there."""

    socket: zmq.Socket[bytes]
    identity: bytes


@dataclass(slots=True, eq=False)
class Session:
    number: int  # the core's name for it; never given twice
    token: bytes  # 16 bytes, secret
    public_id: bytes  # 16 bytes, stands in records
    grant: Grant
    name: str  # what the client calls itself: for people only
    group: bytes
    peer: Peer | None  # None: over TCP
    maps_memory: bool
    replies: ReplyCache
    opened_s: float
    connection: Connection | None = None
    route: Route | None = None  # where its last message came from
    source: int = -1  # tcp: the connection's descriptor inside libzmq
    closed: bool = False
    copies: int = 0  # inline copies in worker threads that touch slots on its behalf


class Sessions:
    """All open sessions. `limit` is the most there may be."""

    def __init__(self, limit: int, max_inflight: int, max_kept: int) -> None:
        self.limit = limit
        self._max_inflight = max_inflight
        self._max_kept = max_kept
        self._by_token: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._last = 0
        self.opened = 0

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def full(self) -> bool:
        return len(self._by_token) >= self.limit

    def open(
        self,
        *,
        grant: Grant,
        name: str,
        group_secret: bytes | None,
        peer: Peer | None,
        maps_memory: bool,
        now_s: float,
    ) -> Session:
        self._last += 1
        public_id = secrets.token_bytes(16)
        # the first byte keeps a secret that somebody chose apart from every public id
        group = b"g" + group_secret if group_secret else b"s" + public_id
        session = Session(
            number=self._last,
            token=secrets.token_bytes(16),
            public_id=public_id,
            grant=grant,
            name=name,
            group=group,
            peer=peer,
            maps_memory=maps_memory,
            replies=ReplyCache(self._max_inflight, self._max_kept),
            opened_s=now_s,
        )
        self._by_token[session.token] = session
        self._by_number[session.number] = session
        self.opened += 1
        return session

    def by_token(self, token: bytes) -> Session | None:
        return self._by_token.get(token)

    def by_number(self, number: int) -> Session | None:
        return self._by_number.get(number)

    def all(self) -> list[Session]:
        return list(self._by_token.values())

    def remove(self, session: Session) -> None:
        session.closed = True
        self._by_token.pop(session.token, None)
        self._by_number.pop(session.number, None)

    @property
    def inflight(self) -> int:
        """Requests that were taken and not answered yet, of all sessions."""
        return sum(session.replies.inflight for session in self._by_token.values())
