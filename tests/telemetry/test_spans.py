"""A request whose client traces it becomes one span; no other does, and nobody waits for one."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon import DaemonProcess
from telemetry_kit import Rotel, in_between, soon

from kvd.chunk import KVSpec, ShardSpec
from kvd.client import Client
from kvd.errors import BadKey, ConfigError, ErrorCode
from kvd.server import spans as spans_module
from kvd.server.config import load_config
from kvd.server.spans import MOST, Ended, Spans
from kvd.telemetry.spans import ATTRIBUTES, SPANS
from kvd.wire import Op, Trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "telemetry.md"
TRACE, PARENT = bytes(range(1, 17)), bytes(range(8, 16))


@pytest.fixture
def rotel(tmp_path: Path) -> Iterator[Rotel]:
    pytest.importorskip("opentelemetry.proto.collector.trace.v1")
    server = Rotel(tmp_path)
    try:
        yield server
    finally:
        server.stop()


def tracing(url: str) -> DaemonProcess:
    args = ["--telemetry-otlp-endpoint", url, "--telemetry-traces", "true"]
    return DaemonProcess(arena_size="16MiB", args=[*args, "--telemetry-timeout-s", "0.2"])


def counted(client: Client) -> dict[str, int]:
    found: dict[str, int] = client.stat()["counters"]["spans"]
    return found


def test_each_sampled_request_is_one_span_of_its_clients_trace(rotel: Rotel) -> None:
    """With its operation, its tenant and its error; nothing of what was asked for."""
    flags = [1]
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, 4096),)
    spec = KVSpec("m", "r", "w", "e", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)
    with (
        tracing(rotel.url) as daemon,
        Client(daemon.socket, trace=lambda: Trace(TRACE, PARENT, flags[0])) as client,
        Client(daemon.socket) as other,
    ):
        handle = client.register(spec)
        for _ in range(3):
            client.lookup(handle, [b"\x5a" * 32])
        with pytest.raises(BadKey):
            client.tier("there-is-none", "probe")
        flags[0] = 0
        for _ in range(5):
            client.lookup(handle, [b"\x5a" * 32])
            other.ping()
        soon(lambda: any(s.get("Name") == "kvd.tier" for s in rotel.spans()))
        soon(lambda: counted(other)["ok"] == sum("session" in s for s in rotel.spans()))
        spans = rotel.spans()
    names = [span["Name"] for span in spans]
    assert names.count("kvd.lookup") == 3
    assert names.count("kvd.tier") == 1 and "kvd.register_spec" in names
    for span in spans:
        assert (span["Trace ID"], span["Parent ID"]) == (TRACE.hex(), PARENT.hex())
        assert (span["tenant"], span["Kind"]) == ("default", "SPAN_KIND_SERVER")
        assert int(span["Start time"]) < int(span["End time"])
        assert "5a5a" not in str(span)
    assert len({span["ID"] for span in spans}) == len(spans)
    errors = {span["Name"]: span.get("error.type") for span in spans}
    assert errors["kvd.tier"] == "bad_key" and errors["kvd.lookup"] is None


def test_a_mute_collector_costs_spans_and_nothing_else() -> None:
    """K135: what is not taken is counted, and a stop does not wait for it."""
    pytest.importorskip("opentelemetry.proto.collector.trace.v1")
    with in_between(None) as port:
        with (
            tracing(f"http://127.0.0.1:{port}") as daemon,
            Client(daemon.socket, trace=lambda: Trace(TRACE, PARENT, 1)) as client,
        ):
            for _ in range(100):
                client.ping()
            soon(lambda: counted(client)["failed"] > 50)
            assert counted(client)["ok"] == 0
            assert daemon.stop() == 0
            assert daemon.log.count("spans are not taken") == 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for others to come along."""
    monkeypatch.setattr(spans_module, "GATHER_S", 0.01)


class Sink:
    def __init__(self) -> None:
        self.sent = 0
        self.largest = 0
        self.go = threading.Event()
        self.held = threading.Event()
        self.closed = False

    def send_spans(self, spans: Sequence[Ended], timeout_s: float) -> str:
        self.held.set()
        assert self.go.wait(20), "nobody cancelled it"
        self.sent += len(spans)
        self.largest = max(self.largest, len(spans))
        return ""

    def cancel(self) -> None:
        self.go.set()

    def close(self) -> None:
        self.closed = True


def request(flags: int = 1) -> Any:
    session = SimpleNamespace(grant=SimpleNamespace(namespace="a"), number=3)
    return SimpleNamespace(
        op=int(Op.LOOKUP), arrived=1, session=session, trace=Trace(TRACE, PARENT, flags)
    )


def test_the_queue_is_bounded_and_what_finds_it_full_is_counted(at_once: None) -> None:
    """K135"""
    sink = Sink()
    spans = Spans(sink, 10.0)
    try:
        spans.add(request(), None)
        assert sink.held.wait(10)  # one is under way, and hangs
        for _ in range(MOST + 500):
            spans.add(request(), ErrorCode.BUSY)
            spans.add(request(flags=0), None)
        assert spans.counted() == {"ok": 0, "failed": 0, "dropped": 500}
        sink.go.set()
        soon(lambda: spans.counted() == {"ok": MOST + 1, "failed": 0, "dropped": 500})
        assert sink.sent == MOST + 1 and sink.largest <= 512
    finally:
        spans.close()
    assert sink.closed


def test_a_stop_cuts_off_what_is_under_way(at_once: None) -> None:
    """K135"""
    sink = Sink()
    spans = Spans(sink, 600.0)
    spans.add(request(), None)
    assert sink.held.wait(10)
    spans.close()
    assert sink.closed


def test_every_operation_has_its_span_and_the_page_lists_them() -> None:
    assert list(SPANS) == [op.name.lower() for op in Op]
    rows = re.findall(r"^\| `kvd\.([a-z_]+)` \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(span.operation, span.help) for span in SPANS.values()]
    for name, text in ATTRIBUTES.items():
        assert f"| `{name}` | {text} |" in PAGE.read_text()


def test_spans_without_a_collector_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.traces.*needs telemetry\.otlp_endpoint"):
        load_config(flags={"telemetry.traces": "true"}, environ={})
