"""A daemon for all tests of a file, and vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import fake_vllm
from daemon import DaemonProcess

from kvd.client import Client

fake_vllm.install()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="64MiB") as process:
        yield process


@pytest.fixture
def leased(daemon: DaemonProcess) -> Iterator[object]:
    """How many chunks are leased now."""
    with Client(daemon.socket) as client:
        yield lambda: sum(tier["leased_chunks"] for tier in client.stat()["tiers"])


@pytest.fixture
def settled(leased, eventually) -> Iterator[None]:
    """Afterwards nothing is leased any more."""
    yield
    eventually(lambda: leased() == 0)
