"""Receiving and sending with the interpreter held is what pyzmq does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from kvd.server import holding
from kvd.server.dispatch import receive
from kvd.server.holding import recv_bytes, recv_small, send_bytes
from kvd.server.respond import DONTWAIT, MORE, new_router

Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture(params=["libzmq", "pyzmq"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    held = request.param == "libzmq"
    assert holding.prefer(held=held) == held, "the libzmq of this pyzmq can't be called"
    yield request.param
    holding.prefer(held=False)


@pytest.fixture
def pair(way: str) -> Iterator[Sockets]:
    """A ROUTER and a DEALER that is called `peer`."""
    context: zmq.Context[Any] = zmq.Context()
    router = new_router(context, 1 << 24)
    router.bind("inproc://here")
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"peer")
    dealer.connect("inproc://here")
    yield router, dealer
    router.close()
    dealer.close(linger=0)
    context.term()


def wait(socket: zmq.Socket[bytes]) -> None:
    assert socket.poll(5000), "nothing came"


@pytest.mark.parametrize("sizes", [(0,), (1,), (70_000,), (30, 0, 300), (5, 200_000, 1)])
def test_a_message_comes_whole(pair: Sockets, sizes: tuple[int, ...]) -> None:
    router, dealer = pair
    frames = [bytes([n]) * size for n, size in enumerate(sizes)]
    for _ in range(2):
        dealer.send_multipart(frames)
        wait(router)
        message = receive(router, tcp=False)
        assert message.identity == b"peer" and message.first == frames[0]
        assert [part.bytes for part in message.payload] == frames[1:]
    with pytest.raises(zmq.Again):
        receive(router, tcp=False)


def test_what_is_kept_of_a_message_is_not_the_next_ones(pair: Sockets) -> None:
    router, dealer = pair
    for frame in (b"a" * 100_000, b"b", b"c" * 300, b""):
        dealer.send(frame)
        wait(router)
        assert recv_small(router) == b"peer"
        assert recv_bytes(router) == (frame, False)


@pytest.mark.parametrize("size", [0, 1, 60_000])
def test_a_reply_goes_whole(pair: Sockets, size: int) -> None:
    router, dealer = pair
    dealer.send(b"here I am")
    wait(router)
    receive(router, tcp=False)
    send_bytes(router, b"peer", MORE)
    send_bytes(router, b"x" * size, MORE)
    send_bytes(router, b"end\0", DONTWAIT)
    wait(dealer)
    assert dealer.recv_multipart() == [b"x" * size, b"end\0"]


def test_who_is_not_there_is_unreachable(pair: Sockets) -> None:
    router, _ = pair
    with pytest.raises(zmq.ZMQError) as error:
        send_bytes(router, b"nobody", MORE)
    assert error.value.errno == zmq.EHOSTUNREACH


def test_a_full_queue_is_to_be_tried_again(pair: Sockets) -> None:
    router, dealer = pair
    dealer.send(b"here I am")
    wait(router)
    with pytest.raises(zmq.Again):
        for _ in range(1 << 20):
            send_bytes(router, b"peer", MORE)
            send_bytes(router, b"x", DONTWAIT)


@pytest.mark.parametrize("call", [recv_small, recv_bytes, lambda s: send_bytes(s, b"", DONTWAIT)])
def test_a_closed_socket_is_an_error(pair: Sockets, call: Any) -> None:
    router, _ = pair
    router.close()
    with pytest.raises(zmq.ZMQError) as error:
        call(router)
    assert error.value.errno == zmq.ENOTSOCK


@pytest.mark.parametrize("way", ["libzmq"], indirect=True)
def test_the_interpreter_stays_with_the_caller(pair: Sockets) -> None:
    """Another thread that wants it does not get it in the middle: its clock stands still."""
    router, _ = pair
    turns, end = [0], threading.Event()

    def turn() -> None:
        while not end.is_set():
            turns[0] += 1
            time.sleep(0)

    other = threading.Thread(target=turn)
    other.start()
    try:
        stood = 0
        for _ in range(200):
            time.sleep(0.001)
            before = turns[0]
            for _ in range(20):
                with suppress(zmq.Again):
                    recv_small(router)
            stood += turns[0] == before
    finally:
        end.set()
        other.join()
    assert stood > 150
