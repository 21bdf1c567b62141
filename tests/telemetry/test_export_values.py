"""What a real collector takes is what `stat` shows, to the unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DaemonProcess
from fake_s3 import FakeS3, error
from telemetry_kit import Export, Rotel, soon

from kvd.chunk import KVSpec, Outcome, ShardSpec, chain_fingerprints, chain_hashes
from kvd.client import Client, Selector
from kvd.telemetry import METRICS, MetricKind
from kvd.telemetry.exported import EXPORTED, series

pytest.importorskip("opentelemetry.proto.collector.metrics.v1")

OK = Outcome.OK
SIZE = 4096
BOB = 'b\u00f6b|"{}'
# what looking changes: the requests and turns that it takes, and time itself
BY_LOOKING = {
    "requests",
    "replies",
    "requests_in_flight",
    "loop_turns",
    "loop_longest_turn",
    "uptime",
}
BY_LOOKING |= {"exports", "transfers", "transfers_pending"}


@pytest.fixture(scope="module")
def rotel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rotel]:
    server = Rotel(tmp_path_factory.mktemp("rotel"))
    try:
        yield server
    finally:
        server.stop()


def flags(rotel: Rotel, *more: str) -> list[str]:
    return ["--telemetry-otlp-endpoint", rotel.url, "--telemetry-interval-s", "0.1", *more]


def of(rotel: Rotel, daemon: DaemonProcess) -> list[Export]:
    """What came from this daemon, in order."""
    found = rotel.exports()
    name = f"/{daemon.instance}"
    return [e for e in found if e.resource.get("service.instance.id", "").endswith(name)]


def settled(rotel: Rotel, daemon: DaemonProcess) -> Export:
    """An export of a moment that is still to come."""
    count = len(of(rotel, daemon))
    soon(lambda: len(of(rotel, daemon)) > count + 2)
    return of(rotel, daemon)[count + 1]


def spec(nbytes: int = SIZE) -> KVSpec:
    shards = (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, nbytes),)
    return KVSpec("m", "r", "w", "e", "bf16", "", "raw", 16, 1, 1, 1, (), (), shards)


def prompt(name: int, chunks: int) -> tuple[list[bytes], list[bytes], list[np.ndarray[Any, Any]]]:
    tokens = np.arange(chunks * 16, dtype=np.uint32) + name * 1_000_003
    data = [np.full(SIZE, (name * 31 + i) % 251, np.uint8) for i in range(chunks)]
    return list(chain_hashes(tokens, 16)), list(chain_fingerprints(tokens, 16)), data


def work(client: Client, name: int, lookups: int, loads: int) -> None:
    """Store 4 chunks, ask for 10, load 2 of the 4."""
    handle = client.register(spec())
    hashes, prints, data = prompt(name, 10)
    assert client.store_chunks(handle, hashes[:4], prints[:4], data[:4]) == [OK] * 4
    for number in range(lookups):
        found = client.lookup(handle, hashes)
        assert found.leading == 4 and found.lease is not None
        if number < loads:
            found.lease.load([0, 1]).check()
        found.lease.release(wait=True)


def at_rest(client: Client) -> None:
    """Nothing goes on any more that nobody asked for."""
    shards = client.stat()["counters"]["shards_committed"]["ok"]
    soon(lambda: sum(client.stat()["counters"]["shards_sealed"].values()) == shards)
    soon(lambda: not client.stat()["counters"]["pending_touches"])


def test_what_the_collector_takes_is_what_stat_shows(rotel: Rotel, tmp_path: Path) -> None:
    """K131: asked, hit, delivered and missed by tenant, and every other metric; the tenants beyond
    the cap are one."""
    for name in ("alice", "bob"):
        (tmp_path / name).write_text(name * 8)
        (tmp_path / name).chmod(0o600)
    config = f"""
[telemetry]
attributes = ["deployment.environment=test"]
[tenancy]
metrics = 2
[tenants.alice]
token_file = "{tmp_path}/alice"
[tenants.'{BOB}']
token_file = "{tmp_path}/bob"
"""
    with DaemonProcess(arena_size="16MiB", config=config, args=flags(rotel)) as daemon:
        with (
            Client(daemon.socket) as admin,
            Client(daemon.socket, token=b"alice" * 8) as alice,
            Client(daemon.socket, token=b"bob" * 8) as bob,
        ):
            work(alice, 1, 100, 30)
            work(bob, 1, 7, 3)
            work(admin, 1, 2, 1)
            at_rest(admin)
            stat = admin.stat()
            assert sorted(stat["tenants"]) == sorted(["alice", BOB, "other"])
            export = settled(rotel, daemon)
            after = admin.stat()
        assert export.resource["service.name"] == "kvd"
        assert export.resource["deployment.environment"] == "test"
        asked = export.metrics["kvd.chunks_asked"].points
        assert asked == {
            frozenset({("tenant", "alice")}): 1000,
            frozenset({("tenant", BOB)}): 70,
            frozenset({("tenant", "other")}): 20,
        }
        hit = export.metrics["kvd.chunks_hit"].points
        assert sorted(hit.values()) == [8, 28, 400]
        delivered = export.metrics["kvd.chunks_delivered"].points
        assert delivered[frozenset({("tenant", "alice")})] == 60
        missed = export.metrics["kvd.chunks_missed"].points
        assert missed[frozenset({("tenant", "alice"), ("reason", "skipped")})] == 500
        compared = 0
        for metric, points in series(stat):
            told = export.metrics.get(metric.otlp_name)
            if metric.name in BY_LOOKING:
                assert told is not None
                continue
            wanted = {
                frozenset(zip(metric.labels, labels, strict=True)): value
                for labels, value in points
            }
            assert (told.points if told else {}) == wanted, metric.name
            if told is not None:
                assert told.unit == metric.unit
                assert told.monotonic == (metric.kind is MetricKind.COUNTER)
                compared += len(wanted)
        assert compared > 400
        for name, metric in METRICS.items():
            if metric.tenant:  # the sum over tenants is the total
                told_sum = sum(export.metrics[f"kvd.{name}"].points.values())
                value = after["counters"][name]
                assert told_sum == (sum(value.values()) if isinstance(value, dict) else value)


def test_counters_stand_still_while_nothing_happens_and_begin_anew_with_the_daemon(
    rotel: Rotel,
) -> None:
    """K132: exported ten times a second and looked at by two clients; a restart has another start
    time."""
    counters = {m.otlp_name for m in EXPORTED.values() if m.name not in BY_LOOKING}
    with DaemonProcess(arena_size="16MiB", args=flags(rotel)) as daemon:
        with Client(daemon.socket) as client, Client(daemon.socket) as other:
            other.ping()
            work(client, 1, 5, 5)
            at_rest(client)
            count = len(of(rotel, daemon))
            soon(lambda: client.stat() and other.stat() and len(of(rotel, daemon)) > count + 6)
            idle = of(rotel, daemon)[count + 1 : count + 6]
        first = idle[0].metrics
        assert first["kvd.lookups"].points == {frozenset({("tenant", "default")}): 5}
        for export in idle[1:]:
            for name in counters & set(first):
                assert export.metrics[name].points == first[name].points, name
                assert export.metrics[name].starts == first[name].starts
        (begun,) = first["kvd.lookups"].starts
        times = [next(iter(export.metrics["kvd.lookups"].times)) for export in idle]
        assert begun < times[0] and times == sorted(set(times))
        before = len(of(rotel, daemon))
        daemon.restart()
        soon(lambda: len(of(rotel, daemon)) > before + 3)
        with Client(daemon.socket) as client:
            work(client, 2, 1, 1)
            at_rest(client)
            again = settled(rotel, daemon).metrics["kvd.lookups"]
    assert again.points == {frozenset({("tenant", "default")}): 1}
    assert min(again.starts) > max(times)


def test_the_last_figures_go_out_before_the_daemon_does(rotel: Rotel) -> None:
    """What happened since the last export is not lost by a stop."""
    with DaemonProcess(
        arena_size="16MiB", args=flags(rotel, "--telemetry-interval-s", "3600")
    ) as daemon:
        soon(lambda: len(of(rotel, daemon)) == 1)
        with Client(daemon.socket) as client:
            soon(lambda: client.stat()["telemetry"]["state"] == "ok")
            work(client, 1, 3, 3)
        assert daemon.stop() == 0
        soon(lambda: len(of(rotel, daemon)) == 2)
        soon(lambda: of(rotel, daemon)[-1].metrics.get("kvd.tenant_share"))  # it is whole
        last = of(rotel, daemon)[-1].metrics
        assert sum(last["kvd.lookups"].points.values()) == 3
        assert last["kvd.exports"].points[frozenset({("result", "ok")})] == 1


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    server = FakeS3()
    try:
        yield server
    finally:
        server.close()


def test_one_event_is_one_count_from_whichever_tier(
    rotel: Rotel, s3: FakeS3, tmp_path: Path, aws_keys: None
) -> None:
    """K134: one chunk from DRAM, from NVMe, and from S3 after a refused attempt: three hits, and
    what was read up for them is counted apart."""
    pytest.importorskip("boto3")
    below = [
        "--nvme-path", str(tmp_path / "nvme"), "--nvme-limit", "16MiB", "--nvme-reserve", "0",
        "--s3-endpoint", s3.endpoint, "--s3-bucket", "kvd", "--s3-addressing", "path",
        "--s3-region", "us-east-1",
    ]  # fmt: skip
    with DaemonProcess(arena_size="16MiB", args=flags(rotel, *below)) as daemon:
        with Client(daemon.socket, timeout_s=20) as client:
            handle = client.register(spec())
            hashes, prints, data = prompt(1, 1)
            back = [np.zeros(SIZE, np.uint8)]

            def load() -> None:
                back[0][:] = 0
                assert client.load_chunks(handle, hashes, back) == [OK]
                assert (back[0] == data[0]).all()
                soon(lambda: not client.stat()["counters"]["active_leases"])

            assert client.store_chunks(handle, hashes, prints, data) == [OK]
            load()
            for tier in ("nvme", "s3"):
                client.tier(tier, "drain")
                soon(lambda: not client.stat()["counters"]["moving"])
            client.evict(Selector(tier="dram", everything=True))
            load()
            for tier in ("dram", "nvme"):
                client.evict(Selector(tier=tier, everything=True))
            refused: list[str] = []

            def once(request: Any) -> Any:
                if request.method == "GET" and request.key in s3.objects and not refused:
                    refused.append(request.key)
                    return error(503, "SlowDown")
                return None

            s3.hook = once
            load()
            assert refused
            at_rest(client)
            told = settled(rotel, daemon).metrics

    def value(name: str, **labels: str) -> float:
        wanted = set(labels.items())
        points = told[f"kvd.{name}"].points.items()
        return sum(count for point, count in points if wanted <= point)

    assert value("chunks_asked") == value("chunks_hit") == value("chunks_delivered") == 3
    assert value("chunks_stored") == 1
    assert value("shards_loaded", outcome="ok") == 3
    assert value("shards_promoted") == 2
    assert value("shards_fetched", answer="ok") == value("shards_fetched") == 2
    assert value("tier_answers", tier="nvme", operation="read", answer="ok") == 1
    assert value("tier_answers", tier="s3", operation="read") == 1
    assert value("tier_notes", tier="s3", note="retries") == 1
