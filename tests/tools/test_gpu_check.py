"""`make test-gpu` where there is no device: it says so; and its parts that need none do hold."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from kvd.tiers.base import Place  # noqa: E402
from kvd.tiers.borrowing import Export  # noqa: E402
from kvd.tools import gpu  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_is_no_failure() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvd.tools.gpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "no CUDA device" in json.loads(done.stdout)["skipped"]


def test_round_trips_hold_on_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    row = gpu._guarded("round trips", gpu._round_trips)
    assert row["ok"] and row["wrong"] == 0 and row["chunks"] == 18, row


def test_the_engine_for_the_disk_is_announced() -> None:
    row = gpu._guarded("storage", gpu._storage)
    assert row["ok"] and row["engine"] and row["said"], row


def test_an_export_travels_to_a_child_as_it_is() -> None:
    export = Export(7, 0, b"h\x00\xff", 1 << 20, 0, b"c", 3, b"", True, 4096, 100, Place(5, 6))
    assert gpu._export(gpu._lent(export)) == export


def test_a_check_that_breaks_is_a_row_that_says_so() -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("no such thing")

    row = gpu._guarded("broken", broken)
    assert row == {"check": "broken", "ok": False, "error": "RuntimeError: no such thing"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="make test-gpu does it")
def test_a_killed_engine_holds_no_lease_any_more() -> None:
    row = gpu._guarded("killed", gpu._engine_killed)
    assert row.get("seconds", 99) <= gpu.RELEASE_S and row["registration"] == "no device", row
    assert row["ok"] is False, "without a registration it shows only half of it"
