"""Seconds as callers give them, as the nanoseconds that clocks and messages count in.

The law of this module: no number of seconds makes anything but nanoseconds that fit or a typed
error that names the value and the limit. Time that is already over is no time, and no error: what
is left of somebody's deadline may be less than nothing.
"""

from __future__ import annotations

import time

from kvd.errors import ConfigError, KvdError, LimitExceeded

DAY_S = 86_400
TIMEOUT_MAX_S = 30 * DAY_S  # the longest deadline of a call
LEASE_MAX_S = DAY_S  # the longest lease or write that a daemon can be told to allow


def deadline_ns(timeout_s: float, what: str = "timeout_s") -> int:
    """CLOCK_MONOTONIC of this process so many seconds from now; a negative number is now.
    LimitExceeded if it is not a number, or more than TIMEOUT_MAX_S."""
    try:
        if timeout_s <= TIMEOUT_MAX_S:
            return time.monotonic_ns() + (int(timeout_s * 1e9) if timeout_s > 0 else 0)
    except (TypeError, ValueError):  # ValueError: an array of several
        pass
    raise _refused(LimitExceeded, what, timeout_s, TIMEOUT_MAX_S, "ask again after that")


def span_ns(seconds: float, what: str) -> int:
    """The life of a lease or an unfinished write. LimitExceeded if it is not from 0 to
    LEASE_MAX_S; the daemon's own limit (Limits.lease_max_ns, ttl_max_ns) may be lower."""
    try:
        if 0 <= seconds <= LEASE_MAX_S:
            return int(seconds * 1e9)
    except (TypeError, ValueError):
        pass
    raise _refused(LimitExceeded, what, seconds, LEASE_MAX_S, "ask for less, and renew")


def check_timeout(timeout_s: float, what: str = "timeout_s") -> float:
    """A client's deadline for calls that name none. ConfigError if it is not from 0 to
    TIMEOUT_MAX_S."""
    try:
        if 0 <= timeout_s <= TIMEOUT_MAX_S:
            return float(timeout_s)
    except (TypeError, ValueError):
        pass
    raise _refused(ConfigError, what, timeout_s, TIMEOUT_MAX_S, "name a deadline a call")


def _refused(kind: type[KvdError], what: str, value: object, most_s: int, way_out: str) -> KvdError:
    try:
        shown = f"{value:g}" if isinstance(value, (int, float)) else repr(value)
    except OverflowError:  # an int that no float holds
        shown = "a number of hundreds of digits"
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return kind(f"{what}: {shown} is no number of seconds from 0 to {most_s}; {way_out}")
