"""How a Redis is reached, and what its errors mean.

The law of this module: every call has a bound, and each way in which it can end is a Refused with
a reason. A password stands in the URL or in a file, and in no message.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvd.errors import ConfigError
from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Answer, Reason

T = TypeVar("T")


class RedisConfig(NamedTuple):
    """`url`: redis://, rediss:// or unix://, as redis-py takes it. `installation`: as for S3."""

    url: str
    installation: str
    limit_bytes: int
    prefix: str = "kvd"
    password_file: str | None = None
    ttl_s: float = 0.0
    timeout_s: float = 2.0
    connections: int = 8
    largest_bytes: int = 64 << 20


def shown(url: str) -> str:
    """The URL without what is secret in it."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


_own = threading.local()


def take_again() -> bool:
    """Whether a request of this thread was sent a second time since this was asked last: then its
    answer is of the second one, and the first may have been carried out."""
    again: bool = getattr(_own, "again", False)
    _own.again = False
    return again


def connect(config: RedisConfig) -> Any:
    """A client; nothing is sent yet. ConfigError."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError("tier redis needs redis: pip install 'kvd[redis]'") from error

    class Noted(NoBackoff):  # type: ignore[misc]
        def compute(self, failures: int) -> int:
            """Asked before each further attempt."""
            _own.again = True
            return 0

    if not config.installation:
        raise ConfigError("tier redis: installation is empty: it says whose keys these are")
    more: dict[str, Any] = {}
    if config.password_file:
        try:
            more["password"] = Path(config.password_file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"tier redis: password_file {config.password_file}: {error.strerror}"
            ) from error
    try:
        if not _names_a_database(config.url):  # redis-py would take the first one
            raise ValueError("no database")
        return redis.Redis.from_url(
            config.url,
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            max_connections=config.connections,
            retry=Retry(Noted(), 1),  # a connection that was closed while it was idle
            **more,
        )
    except ValueError as error:
        raise ConfigError(
            f"tier redis: url {shown(config.url)!r}: give redis://, rediss:// or unix://, "
            "then HOST:PORT/DB or the socket's path; a port is from 1 to 65535, DB a number"
        ) from error


def _names_a_database(url: str) -> bool:
    """Whether the path of a URL, if it is one of a host, is a database's number or nothing."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or re.fullmatch(r"/?[0-9]*", parts.path, re.ASCII) is not None


def ask(what: str, call: Callable[[], T]) -> T:
    """The call's result, or Refused."""
    import redis

    try:
        return call()
    except redis.AuthenticationError as error:
        asks = re.search("authentication required|already authenticated", str(error), re.I)
        why = "it asks for a password" if asks else "the password is not accepted"
        raise failed(Reason.CREDENTIALS, f"{what}: {why}", permanent=True) from error
    except redis.ReadOnlyError as error:
        raise failed(Reason.READ_ONLY, f"{what}: a read-only replica", permanent=True) from error
    except redis.OutOfMemoryError as error:
        raise Refused(Answer.NO_SPACE, Reason.SPACE, f"{what}: maxmemory is reached") from error
    except redis.TimeoutError as error:
        raise failed(Reason.SLOW, f"{what}: no answer in time") from error
    except redis.ConnectionError as error:
        raise failed(Reason.UNREACHABLE, f"{what}: the server can't be reached") from error
    except redis.ResponseError as error:
        said = str(error)
        if said.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            reason = Reason.DENIED if said.startswith("NOPERM") else Reason.CREDENTIALS
            raise failed(reason, f"{what}: {said.split()[0]}", permanent=True) from error
        if said.startswith("OOM") or "maxmemory" in said:
            raise Refused(Answer.NO_SPACE, Reason.SPACE, f"{what}: maxmemory is reached") from error
        if said.startswith("LOADING"):
            raise failed(Reason.THROTTLED, f"{what}: the server is loading") from error
        raise failed(Reason.OTHER, f"{what}: {said[:120]}") from error
    except redis.RedisError as error:
        raise failed(Reason.OTHER, f"{what}: {type(error).__name__}") from error
