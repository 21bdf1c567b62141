"""SGLang's HiCacheController drives the backend: its threads and collectives, one and two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DaemonProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

_spec = importlib.util.find_spec("sglang")
if _spec is None or _spec.loader is None:
    pytest.skip("sglang is not installed here: make test-sglang", allow_module_level=True)

RANK = Path(__file__).with_name("rank.py")


class Engine:
    """All tensor ranks of one engine, each a process."""

    def __init__(self, daemon: DaemonProcess, folder: Path, ranks: int, *how: str) -> None:
        self.log = folder / "log"
        self.ranks = []
        for rank in range(ranks):
            with self.log.open("ab") as log:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", str(RANK), str(rank), str(ranks),
                         daemon.socket, str(folder / "rendezvous"), *how],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )  # fmt: skip
        assert self._answers() == ["ready"] * ranks

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Every rank's answer; they work at once, as collectives need it."""
        for process in self.ranks:
            print(json.dumps([name, *arguments]), file=process.stdin, flush=True)
        return self._answers()

    def one(self, rank: int, name: str, *arguments: Any) -> Any:
        """One rank's answer, to what needs no other."""
        print(json.dumps([name, *arguments]), file=self.ranks[rank].stdin, flush=True)
        return self._answer(rank)

    def close(self) -> list[int]:
        """End all ranks; their exit codes."""
        for process in self.ranks:
            process.stdin.close()
        codes = []
        for process in self.ranks:
            try:
                codes.append(process.wait(30))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait(5))
            process.stdout.close()
        return codes

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self.ranks))]

    def _answer(self, rank: int) -> Any:
        line = self.ranks[rank].stdout.readline()
        assert line, f"rank {rank} ended:\n{self.log.read_text()[-6000:]}"
        return json.loads(line)


@pytest.fixture
def engine(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(ranks: int, *how: str) -> Engine:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Engine(daemon, folder, ranks, *how))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_two_ranks_agree_on_what_both_have_and_live_through_the_daemons_death(
    engine, daemon: DaemonProcess, eventually
) -> None:
    """K102, K92: the least of both ranks counts, each gets its own bytes; without the daemon they
    agree on nothing, and with it again on everything; a detached backend comes back, too."""
    both = engine(2, "mha", "page_first", "v1")
    assert both.all("prefetch", 1, 200) == [[0, 0, True]] * 2
    assert both.all("write", 1, 200) == [3200, 3200]  # two batches of SGLang's
    assert both.all("prefetch", 1, 200) == [[3200, 3200, True]] * 2
    assert [s["loaded"] for s in both.all("stats")] == [200, 200]

    assert both.one(0, "write", 2, 8) == 128
    assert both.all("prefetch", 2, 8) == [[0, 0, True]] * 2
    assert both.one(1, "write", 2, 5) == 80
    assert both.all("prefetch", 2, 8) == [[80, 80, True]] * 2

    daemon.kill()
    assert both.all("prefetch", 1, 200) == [[0, 0, True]] * 2
    assert both.all("write", 3, 8) == [0, 0]
    daemon.start()
    eventually(lambda: both.all("prefetch", 1, 200) == [[3200, 3200, True]] * 2, timeout_s=30)

    assert both.all("detach") == [False, False]
    assert both.all("attach") == [True, True]
    assert both.all("prefetch", 1, 200) == [[3200, 3200, True]] * 2
    assert both.one(0, "clear")
    assert both.all("prefetch", 1, 200) == [[0, 0, True]] * 2
    assert both.close() == [0, 0], both.log.read_text()[-6000:]


def test_mla_ranks_write_once(engine) -> None:
    """K82: rank 0 writes what both hold, both read it."""
    both = engine(2, "mla", "layer_first", "v1")
    assert both.one(0, "write", 1, 20) == 320
    assert both.one(1, "write", 1, 20) == 0  # it is no writer, and is not asked
    assert both.all("prefetch", 1, 20) == [[320, 320, True]] * 2
    assert [s.get("stored", 0) for s in both.all("stats")] == [20, 0]
    assert both.close() == [0, 0]


def test_the_generic_interface_serves_what_version_1_stored(engine) -> None:
    """A restarted engine with another interface finds the pages of the one before."""
    first = engine(1, "mha", "layer_first", "v1")
    assert first.all("write", 4, 12) == [192]
    assert first.close() == [0]
    second = engine(1, "mha", "layer_first", "generic")
    assert second.all("prefetch", 4, 12) == [[192, 192, True]]
    assert second.all("write", 5, 4) == [64]
    assert second.all("prefetch", 5, 4) == [[64, 64, True]]
