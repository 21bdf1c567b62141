"""Servers that the tests of tiers share: started once, when the first test asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import ACCESS, SECRET, Redis, Seaweed


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    pytest.importorskip("boto3")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        server.make_bucket("kvd")
        yield server
    finally:
        server.server.stop()


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
