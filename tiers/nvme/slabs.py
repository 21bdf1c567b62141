"""The slabs of a directory: which there are, which of their slots are free, and what they take.

The law of this module: bytes in the directory never pass the limit, because a slab is taken from
the file system whole, or not at all; and the free-space reserve is kept, because a slab is only
taken while more than that is left. Generations grow through all lives of a directory, so a place
that was deleted or reused is never mistaken for the one that is there now.

One lock guards slabs, slots and generations, and by which engine slabs are opened. It is not held
while bytes move; a slab's `users` say that somebody is in it, so that it is not closed under them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvd.chunk import HEADER_BYTES
from kvd.tiers.backend import Refused, failed
from kvd.tiers.base import Answer, Place, Reason, Usage
from kvd.tiers.nvme.adoption import Adopted
from kvd.tiers.nvme.config import NvmeConfig
from kvd.tiers.nvme.directory import MAX_SLABS, Directory
from kvd.tiers.nvme.layout import Geometry, pages, slab_bytes
from kvd.tiers.nvme.posix import Engine, PosixEngine
from kvd.tiers.nvme.refusals import refusal
from kvd.tiers.nvme.slab import Slab, table_of
from kvd.tiers.tally import Tally

log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """A slot of its own for a write, counted; its slab is in use until the write has ended."""

    slab: Slab
    slot: int
    generation: int

    @property
    def place(self) -> Place:
        return Place(self.slab.geometry.number << 32 | self.slot, self.generation)


class Slabs:
    """From any thread. `notes`: what is counted, also by others."""

    def __init__(self, config: NvmeConfig, directory: Directory, notes: Tally) -> None:
        self._config = config
        self._usual = config.usual
        self._budget = config.budget
        self._directory = directory
        self._notes = notes
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._slabs: dict[int, Slab] = {}
        self._free: dict[int, dict[int, Slab]] = {}  # slot size -> slabs that have free slots
        self._spare: Counter[int] = Counter()  # slot size -> free slots of all of them
        self._empty: Counter[int] = Counter()  # slot size -> bytes of slabs that hold nothing
        self._alien: dict[int, int] = {}  # number -> bytes: files of others
        self._engine: Engine = PosixEngine(direct=False)
        self._held = 0
        self._used = 0
        self._chunks = 0
        self._generation = 1

    def __len__(self) -> int:
        return len(self._slabs)

    def __iter__(self) -> Iterator[Slab]:
        """Those that are there now."""
        return iter(list(self._slabs.values()))

    # -- all of them ----------------------------------------------------------------------------

    def take_over(self, adopted: Adopted, engine: Engine) -> None:
        """What an earlier life left. Pre: no other call runs."""
        self._engine = engine
        self._slabs, self._alien = adopted.slabs, adopted.alien
        self._generation = max(self._generation, adopted.youngest + 1)
        self._held = sum(s.geometry.file_bytes for s in self._slabs.values())
        self._held += sum(self._alien.values())
        self._chunks = sum(slab.live for slab in self._slabs.values())
        self._used = sum(
            slab.live * (slab.geometry.slot_bytes + HEADER_BYTES) for slab in self._slabs.values()
        )
        for slab in self._slabs.values():
            self._enter(slab)

    def close(self) -> None:
        """Pre: no other call runs."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()
        self._free.clear()

    @property
    def engine(self) -> Engine:
        """By which slabs are opened."""
        return self._engine

    def fall_back(self, was: Engine, below: Engine) -> bool:
        """From one engine to another. False if that was done already."""
        with self._lock:
            if self._engine is not was:
                return False
            self._engine = below
            self._notes.add("fallbacks")
            return True

    def reopen(self, slab: Slab) -> None:
        """By the engine of now, if nobody is in it but the caller."""
        with self._lock:
            if slab.engine is self._engine or slab.users > 1:
                return
            old = slab.file
            slab.file = self._engine.open(slab.path)
            slab.engine = self._engine
            old.close()

    def write_again(self, engine: Engine) -> None:
        """What was opened to be read is opened to be written, under whoever is in it. OSError."""
        with self._lock:
            for slab in self._slabs.values():
                slab.write_again()
            self._engine = engine

    # -- a slot for a write ---------------------------------------------------------------------

    def take(self, slot_bytes: int) -> Taken:
        """Refused NO_SPACE if limit or reserve are reached."""
        while True:
            with self._lock:
                slab = next(iter(self._free.get(slot_bytes, {}).values()), None)
                if slab is not None:
                    return self._assign(slab)
            with self._growing:
                with self._lock:
                    free = self._free.get(slot_bytes)
                if not free:  # nobody else grew it, or gave one back
                    self._grow(slot_bytes)

    def _assign(self, slab: Slab) -> Taken:
        """Pre: the lock is held."""
        size = slab.geometry.slot_bytes
        slot = slab.take()
        self._spare[size] -= 1
        if not slab.free:
            self._free[size].pop(slab.geometry.number, None)
        if not slab.live:
            self._empty[size] -= slab.geometry.file_bytes
        slab.users += 1
        slab.live += 1
        self._chunks += 1
        self._used += slab.geometry.slot_bytes + HEADER_BYTES
        generation, self._generation = self._generation, self._generation + 1
        return Taken(slab, slot, generation)

    def written(self, taken: Taken) -> None:
        """From now on something lies there. Refused NOT_FOUND if its slab was lost meanwhile."""
        slab, slot, generation = taken
        with self._lock:
            self._leave(slab)
            if slab.lost:
                raise failed(Reason.NOT_FOUND, "the slab was deleted by somebody else")
            slab.generations[slot] = generation

    def not_written(self, taken: Taken, *, reuse: bool) -> None:
        """The slot is free again. `reuse` False: what its record says is not known."""
        slab = taken.slab
        gone = not slab.there()
        with self._lock:
            if not slab.lost:
                self._release(slab, taken.slot, reuse=reuse)
            if gone:
                self._lose(slab)
            self._leave(slab)

    def _grow(self, slot_bytes: int) -> None:
        """One more slab of this class, if limit and reserve allow. Pre: `_growing` is held."""
        size = slab_bytes(slot_bytes, self._usual)
        with self._lock:
            while self._held + size > self._budget:
                if not self._remove_empty(slot_bytes):
                    raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
            number = next(
                n
                for n in range(MAX_SLABS)
                if n not in self._slabs
                and n not in self._alien
                and not os.path.lexists(self._directory.slab_path(n))
                and not os.path.lexists(table_of(self._directory.slab_path(n)))
            )
            self._held += size
        try:
            if not self._directory.still_ours():
                raise failed(
                    Reason.NOT_FOUND, f"{self._directory.path} was removed", permanent=True
                )
            try:
                left = self._directory.free_bytes() - size
            except OSError as error:
                raise refusal(error) from error
            if left < self._config.reserve_bytes:
                self._notes.add("reserve_refusals")
                raise Refused(
                    Answer.NO_SPACE,
                    Reason.SPACE,
                    _no_room(size, left + size, self._config.reserve_bytes),
                )
            geometry = Geometry.of(number, slot_bytes, size, self._directory.id)
            slab = self._create(geometry)
        except BaseException:
            with self._lock:
                self._held -= size
            raise
        with self._lock:
            self._slabs[number] = slab
            self._enter(slab)

    def _create(self, geometry: Geometry) -> Slab:
        path = self._directory.slab_path(geometry.number)
        try:
            return Slab.create(geometry, path, self._engine, preallocate=self._config.preallocate)
        except OSError as error:
            raise refusal(error) from error

    def _remove_empty(self, slot_bytes: int) -> bool:
        """Give a slab that holds nothing back to the file system. Pre: the lock is held."""
        for slab in self._slabs.values():
            if not slab.live and not slab.users and slab.geometry.slot_bytes != slot_bytes:
                self._retire(slab)
                self._held -= slab.geometry.file_bytes
                return True
        return False

    # -- what lies there ------------------------------------------------------------------------

    @contextmanager
    def using(self, place: Place) -> Iterator[tuple[Slab, int]]:
        """The slab and slot of a place, held open. Refused MISS if nothing lies there any more; who
        is refused inside for want of a slab has it looked at."""
        slab = self.enter(place)
        if slab is None:
            raise Refused(Answer.MISS)
        gone = False
        try:
            yield slab, place.at & 0xFFFFFFFF
        except BaseException:
            gone = not slab.there()
            raise
        finally:
            with self._lock:
                if gone:
                    self._lose(slab)
                self._leave(slab)

    def enter(self, place: Place) -> Slab | None:
        """The slab of a place, in use until `leave` or `deleted`; None if nothing lies there."""
        with self._lock:
            slab = self._slabs.get(place.at >> 32)
            slot = place.at & 0xFFFFFFFF
            if slab is None or slot >= slab.geometry.slots or not place.generation:
                return None
            if int(slab.generations[slot]) != place.generation:
                return None
            slab.users += 1
            return slab

    def leave(self, slab: Slab) -> None:
        with self._lock:
            self._leave(slab)

    def deleted(self, slab: Slab, place: Place, *, reuse: bool) -> None:
        """Nothing lies there any more, if it was not somebody else who saw to that. `reuse` False:
        what its record says is not known."""
        slot = place.at & 0xFFFFFFFF
        with self._lock:
            self._leave(slab)
            if int(slab.generations[slot]) == place.generation:
                slab.generations[slot] = 0
                self._release(slab, slot, reuse=reuse)

    # -- how slots and slabs go -----------------------------------------------------------------

    def _release(self, slab: Slab, slot: int, *, reuse: bool) -> None:
        """Pre: the lock is held."""
        size = slab.geometry.slot_bytes
        slab.live -= 1
        if not slab.live:
            self._empty[size] += slab.geometry.file_bytes
        self._chunks -= 1
        self._used -= size + HEADER_BYTES
        if reuse:
            slab.give_back(slot)
            self._spare[size] += 1
            self._offer(slab)
        if not slab.live and not slab.users and not slab.lost and self._short():
            self._notes.add("returned_slabs")  # others need the disk: it gets what we don't use
            self._retire(slab)
            self._held -= slab.geometry.file_bytes

    def _short(self) -> bool:
        """Whether the file system has less than is kept free. One that can't be asked, for its
        directory is gone, gets nothing back."""
        try:
            return self._directory.free_bytes() < self._config.reserve_bytes
        except OSError:
            return False

    def _enter(self, slab: Slab) -> None:
        """It is there, with what it holds. Pre: the lock is held, or no other call runs."""
        size = slab.geometry.slot_bytes
        self._spare[size] += slab.free
        if not slab.live:
            self._empty[size] += slab.geometry.file_bytes
        self._offer(slab)

    def _offer(self, slab: Slab) -> None:
        """Its free slots may be taken. Pre: the lock is held, or no other call runs."""
        if slab.free and not slab.lost:
            self._free.setdefault(slab.geometry.slot_bytes, {})[slab.geometry.number] = slab

    def _lose(self, slab: Slab) -> None:
        """Somebody deleted or cut its file: all its chunks are gone. Pre: the lock is held."""
        if slab.lost or self._slabs.get(slab.geometry.number) is not slab:
            return
        log.warning("tier nvme: %s is gone, and %d chunks with it", slab.path, slab.live)
        self._notes.add("lost_slabs")
        self._notes.add("lost_chunks", slab.live)
        self._chunks -= slab.live
        self._used -= slab.live * (slab.geometry.slot_bytes + HEADER_BYTES)
        self._held -= slab.geometry.file_bytes
        slab.generations[:] = 0
        if slab.live:
            slab.live = 0
            self._empty[slab.geometry.slot_bytes] += slab.geometry.file_bytes
        self._retire(slab)

    def _leave(self, slab: Slab) -> None:
        """A call is done with its files. Pre: the lock is held."""
        slab.users -= 1
        if slab.lost and not slab.users:
            slab.close()

    def _retire(self, slab: Slab) -> None:
        """Take it out, and its files away; closed as soon as nobody is in it. Pre: the lock is
        held, nothing lies in it."""
        size = slab.geometry.slot_bytes
        self._spare[size] -= slab.free
        self._empty[size] -= slab.geometry.file_bytes
        self._slabs.pop(slab.geometry.number, None)
        self._free.get(size, {}).pop(slab.geometry.number, None)
        slab.lost = True
        try:
            slab.remove()
        except OSError as error:  # of a directory that can't be written any more
            log.warning("tier nvme: %s can't be removed: %s", slab.path, error.strerror)
        if not slab.users:
            slab.close()

    # -- telling --------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Bytes that more slabs may take."""
        return self._budget - self._held

    def room(self, length: int) -> int:
        slot_bytes = pages(length)
        size = slab_bytes(slot_bytes, self._usual)
        if size > self._budget:
            return -1
        with self._lock:
            free = self._spare[slot_bytes]
            empty = self._empty.total() - self._empty[slot_bytes]
            budget = self._budget - self._held + empty
        if free or budget < size:
            disk = budget
        else:
            try:
                disk = self._directory.free_bytes() - self._config.reserve_bytes + empty
            except OSError:
                disk = 0
        more = max(0, min(budget, disk)) // size
        return free + (more * _slots(slot_bytes, size) if more else 0)

    def to_empty(self, length: int) -> tuple[Place, ...]:
        slot_bytes = pages(length)
        size = slab_bytes(slot_bytes, self._usual)
        with self._lock:
            slabs = list(self._slabs.values())
            if any(slab.live for slab in slabs if slab.geometry.slot_bytes == slot_bytes):
                return ()
            fit = [s for s in slabs if s.geometry.file_bytes + self._budget - self._held >= size]
            if not fit:
                return ()
            least = min(fit, key=lambda s: s.live * s.geometry.slot_bytes)
            live = np.flatnonzero(least.generations)
            at, generations = least.at(live), least.generations[live]
            return tuple(map(Place, at.tolist(), generations.tolist()))

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._config.limit_bytes, self._used, self._held, self._chunks)


@lru_cache(maxsize=64)
def _slots(slot_bytes: int, size: int) -> int:
    """Of a slab of this size."""
    return Geometry.of(0, slot_bytes, size, bytes(16)).slots


def _no_room(size: int, free: int, reserve: int) -> str:
    """Why there is no slab of this size, all in bytes."""
    kept = f", and the reserve of {reserve} stays free" if reserve else ""
    return f"a slab needs {size} bytes, the file system has {max(0, free)}{kept}"
