"""A bare ZMQ echo in a process of its own: the limit that kvd's control plane is held against.

The law of this module: nothing but ZMQ is in it. A ROUTER answers every message with itself, over
the same transport and between two processes, as a daemon and its client are.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

import zmq

from kvd.tools.bench.measure import process_cpu_s


class Echo:
    """The echo process and a DEALER that is connected to it."""

    def __init__(self, path: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = f"ipc://{path}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvd.tools.bench.echo", endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.round_trip(b"up?")

    def __enter__(self) -> Echo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()
        self._context.term()
        assert self._process.stdin is not None
        self._process.stdin.close()  # the echo ends with its input
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """Seconds of CPU of the echo's process so far."""
        return process_cpu_s(self._process.pid)

    def round_trip(self, message: bytes) -> float:
        """Seconds of one message there and back."""
        begin = time.perf_counter()
        self.socket.send(message)
        if not self.socket.poll(10_000):
            raise TimeoutError("the echo process does not answer")
        self.socket.recv()
        return time.perf_counter() - begin

    def pipelined(self, message: bytes, count: int, window: int) -> float:
        """Messages a second with `window` of them on their way."""
        send, recv = self.socket.send, self.socket.recv
        begin = time.perf_counter()
        for _ in range(min(window, count)):
            send(message)
        for _ in range(count - min(window, count)):
            recv()
            send(message)
        for _ in range(min(window, count)):
            recv()
        return count / (time.perf_counter() - begin)


def serve(endpoint: str) -> None:
    """Answer until standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(endpoint)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    over = False
    while not over:
        for ready, _ in poller.poll():
            if ready is not router:
                over = True
                continue
            try:
                while True:
                    router.send_multipart(router.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                continue
    router.close()
    context.term()


if __name__ == "__main__":
    serve(sys.argv[1])
