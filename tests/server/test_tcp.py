"""The TCP endpoint: CURVE proves who is there, sessions end with their connection."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from daemon import DaemonProcess
from server_raw import NS, Answer, RawClient, key, prints, spec

from kvd.chunk import Outcome
from kvd.errors import ConfigError, DeadlineExceeded, UnknownSession
from kvd.server.tcp import read_clients, read_secret_key
from kvd.tools.services import free_ports
from kvd.wire import FrameFlag, decode_frame, encode_frame
from kvd.wire import messages as m


def test_keys_are_made_and_used_as_the_operations_page_says(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
    security = page.read_text().partition("**TCP** is off")[2]
    code = re.findall(r"^```(sh|python)\n(.*?)^```", security, flags=re.DOTALL | re.MULTILINE)
    (_, make), (_, use) = code[:2]
    make, line, flags = make.rpartition("\nkvd ")
    assert line
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-ec", make], cwd=tmp_path, env=env, check=True, timeout=30)
    port = str(free_ports(1)[0])
    words = [
        str(tmp_path / word) if (tmp_path / word).exists() else word.replace("7711", port)
        for word in flags.split()
    ]
    use = use.replace("7711", port).replace('Path("', f'Path("{tmp_path}/')
    names: dict[str, Any] = {}
    with DaemonProcess(args=words):
        exec(compile(use, page.name, "exec"), names)
        with names["client"] as client:
            assert client.info().namespace == "team-a"


class Keys:
    def __init__(self, folder: Path) -> None:
        self.server_public, secret = zmq.curve_keypair()
        self.a_public, self.a_secret = zmq.curve_keypair()
        self.b_public, self.b_secret = zmq.curve_keypair()
        self.stranger_public, self.stranger_secret = zmq.curve_keypair()
        self.secret_file = folder / "secret"
        self.secret_file.write_bytes(secret + b"\n")
        self.secret_file.chmod(0o600)
        self.clients_file = folder / "clients"
        self.clients_file.write_bytes(
            b"# who may connect\n" + self.a_public + b" team a\n\n" + self.b_public + b"\tteam-b\n"
        )


class TcpClient:
    def __init__(self, endpoint: str, server: bytes, public: bytes, secret: bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.CURVE_SERVERKEY, server),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, secret),
        ):
            self.dealer.setsockopt(option, value)
        self.dealer.connect(endpoint)
        self.session = bytes(16)
        self.request = 0

    def call(
        self, message: Any, payload: tuple[bytes, ...] = (), timeout_s: float = 5, deadline: int = 0
    ) -> Answer:
        self.request += 1
        frame = encode_frame(
            m.OP_OF[type(message)],
            m.encode_request(message),
            flags=int(FrameFlag.RELATIVE) if deadline else 0,
            session=self.session,
            request=self.request,
            deadline=deadline,
            frames=len(payload),
        )
        self.dealer.send_multipart([frame, *payload])
        if not self.dealer.poll(int(timeout_s * 1000)):
            raise TimeoutError
        first, *parts = self.dealer.recv_multipart()
        return Answer(decode_frame(first), parts)

    def hello(self) -> m.HelloReply:
        reply: m.HelloReply = self.call(m.Hello("tcp", (), 0, None, None, None)).message
        self.session = reply.session
        return reply

    def close(self) -> None:
        self.dealer.close(0)
        self.context.term()


@pytest.fixture(scope="module")
def keys() -> Iterator[Keys]:
    folder = tempfile.mkdtemp(prefix="kvd-", dir="/tmp")
    yield Keys(Path(folder))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def daemon(keys: Keys, endpoint: str) -> Iterator[DaemonProcess]:
    args = ["--tcp-endpoint", endpoint, "--tcp-heartbeat-s", "0.2"]
    args += ["--tcp-secret-key-file", str(keys.secret_file)]
    args += ["--tcp-clients-file", str(keys.clients_file)]
    with DaemonProcess(args=args) as found:
        yield found


@pytest.fixture
def client(daemon: DaemonProcess, keys: Keys, endpoint: str) -> Iterator[TcpClient]:
    found = TcpClient(endpoint, keys.server_public, keys.a_public, keys.a_secret)
    yield found
    found.close()


def put(client: TcpClient, digest: bytes, number: int, data: bytes) -> bytes:
    outcomes: bytes = client.call(
        m.Put(digest, 1, (0,), key(number), bytes(32), 0, prints(1), None, None, 0, 30 * NS),
        (data,),
    ).message.outcomes
    return outcomes


def test_a_known_key_gets_its_namespace_and_inline_transfer(client: TcpClient) -> None:
    told = client.hello()
    assert (told.namespace, told.admin) == ("team a", False)
    digest = client.call(m.RegisterSpec(spec().encode())).message.digest
    data = os.urandom(4096)
    assert put(client, digest, 1, data) == bytes([Outcome.OK])
    answer = client.call(m.Get(digest, 1, (0,), key(1), None, 0))
    assert answer.payload == [data]


def test_another_namespace_misses(
    client: TcpClient, keys: Keys, endpoint: str, daemon: DaemonProcess
) -> None:
    client.hello()
    digest = client.call(m.RegisterSpec(spec().encode())).message.digest
    put(client, digest, 2, bytes(4096))
    other = TcpClient(endpoint, keys.server_public, keys.b_public, keys.b_secret)
    try:
        assert other.hello().namespace == "team-b"
        other.call(m.RegisterSpec(spec().encode()))
        answer = other.call(m.Get(digest, 1, (0,), key(2), None, 0))
        assert answer.message.outcomes == bytes([Outcome.MISS]) and answer.payload == []
    finally:
        other.close()


def test_a_stranger_gets_no_answer(keys: Keys, endpoint: str, daemon: DaemonProcess) -> None:
    stranger = TcpClient(endpoint, keys.server_public, keys.stranger_public, keys.stranger_secret)
    try:
        with pytest.raises(TimeoutError):
            stranger.call(m.Hello("x", (), 0, None, None, None), timeout_s=0.7)
    finally:
        stranger.close()


def test_without_curve_there_is_no_answer(endpoint: str, daemon: DaemonProcess) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(endpoint)
    plain.send(encode_frame(1, m.encode_request(m.Hello("x", (), 0, None, None, None)), request=1))
    assert not plain.poll(500)
    plain.close(0)
    context.term()


def test_a_token_of_the_unix_socket_is_nobodys_over_tcp(
    client: TcpClient, daemon: DaemonProcess
) -> None:
    with RawClient(daemon.socket) as local:
        client.session = local.session
        assert isinstance(client.call(m.Stat()).error, UnknownSession)


def test_a_repeated_hello_opens_no_second_session(client: TcpClient, daemon: DaemonProcess) -> None:
    first = client.hello()
    client.session = bytes(16)
    assert client.hello().session == first.session


def test_a_deadline_is_milliseconds_from_arrival(client: TcpClient) -> None:
    client.hello()
    assert client.call(m.Stat(), deadline=5000).message.stat["version"]
    assert DeadlineExceeded.code


def sessions(daemon: DaemonProcess) -> int:
    with RawClient(daemon.socket) as watcher:
        return int(watcher.stat()["sessions"]) - 1


def test_a_closed_connection_ends_its_session(
    daemon: DaemonProcess, keys: Keys, endpoint: str, eventually
) -> None:
    eventually(lambda: sessions(daemon) == 0)
    found = TcpClient(endpoint, keys.server_public, keys.a_public, keys.a_secret)
    found.hello()
    assert sessions(daemon) == 1
    found.close()
    eventually(lambda: sessions(daemon) == 0)


def test_a_stopped_peer_is_dead_after_three_heartbeats(
    daemon: DaemonProcess, keys: Keys, endpoint: str, eventually
) -> None:
    eventually(lambda: sessions(daemon) == 0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        stopped = TcpClient(endpoint, keys.server_public, keys.a_public, keys.a_secret)
        stopped.hello()
        os.write(write, b"!")
        signal.pause()
        os._exit(0)
    try:
        os.read(read, 1)
        time.sleep(0.5)
        assert sessions(daemon) == 1
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: sessions(daemon) == 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_key_files_are_checked(tmp_path: Path, keys: Keys) -> None:
    bad = tmp_path / "bad"
    for content in (b"", b"short\n", b"~" * 40 + b" team\n", keys.a_public + b"\n"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError):
            read_clients(str(bad))
    bad.write_bytes(keys.a_public + b" a\n" + keys.a_public + b" b\n")
    with pytest.raises(ConfigError, match="twice"):
        read_clients(str(bad))
    bad.write_bytes(keys.a_secret)
    bad.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        read_secret_key(str(bad))
    bad.chmod(0o600)
    assert read_secret_key(str(bad)) == keys.a_secret
    with pytest.raises(ConfigError):
        read_secret_key(str(tmp_path / "none"))
