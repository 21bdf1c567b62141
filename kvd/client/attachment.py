"""The attach socket of a link: who we are goes out, a session and its descriptors come back.

The law of this module: nothing here blocks. A descriptor that came in is in somebody's hand or is
closed, whatever goes wrong. The end of this connection is the end of the session.
"""

from __future__ import annotations

import array
import os
import socket
import time

from kvd.client.settings import Settings
from kvd.errors import AuthError, KvdError, ProtocolError, Unavailable
from kvd.wire import attach_path, short_address
from kvd.wire.attach import (
    FDS_PER_ARENA,
    MAX_ARENAS,
    AttachReply,
    AttachRequest,
    decode_attach_reply,
    encode_attach,
    this_version,
)
from kvd.wire.limits import ATTACH_BYTES

__all__ = ["Attachment", "Lost"]

_MAX_FDS = MAX_ARENAS * FDS_PER_ARENA + 1


class Lost(KvdError):
    """The link is over; the requests on it may be asked again in the next one."""


class Attachment:
    """Connected, and the request is sent. Unavailable when nobody listens there; AuthError where
    the socket's mode keeps us out."""

    def __init__(self, settings: Settings) -> None:
        self.sent_ns = time.monotonic_ns()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            major, minor = this_version()
            request = AttachRequest(
                major,
                minor,
                settings.name,
                os.getpid(),
                settings.group,
                settings.token,
                settings.expected_instance,
                settings.map_memory,
                settings.namespace,
            )
            with short_address(attach_path(settings.socket)) as address:
                sock.connect(address)
            sock.send(encode_attach(request), socket.MSG_NOSIGNAL)
        except PermissionError as error:
            sock.close()
            raise AuthError(
                f"may not connect to {settings.socket}: {error.strerror}; ask for the daemon's "
                f"group, or set --socket to a daemon of your own"
            ) from error
        except OSError as error:
            sock.close()
            raise Unavailable(
                f"no daemon answers at {settings.socket}: {error.strerror or error}"
            ) from error
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self.fd = sock.fileno()

    def receive(self, due: bool) -> tuple[AttachReply, list[int]] | None:
        """The daemon's answer and the descriptors that came with it, which are the caller's to
        close; None if nothing has come. `due`: it is still to come. Lost at the connection's end;
        typed errors of a refusal."""
        size = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                ATTACH_BYTES, size, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise Lost(f"the connection to the daemon broke: {error.strerror}") from error
        fds = _descriptors(ancillary)
        try:
            if not data:
                raise Lost("the daemon closed the connection (it ended, or it ended the session)")
            if not due:
                raise Lost("the daemon sent something after its answer to the attach")
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise ProtocolError("the daemon's answer to the attach is too long")
            return decode_attach_reply(data), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        self._sock.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
