"""`kvd-bench tiers`, the part over S3: both sides really move the bytes, and leave no object."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.tools.bench.s3 import run_s3
from kvd.tools.services import ServiceFailed

MIB = 1 << 20


@pytest.mark.usefixtures("aws_keys")  # which are the bench's own, too, and go with the test
def test_a_row_a_size_with_both_ratios(tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    rows = run_s3(tmp_path, (MIB,), 4 * MIB, concurrency=2, rounds=1)
    if not rows:
        pytest.skip("weed is not installed")
    (row,) = rows
    assert (row["chunk_bytes"], row["concurrency"]) == (MIB, 2)
    figures = ("limit_put_gbps", "limit_get_gbps", "put_ratio", "get_ratio")
    assert all(row[name] > 0 for name in figures)


def test_without_a_server_the_part_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(home: Path) -> None:
        raise ServiceFailed("weed is not installed")

    monkeypatch.setattr("kvd.tools.bench.s3.Seaweed", missing)
    assert run_s3(tmp_path, (MIB,), MIB) == []
