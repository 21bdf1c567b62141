"""Client: what connectors and tools use to talk to a daemon.

The law of this module: every call ends, at its deadline at the latest, with an answer or a typed
error; the client connects, reconnects and registers its specs by itself; it may be used from many
threads, and after a fork it belongs to the parent alone. A connector turns every KvdError into a
miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from kvd.client import fork
from kvd.client.call import Call
from kvd.client.channel import Channel
from kvd.client.durations import check_timeout
from kvd.client.hinting import Hinting
from kvd.client.loading import Loading
from kvd.client.looking import Looking
from kvd.client.memory import Memory
from kvd.client.settings import Counters, Curve, Settings
from kvd.client.storing import Storing
from kvd.errors import KvdError
from kvd.wire import Trace, check_socket_path, default_socket
from kvd.wire import messages as m


class Client(Storing, Loading, Hinting, Looking):
    """One client of one daemon.

    `socket`: path of the daemon's socket; default as for the daemon itself (kvd.wire.paths).
    `endpoint`: "tcp://host:port" instead. `timeout_s`: deadline of calls that name none.
    `group`: the secret that the sessions of one engine share, so that any of them may load or
    release what another leased. `token`: a namespace's token. `expected_instance`: refuse another
    daemon. `map_memory=False`: bytes travel inline. `prefault`: fault the arena in, in the
    background. `trace`: gives the trace context for each request. `public`: lookups find chunks of
    the namespace `public` where the own one has none. `namespace="public"`: a session in that
    namespace, for who may write there (AuthError else).

    ConfigError if the socket's path can't be one, or `timeout_s` is not from 0 s to 30 days (the
    longest deadline of a call, too: LimitExceeded). Nothing is connected before the first call.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        endpoint: str | None = None,
        timeout_s: float = 5.0,
        name: str = "",
        group: bytes | None = None,
        token: bytes | None = None,
        expected_instance: str | None = None,
        map_memory: bool = True,
        prefault: bool = False,
        curve: Curve | None = None,
        trace: Callable[[], Trace] | None = None,
        public: bool = False,
        namespace: str | None = None,
    ) -> None:
        path = ""
        if endpoint is None:
            path = check_socket_path(default_socket() if socket is None else socket)
        settings = Settings(
            path,
            endpoint,
            name,
            group,
            token,
            expected_instance,
            bool(map_memory),  # any truth will do; of a bool a compiler would make sure
            curve,
            trace,
            bool(public),
            namespace,
        )
        self.public = bool(public)
        self.timeout_s = check_timeout(timeout_s)
        self._memory = Memory(prefault=bool(prefault))
        self._specs = {}
        self._registered = set()
        self._channel = Channel(settings, self._specs, self._memory.adopt)
        fork.watch(self._channel)

    # -- the asynchronous core -----------------------------------------------------------------

    def submit(
        self,
        message: m.Request,
        payload: Iterable[bytes | memoryview] = (),
        deadline_s: float | None = None,
    ) -> Call:
        """Send a request (kvd.wire.messages) without waiting; poll() gives it back when done.

        Never blocks: what can't be sent yet is queued. `payload`: inline frames, copied on
        sending. The call ends within `deadline_s` seconds (default `timeout_s`).
        """
        timeout_s = self.timeout_s if deadline_s is None else deadline_s
        return self._channel.submit(
            message, payload, deadline_ns=self.deadline_ns(timeout_s), tracked=True
        )

    def poll(self, timeout_s: float = 0.0) -> list[Call]:
        """Submitted calls that are done and were not given back before; waits at most
        `timeout_s` seconds for the first. Also what makes progress when nobody waits: call it
        when fileno() is readable, and after next_timeout_s()."""
        return self._channel.poll(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable when poll() has something to do; only to be waited on."""
        return self._channel.fileno()

    def next_timeout_s(self) -> float | None:
        """When poll() has something to do though fileno() is quiet (deadlines, reconnecting)."""
        return self._channel.next_timeout_s()

    # -- the session ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a session is open now, as far as this side knows. Never blocks."""
        return self._channel.ready is not None

    @property
    def counters(self) -> Counters:
        """What the client did besides what it was asked for."""
        return self._channel.counters

    @property
    def prefaulted(self) -> int:
        """Bytes of the arena that the prefault thread has gone through."""
        return self._memory.prefaulted

    def close(self) -> None:
        """End the session and every call with it (ClientClosed). Views stay valid memory, but
        nobody keeps their content any more. Idempotent; safe from any thread."""
        channel = self._channel
        if channel.settings.endpoint is not None and channel.ready is not None:
            try:  # over tcp there is no end-of-file that would tell the daemon
                channel.submit(m.Bye(), deadline_ns=self.deadline_ns(0.2)).result()
            except (KvdError, TimeoutError):
                pass
        channel.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if sys.is_finalizing():  # closed before that, see kvd.client.fork
            return
        channel = getattr(self, "_channel", None)
        if channel is not None and fork.is_ours(channel):
            channel.close()
