"""The exporter's thread, with a collector that does as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from telemetry_kit import soon

from kvd.errors import ConfigError
from kvd.server import collector
from kvd.server.config import load_config
from kvd.server.exporter import Exporter
from kvd.telemetry.exported import Series


class Stand:
    """In place of figures."""

    def __init__(self, number: int) -> None:
        self.number = number

    def stat(self) -> dict[str, Any]:
        counters = {"seals_failed": self.number}
        return {"tiers": [], "tenants": {}, "counters": counters, "started_unix_ns": 1}


class Sink:
    def __init__(self) -> None:
        self.sent: list[int] = []
        self.held = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.answer: str | Exception = ""
        self.cancelled = False
        self.closed = 0

    def send(self, series: Iterable[Series], begun: int, now: int, timeout_s: float) -> str:
        (number,) = (s.points[0].value for s in series if s.metric.name == "seals_failed")
        assert begun == 1 < now
        self.held.set()
        assert self.go.wait(20), "nobody cancelled it"
        if self.cancelled:
            return "cancelled"
        if isinstance(self.answer, Exception):
            raise self.answer
        if not self.answer:
            self.sent.append(int(number))
        return self.answer

    def cancel(self) -> None:
        self.cancelled = True
        self.go.set()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def exporter(sink: Sink) -> Iterator[Exporter]:
    made = Exporter(sink, "http://here:1", 10.0)
    yield made
    made.close()


def offer(exporter: Exporter, number: int) -> bool:
    if not exporter.idle:
        exporter.skip()
        return False
    exporter.take(Stand(number))  # type: ignore[arg-type]
    return True


def test_while_one_is_under_way_the_next_is_skipped(exporter: Exporter, sink: Sink) -> None:
    """K135"""
    sink.go.clear()
    assert offer(exporter, 1)
    assert sink.held.wait(10)
    assert not any(offer(exporter, number) for number in range(2, 50))
    sink.go.set()
    soon(lambda: exporter.counted() == {"ok": 1, "failed": 0, "skipped": 48})
    soon(lambda: offer(exporter, 99))
    soon(lambda: sink.sent == [1, 99])


def test_what_the_collector_or_we_do_wrong_is_counted_and_ends_nothing(
    exporter: Exporter, sink: Sink
) -> None:
    """K135"""
    for answer in ("UNAVAILABLE: no", ValueError("bad")):
        sink.answer = answer
        before = exporter.counted()["failed"]
        soon(lambda: offer(exporter, 1))
        soon(lambda before=before: exporter.counted()["failed"] == before + 1)
        assert exporter.stat()["state"] == "failing"
        assert str(answer) in exporter.stat()["last_error"]
    sink.answer = ""
    soon(lambda: offer(exporter, 3))
    soon(lambda: exporter.stat()["state"] == "ok")
    assert sink.sent == [3] and exporter.stat()["failing_since_unix_ns"] == 0


def test_a_stop_cuts_off_what_is_under_way(exporter: Exporter, sink: Sink) -> None:
    """K135"""
    sink.go.clear()
    assert offer(exporter, 1)
    assert sink.held.wait(10)
    exporter.close(Stand(2))  # type: ignore[arg-type]
    assert sink.cancelled and sink.closed == 1
    assert exporter.counted() == {"ok": 0, "failed": 1, "skipped": 0}


def test_a_stop_tells_the_last_figures_if_all_was_well(exporter: Exporter, sink: Sink) -> None:
    assert offer(exporter, 1)
    soon(lambda: exporter.stat()["state"] == "ok" and exporter.idle)
    exporter.close(Stand(2))  # type: ignore[arg-type]
    assert sink.sent == [1, 2] and sink.closed == 1 and not sink.cancelled


def test_without_an_endpoint_nothing_is_made_and_nothing_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The packages of the extra are asked for only where they are used."""
    monkeypatch.setattr(collector, "_installed", lambda name: False)
    config = load_config(environ={})
    assert collector.open_export(config, collector.plan_export(config)) is None
    config = load_config(environ={"KVD_TELEMETRY_OTLP_ENDPOINT": "http://127.0.0.1:4317"})
    with pytest.raises(ConfigError, match=r"pip install 'kvd\[otel\]'"):
        collector.plan_export(config)


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4317", "grpc://a:1", "http://a", "http://a:0", "http://a:65536", "http://u:p@a:1",
     "http://a:1/v1/metrics", "http:// a:1"],
)  # fmt: skip
def test_an_endpoint_that_can_not_be_one_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint.*give http://HOST:PORT"):
        load_config(environ={"KVD_TELEMETRY_OTLP_ENDPOINT": endpoint})


def test_what_is_of_no_use_without_an_endpoint_is_refused() -> None:
    for name, more in (
        ("HEADERS_FILE", {}),
        ("CA_FILE", {}),
        ("CA_FILE", {"KVD_TELEMETRY_OTLP_ENDPOINT": "http://127.0.0.1:4317"}),
    ):
        with pytest.raises(ConfigError, match=f"telemetry.otlp_{name.lower()}"):
            load_config(environ={f"KVD_TELEMETRY_OTLP_{name}": "/x", **more})


def test_what_names_the_service_can_not_be_given_away() -> None:
    config = load_config(
        flags={"telemetry.attributes": "service.name=other,service.instance.id=mine,site=a"},
        environ={"KVD_TELEMETRY_OTLP_ENDPOINT": "http://127.0.0.1:4317"},
    )
    pytest.importorskip("opentelemetry.proto.collector.metrics.v1")
    plan = collector.plan_export(config)
    assert plan is not None and plan.tls is None
    assert plan.resource["service.name"] == "kvd"
    assert plan.resource["service.instance.id"] == "mine" and plan.resource["site"] == "a"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("authorization Bearer s3cret\n", "line 1: write NAME: VALUE"),
        ("ok: yes\nna me: s3cret\n", "line 2"),
        ("a: s3cr\u00e9t\n", "printable ASCII"),
        ("grpc-timeout: s3cret\n", "line 1"),
    ],
)
def test_headers_that_can_not_be_sent_stop_the_start(tmp_path: Path, lines: str, says: str) -> None:
    """And their values, which may be secrets, are not told."""
    pytest.importorskip("opentelemetry.proto.collector.metrics.v1")
    file = tmp_path / "headers"
    file.write_text(lines)
    config = load_config(
        flags={"telemetry.otlp_headers_file": str(file)},
        environ={"KVD_TELEMETRY_OTLP_ENDPOINT": "http://127.0.0.1:4317"},
    )
    with pytest.raises(ConfigError, match=says) as refused:
        collector.plan_export(config)
    assert "s3cr" not in str(refused.value)
