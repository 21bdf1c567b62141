"""What a client holds, in common: it belongs to a session, and knows how to ask it.

The law of this module: a handle belongs to the session that gave it and is given back exactly once,
at the end of its context at the latest.
"""

from __future__ import annotations

from kvd.client.call import Call
from kvd.client.channel import Channel
from kvd.client.durations import deadline_ns
from kvd.client.link import Link
from kvd.errors import ClientClosed, Forked, UnknownHandle
from kvd.wire import messages as m


class Handle:
    """The session, and how to ask it."""

    def __init__(self, channel: Channel, link: Link | None, timeout_s: float) -> None:
        self._channel = channel
        self._session = link
        self._timeout_s = timeout_s

    @property
    def _link(self) -> Link:
        """The session that gave this handle."""
        if self._session is None:
            raise UnknownHandle("nothing was asked for, and nothing was given")
        return self._session

    def _submit(
        self, message: m.Request, timeout_s: float | None = None, *, hold: bool = False
    ) -> Call:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._channel.submit(
            message, deadline_ns=deadline_ns(timeout_s), serial=self._link.serial, hold=hold
        )

    def _forget(self, message: m.Request, *, hold: bool = False) -> None:
        """Send without waiting; if there is no session any more, it has ended there as well."""
        try:
            self._channel.forget(message, self._link.serial, hold=hold)
        except (ClientClosed, Forked):
            return
