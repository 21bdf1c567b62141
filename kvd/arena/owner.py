"""ArenaOwner: the daemon's side of the shared memory.

The law of this module: one owner at a time, by lock; an arena that is there is adopted, or
replaced when it can't be, and never a reason not to start; no file is ever truncated; every page
is reserved before it is used; the new epoch is stored before anything is written, so that no
handle of an earlier life passes its check.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvd.arena.files import Files, Paths, adopt, create, discard, no_memory
from kvd.arena.hugepages import HugePages, Wish
from kvd.arena.inodes import check_inodes
from kvd.arena.layout import plan
from kvd.arena.locks import OwnerLock, SessionLocks
from kvd.arena.mapping import Mapping
from kvd.arena.os_call import punch_hole
from kvd.arena.table import RecordTable, Registry, Scan
from kvd.errors import ArenaError

log = logging.getLogger(__name__)

RESERVE_STEP = 256 << 20  # one fallocate: about 60 ms


class ArenaOwner:
    """A named arena, held by this process until `close`.

    `view` is the payload memory (read-write), `table` all records (RECORD_DTYPE; change them only
    by `write_record` and `patch_record`, which are the record table's `write` and `patch`).
    `fd_arena` (read-write) and `fd_table` (read-only) are what a client is handed. `previous_epoch`
    is that of the owner before, 0 if there was none. `replaced` says of an arena that was there and
    could not be adopted why not, as words after "one that"; else it is empty.
    """

    def __init__(
        self,
        paths: Paths,
        lock: OwnerLock,
        sessions: SessionLocks,
        files: Files,
        epoch: int,
        wish: Wish,
    ) -> None:
        self._paths = paths
        self._lock = lock
        self._sessions = sessions
        self._super = files.super
        self.adopted = files.adopted
        self.replaced = files.replaced
        self.fd_arena = files.arena
        self._fd_table_rw = files.table
        self._mapping = Mapping(files.arena, files.super.geometry.size, writable=True)
        self._huge = HugePages(paths.arena, files.arena, self._mapping, wish)
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
        huge_pages: Wish = "prefer",
        sessions: int = 1,
    ) -> ArenaOwner:
        """Take the arena named `base`, adopting or replacing what is there. The first step of its
        memory is reserved on return, the rest by `reserve_step`. ArenaError if another process
        owns it, if there is no room, if its files are not ours, or if huge pages are required and
        the first step is not in them. `sessions`: how many are to have a lock at a time."""
        geometry = plan(size, slab_size)
        paths = Paths.of(Path(base))
        if not paths.arena.parent.is_dir():
            raise ArenaError(f"arena directory {paths.arena.parent} does not exist: make it")
        lock = OwnerLock(paths.lock)
        files: Files | None = None
        locks: SessionLocks | None = None
        try:
            locks = SessionLocks(paths.sessions)
            _look_for_inodes(paths, sessions)
            found = adopt(paths, geometry, instance)
            if isinstance(found, str):
                files = create(paths, geometry, instance, now_unix_ns, found)
            else:
                files = found
            owner = cls(paths, lock, locks, files, now_unix_ns, huge_pages)
        except BaseException:
            if files is not None:
                os.close(files.arena)
                os.close(files.table)
            # What a refused start leaves is what it found.
            bare = not (paths.arena.exists() or paths.table.exists())
            if bare and locks is not None:
                locks.remove_if_empty()
            lock.release(remove=bare)
            raise
        try:
            owner.reserve_step()
            if huge_pages == "require":
                owner._huge.insist(0, min(owner.reserved, RESERVE_STEP))
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
        a thread may call it (and must have ended before `close`). ArenaError when memory is out,
        or not to be had in the pages that are required: what was reserved stays usable. What was
        had in vain is given back, but in an arena that was adopted."""
        geometry = self._super.geometry
        begin = self._table.reserved
        end = min(begin + RESERVE_STEP, geometry.size)
        if begin < end:
            try:
                self._huge.take(begin, end)
                os.posix_fallocate(self.fd_arena, begin, end - begin)
            except (ArenaError, OSError) as error:
                if not self.adopted:  # else chunks may lie there; here nobody uses what was had
                    with contextlib.suppress(OSError):
                        punch_hole(self.fd_arena, begin, end - begin)
                if isinstance(error, ArenaError):
                    raise
                raise ArenaError(no_memory(self._paths.arena, geometry, begin, error)) from error
            for slab in range(begin // geometry.slab_size, end // geometry.slab_size):
                self._table.reserve(slab)
            self._table.reserved = end
        return end >= geometry.size

    def prefault(self, offset: int, length: int) -> None:
        """Fault a reserved range into the daemon's own mapping, in huge pages if it may be,
        without the GIL. ArenaError."""
        self._huge.gather(offset, offset + length)
        self._mapping.populate(offset, length, write=False)

    def huge_bytes(self) -> int:
        """Bytes of the arena that are in huge pages and faulted in: milliseconds, without the GIL
        for most of it. OSError."""
        return self._huge.count()

    @property
    def huge_problem(self) -> str:
        """Why some of it could not be put into huge pages, as far as that was tried; empty if
        nothing is known."""
        return self._huge.problem

    @property
    def why_small(self) -> str:
        """Why not all of it is in huge pages, be it a problem or as it was asked for; empty if all
        of it is, or nothing is known."""
        return self._huge.why_small(self.reserved)

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
            discard(self._paths, self.fd_arena, self._fd_table_rw)
            self._sessions.remove()
        del self.table, self.view
        self._table.close()
        self._mapping.close()
        for fd in (self.fd_arena, self.fd_table, self._fd_table_rw):
            os.close(fd)
        self._lock.release(remove=remove)


def _look_for_inodes(paths: Paths, sessions: int) -> None:
    """ArenaError if files can't be made for the arena and for enough sessions."""
    missing = sum(not path.exists() for path in (paths.arena, paths.table))
    room = check_inodes(missing, paths.sessions, sessions)
    if room < sessions:
        log.warning(
            "the file system of %s has inodes for %d sessions of %d: more will be refused "
            "(mount -o remount,nr_inodes=...)",
            paths.arena.parent,
            room,
            sessions,
        )
