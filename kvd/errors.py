"""Every error that kvd raises on purpose.

The law of this module: an error that a caller can act on is a type of its own, it travels the
wire as one small number, and its message names the thing, the limit and the way out. The numbers
are part of protocol 1: they are never reused.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "ArenaError",
    "AuthError",
    "BadKey",
    "Busy",
    "ClientClosed",
    "ConfigError",
    "DeadlineExceeded",
    "Draining",
    "ErrorCode",
    "Forked",
    "InternalError",
    "KvdError",
    "LeaseLost",
    "LimitExceeded",
    "ProtocolError",
    "SpecError",
    "StaleEpoch",
    "Unavailable",
    "UnknownHandle",
    "UnknownSession",
    "VersionError",
    "WrongInstance",
    "error_from_wire",
]


class ErrorCode(IntEnum):
    """The number of an error on the wire (protocol 1, append only)."""

    INTERNAL = 1
    PROTOCOL = 2
    VERSION = 3
    AUTH = 4
    UNKNOWN_SESSION = 5
    STALE_EPOCH = 6
    DEADLINE = 7
    LIMIT = 8
    SPEC = 9
    BAD_KEY = 10
    UNKNOWN_HANDLE = 11
    LEASE_LOST = 12
    DRAINING = 13
    WRONG_INSTANCE = 14
    BUSY = 15
    # below: raised on the client's side or at start, never sent by a daemon
    UNAVAILABLE = 100
    CLOSED = 101
    FORKED = 102
    CONFIG = 103
    ARENA = 104


class KvdError(Exception):
    """Base of all errors of kvd. `code` is its number on the wire."""

    code: ErrorCode = ErrorCode.INTERNAL


class InternalError(KvdError):
    """The daemon met an exception that it did not expect; the request had no reported effect."""


class ProtocolError(KvdError):
    """A message that does not follow protocol 1 (framing, types, unknown operation)."""

    code = ErrorCode.PROTOCOL


class VersionError(KvdError):
    """The peer speaks another major version of the protocol; the message names both."""

    code = ErrorCode.VERSION


class AuthError(KvdError):
    """The peer may not do this: unknown uid or token, or an operation that needs the admin role."""

    code = ErrorCode.AUTH


class UnknownSession(KvdError):
    """The session token is not one of this daemon's live sessions: attach again."""

    code = ErrorCode.UNKNOWN_SESSION


class StaleEpoch(KvdError):
    """The handle or request belongs to an earlier life of the daemon."""

    code = ErrorCode.STALE_EPOCH


class DeadlineExceeded(KvdError):
    """The request's deadline had passed before it was carried out; it had no effect."""

    code = ErrorCode.DEADLINE


class LimitExceeded(KvdError):
    """A request beyond a limit that was told at hello."""

    code = ErrorCode.LIMIT


class SpecError(KvdError):
    """The KVSpec is not registered, not valid, or does not have the shards that were named."""

    code = ErrorCode.SPEC


class BadKey(KvdError):
    """A hash, namespace or other part of an identity that can't be accepted."""

    code = ErrorCode.BAD_KEY


class UnknownHandle(KvdError):
    """A lease, write or transfer id that is not valid now, or is not this group's."""

    code = ErrorCode.UNKNOWN_HANDLE


class LeaseLost(KvdError):
    """A lease ended while its bytes were in use: what was read must be thrown away."""

    code = ErrorCode.LEASE_LOST


class Draining(KvdError):
    """The daemon is shutting down and takes no stores."""

    code = ErrorCode.DRAINING


class WrongInstance(KvdError):
    """The daemon that answered is not the instance that the client expected."""

    code = ErrorCode.WRONG_INSTANCE


class Busy(KvdError):
    """The tenant asks for more at a time than it may. The request was not carried out; asked again
    after `retry_after_s` seconds it has a chance."""

    code = ErrorCode.BUSY

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KvdError):
    """No daemon answered within the call's deadline. A connector treats it as a miss."""

    code = ErrorCode.UNAVAILABLE


class ClientClosed(KvdError):
    """The client object was closed."""

    code = ErrorCode.CLOSED


class Forked(KvdError):
    """The client object was made before a fork: make a new one in the child."""

    code = ErrorCode.FORKED


class ConfigError(KvdError):
    """A setting that can't be used; start is refused with exit code 2."""

    code = ErrorCode.CONFIG


class ArenaError(KvdError):
    """The shared-memory arena can't be made, mapped or adopted."""

    code = ErrorCode.ARENA


_BY_CODE: dict[int, type[KvdError]] = {
    int(cls.code): cls
    for cls in (
        InternalError,
        ProtocolError,
        VersionError,
        AuthError,
        UnknownSession,
        StaleEpoch,
        DeadlineExceeded,
        LimitExceeded,
        SpecError,
        BadKey,
        UnknownHandle,
        LeaseLost,
        Draining,
        WrongInstance,
        Busy,
    )
}


def error_from_wire(code: int, message: str) -> KvdError:
    """The typed error for a wire code; an unknown code (a newer daemon's) is a KvdError."""
    cls = _BY_CODE.get(code)
    return cls(message) if cls is not None else KvdError(f"error {code}: {message}")
