"""A daemon for all tests of a file, and vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import fake_vllm
from daemon import DaemonProcess

fake_vllm.install()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="64MiB") as process:
        yield process
