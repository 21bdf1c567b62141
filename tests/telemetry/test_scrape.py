"""What Prometheus reads is what `stat` shows; who reads badly costs a connection."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from daemon import DaemonProcess
from telemetry_kit import soon

from kvd.client import Client
from kvd.errors import ConfigError
from kvd.server.config import load_config
from kvd.server.scrape import Scrapes
from kvd.telemetry import MetricKind
from kvd.telemetry.exported import Exported, Point, Series, series
from kvd.telemetry.text import CONTENT_TYPE, exposition
from kvd.tools.services import free_ports

parser = pytest.importorskip("prometheus_client.parser")

# what looking changes
BY_LOOKING = {"requests", "replies", "requests_in_flight", "loop_turns", "loop_longest_turn"}
BY_LOOKING |= {"uptime", "scrapes", "transfers", "transfers_pending"}
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def wanted(told: Any, *without: str) -> Values:
    return {
        (metric.prometheus_name, frozenset(zip(metric.labels, labels, strict=True))): value
        for metric, points in told
        for labels, value in points
        if metric.name not in without
    }


def get(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def daemon(port: int) -> Iterator[DaemonProcess]:
    args = ["--telemetry-prometheus", f"127.0.0.1:{port}"]
    with DaemonProcess(arena_size="16MiB", args=args) as process:
        yield process


def test_two_scrapers_read_what_stat_shows_and_change_nothing(
    daemon: DaemonProcess, port: int
) -> None:
    """K132: every value, as an independent parser reads it, and again by each of thirty reads."""
    with Client(daemon.socket) as client:
        soon(lambda: not client.stat()["loop"]["transfers_pending"])
        told = wanted(series(client.stat()), *BY_LOOKING)
        assert len(told) > 100
        looking = {name for name, _ in wanted(series(client.stat()))} - {name for name, _ in told}
        for _ in range(15):
            for _ in range(2):
                status, kind, text = get(port)
                assert (status, kind) == (200, CONTENT_TYPE)
                found = {k: v for k, v in read(text).items() if k[0] not in looking}
                assert found == told
        counts = client.stat()["counters"]["scrapes"]
        assert counts == {"ok": 30, "failed": 0, "refused": 0}
        assert abs(read(text)["kvd_start_time_seconds", frozenset()] - time.time()) < 600


def test_no_name_ends_a_line_or_a_label() -> None:
    metric = Exported("chunks_hit", MetricKind.COUNTER, "{chunk}", 'a\\b\n"c"', ("tenant",))
    names = ['a"} 1\nkvd_x_total 7 #', "\\", "\\n", 'ü"', "a\r\nb", "{}=,", " "]
    told = [Series(metric, [Point((name,), n) for n, name in enumerate(names)])]
    assert read("".join(exposition(told))) == wanted(told)


def test_what_is_not_there_is_not_found(daemon: DaemonProcess, port: int) -> None:
    assert get(port, "/")[0] == get(port, "/metrics/x")[0] == 404
    assert get(port, "/metrics?a=b")[0] == 200
    for request in (b"POST /metrics HTTP/1.1\r\n\r\n", b"\0\1\2\r\n\r\n", b"GET\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(request)
            assert b"200" not in raw.recv(200)
    assert "Traceback" not in daemon.log


def test_readers_that_say_nothing_keep_nobody_out_for_long(
    daemon: DaemonProcess, port: int
) -> None:
    """More of them than there may be; requests go on, and so do reads when they are hung up."""
    mute = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(20)]
    with Client(daemon.socket) as client:
        try:
            soon(lambda: client.stat()["counters"]["scrapes"]["refused"] >= 12)
            threads = daemon.threads

            def readable() -> bool:
                try:
                    return get(port)[0] == 200
                except OSError:
                    return False
                except http.client.HTTPException:
                    return False

            soon(readable, 20)
            assert daemon.threads <= threads
        finally:
            for one in mute:
                one.close()


def test_an_address_that_is_taken_refuses_the_start_and_readiness_is_never_told() -> None:
    """K130"""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        args = ["--telemetry-prometheus", f"127.0.0.1:{port}"]
        daemon = DaemonProcess(arena_size="16MiB", args=args, start=False)
        with daemon:
            daemon.spawn()
            assert daemon.wait() == 2
            assert f"can't bind 127.0.0.1:{port}: Address already in use" in daemon.log
            assert len(daemon.log.splitlines()) == 1 and not daemon.out
            assert not daemon.arena_base.exists()


@pytest.mark.parametrize(
    "address", ["9464", "localhost:9464", "127.0.0.1", "127.0.0.1:0", "::1:9464", "1.2.3:9464"]
)
def test_an_address_that_can_not_be_one_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"give ADDRESS:PORT"):
        load_config(flags={"telemetry.prometheus": address}, environ={})


def test_a_version_6_address_is_one() -> None:
    assert load_config(flags={"telemetry.prometheus": "[::1]:9464"}, environ={}).prometheus


def test_a_stop_does_not_wait_for_readers_whom_nobody_answers() -> None:
    """The loop is where `close` runs: it answers nobody any more."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    scrapes = Scrapes(address)
    scrapes.start()
    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # cut off by the stop
            answers.append(get(int(address[10:]))[0])

    reader = threading.Thread(target=ask)
    reader.start()
    soon(lambda: select.select([scrapes.asked], [], [], 0)[0] != [])
    others = [socket.create_connection(("127.0.0.1", int(address[10:])), 10) for _ in range(9)]
    try:
        soon(lambda: scrapes.counted()["refused"] > 0)  # it is refused while the reader waits
        assert answers == []
        scrapes.close()
        assert scrapes.asked == -1
    finally:
        for one in others:
            one.close()
        reader.join(10)
    assert not reader.is_alive()
