"""ArenaOwner: the daemon's side of the shared memory.

The law of this module: one owner at a time, by lock; an arena that is there is adopted, or
replaced when it can't be, and never a reason not to start; no file is ever truncated; every page
is reserved before it is used; the new epoch is stored before anything is written, so that no
handle of an earlier life passes its check.
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

import numpy as np
from numpy.typing import NDArray

from kvd.arena.layout import EPOCH, HEAD_BYTES, RESERVED, Geometry, Superblock, is_table, plan
from kvd.arena.locks import OwnerLock, SessionLocks, open_owned
from kvd.arena.mapping import Mapping
from kvd.arena.os_call import punch_hole
from kvd.arena.preflight import check_room
from kvd.arena.table import RecordTable, Registry, Scan
from kvd.errors import ArenaError

log = logging.getLogger(__name__)

RESERVE_STEP = 256 << 20  # one fallocate: about 60 ms
_EPOCHS = 1 << 63  # an epoch beyond is not one


class _Paths(NamedTuple):
    arena: Path
    table: Path
    lock: Path
    sessions: Path

    @classmethod
    def of(cls, base: Path) -> _Paths:
        return cls(
            *(base.with_name(base.name + suffix) for suffix in ("", ".table", ".lock", ".s"))
        )


class ArenaOwner:
    """A named arena, held by this process until `close`.

    `view` is the payload memory (read-write), `table` all records (RECORD_DTYPE; change them only
    by `write_record` and `patch_record`, which are the record table's `write` and `patch`).
    `fd_arena` (read-write) and `fd_table` (read-only) are what a client is handed. `previous_epoch`
    is that of the owner before, 0 if there was none.
    """

    def __init__(
        self, paths: _Paths, lock: OwnerLock, sessions: SessionLocks, files: _Files, epoch: int
    ) -> None:
        self._paths = paths
        self._lock = lock
        self._sessions = sessions
        self._super = files.super
        self.adopted = files.adopted
        self.fd_arena = files.arena
        self._fd_table_rw = files.table
        self._mapping = Mapping(files.arena, files.super.geometry.size, writable=True)
        self._table = RecordTable(files.table, files.super.geometry)
        self.write_record, self.patch_record = self._table.write, self._table.patch
        self.fd_table = os.open(paths.table, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.previous_epoch = self._table.epoch
        self._table.epoch = max(self.previous_epoch + 1, epoch)
        self._table.recover()
        self.was_clean = self._table.clean
        self._table.clean = False
        self.view = self._mapping.bytes.data
        self.table: NDArray[np.void] = self._table.records
        self._short = False  # the last reserve_records failed
        self._closed = False

    # -- opening --------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        base: str | Path,
        size: int,
        *,
        slab_size: int | None = None,
        instance: str,
        now_unix_ns: int,
    ) -> ArenaOwner:
        """Take the arena named `base`, adopting or replacing what is there. The first step of its
        memory is reserved on return, the rest by `reserve_step`. ArenaError if another process
        owns it, if there is no room, or if its files are not ours."""
        geometry = plan(size, slab_size)
        paths = _Paths.of(Path(base))
        if not paths.arena.parent.is_dir():
            raise ArenaError(f"arena directory {paths.arena.parent} does not exist: make it")
        lock = OwnerLock(paths.lock)
        files: _Files | None = None
        sessions: SessionLocks | None = None
        try:
            sessions = SessionLocks(paths.sessions)
            files = _adopt(paths, geometry, instance) or _create(
                paths, geometry, instance, now_unix_ns
            )
            owner = cls(paths, lock, sessions, files, now_unix_ns)
        except BaseException:
            if files is not None:
                os.close(files.arena)
                os.close(files.table)
            # What a refused start leaves is what it found.
            bare = not (paths.arena.exists() or paths.table.exists())
            if bare and sessions is not None:
                sessions.remove_if_empty()
            lock.release(remove=bare)
            raise
        try:
            owner.reserve_step()
        except BaseException:
            owner._end(remove=not owner.adopted)
            raise
        return owner

    @property
    def id(self) -> bytes:
        """16 bytes; kept over adoption, so that mappings and registrations of it stay good."""
        return self._super.arena_id

    @property
    def instance(self) -> str:
        return self._super.instance

    @property
    def size(self) -> int:
        return self._super.geometry.size

    @property
    def slab_size(self) -> int:
        return self._super.geometry.slab_size

    @property
    def slab_count(self) -> int:
        return self._super.geometry.slab_count

    @property
    def epoch(self) -> int:
        return self._table.epoch

    # -- memory ---------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """Bytes from the start of the arena that have memory. Use no slab beyond."""
        return self._table.reserved

    def reserve_step(self) -> bool:
        """Reserve up to 256 MiB more; True when all of the arena is. The GIL is free meanwhile, so
        a thread may call it (and must have ended before `close`). ArenaError when memory is out:
        what was reserved stays usable."""
        geometry = self._super.geometry
        begin = self._table.reserved
        end = min(begin + RESERVE_STEP, geometry.size)
        if begin < end:
            try:
                os.posix_fallocate(self.fd_arena, begin, end - begin)
            except OSError as error:
                raise ArenaError(_no_memory(self._paths.arena, geometry, begin, error)) from error
            for slab in range(begin // geometry.slab_size, end // geometry.slab_size):
                self._table.reserve(slab)
            self._table.reserved = end
        return end >= geometry.size

    def prefault(self, offset: int, length: int) -> None:
        """Fault a reserved range into the daemon's own mapping, without the GIL. ArenaError."""
        self._mapping.populate(offset, length, write=False)

    # -- records --------------------------------------------------------------------------------

    def reserve_records(self, slab: int, slot_size: int) -> bool:
        """Take memory for the records of a slab's slots before it is cut into them; False, and
        nothing has changed, when there is none. It stays reserved from then on."""
        try:
            self._table.reserve(slab, self._super.geometry.slots(slot_size))
        except ArenaError as error:
            if not self._short:
                log.warning("%s", error)
            self._short = True
            return False
        self._short = False
        return True

    def assign_slab(self, slab: int, slot_size: int) -> None:
        """Give an empty slab a slot size (0: none); its records are cleared. ArenaError if the
        size is impossible or there is no memory for the records; the slab is then unassigned."""
        self._table.assign(slab, slot_size)

    def slot_sizes(self) -> list[int]:
        """Slot size of each slab in bytes, 0 where none is assigned."""
        return self._table.slot_sizes()

    def scan(self) -> Scan:
        """What the table holds, for adoption: 0.4 to 0.7 s a million records."""
        return self._table.scan()

    @property
    def lease_horizon(self) -> int:
        """No lease given so far lasts beyond this (CLOCK_MONOTONIC ns)."""
        return self._table.lease_horizon

    @lease_horizon.setter
    def lease_horizon(self, until: int) -> None:
        self._table.lease_horizon = until

    def registry_load(self) -> Registry:
        """Namespaces and encoded specs as stored last, for example by the owner before."""
        return self._table.registry_load()

    def registry_store(self, namespaces: list[str], specs: list[bytes]) -> int:
        """Keep them; returns how many (the oldest) had no room. ArenaError."""
        return self._table.registry_store(namespaces, specs)

    # -- sessions -------------------------------------------------------------------------------

    def session_lock_create(self, public_id: bytes) -> int:
        """A locked descriptor to hand to a client; the caller closes its own copy. ArenaError."""
        return self._sessions.create(public_id)

    def session_lock_free(self, public_id: bytes) -> bool:
        """Whether no process can hold that session's mapping any more."""
        return self._sessions.free(public_id)

    def session_locks(self) -> list[bytes]:
        """Public ids whose lock is still held, of this life and earlier ones."""
        return self._sessions.held()

    # -- ending ---------------------------------------------------------------------------------

    def set_clean(self) -> None:
        """Say that this life ended in order (told to the next owner as `was_clean`)."""
        self._table.clean = True

    def close(self) -> None:
        """Let go and leave the arena for adoption. Idempotent. Views that others still hold stay
        readable; nobody may write through them any more."""
        self._end(remove=False)

    def destroy(self) -> None:
        """Close, give the memory back and remove all files, also from under clients."""
        self._end(remove=True)

    def _end(self, *, remove: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if remove:
            _discard(self._paths, self.fd_arena, self._fd_table_rw)
            self._sessions.remove()
        del self.table, self.view
        self._table.close()
        self._mapping.close()
        for fd in (self.fd_arena, self.fd_table, self._fd_table_rw):
            os.close(fd)
        self._lock.release(remove=remove)


class _Files(NamedTuple):
    arena: int  # descriptors, read-write
    table: int
    super: Superblock
    adopted: bool


def _adopt(paths: _Paths, geometry: Geometry, instance: str) -> _Files | None:
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
    return _Files(arena, table, block, True)


def _create(paths: _Paths, geometry: Geometry, instance: str, now_unix_ns: int) -> _Files:
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
        _discard(paths, *old)
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
        return _Files(arena, table, block, False)
    except BaseException as error:
        _discard(paths, arena, table)
        _close(arena, table)
        if isinstance(error, OSError):
            raise ArenaError(_no_memory(paths.arena, geometry, 0, error)) from error
        raise


def _discard(paths: _Paths, arena: int, table: int) -> None:
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


def _no_memory(path: Path, geometry: Geometry, reserved: int, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return f"can't make arena {path}: {error.strerror}"
    return (
        f"no memory for arena {path} of {geometry.size} bytes ({reserved} reserved so far): make "
        f"it smaller (--arena-size) or enlarge {path.parent}"
    )
