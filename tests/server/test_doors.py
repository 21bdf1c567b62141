"""Connections without end: they take no descriptor that the daemon itself needs."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from daemon import DaemonProcess
from server_raw import RawClient, key, spec

from kvd.client import Client, Curve
from kvd.errors import KvdError
from kvd.tools.services import free_ports

FLOOD = """
import socket, sys, time
kind, address, seconds = sys.argv[1:]
where = address if kind == "unix" else ("127.0.0.1", int(address))
family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
held, end = [], time.monotonic() + float(seconds)
while time.monotonic() < end:
    one = socket.socket(family)
    one.settimeout(0.05)
    try:
        one.connect(where)
        held.append(one)
    except OSError:
        one.close()
        time.sleep(0.001)
    if len(held) > 5000:
        held = held[1000:]
"""


class Few(DaemonProcess):
    """A daemon that may have few descriptors."""

    most = 1024

    def spawn(self, env: Any = None) -> Any:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.most, self.most))

        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvd.server.main", *self.args], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, env={**self.env, **(env or {})}, preexec_fn=limit,
            )  # fmt: skip
        return self.process


def flood(kind: str, address: str, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", FLOOD, kind, address, str(seconds)])


def test_a_flood_of_local_connections_ends_and_the_daemon_does_not() -> None:
    kv = spec(4096)
    with Few(arena_size="16MiB") as daemon, Client(daemon.socket) as client:
        assert client.put(kv, key(1), None, bytes(4096)).name == "OK"
        them = flood("unix", daemon.socket, 2)
        while them.poll() is None:
            assert daemon.poll() is None, daemon.log
            assert daemon.descriptors < Few.most
            time.sleep(0.05)
        assert "daemon.socket: connections took the descriptors up to number 512" in daemon.log
        # its session is still there, and whoever comes anew is let in
        assert client.get(kv, key(1), timeout_s=10) == bytes(4096)
        with Client(daemon.socket, timeout_s=10) as fresh:
            assert fresh.get(kv, key(1)) == bytes(4096)
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


def silent(path: str, kind: socket.SocketKind, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    held: list[socket.socket] = []
    while len(held) < count:
        one = socket.socket(socket.AF_UNIX, kind)
        one.settimeout(1)
        try:
            one.connect(path)
        except BlockingIOError:  # the backlog is full: the daemon takes them in its next turns
            one.close()
            time.sleep(0.01)
        else:
            held.append(one)
    return held


@pytest.mark.parametrize(("attach", "zmq_", "within_s"), [(150, 200, 1.0), (0, 400, 8.0)])
def test_who_says_nothing_keeps_nobody_out(attach: int, zmq_: int, within_s: float) -> None:
    """Too few to shut a door, and enough that no client fits beside them."""
    with Few(arena_size="16MiB") as daemon:
        them = silent(daemon.socket, socket.SOCK_STREAM, zmq_)
        them += silent(f"{daemon.socket}.a", socket.SOCK_SEQPACKET, attach)
        time.sleep(0.3)
        try:
            for _ in range(3):
                with Client(daemon.socket, timeout_s=within_s) as client:
                    assert client.info().admin
        finally:
            for one in them:
                one.close()


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[tuple[Path, Curve]]:
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    (tmp_path / "secret").write_bytes(secret)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "clients").write_text(f"{own_public.decode()} default\n")
    yield tmp_path, Curve(public, own_public, own_secret)


def test_a_flood_from_the_network_does_not_keep_local_clients_out(
    keys: tuple[Path, Curve],
) -> None:
    folder, curve = keys
    (port,) = free_ports(1)
    args = ["--tcp-endpoint", f"tcp://127.0.0.1:{port}", "--tcp-secret-key-file",
            str(folder / "secret"), "--tcp-clients-file", str(folder / "clients")]  # fmt: skip
    kv = spec(4096)
    with Few(arena_size="16MiB", args=args) as daemon, Client(daemon.socket) as client:
        assert client.put(kv, key(1), None, bytes(4096)).name == "OK"
        them = flood("tcp", str(port), 2)
        while them.poll() is None:
            with Client(daemon.socket) as fresh:
                assert fresh.get(kv, key(1)) == client.get(kv, key(1)) == bytes(4096)
        assert "tcp.endpoint: connections took the descriptors up to number 256" in daemon.log
        assert "daemon.socket: connections" not in daemon.log
        end = time.monotonic() + 10
        while True:
            try:
                with Client(endpoint=f"tcp://127.0.0.1:{port}", curve=curve) as remote:
                    assert remote.get(kv, key(1), timeout_s=2) == bytes(4096)
                break
            except KvdError:
                assert time.monotonic() < end, daemon.log
        assert "Traceback" not in daemon.log


def test_a_start_with_too_few_descriptors_is_refused_with_the_number() -> None:
    class Fewer(Few):
        most = 1023

    with Fewer(start=False) as daemon:
        assert daemon.spawn().wait(20) == 2
        says = "kvd: only 1023 open files are allowed, at least 1024 are needed: raise"
        assert daemon.log.splitlines()[-1].startswith(says)


def test_clients_beyond_the_descriptors_are_refused_and_those_inside_go_on() -> None:
    kv = spec(4096)
    with Few(arena_size="16MiB") as daemon, Client(daemon.socket) as client:
        assert client.put(kv, key(1), None, bytes(4096)).name == "OK"
        inside: list[RawClient] = []
        with pytest.raises((KvdError, OSError)):  # hung up, before or after it could ask
            while len(inside) < 200:
                inside.append(RawClient(daemon.socket))
        assert len(inside) > 40
        assert "clients took the descriptors up to number 307" in daemon.log
        assert "daemon.socket: connections" not in daemon.log
        for one in inside:
            one.stat()
        assert client.get(kv, key(1)) == bytes(4096)
        for one in inside:
            one.close()
