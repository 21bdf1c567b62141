"""Replies that are kept back, to go out together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.server.counters import Counters
from kvd.server.respond import Responder
from kvd.server.sessions import Route


class Socket:
    """What was sent: identities and frames, in order."""

    underlying = 0  # not one of libzmq's

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, frame: bytes, flags: int) -> None:
        self.sent.append(frame)


def session(number: int) -> Any:
    return SimpleNamespace(number=number, closed=False)


@pytest.mark.parametrize(
    "held, gone",
    [
        ([], []),
        ([1], []),  # a client's own: it sent both requests together
        ([1, 1], []),
        ([2], [b"2"]),
        ([1, 2, 1], [b"1", b"2", b"1"]),  # in order
    ],
    ids=str,
)
def test_what_takes_its_time_keeps_no_other_client_waiting_for_a_reply(
    held: list[int], gone: list[bytes]
) -> None:
    socket, sessions = Socket(), {1: session(1), 2: session(2)}
    responder = Responder(1, Counters(), lambda session, why: None)
    responder.hold()
    for number in held:
        route = Route(socket, b"route")  # type: ignore[arg-type]
        responder.send(route, [str(number).encode()], sessions[number])
    responder.let_go(sessions[1])
    assert socket.sent[1::2] == gone
    responder.flush()
    assert socket.sent[1::2] == [str(number).encode() for number in held]
