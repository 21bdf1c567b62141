"""The tests' own `du`: what it says was so at one moment."""

from __future__ import annotations

import os
from pathlib import Path

import diskuse
import pytest
from diskuse import on_disk

MIB = 1 << 20


def take(path: Path, nbytes: int) -> None:
    """Give a file that many bytes of the file system, or take them away."""
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), 0)
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Files in the order in which they are looked at: the first has a MiB, the other nothing."""
    for name in "ab":
        (tmp_path / name).touch()
    (_, _, names) = next(os.walk(tmp_path))
    first, second = (tmp_path / name for name in names)
    take(first, MIB)
    return first, second


def test_bytes_that_go_from_one_file_to_another_are_counted_once(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    looked: list[str] = []

    def look(path: str) -> os.stat_result:
        said = os.stat(path, follow_symlinks=False)
        if not looked:  # just counted: now it goes, and the other one, still to be counted, grows
            take(first, 0)
            take(second, MIB)
        looked.append(path)
        return said

    monkeypatch.setattr(diskuse.os, "lstat", look)
    assert on_disk(tmp_path) == MIB


def test_what_never_stands_still_has_no_sum(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def look(path: str) -> os.stat_result:
        looked.append(path)
        take(two[0], len(looked) * 4096)
        return os.stat(path, follow_symlinks=False)

    monkeypatch.setattr(diskuse.os, "lstat", look)
    with pytest.raises(AssertionError, match="at each of 5 looks"):
        on_disk(tmp_path, looks=5)


def test_a_file_that_goes_while_it_is_looked_at_is_none(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(path: str) -> os.stat_result:
        two[1].unlink(missing_ok=True)
        return os.stat(path, follow_symlinks=False)

    monkeypatch.setattr(diskuse.os, "lstat", look)
    assert on_disk(tmp_path) == MIB
