"""Attach: who is there, what it gets, and the moment when it is gone.

The law of this module: a connection is a session's life. It is told from outside by what the
kernel says (SO_PEERCRED, SO_PEERGROUPS), answered once, and then only held open: the process's
pidfd or the connection's end, whichever comes first, is its death. (With a forked child alive the
connection does not end when the parent is killed; the pidfd fires at once.) Nothing here blocks,
and a peer that says nothing is dropped after a few seconds: nobody whose word lies here unread,
because the loop was busy, is taken for one.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from kvd.errors import KvdError, LimitExceeded, ProtocolError
from kvd.server.access import Peer
from kvd.server.doors import ATTACH_SHARE, mark
from kvd.server.loop import Loop
from kvd.server.sessions import Session
from kvd.wire.attach import AttachRequest, decode_attach, encode_attach_error
from kvd.wire.limits import ATTACH_BYTES

__all__ = ["AttachHost", "AttachServer", "Attached", "Connection"]

log = logging.getLogger(__name__)

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77  # Linux 6.5
HELLO_S = 5.0  # a connection that has not attached by then is dropped
MAX_WAITING = 256  # connections that have not attached yet
ACCEPTS_A_TURN = 64
DESCRIPTORS = 4  # that a client takes
SILENT_S = 0.1  # who means to attach says so at once
ASKED = 16  # of the oldest, whether they said something that was not heard yet
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Attached(NamedTuple):
    """What the host answers: the session, the encoded reply and the descriptors that go with it.
    `close` lists those that are only for the peer and are closed here after they were sent."""

    session: Session
    reply: bytes
    descriptors: Sequence[int]
    close: Sequence[int]


class AttachHost(Protocol):
    """Who decides about sessions (the server)."""

    def attach(self, request: AttachRequest, peer: Peer) -> Attached:
        """Open a session. KvdError to refuse."""

    def attach_failed(self, error: KvdError) -> None:
        """Somebody was refused: to be counted."""

    def lost(self, session: Session, why: str) -> None:
        """The session's process or connection is gone."""


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection, before and after it attached."""

    sock: socket.socket
    peer: Peer
    since_s: float
    pidfd: int = -1
    session: Session | None = None


class AttachServer:
    """Owns the listener, all connections and their pidfds."""

    def __init__(self, loop: Loop, listener: socket.socket, host: AttachHost) -> None:
        self._loop = loop
        self._listener = listener
        self._host = host
        self._waiting: dict[int, Connection] = {}  # by descriptor, oldest first
        self._attached: dict[int, Connection] = {}
        self._most = mark(ATTACH_SHARE)
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        loop.watch(listener.fileno(), self._accept)
        loop.every(1.0, self._drop_silent)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._attached)

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for connection in [*self._waiting.values(), *self._attached.values()]:
            self.drop(connection)
        os.close(self._spare)

    def drop(self, connection: Connection) -> None:
        """Close a connection; the peer sees end-of-file. The host is not told."""
        descriptor = connection.sock.fileno()
        if descriptor < 0:
            return
        self._waiting.pop(descriptor, None)
        self._attached.pop(descriptor, None)
        self._loop.unwatch(descriptor)
        connection.sock.close()
        if connection.pidfd >= 0:
            self._loop.unwatch(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = -1

    # -- before attach --------------------------------------------------------------------------

    def _accept(self, events: int) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse_one()
                elif error.errno != errno.ECONNABORTED:
                    log.warning("accept on the attach socket failed: %s", error)
                return
            if sock.fileno() >= self._most and not self._make_room():
                log.error("clients took the descriptors up to number %d; refused one; see who "
                          "holds so many, or raise LimitNOFILE", self._most)  # fmt: skip
                sock.close()
                return
            self._begin(sock)

    def _make_room(self) -> bool:
        """Whether those that say nothing could make room for one that may have something to say."""
        before = time.monotonic() - SILENT_S
        oldest = [c for c in islice(self._waiting.values(), ASKED) if c.since_s <= before]
        silent = _silent(oldest)[:DESCRIPTORS]
        if len(silent) < DESCRIPTORS:
            return False
        for connection in silent:
            self.drop(connection)
        return True

    def _refuse_one(self) -> None:
        """No descriptor left: take the next peer with the spare one and hang up, or the listener
        would stay readable and the loop would spin."""
        log.error("no file descriptor left; refused a client; raise LimitNOFILE")
        os.close(self._spare)
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.close()
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _begin(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            peer = _peer_of(sock)
        except OSError as error:
            log.info("a client was gone before it could be asked who it is: %s", error)
            sock.close()
            return
        if len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting.values()))
            if _silent([oldest]):
                self.drop(oldest)
            else:
                self._heard(oldest, select.EPOLLIN)
        connection = Connection(sock, peer, time.monotonic())
        descriptor = sock.fileno()
        self._waiting[descriptor] = connection
        self._loop.watch(descriptor, lambda events: self._heard(connection, events))

    def _heard(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLIN:
            try:
                data, _, flags, _ = connection.sock.recvmsg(ATTACH_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("attach connection: %s", error)
                data, flags = b"", 0
            if data and connection.session is None:
                self._answer(connection, data, bool(flags & socket.MSG_TRUNC))
                return
            if data and not events & GONE:
                return  # an attached peer has nothing to say here: thrown away
        if events & GONE or connection.session is None:
            self._end(connection, "connection")

    def _answer(self, connection: Connection, data: bytes, cut: bool) -> None:
        try:
            if cut:
                raise LimitExceeded(f"attach message: more than {ATTACH_BYTES} bytes")
            attached = self._host.attach(decode_attach(data), connection.peer)
        except KvdError as refused:
            self._host.attach_failed(refused)
            _send(connection.sock, encode_attach_error(refused.code, str(refused)), ())
            self.drop(connection)
            return
        session = attached.session
        connection.session = session
        session.connection = connection
        try:
            sent = _send(connection.sock, attached.reply, attached.descriptors)
        finally:
            for descriptor in attached.close:
                os.close(descriptor)
        descriptor = connection.sock.fileno()
        self._waiting.pop(descriptor)
        self._attached[descriptor] = connection
        if not sent:
            self._end(connection, "connection")
            return
        self._watch_process(connection)

    def _watch_process(self, connection: Connection) -> None:
        connection.pidfd = _pidfd_of(connection.sock, connection.peer)
        if connection.pidfd >= 0:
            self._loop.watch(connection.pidfd, lambda events: self._end(connection, "process"))

    # -- the end --------------------------------------------------------------------------------

    def _end(self, connection: Connection, why: str) -> None:
        session = connection.session
        self.drop(connection)
        if session is not None and not session.closed:
            self._host.lost(session, why)

    def _drop_silent(self, now_s: float) -> None:
        late = [c for c in self._waiting.values() if now_s - c.since_s > HELLO_S]
        for connection in _silent(late):
            self._host.attach_failed(ProtocolError("no attach message came"))
            self.drop(connection)


def _silent(connections: Sequence[Connection]) -> list[Connection]:
    """Those of which nothing lies here unread."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection.sock, select.POLLIN)
    said = {descriptor for descriptor, _ in poll.poll(0)}
    return [connection for connection in connections if connection.sock.fileno() not in said]


def _peer_of(sock: socket.socket) -> Peer:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("iII", credentials)
    groups = array.array("I")
    # more groups than fit this buffer (256): only the primary one counts
    with contextlib.suppress(OSError):
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024))
    return Peer(pid, uid, tuple(dict.fromkeys((gid, *groups))))


def _pidfd_of(sock: socket.socket, peer: Peer) -> int:
    """A pidfd of the process that connected, or -1: then end-of-file and expiry bound its death.

    The kernel's own (SO_PEERPIDFD) can't be confused by a pid that was used again.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        log.debug("no SO_PEERPIDFD: %s", error)
    if peer.pid <= 0:
        return -1
    try:
        return os.pidfd_open(peer.pid)
    except OSError as error:
        log.info("no pidfd for pid %d: %s", peer.pid, error.strerror)
        return -1


def _send(sock: socket.socket, data: bytes, descriptors: Sequence[int]) -> bool:
    ancillary = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        if descriptors
        else []
    )
    try:
        sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        log.debug("reply to attach: %s", error)
        return False
    return True
