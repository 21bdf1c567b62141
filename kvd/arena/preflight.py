"""Is there room for an arena: asked before a byte is taken, so that the answer is a sentence and
not an OOM kill.

The law of this module: each limit is looked at on its own, and a refusal names the sizes, the
limit and the way out. What can't be read does not refuse: the fallocate that follows is the proof.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvd.errors import ArenaError

MEMORY_KINDS = frozenset({"tmpfs", "hugetlbfs", "ramfs", "devtmpfs", ""})


class Room(NamedTuple):
    """What one limit leaves."""

    what: str
    free: int  # bytes still free under it
    total: int  # bytes of the limit itself
    way_out: str


def check_room(directory: Path, need: int, reclaim: int = 0, *, root: Path = Path("/")) -> None:
    """ArenaError unless `need` more bytes fit in the directory's file system, in this process's
    memory cgroups and in the machine's memory. `reclaim`: bytes of an old arena that goes away
    first. `root` stands for / in tests."""
    for room in (file_system_room(directory), *cgroup_rooms(root), *machine_room(root)):
        if need > room.free + reclaim:
            raise ArenaError(
                f"arena needs {need} bytes more, but {room.what} has {room.free + reclaim} free "
                f"of {room.total}: make the arena smaller (--arena-size) or {room.way_out}"
            )


def file_system_room(directory: Path) -> Room:
    """Free bytes of the file system (tmpfs for /dev/shm) that holds the directory."""
    try:
        info = os.statvfs(directory)
    except OSError as error:
        raise ArenaError(f"arena directory {directory}: {error.strerror}") from error
    return Room(
        f"the file system of {directory}",
        info.f_bavail * info.f_frsize,
        info.f_blocks * info.f_frsize,
        "enlarge it (mount -o remount,size=..., docker run --shm-size=...)",
    )


def file_system_kind(directory: str | Path) -> str:
    """The kind of file system that holds the directory, as in mountinfo (tmpfs, ext4); "" if that
    can't be told."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):  # the mount on top of others is the last
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == device:
            return kind.split()[0]
    return _kind_by_path(Path(directory).resolve(), lines)


def _kind_by_path(directory: Path, lines: list[str]) -> str:
    """Some file systems (btrfs, overlayfs) show other device numbers: the deepest mount holds."""
    best = (-1, "")
    for line in lines:
        mount, _, kind = line.partition(" - ")
        point = Path(mount.split()[4].replace("\\040", " "))
        if directory.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), kind.split()[0])
    return best[1]


def cgroup_rooms(root: Path = Path("/")) -> list[Room]:
    """What the limits of this process's memory cgroup and of all above it leave (v2 and v1)."""
    rooms = []
    for group, limit_file, usage_file, cache_names in _cgroup_chain(root):
        limit = _number(group / limit_file)
        usage = _number(group / usage_file)
        if limit is None or usage is None or limit >= 1 << 62:  # v1 says "none" as a huge number
            continue
        # Page cache of files gives way; shared memory, which the kernel counts apart, does not.
        cache = _stat(group / "memory.stat", cache_names)
        free = limit - max(usage - cache, 0)
        rooms.append(
            Room(f"memory cgroup {group}", max(free, 0), limit, "raise the cgroup's memory limit")
        )
    return rooms


def machine_room(root: Path = Path("/")) -> list[Room]:
    """Memory and swap that the machine can give without killing anything."""
    fields = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        free = fields["MemAvailable"] + fields["SwapFree"]
        total = fields["MemTotal"] + fields["SwapTotal"]
    except (OSError, ValueError, IndexError, KeyError):
        return []
    return [Room("the machine's memory", free, total, "add memory")]


def _cgroup_chain(root: Path) -> list[tuple[Path, str, str, tuple[str, ...]]]:
    """(directory, limit file, usage file, names of page cache in memory.stat) from the process's
    own cgroup up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    chain: list[tuple[Path, str, str, tuple[str, ...]]] = []
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            cache = ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache = ("total_active_file", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's; then only the mount's own root is visible.
        group = base / path.lstrip("/")
        if ".." in group.parts or not group.is_dir():
            group = base
        while True:
            chain.append((group, *files, cache))
            if group == base:
                break
            group = group.parent
    return chain


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(path: Path, names: tuple[str, ...]) -> int:
    total = 0
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                total += int(value)
    except (OSError, ValueError):
        return 0
    return total
