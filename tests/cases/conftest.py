"""A daemon and a client for each test of reported failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon import DaemonProcess

from kvd.client import Client


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="16MiB") as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.socket, timeout_s=20) as made:
        yield made
