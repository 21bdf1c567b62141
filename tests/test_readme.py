"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import DaemonProcess

from kvd.chunk import Outcome

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    tier = str(tmp_path_factory.mktemp("disk") / "tier")
    with DaemonProcess(
        arena_size="128MiB",
        args=["--nvme-path", tier, "--nvme-limit", "32MiB", "--nvme-reserve", "0"],
    ) as found:
        yield found


def test_the_client_example_stores_and_loads(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [block for block in _blocks("python") if "store_chunks" in block]
    monkeypatch.setenv("KVD_SOCKET", daemon.socket)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["stored"] == [Outcome.OK] * 4
    assert names["loaded"] == [Outcome.OK] * 4
    assert all((a == b).all() for a, b in zip(names["kv"], names["back"], strict=True))  # type: ignore[call-overload]


def test_the_commands_that_look_in_work(daemon: DaemonProcess) -> None:
    shown = [line for block in _blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in shown if line.startswith("kvd-cli")]
    assert len(commands) >= 4
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "kvd.tools.cli", *command[1:]],
            env={**os.environ, "KVD_SOCKET": daemon.socket},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
