"""A client of a daemon behind TCP: inline bytes, CURVE, sessions that end with the connection."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq
from daemon import DaemonProcess
from fake_daemon import keys, make_spec

from kvd.chunk import Outcome
from kvd.client import Client, Curve
from kvd.errors import Unavailable
from kvd.tools.services import free_ports

OK = Outcome.OK
SIZE = 64 * 1024


class Remote(NamedTuple):
    daemon: DaemonProcess
    endpoint: str
    curve: Curve


@pytest.fixture
def remote() -> Iterator[Remote]:
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    (folder / "secret").write_bytes(server_secret + b"\n")
    (folder / "secret").chmod(0o600)
    (folder / "clients").write_bytes(public + b" team-a\n")
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    args = ["--tcp-endpoint", endpoint, "--tcp-secret-key-file", str(folder / "secret")]
    args += ["--tcp-clients-file", str(folder / "clients")]
    try:
        with DaemonProcess(args=args) as daemon:
            yield Remote(daemon, endpoint, Curve(server_public, public, secret))
    finally:
        shutil.rmtree(folder)


def test_everything_that_needs_no_shared_memory_works_over_tcp(remote: Remote) -> None:
    with Client(endpoint=remote.endpoint, curve=remote.curve, timeout_s=15) as client:
        info = client.info()
        assert info.namespace == "team-a" and not info.maps_memory and info.public_id is None
        handle = client.register(make_spec(2, SIZE))
        source = [bytes([i]) * SIZE for i in range(20)]
        assert client.store_chunks(handle, keys(10), None, source, shards=(0, 1)) == [OK] * 20
        target = [bytearray(SIZE) for _ in range(24)]
        said = client.load_chunks(handle, keys(12), target, shards=(0, 1))
        assert said[:20] == [OK] * 20 and OK not in said[20:]
        assert [bytes(t) for t in target[:20]] == source
        assert client.put(handle, keys(1, 90)[0], None, source[3], shard=1) is OK
        assert client.get(handle, keys(1, 90)[0], shard=1) == source[3]
        assert client.lookup(handle, keys(10), shards=(0, 1), lease=False).leading == 10
        client.heartbeat()
    with Client(remote.daemon.socket) as local:  # and it is a namespace of its own
        assert local.lookup(make_spec(2, SIZE), keys(10), lease=False).leading == 0


def test_a_restart_behind_tcp_is_found_without_an_end_of_file(remote: Remote) -> None:
    """K92"""
    with Client(endpoint=remote.endpoint, curve=remote.curve, timeout_s=20) as client:
        handle = client.register(make_spec(1, SIZE))
        assert client.put(handle, keys(1)[0], None, b"x" * SIZE) is OK
        before = client.info().epoch
        remote.daemon.kill()
        with pytest.raises(Unavailable):
            client.get(handle, keys(1)[0], timeout_s=0.3)
        remote.daemon.start()
        assert client.get(handle, keys(1)[0]) == b"x" * SIZE
        assert client.info().epoch > before and client.counters.lost >= 1


def test_a_client_whose_key_is_not_known_is_unavailable_at_its_deadline(remote: Remote) -> None:
    public, secret = zmq.curve_keypair()
    stranger = Curve(remote.curve.server_key, public, secret)
    with (
        Client(endpoint=remote.endpoint, curve=stranger) as client,
        pytest.raises(Unavailable, match="did not let us in"),
    ):
        client.info(timeout_s=0.5)
