"""Receive and send on a ZMQ socket without giving Python's interpreter away.

The law of this module: what it does is what pyzmq does, with the same errors. pyzmq hands the
interpreter over around each call, although a call with DONTWAIT takes a microsecond; the loop would
get it back when one worker after the other has had it. So libzmq itself is called, the very library
that pyzmq has loaded, with the interpreter held. Where it can't be reached so, pyzmq does it, and
it does large frames; also where no workers of tiers want the interpreter, for it is faster by a
microsecond or two a message.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import zmq

__all__ = ["prefer", "recv_bytes", "recv_small", "send_bytes"]

log = logging.getLogger(__name__)

DONTWAIT = int(zmq.DONTWAIT)
_MSG_BYTES = 64  # of a zmq_msg_t, fixed by libzmq's ABI
_SMALL = 256  # more than an identity has
_KEPT = 64 << 10  # a received message's own memory is kept until the next one, up to this
_EAGAIN = int(zmq.EAGAIN)
_EINTR = 4


class _Lib:
    """libzmq's functions, and memory for what is received. For one thread: the loop's."""

    def __init__(self) -> None:
        from zmq.backend.cython import _zmq

        lib = ctypes.PyDLL(_zmq.__file__)  # a symbol is looked for in what this is linked with
        place, number = ctypes.c_void_p, ctypes.c_int
        self.recv = lib.zmq_recv
        self.recv.argtypes = [place, place, ctypes.c_size_t, number]
        self.send = lib.zmq_send
        self.send.argtypes = [place, ctypes.c_char_p, ctypes.c_size_t, number]
        self.msg_recv = lib.zmq_msg_recv
        self.msg_recv.argtypes = [place, place, number]
        self.msg_data = lib.zmq_msg_data
        self.msg_data.argtypes, self.msg_data.restype = [place], place
        self.msg_more = lib.zmq_msg_more
        self.msg_more.argtypes = [place]
        self.msg_close = lib.zmq_msg_close
        self.msg_close.argtypes = [place]
        self.msg_init = lib.zmq_msg_init
        self.msg_init.argtypes = [place]
        self.errno = lib.zmq_errno
        self._small = ctypes.create_string_buffer(_SMALL)
        self._message = ctypes.create_string_buffer(_MSG_BYTES)
        self.small = ctypes.addressof(self._small)
        self.view = memoryview(self._small).cast("B")
        self.message = ctypes.addressof(self._message)
        self.msg_init(self.message)


def _load() -> _Lib | None:
    try:
        return _Lib()
    except (ImportError, OSError, AttributeError) as error:
        log.info("libzmq is called through pyzmq alone: %s", error)
        return None


_lib: _Lib | None = None  # None: pyzmq does all


def prefer(*, held: bool) -> bool:
    """Whether the interpreter is to be held from now on, for the whole process; whether it is."""
    global _lib
    _lib = _load() if held else None
    return _lib is not None


def recv_small(socket: zmq.Socket[bytes]) -> bytes:
    """`socket.recv(DONTWAIT)` of a frame that has 256 bytes at most, as an identity has."""
    lib, at = _lib, socket.underlying
    if lib is None or not at:
        return socket.recv(DONTWAIT)
    while (size := lib.recv(at, lib.small, _SMALL, DONTWAIT)) < 0:
        _check(lib)
    return lib.view[: min(size, _SMALL)].tobytes()


def recv_bytes(socket: zmq.Socket[bytes]) -> tuple[bytes, bool]:
    """The next frame, and whether more come after it in the message."""
    lib, at = _lib, socket.underlying
    if lib is None or not at:
        frame = socket.recv(DONTWAIT, copy=False)
        return frame.bytes, frame.more
    message = lib.message
    while (size := lib.msg_recv(message, at, DONTWAIT)) < 0:
        _check(lib)
    data = ctypes.string_at(lib.msg_data(message), size)
    more = bool(lib.msg_more(message))
    if size > _KEPT:
        lib.msg_close(message)
        lib.msg_init(message)
    return data, more


def send_bytes(socket: zmq.Socket[bytes], frame: bytes, flags: int) -> None:
    """`socket.send(frame, flags)`; `flags` have DONTWAIT."""
    lib, at = _lib, socket.underlying
    if lib is None or not at:
        socket.send(frame, flags)
        return
    while lib.send(at, frame, len(frame), flags) < 0:
        _check(lib)


def _check(lib: Any) -> None:
    """Raise what pyzmq would; nothing after a signal: the call is made again."""
    number = lib.errno()
    if number == _EAGAIN:
        raise zmq.Again(number)
    if number != _EINTR:
        raise zmq.ZMQError(number)
