"""A request between its arrival and its one reply.

The law of this module: each request that was taken is answered exactly once, by `result` or by
`fail`. The core hands the object back in its Reply or Fail and knows nothing about it; those that
need several steps of the core (inline put and get) are objects of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvd.errors import ErrorCode
from kvd.server.sessions import Route, Session
from kvd.wire import Frame, Trace

if TYPE_CHECKING:
    from kvd.core.actions import Result

__all__ = ["Answerable", "Request", "Respond"]


class Answerable(Protocol):
    """What stands in `request` of an event."""

    def result(self, result: Result) -> None: ...

    def fail(self, code: ErrorCode, message: str, retry_ns: int = 0) -> None: ...


class Request:
    """One request of a session. `deadline` is ns of our monotonic clock, 0 if there is none;
    `arrived` is, too."""

    __slots__ = ("_frame", "arrived", "deadline", "id", "op", "respond", "route", "session")

    def __init__(
        self,
        session: Session,
        route: Route,
        frame: Frame,
        deadline: int,
        respond: Respond,
        arrived: int = 0,
    ) -> None:
        self.session = session
        self.route = route
        self.id = frame.request
        self.op = frame.op
        self._frame = frame
        self.deadline = deadline
        self.arrived = arrived
        self.respond = respond

    @property
    def trace(self) -> Trace:
        """What the client sent, for its reply and for spans."""
        frame = self._frame
        return Trace(frame.trace_id, frame.span_id, frame.trace_flags)

    def result(self, result: Result) -> None:
        self.respond.result(self, result, ())

    def fail(self, code: ErrorCode, message: str, retry_ns: int = 0) -> None:
        self.respond.fail(self, code, message, retry_ns)


class Respond(Protocol):
    """Encodes, keeps and sends the one reply of a request."""

    def result(
        self, request: Request, result: tuple[Any, ...], payload: Sequence[bytes]
    ) -> None: ...

    def fail(self, request: Request, code: ErrorCode, message: str, retry_ns: int = 0) -> None: ...
