"""What a directory takes on disk, while others write there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

LOOKS = 50


class File(NamedTuple):
    name: str
    inode: int
    nbytes: int


def on_disk(path: Path, looks: int = LOOKS) -> int:
    """Bytes that the file system gave to the files below `path`, as `du` counts, all at one moment.

    Files are looked at one after another, and meanwhile one that was counted may go and another
    grow: the sum would be of no moment. So it holds only if a second look finds each file as the
    first one did. AssertionError if no two looks agree."""
    before = _files(path)
    for _ in range(looks):
        now = _files(path)
        if now == before:
            return sum(file.nbytes for file in now)
        before = now
    raise AssertionError(f"{path} changed at each of {looks} looks")


def _files(path: Path) -> set[File]:
    found = set()
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            try:
                said = os.lstat(full)
            except FileNotFoundError:  # gone since its folder was read
                continue
            found.add(File(full, said.st_ino, said.st_blocks * 512))
    return found
