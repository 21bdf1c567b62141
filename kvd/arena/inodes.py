"""How many more files a file system takes: a tmpfs has a number of inodes beside its bytes.

The law of this module: a file system that tells of no number has no limit, and what can't be read
refuses nothing. A refusal names the directory, the number and the way out.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvd.errors import ArenaError

__all__ = ["check_inodes", "free_inodes", "why_no_file"]

LEAST_LOCKS = 16  # fewer sessions than these are no service
_WAY_OUT = "remove files there, or let it have more (mount -o remount,nr_inodes=...)"


def free_inodes(directory: Path) -> tuple[int, int] | None:
    """Files that can still be made in the file system that holds the directory, and those that it
    has at most; None if there is no limit, or none that is known."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return None
    return (info.f_favail, info.f_files) if info.f_files else None


def why_no_file(path: str | Path, error: OSError) -> str:
    """Why a file could not be made at `path`: of a file system without room what it lacks, and the
    way out."""
    said = error.strerror or str(error)
    if error.errno != errno.ENOSPC:
        return said
    directory = Path(path).parent
    inodes = free_inodes(directory)
    if inodes is not None and not inodes[0]:
        return f"the file system of {directory} has none of its {inodes[1]} inodes free: {_WAY_OUT}"
    return (
        f"the file system of {directory} has no free space: remove files there, or enlarge it "
        f"(mount -o remount,size=...)"
    )


def check_inodes(files: int, locks: Path, sessions: int) -> int:
    """How many sessions can have a lock in the directory `locks`, at most `sessions`, once `files`
    more files are made beside it. ArenaError if these are too few for any service."""
    inodes = free_inodes(locks)
    if inodes is None:
        return sessions
    least = min(sessions, LEAST_LOCKS)
    # the locks of an earlier life's sessions go when these attach anew
    room = inodes[0] - files + len(os.listdir(locks))
    if room < least:
        raise ArenaError(
            f"the file system of {locks.parent} has {inodes[0]} of its {inodes[1]} inodes free, "
            f"too few for {files} more files and the locks of {least} sessions: {_WAY_OUT}"
        )
    return min(room, sessions)
