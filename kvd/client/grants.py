"""What an answer grants, and how that is given back.

The law of this module: whatever a reply puts into a client's hand (a lease, a write, a transfer)
has a request here that takes it out again.
"""

from __future__ import annotations

from kvd.wire import messages as m
from kvd.wire.messages import Reply, Request

__all__ = ["HANDLE_REQUESTS", "granted_by"]

# Requests that name a lease, write or transfer: these die with their session.
HANDLE_REQUESTS = (m.Commit, m.Abort, m.Load, m.Wait, m.Cancel, m.Renew, m.Release)


def granted_by(reply: Reply, message: Request) -> list[Request]:
    """The requests that give back what `reply` granted."""
    if isinstance(reply, m.ReserveReply):
        return [m.Abort(reply.write, None)] if reply.write else []
    if isinstance(reply, m.LookupReply):
        given: list[Request] = []
        if reply.reserved is not None and reply.reserved.write:
            given.append(m.Abort(reply.reserved.write, None))
        if reply.lease:
            given.append(m.Release(reply.lease))  # ends its transfers too
        return given
    if isinstance(reply, m.LoadReply) and reply.transfer and isinstance(message, m.Load):
        return [m.Cancel(reply.transfer)]
    return []
