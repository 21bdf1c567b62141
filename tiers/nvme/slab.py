"""One slab file: its table, which slots are taken, and their generations.

The law of this module: a slot's generation is 0 when it is free, and what its record says when it
is taken; the number in memory follows the record on disk, never the other way round. Records are
written through the page cache, where SIGKILL can't reach them, payloads around it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import (
    HEADER_BYTES,
    IDENTITY_DTYPE,
    RECORD_DTYPE,
    ChunkHeader,
    HeaderFlag,
    State,
    verify_table,
)
from kvd.tiers.nvme.layout import PAGE, SUPER_BYTES, Geometry, OtherVersion
from kvd.tiers.nvme.posix import BufferedFile, Engine, File, take_for_writing

BATCH = 16384  # records read at a time: 8 MiB
LOOK_NS = 20_000_000  # files are looked at beside writes no oftener than so


_CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


def table_of(path: Path) -> Path:
    return path.with_name(path.name.replace("slab", "table"))


def superblock(path: Path) -> Geometry:
    """OSError, ValueError, OtherVersion."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return Geometry.unpack(os.pread(fd, SUPER_BYTES, 0))
    finally:
        os.close(fd)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


class Slab:
    """Not thread-safe but for `move` calls of different slots; its owner has the lock."""

    def __init__(self, geometry: Geometry, path: Path, engine: Engine, table_fd: int) -> None:
        self.geometry = geometry
        self.path = path
        self.engine = engine
        self._table = table_fd
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # to look at it
        try:
            self.file: File = engine.open(path)
        except OSError:
            os.close(self._fd)
            raise
        self.generations: NDArray[np.uint64] = np.zeros(geometry.slots, np.uint64)
        self.live = 0
        self.lost = False
        self._high = 0  # slots from here on were never taken in this life
        self._freed: list[int] = []
        self.users = 0  # calls that are using the files now
        self._seen = 0  # when the files were there last, as far as writes look

    # -- making and opening ---------------------------------------------------------------------

    @classmethod
    def create(cls, geometry: Geometry, path: Path, engine: Engine, *, preallocate: bool) -> Slab:
        """New files that take their whole size from the file system at once, or OSError and none.
        They get their names when they are complete, the table first: without it a slab is none."""
        table = table_of(path)
        fds = []
        try:
            for file, size in ((table, geometry.table_bytes), (path, geometry.payload_bytes)):
                fd = os.open(_unfinished(file), _CREATE, 0o600)
                fds.append(fd)
                if preallocate:
                    os.posix_fallocate(fd, 0, size)
                else:
                    os.ftruncate(fd, size)
                os.pwrite(fd, geometry.pack(), 0)
            for file in (table, path):
                os.rename(_unfinished(file), file)
            slab = cls(geometry, path, engine, fds[0])
        except OSError:
            for fd in fds:
                os.close(fd)
            for file in (table, path):
                _unfinished(file).unlink(missing_ok=True)
            raise
        os.close(fds[1])
        return slab

    @classmethod
    def open(cls, path: Path, engine: Engine, number: int, tier: bytes, *, read_only: bool) -> Slab:
        """OtherVersion for a slab of another kvd or directory, ValueError for what is none, or
        none any more; OSError."""
        geometry = superblock(path)
        if (geometry.number, geometry.tier) != (number, tier):
            raise OtherVersion("a slab of another directory")
        try:
            if superblock(table_of(path)) != geometry:
                raise ValueError("its table is another slab's")
        except FileNotFoundError as error:
            raise ValueError("its table is gone") from error
        mode = os.O_RDONLY if read_only else os.O_RDWR
        fd = os.open(table_of(path), mode | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            slab = cls(geometry, path, engine, fd)
        except OSError:
            os.close(fd)
            raise
        if not slab.there():
            slab.close()
            raise ValueError("a file is of another size than its superblock says")
        return slab

    def close(self) -> None:
        if self._fd >= 0:
            self.file.close()
            os.close(self._fd)
            os.close(self._table)
            self._fd = -1

    def write_again(self) -> None:
        """What was opened to be read can be written from now on; whoever reads it goes on. OSError.
        A file that somebody took away stays as it is: it is lost, and found to be."""
        if self.there() and isinstance(self.file, BufferedFile):
            take_for_writing(table_of(self.path), self._table)
            take_for_writing(self.path, self.file.fd)

    def there(self) -> bool:
        """Whether the files are still what they were: somebody may delete or cut them behind our
        back."""
        slots, table = os.fstat(self._fd), os.fstat(self._table)
        return (
            slots.st_nlink > 0
            and slots.st_size == self.geometry.payload_bytes
            and table.st_nlink > 0
            and table.st_size == self.geometry.table_bytes
        )

    def there_lately(self) -> bool:
        """The same for a write, which may well be told of files that go just after it: they are
        looked at only now and then."""
        now = time.monotonic_ns()
        if now - self._seen < LOOK_NS:
            return True
        if not self.there():
            return False
        self._seen = now
        return True

    def remove(self) -> None:
        """Take our files from the directory; what has their names by now is not touched. The slab
        goes first: a table without a slab is nothing."""
        for file, fd in ((self.path, self._fd), (table_of(self.path), self._table)):
            try:
                there = os.stat(file, follow_symlinks=False)
            except OSError:
                continue
            here = os.fstat(fd)
            if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                file.unlink(missing_ok=True)

    # -- slots ----------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.geometry.slots - self._high + len(self._freed)

    def take(self) -> int:
        """A free slot. Pre: there is one."""
        if self._freed:
            return self._freed.pop()
        self._high += 1
        return self._high - 1

    def give_back(self, slot: int) -> None:
        self._freed.append(slot)

    def at(self, slots: NDArray[np.intp]) -> NDArray[np.uint64]:
        """What `Place.at` says of them."""
        return slots.astype(np.uint64) | np.uint64(self.geometry.number << 32)

    # -- records --------------------------------------------------------------------------------

    def write_record(self, slot: int, header: ChunkHeader) -> None:
        raw = header.pack()
        at = self.geometry.record_at(slot)
        if os.pwrite(self._table, raw, at) != HEADER_BYTES:
            raise OSError(errno.EIO, "a record was written in part")

    def read_record(self, slot: int) -> bytes:
        return os.pread(self._table, HEADER_BYTES, self.geometry.record_at(slot))

    # -- recovery -------------------------------------------------------------------------------

    def scan(self) -> tuple[NDArray[np.uint64], int]:
        """Take up what the table says: generations, free slots. Returns a name (a digest of the
        key; 0: free) for each slot, and how many records were written and do not hold."""
        slots = self.geometry.slots
        names: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        bad = 0
        for at, batch in self._batches():
            written = (batch["check"] != 0) | (batch["length"] != 0)
            if not written.any():
                continue
            holds = verify_table(batch)
            bad += int((written & ~holds).sum())
            live = holds & _live(batch, self.geometry.slot_bytes)
            end = at + len(batch)
            self.generations[at:end] = np.where(live, batch["generation"], 0)
            names[at:end] = np.where(live, _name(batch), 0)
        self._count()
        return names, bad

    def drop(self, slots: NDArray[np.intp]) -> None:
        """Forget these slots of a scan: an older copy of a key."""
        self.generations[slots] = 0
        self._count()

    def _count(self) -> None:
        taken = self.generations != 0
        self.live = int(taken.sum())
        self._high = int(np.flatnonzero(taken)[-1]) + 1 if self.live else 0
        self._freed = np.flatnonzero(~taken[: self._high])[::-1].tolist()

    def identities(self) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.void]]]:
        """What is live, in batches: first slot, slots from there, records (IDENTITY_DTYPE)."""
        for at, batch in self._batches():
            taken = self.generations[at : at + len(batch)]
            # The record must still be the one that was scanned, and hold: it was read again.
            same = (taken != 0) & (batch["generation"] == taken)
            if not same.any():
                continue
            here = np.flatnonzero(same & verify_table(batch))
            if here.size:
                rows = batch.view(np.uint8).reshape(len(batch), HEADER_BYTES)
                kept = np.ascontiguousarray(rows[here, : IDENTITY_DTYPE.itemsize])
                yield at, here, kept.view(IDENTITY_DTYPE).reshape(-1)

    def _batches(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        buffer: NDArray[np.void] = np.empty(min(BATCH, self.geometry.slots), RECORD_DTYPE)
        for at in range(0, self.geometry.slots, BATCH):
            batch = buffer[: min(BATCH, self.geometry.slots - at)]
            view = batch.view(np.uint8).data
            offset = self.geometry.record_at(at)
            while view.nbytes:
                got = os.preadv(self._table, [view], offset)
                if got == 0:
                    raise OSError(errno.ESTALE, "the table ends early")
                view, offset = view[got:], offset + got
            yield at, batch


def _live(batch: NDArray[np.void], slot_bytes: int) -> NDArray[np.bool_]:
    live: NDArray[np.bool_] = (
        (batch["state"] == State.READY)
        & (batch["flags"] & int(HeaderFlag.SEALED) != 0)
        & (batch["generation"] != 0)
        & (batch["length"] > 0)
        & (batch["length"] <= slot_bytes)
    )
    return live


def _name(batch: NDArray[np.void]) -> NDArray[np.uint64]:
    """64 bits that are equal for equal keys, and rarely otherwise; never 0."""
    words = batch.view(np.uint64).reshape(len(batch), HEADER_BYTES // 8)
    name = words[:, 10] ^ (words[:, 6] * np.uint64(0x9E3779B97F4A7C15))  # chunk, spec
    name ^= words[:, 2] * np.uint64(0xC2B2AE3D27D4EB4F)  # namespace
    name ^= batch["shard"].astype(np.uint64) * np.uint64(0x165667B19E3779F9)
    name ^= batch["kind"].astype(np.uint64) << np.uint64(56)
    return name | np.uint64(1)


assert RECORD_DTYPE.fields is not None
assert [RECORD_DTYPE.fields[n][1] for n in ("namespace_digest", "spec", "chunk")] == [16, 48, 80]
assert PAGE % HEADER_BYTES == 0
