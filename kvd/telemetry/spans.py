"""The declared table of spans: one for each operation of the protocol.

The law of this module: a span says which operation, for whom, how long, and how it ended. No key,
no hash, no token and no payload is in one.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ATTRIBUTES", "SPANS", "Span"]


class Span(NamedTuple):
    """`operation`: as the protocol names it, in small letters."""

    operation: str
    help: str

    @property
    def name(self) -> str:
        return f"kvd.{self.operation}"


ATTRIBUTES = {
    "tenant": "The session's namespace.",
    "session": "The session's number.",
    "error.type": "The error that answered it, if one did: its code in small letters.",
}

_ALL = (
    Span("hello", "A client introduces itself."),
    Span("register_spec", "A model's layout is made known."),
    Span("reserve", "Slots are asked for, to store into."),
    Span("commit", "What was written there becomes readable."),
    Span("abort", "Slots are given back unwritten."),
    Span("lookup", "Which chunks are there; mostly leased at once."),
    Span("load", "A transfer of leased chunks begins."),
    Span("wait", "Until chunks of a transfer are there: a long poll."),
    Span("cancel", "A transfer is not wanted any more."),
    Span("renew", "A lease is made longer."),
    Span("release", "A lease is given back."),
    Span("evict", "Chunks are removed by command."),
    Span("list", "What is stored is listed."),
    Span("stat", "The daemon's numbers."),
    Span("heartbeat", "A client is alive."),
    Span("put", "A store whose bytes travel inline."),
    Span("get", "A load whose bytes travel inline."),
    Span("bye", "A client leaves."),
    Span("tier", "A command to a tier below."),
    Span("hint", "What will be asked for, or will not."),
    Span("prefetch", "What lies below is read up ahead."),
    Span("tenant", "A command about tenants."),
)

SPANS: dict[str, Span] = {span.operation: span for span in _ALL}
