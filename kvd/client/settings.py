"""What a client was told when it was made, and what it learned when it connected.

The law of this module: plain values, frozen; nothing here opens or waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvd.errors import ConfigError
from kvd.wire import Limits, Trace

# A lease or transfer is believed until this long before its expiry: what a copy's last
# instructions and the check itself may take.
LEASE_MARGIN_NS = 50_000_000

# An answer that is not there by then is asked for again, then after twice as long.
RESEND_NS = 1_000_000_000
BACKOFF_S = (0.01, 0.25)  # first and longest pause between two tries to reach a daemon


class Curve(NamedTuple):
    """CURVE keys for tcp, 40 characters of Z85 each."""

    server_key: bytes
    public_key: bytes
    secret_key: bytes


class Settings(NamedTuple):
    """How to reach the daemon, and as whom."""

    socket: str  # path of the ZMQ ipc socket; unused with `endpoint`
    endpoint: str | None  # "tcp://host:port"
    name: str
    group: bytes | None
    token: bytes | None
    expected_instance: str | None
    map_memory: bool
    curve: Curve | None
    trace: Callable[[], Trace] | None
    public: bool = False  # lookups go on in the namespace `public`
    namespace: str | None = None  # `public`, to write there

    @property
    def where(self) -> str:
        """For messages: what was tried."""
        return self.endpoint if self.endpoint is not None else self.socket


class Info(NamedTuple):
    """Who answered, as told at attach and hello."""

    instance: str
    epoch: int
    version: str  # of the daemon's package
    features: tuple[str, ...]  # that both sides have
    limits: Limits
    namespace: str
    admin: bool
    lease_default_ns: int
    maps_memory: bool  # the arena is mapped here; otherwise bytes travel inline
    public_id: bytes | None  # this session's public id; None over tcp

    def check_memory(self, what: str) -> None:
        """ConfigError if no memory is mapped, which `what` gives slots of."""
        if not self.maps_memory:
            raise ConfigError(
                f"{what} gives slots of shared memory, and this client maps none (over tcp, or "
                "map_memory=False): use put, get, store_chunks or load_chunks, which carry the "
                "bytes, or a client that maps the memory"
            )


class SharedLease(NamedTuple):
    """A lease as it is told to the other sessions of its group (Lease.share, Client.join). Plain
    values, to be sent in whatever way the engine's processes talk."""

    id: int
    expiry_ns: int  # of the daemon's CLOCK_MONOTONIC
    epoch: int  # of the daemon


class Counters(NamedTuple):
    """What a client did besides what it was asked for (see Client.counters)."""

    links: int = 0  # sessions opened
    resends: int = 0  # requests sent again because no answer came
    stray: int = 0  # answers that nobody waited for (duplicates)
    late: int = 0  # answers to abandoned requests
    given_back: int = 0  # grants, leases and transfers given back for them
    lost: int = 0  # sessions that ended from the other side
    delayed: int = 0  # requests that the daemon was too busy for, and that were sent again
