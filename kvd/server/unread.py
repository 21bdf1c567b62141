"""Replies that wait in memory because their readers have not taken them.

The law of this module: what slow or stopped readers hold is bounded, for each session and for all
together, whatever they ask for; and those of one tenant leave room for the others'. Whoever is over
is told to come back, and has lost nothing; whoever takes nothing at all while others need the room
loses its connection, which is where the memory hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Protocol

from kvd.errors import Busy

if TYPE_CHECKING:
    from kvd.server.sessions import Session

__all__ = ["COUNTED", "Unread", "Waiting"]

log = logging.getLogger(__name__)

MIB = 1 << 20
MAX_EACH = 128 * MIB  # bytes of a session; more only for a single reply
MAX_ALL = 512 * MIB  # bytes of all
STUCK_S = 30.0
COUNTED = 64 << 10  # smaller replies are not: ZMQ's own mark bounds their number
AGAIN_S = 0.02


class Tracker(Protocol):
    @property
    def done(self) -> bool: ...


class Waiting:
    """One reply: being copied, then with ZMQ until `tracker` is done."""

    __slots__ = ("inode", "namespace", "over", "session", "since", "size", "source", "tracker")

    def __init__(self, session: Session, size: int, tracker: Tracker | None = None) -> None:
        self.session = session.number
        self.namespace = session.grant.namespace
        self.size = size
        self.tracker = tracker
        self.over = False  # the copy: what was made of it is another entry, or nothing
        self.since = time.monotonic()
        self.source = session.source
        self.inode = 0 if tracker is None else _inode(session.source)

    @property
    def done(self) -> bool:
        return self.over if self.tracker is None else self.tracker.done


class Unread:
    """All of them. What a session that has ended left with ZMQ counts until its connection ends,
    too: the memory is not free before."""

    def __init__(self, each: int = MAX_EACH, most: int = MAX_ALL, stuck_s: float = STUCK_S) -> None:
        self._each = each
        self._most = most
        self._stuck_s = stuck_s
        self._waiting: list[Waiting] = []

    def check(self, session: Session) -> None:
        """Busy if this session reads so little that it gets no other reply, of whatever kind."""
        if self._waiting:
            self._prune()
            if any(entry.session == session.number for entry in self._waiting):
                self._fits(session, 0)

    def copying(self, session: Session, size: int) -> Waiting:
        """A reply of so many bytes is about to be copied. Busy if there is no room for it now."""
        self._prune()
        self._fits(session, size)
        entry = Waiting(session, size)
        self._waiting.append(entry)
        return entry

    def sent(self, session: Session, size: int, tracker: Tracker) -> None:
        """ZMQ has it."""
        self._waiting.append(Waiting(session, size, tracker))

    def _prune(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry.done]

    def _fits(self, session: Session, size: int) -> None:
        own = tenant = total = 0
        for entry in self._waiting:
            total += entry.size
            if entry.namespace == session.grant.namespace:
                tenant += entry.size
                if entry.session == session.number:
                    own += entry.size
        if own and own + size > self._each:
            raise Busy(f"replies not read yet: {own} bytes, at most {self._each} a session; "
                       "read them", AGAIN_S)  # fmt: skip
        # No tenant takes more than what is left: one slow tenant holds half, two a third each.
        if tenant + size > self._most - total:
            self._cut_stuck()
            raise Busy(f"replies not read yet: {tenant} bytes of this tenant, {total} of all, who "
                       f"share {self._most}; read them", AGAIN_S)  # fmt: skip

    def _cut_stuck(self) -> None:
        before = time.monotonic() - self._stuck_s
        stuck = {
            (entry.source, entry.inode): entry
            for entry in self._waiting
            if entry.inode and entry.since < before
        }
        for (source, inode), entry in stuck.items():
            log.warning(
                "session %d: replies were not read for %g s, and the room is needed: its "
                "connection is ended", entry.session, self._stuck_s,
            )  # fmt: skip
            _cut(source, inode)


def _inode(descriptor: int) -> int:
    """Of a connection inside libzmq, which may close it at any time: its number says too little."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def _cut(source: int, inode: int) -> None:
    try:
        descriptor = os.dup(source)
    except OSError:  # it has ended by itself
        return
    try:
        if os.fstat(descriptor).st_ino == inode:
            connection = socket.socket(fileno=descriptor)
            descriptor = -1  # the socket's from here on
            with connection:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # likewise; or the number is a file's by now
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
