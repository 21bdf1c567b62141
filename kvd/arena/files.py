"""The files of an arena: taken over as they are, made, or removed.

The law of this module: what is there is adopted whole or not at all; no file is ever truncated; an
epoch never goes back; those who still have removed files mapped find epoch 0 there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
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
from kvd.sizes import format_size

log = logging.getLogger(__name__)

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
    replaced: str = ""  # what there was of an arena that was discarded: "had no table"


def adopt(paths: Paths, geometry: Geometry, instance: str) -> Files | str:
    """What is there, if it is whole and of this geometry, instance and boot; else what it is that
    it has or had, as words after "one that", or nothing if nothing was there."""
    arena = table = -1
    try:
        try:
            arena = open_owned(paths.arena)
        except FileNotFoundError:
            return "had no file for its payloads" if paths.table.exists() else ""
        try:
            table = open_owned(paths.table)
        except FileNotFoundError:
            return "had no table"
        try:
            block = Superblock.unpack(os.pread(table, 512, 0))
        except ValueError as error:
            return f"had a table that does not hold ({error})"
        unfit = _unfit(block, geometry, instance, arena, table)
        if unfit:
            return unfit
        _make_good(paths, geometry, arena, table)
        files = Files(arena, table, block, True)
        arena = table = -1
        return files
    finally:
        _close(arena, table)


def _unfit(block: Superblock, wanted: Geometry, instance: str, arena: int, table: int) -> str:
    """Why an arena whose superblock holds can't be adopted; empty if it can."""
    had, info = block.geometry, os.fstat(arena)
    if block.instance != instance:
        return f"was of instance {block.instance!r}, not {instance!r}"
    if had.size != wanted.size:
        return f"had {format_size(had.size)}, not {format_size(wanted.size)}"
    if had != wanted:
        return f"had slabs of {format_size(had.slab_size)}, not {format_size(wanted.slab_size)}"
    if block.boot_id != _boot_id():
        return "was of another boot of the machine"
    if block.arena_inode != info.st_ino:
        return "had a table that belongs to another file"
    if info.st_size != wanted.size:
        return f"had a file of {info.st_size} bytes for payloads, not {wanted.size}"
    if os.fstat(table).st_size != wanted.table_bytes:
        return f"had a table of {os.fstat(table).st_size} bytes, not {wanted.table_bytes}"
    if _word(table, EPOCH) >= _EPOCHS:
        return "had an epoch that does not hold"
    return ""


def _make_good(paths: Paths, geometry: Geometry, arena: int, table: int) -> None:
    """Before an arena is adopted: there is memory for what it has not reserved. ArenaError."""
    have = os.fstat(arena).st_blocks * 512
    if _word(table, RESERVED) > min(have, geometry.size):  # not true: reserve all of it anew
        os.pwrite(table, bytes(8), 8 * RESERVED)
    need = max(geometry.size - have, 0)
    if need:
        need += max(geometry.reserved_table_bytes - os.fstat(table).st_blocks * 512, 0)
    check_room(paths.arena.parent, need)
    with contextlib.suppress(OSError):  # an arena is adopted also where its registry has no room
        os.posix_fallocate(table, 0, HEAD_BYTES)


def create(
    paths: Paths, geometry: Geometry, instance: str, now_unix_ns: int, replaced: str = ""
) -> Files:
    """New files, after what is there has been given back. `replaced`: what `adopt` said of it."""
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
        if replaced:
            log.warning("discarded the arena %s with all chunks: it %s", paths.arena, replaced)
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
        return Files(arena, table, block, False, replaced)
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
