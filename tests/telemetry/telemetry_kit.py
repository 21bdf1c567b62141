"""What the tests of this folder share: a real collector, and a socket that is mute or slow.

The collector is rotel: it takes OTLP over gRPC and writes what it took into its log.
"""

from __future__ import annotations

import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvd.tools.services import ServiceFailed, _Process, find_program, free_ports

ROTEL = ("rotel-agent", "rotel", "rotel")


class Taken(NamedTuple):
    """One metric of one export: its kind, unit, and values by labels."""

    kind: str
    unit: str
    monotonic: bool
    starts: set[int]  # ns since the epoch
    times: set[int]
    points: dict[frozenset[tuple[str, str]], float]


class Export(NamedTuple):
    resource: dict[str, str]
    metrics: dict[str, Taken]


class Rotel:
    """A real collector on a free port."""

    def __init__(self, home: Path, *, start: bool = True) -> None:
        try:
            self._program = find_program(*ROTEL)
        except ServiceFailed as missing:
            pytest.skip(str(missing))
        self._home = home
        self._process: _Process | None = None
        self.port, self._http = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        if start:
            self.start()

    def start(self) -> None:
        """Also again, on the same port, after a `stop`."""
        command = [
            self._program, "start", "--exporter", "blackhole",
            "--otlp-grpc-endpoint", f"127.0.0.1:{self.port}",
            "--otlp-http-endpoint", f"127.0.0.1:{self._http}",
            "--debug-log", "metrics", "--debug-log", "traces", "--debug-log-verbosity", "detailed",
            "--pid-file", str(self._home / "pid"), "--log-file", str(self._home / "agent.log"),
        ]  # fmt: skip
        self._process = _Process(command, self._home, {"NO_COLOR": "1"})

        def listens() -> bool:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True

        self._process.wait(listens)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def exports(self) -> list[Export]:
        """All that it took, in order; one that is being written may be incomplete."""
        return [_export(part) for part in self._parts("ResourceMetrics #")]

    def spans(self) -> list[dict[str, str]]:
        """Fields and attributes of all spans that it took, by the names that it gives them."""
        return [
            dict(field)
            for part in self._parts("ResourceSpans #")
            for span in part.split("\nSpan #")[1:]
            for field in [re.findall(r"^[ >-]*(.+?) *: (?:\w+\(|)(.*?)\)?$", span, re.MULTILINE)]
        ]

    def _parts(self, kind: str) -> list[str]:
        text = (self._home / "server.log").read_text(errors="replace")
        parts = re.split(r"^(Resource(?:Metrics|Spans) #)", text, flags=re.MULTILINE)
        return [part for name, part in zip(parts[1::2], parts[2::2], strict=True) if name == kind]


_ATTRIBUTE = re.compile(r" *-> (.+?): (?:Str\((.*)\)|Int\((.*)\))")


def _export(text: str) -> Export:
    head, *parts = text.split("\nMetric #")
    resource = {m[1]: m[2] for line in head.splitlines() if (m := _ATTRIBUTE.match(line))}
    return Export(resource, dict(_metric(part) for part in parts))


def _metric(text: str) -> tuple[str, Taken]:
    head, *points = text.split("NumberDataPoints #")

    def field(name: str) -> str:
        found = re.search(rf"-> {name}: (.*)", head)
        return found[1] if found else ""

    taken = Taken(
        field("DataType"), field("Unit"), field("IsMonotonic") == "true", set(), set(), {}
    )
    for point in points:
        labels = frozenset(
            (m[1], m[2]) for line in point.splitlines() if (m := _ATTRIBUTE.match(line))
        )
        value = re.search(r"^Value: (.*)$", point, re.MULTILINE)
        times = re.findall(r"^(?:Start)?Timestamp: (\d+)$", point, re.MULTILINE)
        if value is None or len(times) != 2:
            continue  # it is being written
        assert labels not in taken.points, (field("Name"), labels)
        taken.points[labels] = float(value[1])
        taken.starts.add(int(times[0]))
        taken.times.add(int(times[1]))
    return field("Name"), taken


def soon(condition: Callable[[], object], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


@contextmanager
def in_between(port: int | None, delay_s: float = 0.0) -> Iterator[int]:
    """A port that takes connections, and passes what it hears on to another one, each time after
    that long. None: it is mute, whatever it hears."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        peers: dict[socket.socket, socket.socket | None] = {}

        def take(one: socket.socket) -> None:
            other = None if port is None else socket.create_connection(("127.0.0.1", port))
            peers[one] = other
            selector.register(one, selectors.EVENT_READ)
            if other is not None:
                peers[other] = one
                selector.register(other, selectors.EVENT_READ)

        def hear(one: socket.socket) -> None:
            try:
                heard = one.recv(1 << 16)
                other = peers[one]
                if heard and other is not None:
                    time.sleep(delay_s)
                    other.sendall(heard)
            except OSError:
                heard = b""
            if not heard:
                selector.unregister(one)
                one.close()

        def work() -> None:
            while not ended.is_set():
                for key, _ in selector.select(0.05):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if one is server:
                        take(server.accept()[0])
                    else:
                        hear(one)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            thread.join()
            for one in peers:
                one.close()
