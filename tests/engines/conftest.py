"""Real engines. Starting one takes half a minute and more, so each serves many tests, which are
written so that their order does not matter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import DaemonProcess

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Instead of the one for all tests: an engine, and a daemon that a test restarts, live longer
    than the test. What outlives the run is found at its end."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(HERE / "tiny_model.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="512MiB") as process:
        yield process
