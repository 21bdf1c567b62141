"""Whether to ask the daemon, and what it costs when it does not answer.

The law of this module: a question ends within its deadline, with an answer or with the caller's
own "nothing"; a daemon that is away costs one deadline, then it is left alone for a while; no
error of kvd reaches SGLang. Any thread may ask.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvd.client import Client, Info
from kvd.connectors.backoff import Backoff
from kvd.connectors.sglang.config import Options
from kvd.connectors.sglang.stats import Stats
from kvd.errors import AuthError, ConfigError, KvdError

__all__ = ["Daemon"]

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class Daemon:
    """A client, and the memory of how it went. Nothing is connected before the first question.
    ConfigError when the socket's path can't be one, or the token can't be read."""

    def __init__(self, options: Options, stats: Stats, name: str) -> None:
        self._options, self._stats = options, stats
        self._client = Client(
            options.socket or None,
            endpoint=options.endpoint or None,
            timeout_s=options.lookup_deadline_s,
            name=name,
            token=_token(options.token_file),
            expected_instance=options.instance or None,
            prefault=options.prefault,
        )
        self._lock = threading.Lock()
        self._backoff = Backoff(first_s=0.5, most_s=10.0)
        self._away = self._closed = False

    @property
    def away(self) -> bool:
        """Whether the last question found nobody."""
        return self._away

    def ask(self, what: str, question: Callable[[Client], _Answer], nothing: _Answer) -> _Answer:
        """What `question` returns; `nothing` when there is no answer, or nobody is asked now.
        The question itself has to keep to its deadline."""
        with self._lock:
            if self._closed:
                return nothing
            silent = not self._backoff.may_try(time.monotonic())
        if silent:
            self._stats.add(f"{what}.silent")
            return nothing
        try:
            answer = question(self._client)
        except (KvdError, OSError) as error:
            self._failed(what, error)
            return nothing
        self._worked()
        return answer

    def admit(self, client: Client, timeout_s: float) -> Info:
        """Who answers; AuthError if it is not the namespace that the configuration names."""
        info = client.info(timeout_s)
        wanted = self._options.namespace
        if wanted and info.namespace != wanted:
            raise AuthError(
                f"the daemon gives this process the namespace {info.namespace!r}, not {wanted!r}: "
                'give its token in "token_file", or map this uid to it in kvd.toml'
            )
        return info

    def close(self) -> None:
        """End the session; every later question is answered with nothing. Idempotent."""
        with self._lock:
            self._closed = True
        self._client.close()

    def _failed(self, what: str, error: Exception) -> None:
        self._stats.add(f"{what}.{type(error).__name__}")
        with self._lock:
            if self._closed:
                return
            pause = self._backoff.failed(time.monotonic())
            before, self._away = self._away, True
        if not before:
            log.warning(
                "kvd %s failed; going on without it, next try in %.1f s: %s", what, pause, error
            )

    def _worked(self) -> None:
        with self._lock:
            self._backoff.worked()
            before, self._away = self._away, False
        if before:
            log.warning("kvd is back")


def _token(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"token_file {path} can't be read: {error}") from error
