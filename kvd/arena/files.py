"""The files of an arena: taken over as they are, made, or removed.

The law of this module: what is there is adopted whole or not at all; no file is ever truncated; an
epoch never goes back; those who still have removed files mapped find epoch 0 there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import uuid
from pathlib import Path
from typing import NamedTuple

from kvd.arena.layout import EPOCH, HEAD_BYTES, RESERVED, Geometry, Superblock, is_table
from kvd.arena.locks import open_owned
from kvd.arena.os_call import punch_hole
from kvd.arena.preflight import check_room
from kvd.errors import ArenaError

_EPOCHS = 1 << 63  # an epoch beyond is not one


class Paths(NamedTuple):
    arena: Path
    table: Path
    lock: Path
    sessions: Path

    @classmethod
    def of(cls, base: Path) -> Paths:
        return cls(
            *(base.with_name(base.name + suffix) for suffix in ("", ".table", ".lock", ".s"))
        )


class Files(NamedTuple):
    arena: int  # descriptors, read-write
    table: int
    super: Superblock
    adopted: bool


def adopt(paths: Paths, geometry: Geometry, instance: str) -> Files | None:
    """What is there, if it is whole and of this geometry, instance and boot."""
    arena = table = -1
    try:
        arena = open_owned(paths.arena)
        table = open_owned(paths.table)
        block = Superblock.unpack(os.pread(table, 512, 0))
        fits = (
            block.geometry == geometry
            and block.instance == instance
            and block.boot_id == _boot_id()
            and block.arena_inode == os.fstat(arena).st_ino
            and os.fstat(arena).st_size == geometry.size
            and os.fstat(table).st_size == geometry.table_bytes
            and _word(table, EPOCH) < _EPOCHS
        )
    except (FileNotFoundError, ValueError):
        fits = False
    except BaseException:
        _close(arena, table)
        raise
    if not fits:
        _close(arena, table)
        return None
    have = os.fstat(arena).st_blocks * 512
    if _word(table, RESERVED) > min(have, geometry.size):  # not true: reserve all of it anew
        os.pwrite(table, bytes(8), 8 * RESERVED)
    need = max(geometry.size - have, 0)
    if need:
        need += max(geometry.reserved_table_bytes - os.fstat(table).st_blocks * 512, 0)
    try:
        check_room(paths.arena.parent, need)
    except ArenaError:
        _close(arena, table)
        raise
    with contextlib.suppress(OSError):  # an arena is adopted also where its registry has no room
        os.posix_fallocate(table, 0, HEAD_BYTES)
    return Files(arena, table, block, True)


def create(paths: Paths, geometry: Geometry, instance: str, now_unix_ns: int) -> Files:
    """New files, after what is there has been given back."""
    old = []
    floor = 0
    try:
        for path in (paths.arena, paths.table):
            try:
                old.append(open_owned(path))
            except FileNotFoundError:
                old.append(-1)
        reclaim = sum(os.fstat(fd).st_blocks * 512 for fd in old if fd >= 0)
        need = geometry.size + geometry.reserved_table_bytes
        check_room(paths.arena.parent, need, reclaim)
        if old[1] >= 0 and is_table(os.pread(old[1], 8, 0)):
            floor = _word(old[1], EPOCH)
        discard(paths, *old)
    finally:
        _close(*old)
    arena = table = -1
    try:
        arena = open_owned(paths.arena, os.O_CREAT | os.O_EXCL)
        os.ftruncate(arena, geometry.size)
        table = open_owned(paths.table, os.O_CREAT | os.O_EXCL)
        os.ftruncate(table, geometry.table_bytes)  # sparse: takes no memory yet
        os.posix_fallocate(table, 0, HEAD_BYTES)
        block = Superblock(
            secrets.token_bytes(16),
            geometry,
            _boot_id(),
            os.fstat(arena).st_ino,
            now_unix_ns,
            instance,
        )
        raw = block.pack()
        # An epoch never goes back, whatever the clock did: old handles must not come true again.
        os.pwrite(table, (floor if floor < _EPOCHS else 0).to_bytes(8, "little"), 8 * EPOCH)
        os.pwrite(table, raw[:64], 0)
        os.pwrite(table, raw[128:], 128)
        return Files(arena, table, block, False)
    except BaseException as error:
        discard(paths, arena, table)
        _close(arena, table)
        if isinstance(error, OSError):
            raise ArenaError(no_memory(paths.arena, geometry, 0, error)) from error
        raise


def discard(paths: Paths, arena: int, table: int) -> None:
    """Give the memory of the arena back and remove both names. Those who still have them mapped
    find epoch 0 from now on, so nothing they read there counts. The table's pages go with its
    last mapping: who looked at a hole in it would need memory that there may not be."""
    if table >= 0 and os.fstat(table).st_size >= 8 * (EPOCH + 1):
        with contextlib.suppress(OSError):
            os.pwrite(table, bytes(8), 8 * EPOCH)
    if arena >= 0:
        punch_hole(arena, 0, os.fstat(arena).st_size)
    paths.table.unlink(missing_ok=True)
    paths.arena.unlink(missing_ok=True)


def _word(table: int, index: int) -> int:
    return int.from_bytes(os.pread(table, 8, 8 * index), "little")


def _boot_id() -> bytes:
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def no_memory(path: Path, geometry: Geometry, reserved: int, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return f"can't make arena {path}: {error.strerror}"
    return (
        f"no memory for arena {path} of {geometry.size} bytes ({reserved} reserved so far): make "
        f"it smaller (--arena-size) or enlarge {path.parent}"
    )
