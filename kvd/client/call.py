"""One request on its way.

The law of this module: a call ends exactly once, with an answer or with an error, at its deadline
at the latest. Until then it belongs to its channel, and its fields change only under the channel's
lock; afterwards nothing changes but the decoded value, which is the same whoever decodes it.
"""

from __future__ import annotations

import copy
from _thread import LockType
from typing import TYPE_CHECKING

from kvd.client.durations import deadline_ns
from kvd.client.settings import RESEND_NS
from kvd.errors import KvdError
from kvd.native import Given
from kvd.wire.messages import (
    OP_OF,
    Abort,
    Bye,
    Cancel,
    Release,
    Reply,
    Request,
    Wait,
    decode_error,
    decode_reply,
    encode_request,
)
from kvd.wire.ops import FrameFlag

if TYPE_CHECKING:
    from kvd.client.link import Link
    from kvd.client.waiters import Waiters


_ERROR = int(FrameFlag.ERROR)

# What a client gives back. It is carried out whenever the daemon reads it, so it has no deadline.
GIVE_BACKS = (Abort, Release, Cancel, Bye)


def _another(error: KvdError) -> KvdError:
    """The same error, to be kept or raised. One that is raised refers to all frames on its way, and
    so to this call: one that the call kept, too, would keep whatever is in them (a reservation, and
    with it the lock that says that somebody may still write) until a collector comes by."""
    other = copy.copy(error)
    if error.__cause__ is not None:
        other.__cause__ = error.__cause__
    return other


class Call:
    """A request that was submitted. `result()` waits for its answer."""

    __slots__ = (
        "_channel",
        "_decoded",
        "body",
        "collected",
        "deadline_ns",
        "done",
        "error",
        "flags",
        "frames",
        "gives_back",
        "internal",
        "link",
        "message",
        "newer",
        "op",
        "payload",
        "raw",
        "request",
        "resend_ns",
        "resend_pause_ns",
        "serial",
        "tracked",
        "tries",
        "waiter",
    )

    def __init__(
        self,
        channel: Waiters,
        message: Request,
        payload: tuple[bytes | memoryview, ...],
        deadline_ns: int,
        serial: int | None,
        *,
        tracked: bool = False,
        internal: bool = False,
    ) -> None:
        self._channel = channel
        self._decoded: Reply | None = None
        self.message = message
        self.op = int(OP_OF[type(message)])
        self.body = encode_request(message)
        self.payload = payload  # copied when it is sent
        self.deadline_ns = deadline_ns  # CLOCK_MONOTONIC of this process
        self.serial = serial  # the session that its handles belong to; None: any
        self.tracked = tracked  # poll() returns it when it is done
        self.internal = internal  # nobody waits for it
        self.gives_back = isinstance(message, GIVE_BACKS)
        self.link: Link | None = None  # that answered
        self.request = 0  # id within the session in which it was sent last; 0: not sent
        self.tries = 0  # sessions in which it was sent
        self.resend_ns = 0
        self.resend_pause_ns = 0
        self.waiter: LockType | None = None  # released when it is done
        self.done = False
        self.collected = False  # result() was called before poll() returned it
        self.error: KvdError | None = None
        self.raw: bytes = b""
        self.flags = 0
        self.newer = False
        self.frames: list[bytes] = []  # inline payload of the answer

    def sent(self, now: int) -> None:
        """In one more session. An answer that takes its time by design is not asked for again
        before that is over."""
        self.tries += 1
        self.resend_pause_ns = RESEND_NS
        if isinstance(self.message, Wait):
            self.resend_pause_ns += self.message.timeout_ns
        self.resend_ns = now + self.resend_pause_ns

    def resent(self, now: int) -> None:
        self.resend_pause_ns *= 2
        self.resend_ns = now + self.resend_pause_ns

    def answer(self) -> Reply:
        """The answer of a call that is done; raises its error."""
        if self.error is not None:
            raise _another(self.error)
        if self._decoded is None:
            if self.flags & _ERROR:
                self.error = decode_error(self.raw)
                raise _another(self.error)
            self._decoded = decode_reply(self.op, self.raw, newer=self.newer)
        return self._decoded

    def fail(self, error: KvdError) -> None:
        """End it so."""
        self.error = _another(error)

    def result(self, timeout_s: Given[float] | None = None) -> Reply:
        """The answer. Waits until the call's deadline, or at most `timeout_s` seconds.

        Raises the typed error that the daemon answered, Unavailable when no answer came by the
        deadline, TimeoutError when `timeout_s` passed before it (the call then goes on).
        """
        if not self.done:
            until_ns = self.deadline_ns
            if timeout_s is not None:
                until_ns = min(until_ns, deadline_ns(timeout_s))  # type: ignore[arg-type]
            self._channel.wait(self, until_ns)
            if not self.done:
                raise TimeoutError(f"no answer within {timeout_s} s; the call goes on")
        self.collected = True
        return self.answer()

    def cancel(self) -> None:
        """Give the call up. What a late answer grants is given back."""
        self._channel.abandon(self)

    def __repr__(self) -> str:
        state = "done" if self.done else "pending"
        return f"<Call {type(self.message).__name__} request={self.request} {state}>"
