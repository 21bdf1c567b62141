"""Ends exchanges that a socket's time-out can't: each byte of a trickled answer starts it anew.

The law of this module: between the first byte of a request and the last of its answer's head, a
connection is watched; past the deadline its socket is shut down, and whoever waits on it gets a
broken connection. One thread watches all, and only while there is something to watch.

The head is all that needs it: a body is received piece by piece, with a look at the clock between
(objects.receive).
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from kvd.tiers.base import NEVER

SECOND = 1_000_000_000


class Guard:
    def __init__(self, most_ns: int) -> None:
        self._most_ns = most_ns  # for an exchange without a deadline
        self._lock = threading.Condition()
        self._watched: dict[int, tuple[Any, int]] = {}  # thread -> connection, until when
        self._thread: threading.Thread | None = None
        self._closed = False
        self._local = threading.local()
        self.ended = 0  # exchanges that were ended; only grows

    def deadline(self, deadline: int) -> None:
        """For the exchanges of this thread, until it is told otherwise."""
        self._local.deadline = deadline

    def install(self, client: Any) -> None:
        """Make the client's connections watched ones."""
        from botocore.awsrequest import AWSHTTPConnectionPool, AWSHTTPSConnectionPool

        manager = client._endpoint.http_session._manager
        manager.pool_classes_by_scheme = {
            "http": self._pool(AWSHTTPConnectionPool),
            "https": self._pool(AWSHTTPSConnectionPool),
        }

    def _pool(self, pool: Any) -> Any:
        guard = self

        class Watched(pool.ConnectionCls):  # type: ignore[misc]
            def request(self, *args: Any, **kwargs: Any) -> Any:
                guard._enter(self)
                try:
                    return super().request(*args, **kwargs)
                finally:
                    guard._leave()

            def getresponse(self, *args: Any, **kwargs: Any) -> Any:
                guard._enter(self)
                try:
                    response = super().getresponse(*args, **kwargs)
                finally:
                    ended = not guard._leave()
                if ended:  # what came of its head may look like a whole one
                    response.close()
                    raise ConnectionResetError("its time was over before its head had come")
                return response

        return type(f"Watched{pool.__name__}", (pool,), {"ConnectionCls": Watched})

    def _enter(self, connection: Any) -> None:
        until = min(getattr(self._local, "deadline", NEVER), time.monotonic_ns() + self._most_ns)
        with self._lock:
            self._watched[threading.get_ident()] = connection, until
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._watch, name="kvd-tier-s3-guard", daemon=True
                )
                self._thread.start()
            elif len(self._watched) == 1:
                self._lock.notify()

    def _leave(self) -> bool:
        """False: the watch ended it."""
        with self._lock:
            return self._watched.pop(threading.get_ident(), None) is not None

    def _watch(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic_ns()
                for thread, (connection, until) in list(self._watched.items()):
                    if now >= until:
                        del self._watched[thread]
                        self.ended += 1
                        self._shut(connection)
                self._lock.wait(0.1 if self._watched else None)

    @staticmethod
    def _shut(connection: Any) -> None:
        sock = getattr(connection, "sock", None)
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it was not connected any more
                pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
