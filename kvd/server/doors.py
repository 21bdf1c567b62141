"""The daemon's listening ZMQ sockets, and the descriptors that are left for everybody else.

The law of this module: the process never runs out of descriptors by being connected to. libzmq ends
it where it can't accept a local connection for want of one; and whatever else needs one, a slab, a
session's lock, would fail. So once a connection got a number above its door's mark, the door is
shut: all that came through it end, those of clients that live come again by themselves, and it is
opened when there is room.
"""

from __future__ import annotations

import logging
import os
import resource
import struct
import time
from collections.abc import Callable

import zmq

from kvd.errors import ConfigError

__all__ = ["ATTACH_SHARE", "LOCAL_SHARE", "REMOTE_SHARE", "Door", "mark", "raise_limit"]

log = logging.getLogger(__name__)

LEAST_DESCRIPTORS = 1024
KEPT = 512  # at least: for the daemon's files, and for who comes in before the loop hears of it
# Of all but those that are kept, so many are taken before ...
LOCAL_SHARE = 1.0  # ... the local door is shut
ATTACH_SHARE = 0.6  # ... clients are refused: what each of them connects next is above
REMOTE_SHARE = 0.5  # ... the door is shut for whoever reaches the port, so that local ones go on
PAUSE_S = (0.25, 8.0)  # of a door that is shut again and again: the first, the longest
CALM_S = 30.0  # so long open, and the pause is the first one again
_EVENT = struct.Struct("=HI")  # of a monitor: what, and its value
_HEARD = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


def raise_limit() -> None:
    """Each client takes three or four descriptors: use all that we may have. ConfigError if that is
    less than what this module can do with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.info("descriptor limit stays at %d: %s", soft, error)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < LEAST_DESCRIPTORS:
        raise ConfigError(
            f"only {allowed} open files are allowed, at least {LEAST_DESCRIPTORS} are needed: "
            "raise LimitNOFILE of the unit, or ulimit -n"
        )


def mark(share: float) -> int:
    """The number of a descriptor up to which so large a share is taken."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return int((most - max(KEPT, most // 8)) * share)


class Door:
    """One listening socket. `bind` binds it anew; it is bound when this is made."""

    def __init__(
        self, name: str, socket: zmq.Socket[bytes], most: int, bind: Callable[[], object]
    ) -> None:
        self.name = name
        self._socket = socket
        self._most = most
        self._bind = bind
        self._open = True
        self._since = 0.0  # monotonic: when it was opened or shut last
        self._pause_s = PAUSE_S[0]
        self._gone = False  # the listener is: before that its end would take the next one's file
        self.monitor = socket.get_monitor_socket(_HEARD)

    def hear(self) -> list[int]:
        """Take what the monitor tells; descriptors of connections that have ended."""
        ended: list[int] = []
        while True:
            try:
                frames = self.monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return ended
            event, value = _EVENT.unpack(frames[0][: _EVENT.size])
            if event == zmq.EVENT_DISCONNECTED:
                ended.append(value)
            elif event == zmq.EVENT_CLOSED:
                self._gone = True
            elif self._open and value >= self._most:
                self._close()

    def watch(self, now: float) -> None:
        """Open it again once the old listener is gone and its connections have left room."""
        if self._open or not self._gone or now < self._since + self._pause_s:
            return
        if _lowest() >= self._most:
            return
        try:
            self._bind()
        except (ConfigError, zmq.ZMQError, OSError) as error:
            log.warning("%s: can't listen again yet: %s", self.name, error)
            return
        self._open, self._since = True, now
        log.warning("%s: listening again", self.name)

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(linger=0)

    def _close(self) -> None:
        now = time.monotonic()
        calm = now > self._since + CALM_S
        self._pause_s = PAUSE_S[0] if calm else min(2 * self._pause_s, PAUSE_S[1])
        self._open, self._gone, self._since = False, False, now
        log.error(
            "%s: connections took the descriptors up to number %d: all that came this way are "
            "ended, and clients come again; see who holds so many, or raise LimitNOFILE",
            self.name, self._most,
        )  # fmt: skip
        self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _lowest() -> int:
    """The number that the next descriptor gets."""
    try:
        descriptor = os.dup(0)
    except OSError:
        return 1 << 31
    os.close(descriptor)
    return descriptor
