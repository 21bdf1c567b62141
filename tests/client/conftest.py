"""A fake daemon and a client of it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_daemon import FakeDaemon

from kvd.client import Client


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with FakeDaemon() as daemon:
        yield daemon


@pytest.fixture
def client(fake: FakeDaemon) -> Iterator[Client]:
    with Client(fake.socket, timeout_s=5) as made:
        yield made
