"""NvmeBackend: which slot a chunk gets, and what happens when the disk does not do as it should.

The law of this module: bytes in the directory never pass the limit, because a slab is taken from
the file system whole, or not at all; and the free-space reserve is kept, because a slab is only
taken while more than that is left. Generations grow through all lives of a directory, so a place
that was deleted or reused is never mistaken for the one that is there now.

One lock guards slabs, slots and generations. It is not held while bytes move; a slab's `users` say
that somebody is in it, so that it is not closed under them.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import HEADER_BYTES, ChunkHeader, State
from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Found, Refused, Stored, failed
from kvd.tiers.base import Answer, Key, Place, ProbeReport, Reason, Recovered, Usage
from kvd.tiers.nvme.choose import PROBE_NAME, choose, compare, make_probe, measure
from kvd.tiers.nvme.directory import MAX_SLABS, Directory
from kvd.tiers.nvme.layout import PAGE, Geometry, OtherVersion, pages, slab_bytes
from kvd.tiers.nvme.posix import Engine, File, PosixEngine
from kvd.tiers.nvme.slab import Slab, superblock, table_of

log = logging.getLogger(__name__)

SLACK = 64 << 10  # of the limit, for the marker, the lock and the probe file
LEAST_SLAB = 1 << 20
MOST_SLAB = 1 << 30
MEASURE_BYTES = 16 << 20


class NvmeConfig(NamedTuple):
    """`slab_bytes` None: a 32nd of the limit, from 1 MiB to 1 GiB. `reserve_bytes` of the file
    system are left free. `preallocate` False: sparse slabs, which may meet a full disk."""

    directory: Path
    instance: str
    limit_bytes: int
    slab_bytes: int | None = None
    engine: str = "auto"
    reserve_bytes: int = 1 << 30
    preallocate: bool = True
    threads: int = 4


class NvmeBackend(Backend):
    delete_batch = 64

    def __init__(self, config: NvmeConfig) -> None:
        limit = config.limit_bytes
        usual = config.slab_bytes or min(MOST_SLAB, max(LEAST_SLAB, limit // 32 // PAGE * PAGE))
        if usual % PAGE or usual < 4 * PAGE:
            raise ConfigError(f"tier nvme: slab_bytes {usual} must be a multiple of {PAGE}")
        if limit < usual + SLACK:
            raise ConfigError(
                f"tier nvme: limit {limit} is too small: at least {usual + SLACK} bytes are needed "
                f"for one slab of {usual}"
            )
        self._config = config
        self._usual = usual
        self._budget = limit - SLACK
        self._directory = Directory(config.directory, config.instance)
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._slabs: dict[int, Slab] = {}
        self._free: dict[int, dict[int, Slab]] = {}  # slot size -> slabs that have free slots
        self._engine: Engine = PosixEngine(direct=False)
        self._alien: dict[int, int] = {}  # number -> bytes: slabs of other versions
        self._held = 0
        self._used = 0
        self._chunks = 0
        self._generation = 1
        self._notes: Counter[str] = Counter()

    @property
    def engine(self) -> str:
        return self._engine.name

    # -- opening --------------------------------------------------------------------------------

    def open(self) -> ProbeReport:
        try:
            self._directory.claim()
            return self._open()
        except OSError as error:
            self.close()
            raise _refusal(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> ProbeReport:
        config, directory = self._config, self._directory
        found = directory.contents()
        self._notes["foreign_files"] = found.foreign
        self._notes["removed_files"] += found.removed
        self._slabs.clear()
        self._alien = dict.fromkeys(found.taken, 0)
        why = ""
        if not directory.read_only:
            make_probe(directory.path)
            self._engine, why = choose(config.engine, directory.path, threads=config.threads)
        for number, path in sorted(found.slabs.items()):
            self._adopt(number, path)
        for number in found.tables.keys() - found.slabs.keys():
            self._orphan(number, found.tables[number])
        self._trim()
        self._recount()
        rates = self._measure()
        where = f"{directory.path}: {self._engine.name}"
        if rates[0]:
            where += f", wrote {rates[0]:.2f} GB/s, read {rates[1]:.2f} GB/s"
        if directory.read_only:
            where += ", read-only"
        if why:
            where += f" ({why})"
        log.info("tier nvme: %s; %d chunks in %d slabs", where, self._chunks, len(self._slabs))
        return ProbeReport(self._engine.name, where, *rates)

    def _adopt(self, number: int, path: Path) -> None:
        try:
            slab = Slab.open(
                path,
                self._engine,
                number,
                self._directory.id,
                read_only=self._directory.read_only,
            )
        except OtherVersion as error:
            log.warning("tier nvme: %s is left alone: %s", path, error)
            self._alien[number] = _size(path)
            self._notes["foreign_slabs"] += 1
            return
        except ValueError as error:
            log.warning("tier nvme: %s is of no use and removed: %s", path, error)
            self._notes["removed_files"] += 1
            if not self._directory.read_only:
                path.unlink(missing_ok=True)
                table_of(path).unlink(missing_ok=True)
            else:
                self._alien[number] = _size(path)
            return
        self._slabs[number] = slab

    def _orphan(self, number: int, table: Path) -> None:
        """A table without its slab: a kill between the two, or somebody took the slab away."""
        try:
            ours = superblock(table).tier == self._directory.id
        except OtherVersion:
            ours = False
        except ValueError:
            ours = True
        if ours and not self._directory.read_only:
            table.unlink(missing_ok=True)
            self._notes["removed_files"] += 1
        else:
            self._alien[number] = table.stat().st_size
            self._notes["foreign_slabs"] += not ours

    def _recount(self) -> None:
        """Take up the tables of all slabs; of two records of one key the younger counts."""
        names, places, generations = [], [], []
        for slab in list(self._slabs.values()):
            try:
                name, bad = slab.scan()
            except OSError as error:
                log.warning("tier nvme: %s is lost: %s", slab.path, error.strerror)
                self._retire(slab, remove=not self._directory.read_only)
                self._notes["lost_slabs"] += 1
                continue
            self._notes["bad_records"] += bad
            live = np.flatnonzero(slab.generations)
            names.append(name[live])
            places.append(_at(slab, live))
            generations.append(slab.generations[live])
        if names:
            self._drop_older(*(np.concatenate(part) for part in (names, places, generations)))
        self._held = sum(s.geometry.file_bytes for s in self._slabs.values())
        self._held += sum(self._alien.values())
        self._chunks = sum(slab.live for slab in self._slabs.values())
        self._used = sum(
            slab.live * (slab.geometry.slot_bytes + HEADER_BYTES) for slab in self._slabs.values()
        )
        for slab in self._slabs.values():
            self._offer(slab)

    def _drop_older(
        self, names: NDArray[np.uint64], at: NDArray[np.uint64], generations: NDArray[np.uint64]
    ) -> None:
        if not len(names):
            return
        self._generation = int(generations.max()) + 1
        order = np.lexsort((generations, names))
        older = order[:-1][names[order[:-1]] == names[order[1:]]]
        for place in at[older].tolist():
            slab, slot = self._slabs[place >> 32], place & 0xFFFFFFFF
            generation = int(slab.generations[slot])
            slab.drop(np.array([slot]))
            self._notes["older_copies"] += 1
            if not self._directory.read_only:
                slab.write_record(slot, ChunkHeader(generation=generation))

    def _trim(self) -> None:
        """A limit that is lower than it was: the emptiest slabs go, whole."""
        held = sum(s.geometry.file_bytes for s in self._slabs.values()) + sum(self._alien.values())
        if held <= self._budget or self._directory.read_only:
            return
        for slab in self._slabs.values():
            slab.scan()
        for slab in sorted(self._slabs.values(), key=lambda s: s.live * s.geometry.slot_bytes):
            if held <= self._budget:
                break
            held -= slab.geometry.file_bytes
            self._notes["trimmed_slabs"] += 1
            self._notes["trimmed_chunks"] += slab.live
            self._retire(slab, remove=True)

    def _measure(self) -> tuple[float, float]:
        room = self._budget - self._held
        free = self._directory.free_bytes() - self._config.reserve_bytes
        if self._directory.read_only or min(room, free) < MEASURE_BYTES:
            return 0.0, 0.0
        return measure(self._engine, self._directory.path, MEASURE_BYTES)

    def recover(self) -> Iterator[Recovered]:
        for slab in list(self._slabs.values()):
            for first, slots, records in slab.identities():
                taken = first + slots
                yield Recovered(records, _at(slab, taken), slab.generations[taken].copy())

    # -- put ------------------------------------------------------------------------------------

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        if self._directory.read_only:
            raise failed(Reason.READ_ONLY, "the file system is read-only", permanent=True)
        slab, slot, generation = self._take(pages(len(source)))
        wrote = False
        try:
            self._move(slab, "write", slot, source)
            if not slab.there():
                raise OSError(errno.ESTALE, "the slab was deleted or cut by somebody else")
            wrote = True
            slab.write_record(slot, header._replace(generation=generation))
        except OSError as error:
            self._undo(slab, slot, generation, wrote=wrote)
            raise _refusal(error) from error
        with self._lock:
            self._leave(slab)
            if slab.lost:
                raise failed(Reason.NOT_FOUND, "the slab was deleted by somebody else")
            slab.generations[slot] = generation
        return Stored(Place(slab.geometry.number << 32 | slot, generation))

    def _take(self, slot_bytes: int) -> tuple[Slab, int, int]:
        """A slot of its own for a write, counted from now on; its slab is in use."""
        while True:
            with self._lock:
                for slab in self._free.get(slot_bytes, {}).values():
                    return self._assign(slab)
            with self._growing:
                with self._lock:
                    if self._free.get(slot_bytes):
                        continue  # somebody else grew it, or gave one back
                self._grow(slot_bytes)

    def _assign(self, slab: Slab) -> tuple[Slab, int, int]:
        slot = slab.take()
        if not slab.free:
            self._free[slab.geometry.slot_bytes].pop(slab.geometry.number, None)
        slab.users += 1
        slab.live += 1
        self._chunks += 1
        self._used += slab.geometry.slot_bytes + HEADER_BYTES
        generation, self._generation = self._generation, self._generation + 1
        return slab, slot, generation

    def _undo(self, slab: Slab, slot: int, generation: int, *, wrote: bool) -> None:
        """A write that failed: its slot is free again once its record certainly is none."""
        clean = True
        if wrote:
            try:
                slab.write_record(slot, ChunkHeader(generation=generation))
            except OSError:
                clean = False  # what its record says is not known: the slot waits for a restart
                self._notes["lost_slots"] += 1
        lost = not slab.there()
        with self._lock:
            if not slab.lost:
                self._release(slab, slot, reuse=clean)
            if lost:
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
            left = self._directory.free_bytes() - size
            if left < self._config.reserve_bytes:
                self._notes["reserve_refusals"] += 1
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
            self._offer(slab)

    def _create(self, geometry: Geometry) -> Slab:
        path = self._directory.slab_path(geometry.number)
        try:
            return Slab.create(geometry, path, self._engine, preallocate=self._config.preallocate)
        except OSError as error:
            raise _refusal(error) from error

    def _remove_empty(self, slot_bytes: int) -> bool:
        """Give a slab that holds nothing back to the file system. Pre: the lock is held."""
        for slab in self._slabs.values():
            if not slab.live and not slab.users and slab.geometry.slot_bytes != slot_bytes:
                self._retire(slab, remove=True)
                self._held -= slab.geometry.file_bytes
                return True
        return False

    # -- get ------------------------------------------------------------------------------------

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        with self._using(place) as (slab, slot):
            try:
                self._move(slab, "read", slot, into)  # first: it is what takes time
                if not slab.there():
                    raise Refused(Answer.MISS, detail="its slab was deleted by somebody else")
                header = ChunkHeader.unpack(slab.read_record(slot))
                if header.generation != place.generation or header.state != State.READY:
                    raise ValueError("the record that lies there is another")
                if header.length != len(into):
                    raise Refused(Answer.MISS, detail="a chunk of another length lies there")
                return Found(header)
            except ValueError as error:
                self.quarantine(key, place, None)
                raise Refused(Answer.CORRUPT, detail=str(error)) from error
            except OSError as error:
                if slab.there():
                    raise _refusal(error) from error
                raise Refused(Answer.MISS, detail="its slab was cut by somebody else") from error

    @contextmanager
    def _using(self, place: Place) -> Iterator[tuple[Slab, int]]:
        """The slab and slot of a place, held open. Refused MISS if nothing lies there any more."""
        with self._lock:
            slab = self._find(place)
            if slab is None:
                raise Refused(Answer.MISS)
            slab.users += 1
        try:
            yield slab, place.at & 0xFFFFFFFF
        finally:
            gone = not slab.there()
            with self._lock:
                if gone:
                    self._lose(slab)
                self._leave(slab)

    def _find(self, place: Place) -> Slab | None:
        slab = self._slabs.get(place.at >> 32)
        slot = place.at & 0xFFFFFFFF
        if slab is None or slot >= slab.geometry.slots or not place.generation:
            return None
        return slab if int(slab.generations[slot]) == place.generation else None

    # -- delete ---------------------------------------------------------------------------------

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        return [self._delete(place, State.FREE) for _, place in items]

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        self._delete(place, State.QUARANTINED)

    def _delete(self, place: Place, state: State) -> Answer:
        """Its record says so first; then the slot is free."""
        with self._lock:
            slab = self._find(place)
            if slab is None:
                return Answer.MISS
            slab.users += 1
        slot = place.at & 0xFFFFFFFF
        problem = ""
        try:
            if not self._directory.read_only:
                slab.write_record(slot, ChunkHeader(state=state, generation=place.generation))
        except OSError as error:
            problem = error.strerror or str(error)
        with self._lock:
            self._leave(slab)
            if problem and state is State.FREE:
                log.warning("tier nvme: a record of %s can't be freed: %s", slab.path, problem)
                return Answer.FAILED
            if int(slab.generations[slot]) == place.generation:
                slab.generations[slot] = 0
                self._release(slab, slot, reuse=not problem)
        return Answer.OK

    def _release(self, slab: Slab, slot: int, *, reuse: bool) -> None:
        """Pre: the lock is held."""
        slab.live -= 1
        self._chunks -= 1
        self._used -= slab.geometry.slot_bytes + HEADER_BYTES
        if reuse:
            slab.give_back(slot)
            self._offer(slab)
        short = not slab.live and self._directory.free_bytes() < self._config.reserve_bytes
        if short and not slab.users and not slab.lost:
            self._notes["returned_slabs"] += 1  # others need the disk: it gets what we don't use
            self._retire(slab, remove=True)
            self._held -= slab.geometry.file_bytes

    def _offer(self, slab: Slab) -> None:
        if slab.free and not slab.lost:
            self._free.setdefault(slab.geometry.slot_bytes, {})[slab.geometry.number] = slab

    # -- when things go wrong -------------------------------------------------------------------

    def _move(self, slab: Slab, what: str, slot: int, memory: memoryview) -> None:
        at = slab.geometry.slot_at(slot)
        if slab.engine is not self._engine:
            self._reopen(slab)
        file = slab.file
        try:
            if what == "write":
                self._write(file, at, memory)
            else:
                file.read(at, memory)
        except OSError as error:
            below = _below(slab.engine, error)
            if below is None or not slab.there():
                raise
            other = below.open(slab.path)
            try:  # is it the engine, or the disk?
                other.write(at, memory) if what == "write" else other.read(at, memory)
            finally:
                other.close()
            self._fall_back(slab.engine, below, error)

    def _write(self, file: File, at: int, source: memoryview) -> None:
        while source:
            now = self.give_way(len(source))
            file.write(at, source[:now])
            source, at = source[now:], at + now

    def _fall_back(self, was: Engine, below: Engine, error: OSError) -> None:
        with self._lock:
            if self._engine is not was:
                return
            self._engine = below
            self._notes["fallbacks"] += 1
        log.warning(
            "tier nvme: %s failed (%s), goes on with %s", was.name, error.strerror, below.name
        )

    def _reopen(self, slab: Slab) -> None:
        with self._lock:
            if slab.engine is self._engine or slab.users > 1:
                return
            old = slab.file
            slab.file = self._engine.open(slab.path)
            slab.engine = self._engine
            old.close()

    def _lose(self, slab: Slab) -> None:
        """Somebody deleted or cut its file: all its chunks are gone. Pre: the lock is held."""
        if slab.lost or self._slabs.get(slab.geometry.number) is not slab:
            return
        log.warning("tier nvme: %s is gone, and %d chunks with it", slab.path, slab.live)
        self._notes["lost_slabs"] += 1
        self._notes["lost_chunks"] += slab.live
        self._chunks -= slab.live
        self._used -= slab.live * (slab.geometry.slot_bytes + HEADER_BYTES)
        self._held -= slab.geometry.file_bytes
        slab.generations[:] = 0
        slab.live = 0
        self._retire(slab, remove=True)

    def _leave(self, slab: Slab) -> None:
        """A call is done with its files. Pre: the lock is held."""
        slab.users -= 1
        if slab.lost and not slab.users:
            slab.close()

    def _retire(self, slab: Slab, *, remove: bool) -> None:
        """Take it out; closed as soon as nobody is in it. Pre: the lock is held, or none runs."""
        self._slabs.pop(slab.geometry.number, None)
        self._free.get(slab.geometry.slot_bytes, {}).pop(slab.geometry.number, None)
        slab.lost = True
        if remove:
            slab.remove()
        if not slab.users:
            slab.close()

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        try:
            if not self._directory.still_ours():
                self._directory.release()
                self._directory.claim()
            if write and self._directory.read_only:
                raise OSError(errno.EROFS, "the file system is read-only")
            path = self._directory.path / PROBE_NAME
            if write:
                path = make_probe(self._directory.path)
            if path.exists():
                compare(self._engine, path, write=write)
        except OSError as error:
            raise _refusal(error) from error
        return ProbeReport(self._engine.name, f"{self._directory.path}: {self._engine.name} works")

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return pages(length) + HEADER_BYTES

    def room(self, length: int) -> int:
        slot_bytes = pages(length)
        size = slab_bytes(slot_bytes, self._usual)
        if size > self._budget:
            return -1
        with self._lock:
            free = sum(slab.free for slab in self._free.get(slot_bytes, {}).values())
            empty = sum(
                slab.geometry.file_bytes
                for slab in self._slabs.values()
                if not slab.live and slab.geometry.slot_bytes != slot_bytes
            )
            budget = self._budget - self._held + empty
        if free or budget < size:
            disk = budget
        else:
            try:
                disk = self._directory.free_bytes() - self._config.reserve_bytes + empty
            except OSError:
                disk = 0
        more = max(0, min(budget, disk)) // size
        return free + (more * Geometry.of(0, slot_bytes, size, bytes(16)).slots if more else 0)

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
            at, generations = _at(least, live), least.generations[live]
            return tuple(map(Place, at.tolist(), generations.tolist()))

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._config.limit_bytes, self._used, self._held, self._chunks)

    def notes(self) -> dict[str, int]:
        return dict(self._notes)

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()
        self._free.clear()
        self._directory.release()


def _size(path: Path) -> int:
    """Bytes of a slab's files."""
    table = table_of(path)
    return path.stat().st_size + (table.stat().st_size if table.exists() else 0)


def _at(slab: Slab, slots: NDArray[np.intp]) -> NDArray[np.uint64]:
    return slots.astype(np.uint64) | np.uint64(slab.geometry.number << 32)


def _below(engine: Engine, error: OSError) -> Engine | None:
    """The engine to try when this one fails so; None if it is the disk's failure."""
    if engine.name in ("cufile", "kvikio-posix"):
        return PosixEngine(direct=True)
    if engine.name == "o_direct" and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return PosixEngine(direct=False)
    return None


_REASONS = {
    errno.EROFS: Reason.READ_ONLY,
    errno.EACCES: Reason.DENIED,
    errno.EPERM: Reason.DENIED,
    errno.ENOENT: Reason.NOT_FOUND,
    errno.EIO: Reason.IO,
    errno.ESTALE: Reason.SHORT,
}


def _refusal(error: OSError) -> Refused:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused(Answer.NO_SPACE, Reason.SPACE, what)
    reason = _REASONS.get(error.errno or 0, Reason.OTHER)
    return failed(reason, what, permanent=reason is Reason.READ_ONLY)


def _no_room(size: int, free: int, reserve: int) -> str:
    """Why there is no slab of this size, all in bytes."""
    kept = f", and the reserve of {reserve} stays free" if reserve else ""
    return f"a slab needs {size} bytes, the file system has {max(0, free)}{kept}"
