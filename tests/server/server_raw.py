"""A client made of bare sockets: says what a test wants it to say, and nothing else."""

from __future__ import annotations

import os
import socket
import time
from types import TracebackType
from typing import Any, NamedTuple

import zmq

from kvd.chunk import KVSpec, ShardSpec
from kvd.errors import KvdError
from kvd.wire import Frame, FrameFlag, Op, attach_path, decode_frame, encode_frame
from kvd.wire import messages as m
from kvd.wire.attach import AttachReply, AttachRequest, decode_attach_reply, encode_attach
from kvd.wire.frame import HEADER_BYTES

NS = 1_000_000_000


class Answer(NamedTuple):
    frame: Frame
    payload: list[bytes]

    @property
    def error(self) -> KvdError | None:
        return m.decode_error(self.frame.body) if self.frame.flags & FrameFlag.ERROR else None

    @property
    def message(self) -> Any:
        if self.error is not None:
            raise self.error
        return m.decode_reply(self.frame.op, self.frame.body)


def spec(nbytes: int = 4096, **changes: Any) -> KVSpec:
    """A small model's KVSpec with one shard of `nbytes` a chunk."""
    fields: dict[str, Any] = {
        "model": "test/model",
        "revision": "main",
        "weights": "sha256:00",
        "engine": "test",
        "dtype": "bfloat16",
        "quantisation": "none",
        "codec": "raw",
        "chunk_tokens": 16,
        "pipeline": 1,
        "tensor": 1,
        "groups": 1,
        "rope": (),
        "extra": (),
        "shards": (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes),),
        **changes,
    }
    return KVSpec(**fields)


def key(number: int) -> bytes:
    """A chunk hash."""
    return number.to_bytes(4, "big") * 8


def prints(count: int) -> bytes:
    return b"".join(i.to_bytes(16, "big") for i in range(1, count + 1))


class RawClient:
    """Attached and connected on construction; `hello` only if asked for."""

    def __init__(
        self,
        path: str,
        *,
        name: str = "raw",
        attach: bool = True,
        maps: bool = True,
        token: bytes | None = None,
        group: bytes | None = None,
        expected: str | None = None,
        hello: bool = True,
    ) -> None:
        self.path = path
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{path}")
        self.request = 0
        self.attach_socket: socket.socket | None = None
        self.descriptors: list[int] = []
        self.told: AttachReply | None = None
        self.session = bytes(16)
        try:
            if attach:
                self.attach_socket = dial(path)
                request = AttachRequest(1, 0, name, os.getpid(), group, token, expected, maps)
                self.told, self.descriptors = attach_over(self.attach_socket, request)
                self.session = self.told.session
                if hello:
                    self.hello_reply = self.call(m.Hello(name, (), 0, None, None, None)).message
        except BaseException:
            self.close()
            raise

    def send(self, op: int, body: bytes, payload: tuple[bytes, ...] = (), **fields: Any) -> int:
        """One request; its id."""
        if "request" not in fields:
            self.request += 1
            fields["request"] = self.request
        fields.setdefault("session", self.session)
        frame = encode_frame(op, body, frames=len(payload), **fields)
        self.dealer.send_multipart([frame, *payload])
        return int(fields["request"])

    def recv(self, timeout_s: float = 10.0) -> Answer:
        """The next answer, whichever request it belongs to."""
        if not self.dealer.poll(int(timeout_s * 1000)):
            raise TimeoutError("no answer came")
        first, *payload = self.dealer.recv_multipart()
        return Answer(decode_frame(first), payload)

    def call(
        self, message: Any, payload: tuple[bytes, ...] = (), timeout_s: float = 10.0, **fields: Any
    ) -> Answer:
        """Ask and wait for that answer; others are thrown away."""
        body = m.encode_request(message)
        request = self.send(m.OP_OF[type(message)], body, payload, **fields)
        end = time.monotonic() + timeout_s
        while True:
            answer = self.recv(max(0.0, end - time.monotonic()))
            if answer.frame.request == request:
                return answer

    def ask(self, message: Any, payload: tuple[bytes, ...] = (), **fields: Any) -> Any:
        """The decoded answer; raises the typed error if it is one."""
        return self.call(message, payload, **fields).message

    def raw(self, *frames: bytes) -> None:
        self.dealer.send_multipart(list(frames))

    def register(self, kv: KVSpec) -> bytes:
        digest: bytes = self.call(m.RegisterSpec(kv.encode())).message.digest
        return digest

    def reserve(self, digest: bytes, first: int, count: int, ttl_s: float = 30.0) -> Any:
        """Chunks `first`, `first`+1, ... of a chain whose root is at the last multiple of 100."""
        hashes = b"".join(key(first + i) for i in range(count))
        return self.call(
            m.Reserve(
                digest,
                1,
                (0,),
                hashes,
                bytes(32) if first % 100 == 0 else key(first - 1),
                first % 100,
                prints(count),
                None,
                None,
                0,
                int(ttl_s * NS),
            )
        ).message

    def store(self, digest: bytes, first: int, count: int) -> bytes:
        """Reserve and commit without writing a byte; the outcomes of the commit."""
        reserved = self.reserve(digest, first, count)
        outcomes: bytes = self.call(m.Commit(reserved.write, None, None)).message.outcomes
        return outcomes

    def lookup(self, digest: bytes, first: int, count: int, flags: int = 0) -> Any:
        hashes = b"".join(key(first + i) for i in range(count))
        return self.call(
            m.Lookup(digest, 1, (0,), hashes, None, flags, 30 * NS, bytes(32), first, 0)
        ).message

    def stat(self) -> dict[str, Any]:
        stat: dict[str, Any] = self.call(m.Stat()).message.stat
        return stat

    def close(self) -> None:
        self.dealer.close(0)
        self.context.term()
        self.drop_descriptors()
        if self.attach_socket is not None:
            self.attach_socket.close()

    def drop_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def dial(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    try:
        sock.connect(attach_path(path))
    except BaseException:
        sock.close()
        raise
    return sock


def attach_over(sock: socket.socket, request: AttachRequest) -> tuple[AttachReply, list[int]]:
    sock.send(encode_attach(request))
    return attach_answer(sock)


def attach_answer(sock: socket.socket) -> tuple[AttachReply, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(sock, 4096, 8)
    try:
        return decode_attach_reply(data), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def gone(sock: socket.socket, timeout_s: float = 10.0) -> bool:
    """Whether the other end hangs up within the time."""
    sock.settimeout(timeout_s)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


assert HEADER_BYTES == 96 and Op.HELLO == 1
