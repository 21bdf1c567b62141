"""A collector that is away, mute or slow costs metrics, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DaemonProcess
from telemetry_kit import Rotel, in_between, soon

from kvd.chunk import KVSpec, Outcome, ShardSpec, chain_fingerprints, chain_hashes
from kvd.client import Client
from kvd.tools.services import free_ports

pytest.importorskip("opentelemetry.proto.collector.metrics.v1")

MIB = 1 << 20
OK = Outcome.OK
SIZE = 4096


@pytest.fixture
def rotel(tmp_path: Path) -> Iterator[Rotel]:
    (tmp_path / "rotel").mkdir()
    server = Rotel(tmp_path / "rotel", start=False)
    try:
        yield server
    finally:
        server.stop()


def exporting(url: str, *more: str) -> DaemonProcess:
    args = ["--telemetry-otlp-endpoint", url, "--telemetry-interval-s", "0.1", *more]
    return DaemonProcess(arena_size="16MiB", args=args)


def told(client: Client) -> dict[str, Any]:
    stat = client.stat()
    return {**stat["telemetry"], **stat["counters"]["exports"]}


def serve(client: Client, name: int) -> None:
    """Store and load: every chunk as if nothing were wrong."""
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, SIZE),)
    handle = client.register(
        KVSpec("m", "r", "w", "e", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)
    )
    tokens = np.arange(160, dtype=np.uint32) + name * 1_000_003
    hashes, prints = chain_hashes(tokens, 16), chain_fingerprints(tokens, 16)
    data = [np.full(SIZE, n, np.uint8) for n in range(10)]
    assert client.store_chunks(handle, hashes, prints, data) == [OK] * 10
    for _ in range(20):
        back = [np.zeros(SIZE, np.uint8) for _ in data]
        assert client.load_chunks(handle, hashes, back) == [OK] * 10
        assert all((a == b).all() for a, b in zip(data, back, strict=True))


def test_a_collector_that_is_away_is_shown_and_found_again_when_it_is_back(rotel: Rotel) -> None:
    """K135: refused, then there, then gone, then there again."""
    with exporting(rotel.url) as daemon, Client(daemon.socket) as client:
        soon(lambda: told(client)["failed"] > 2)
        said = told(client)
        assert said["state"] == "failing" and "UNAVAILABLE" in said["last_error"]
        assert said["failing_since_unix_ns"] and not said["ok"]
        serve(client, 1)
        for _ in range(2):
            rotel.start()
            soon(lambda: told(client)["state"] == "ok")
            assert told(client)["failing_since_unix_ns"] == 0
            before = len(rotel.exports())
            soon(lambda before=before: len(rotel.exports()) > before + 1)
            points = rotel.exports()[-2].metrics["kvd.chunks_stored"].points  # nothing was lost
            assert sum(points.values()) == client.stat()["counters"]["chunks_stored"]
            rotel.stop()
            soon(lambda: told(client)["state"] == "failing")
        log = [line for line in daemon.log.splitlines() if "metrics" in line]
        assert len(log) == 5, log  # one line a change, not one an export


def test_a_mute_collector_holds_up_nothing_and_takes_no_memory() -> None:
    """K135: exports fall due faster than they fail; there is never more than one."""
    with in_between(None) as port:
        url = f"http://127.0.0.1:{port}"
        with (
            exporting(url, "--telemetry-timeout-s", "0.15") as daemon,
            Client(daemon.socket) as client,
        ):
            soon(lambda: told(client)["failed"] >= 2)
            serve(client, 1)
            rss, threads, files = daemon.rss, daemon.threads, daemon.descriptors
            for number in range(2, 4):
                serve(client, number)
            soon(lambda: told(client)["failed"] >= 6)
            said = told(client)
            assert said["skipped"] > 0 and said["ok"] == 0
            assert "DEADLINE_EXCEEDED" in said["last_error"]
            assert daemon.rss < rss + 50 * MIB
            assert daemon.threads <= threads + 4
            assert daemon.descriptors <= files + 4
            assert daemon.stop() == 0


def test_a_stop_does_not_wait_for_a_mute_collector() -> None:
    """K135: an export that may take ten minutes is cut off."""
    with in_between(None) as port:
        url = f"http://127.0.0.1:{port}"
        with exporting(url, "--telemetry-timeout-s", "600") as daemon:
            with Client(daemon.socket) as client:
                soon(lambda: told(client)["skipped"] > 2)
                assert told(client)["state"] == "starting"
            assert daemon.stop(timeout_s=20) == 0
            assert "Traceback" not in daemon.log


def test_a_slow_collector_gets_fewer_exports(rotel: Rotel) -> None:
    """K135: what falls due meanwhile is skipped and counted."""
    rotel.start()
    with in_between(rotel.port, 0.1) as port:
        with exporting(f"http://127.0.0.1:{port}") as daemon, Client(daemon.socket) as client:
            soon(lambda: told(client)["ok"] >= 2)
            serve(client, 1)
            said = told(client)
            assert said["skipped"] > 0 and said["failed"] == 0 and said["state"] == "ok"


def test_a_peer_that_is_no_collector_is_a_failed_export(rotel: Rotel) -> None:
    """TLS with one who has none."""
    rotel.start()
    with exporting(f"https://127.0.0.1:{rotel.port}") as daemon, Client(daemon.socket) as client:
        soon(lambda: told(client)["failed"] > 1)
        serve(client, 1)
        assert told(client)["state"] == "failing"
        assert daemon.stop() == 0


LISTENER = """
import concurrent.futures, json, sys
import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as p
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as g

class Service(g.MetricsServiceServicer):
    def Export(self, request, context):
        print(json.dumps(dict(context.invocation_metadata())), flush=True)
        answer = p.ExportMetricsServiceResponse()
        answer.partial_success.rejected_data_points = 7
        answer.partial_success.error_message = "too many labels"
        return answer

server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
g.add_MetricsServiceServicer_to_server(Service(), server)
where = "127.0.0.1:" + sys.argv[1]
if len(sys.argv) > 2:
    key, chain = (open(name, "rb").read() for name in sys.argv[2:])
    server.add_secure_port(where, grpc.ssl_server_credentials([(key, chain)]))
else:
    server.add_insecure_port(where)
server.start()
sys.stdin.read()
server.stop(0)
"""


@pytest.mark.parametrize("tls", [False, True])
def test_headers_go_along_and_what_is_refused_in_part_has_failed(tmp_path: Path, tls: bool) -> None:
    """With TLS, too, to a collector whose certificate is vouched for."""
    headers = tmp_path / "headers"
    headers.write_text("# who we are\nAuthorization: Bearer s3cret\n\nx-scope: team-a\n")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    more = ["--telemetry-otlp-headers-file", str(headers)]
    command = [sys.executable, "-c", LISTENER, str(port)]
    if tls:
        key, chain = certificate(tmp_path)
        url = f"https://127.0.0.1:{port}"
        more += ["--telemetry-otlp-ca-file", str(chain)]
        command += [str(key), str(chain)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listener:
        try:
            with exporting(url, *more) as daemon, Client(daemon.socket) as client:
                assert listener.stdout is not None
                metadata = json.loads(listener.stdout.readline())
                soon(lambda: "refused" in told(client)["last_error"])
                assert told(client)["last_error"] == "7 points refused: too many labels"
                assert "s3cret" not in daemon.log + json.dumps(client.stat())
        finally:
            listener.kill()
    assert metadata["authorization"] == "Bearer s3cret"
    assert metadata["x-scope"] == "team-a"
    assert metadata["user-agent"].startswith("kvd/")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate that it signed itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: nothing makes a certificate")
    key, chain = folder / "key.pem", folder / "chain.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(chain)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, chain
