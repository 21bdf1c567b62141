"""NvmeBackend: how a chunk gets to its slot and goes, and what if a disk does not do as it should.

The law of this module: a write is told only after its record is there; what one that failed leaves
behind is no record, or a slot that is not used again in this life. An error is the engine's only if
the one below it does the same work, and then all calls go on with that; otherwise it is the disk's.

It holds no lock: what calls share stands in slabs.py.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence

from kvd.chunk import HEADER_BYTES, ChunkHeader, State
from kvd.tiers.backend import Backend, Found, Refused, Stored, failed
from kvd.tiers.base import Answer, Key, Place, ProbeReport, Reason, Recovered, Usage
from kvd.tiers.nvme.adoption import Adoption
from kvd.tiers.nvme.choose import PROBE_NAME, choose, compare, make_probe, measure
from kvd.tiers.nvme.config import NvmeConfig, check
from kvd.tiers.nvme.directory import Directory
from kvd.tiers.nvme.layout import pages
from kvd.tiers.nvme.posix import Engine, File, PosixEngine
from kvd.tiers.nvme.refusals import refusal
from kvd.tiers.nvme.slab import Slab
from kvd.tiers.nvme.slabs import Slabs, Taken
from kvd.tiers.tally import Tally

log = logging.getLogger(__name__)

MEASURE_BYTES = 16 << 20


class NvmeBackend(Backend):
    delete_batch = 64

    def __init__(self, config: NvmeConfig) -> None:
        check(config)
        self._config = config
        self._directory = Directory(config.directory, config.instance)
        self._notes = Tally()
        self._slabs = Slabs(config, self._directory, self._notes)

    @property
    def engine(self) -> str:
        return self._slabs.engine.name

    # -- opening --------------------------------------------------------------------------------

    def open(self) -> ProbeReport:
        try:
            self._directory.claim()
            return self._open()
        except OSError as error:
            self.close()
            raise refusal(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> ProbeReport:
        config, directory = self._config, self._directory
        found = directory.contents()
        self._notes.set("foreign_files", found.foreign)
        self._notes.add("removed_files", found.removed)
        engine, why = self._slabs.engine, ""
        if not directory.read_only:
            make_probe(directory.path)
            engine, why = choose(config.engine, directory.path, threads=config.threads)
        adopted = Adoption(directory, engine, config.budget, self._notes).run(found)
        self._slabs.take_over(adopted, engine)
        rates = self._measure(engine)
        where = f"{directory.path}: {engine.name}"
        if rates[0]:
            where += f", wrote {rates[0]:.2f} GB/s, read {rates[1]:.2f} GB/s"
        if directory.read_only:
            where += ", read-only"
        if why:
            where += f" ({why})"
        chunks = self._slabs.usage().chunks
        log.info("tier nvme: %s; %d chunks in %d slabs", where, chunks, len(self._slabs))
        return ProbeReport(engine.name, where, *rates)

    def _measure(self, engine: Engine) -> tuple[float, float]:
        free = self._directory.free_bytes() - self._config.reserve_bytes
        if self._directory.read_only or min(self._slabs.left, free) < MEASURE_BYTES:
            return 0.0, 0.0
        return measure(engine, self._directory.path, MEASURE_BYTES)

    def recover(self) -> Iterator[Recovered]:
        for slab in self._slabs:
            for first, slots, records in slab.identities():
                taken = first + slots
                yield Recovered(records, slab.at(taken), slab.generations[taken].copy())

    # -- put ------------------------------------------------------------------------------------

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        if self._directory.read_only:
            raise failed(Reason.READ_ONLY, "the file system is read-only", permanent=True)
        taken = self._slabs.take(pages(len(source)))
        slab, slot, generation = taken
        wrote = False
        try:
            self._move(slab, "write", slot, source)
            if not slab.there_lately():
                raise OSError(errno.ESTALE, "the slab was deleted or cut by somebody else")
            wrote = True
            slab.write_record(slot, header._replace(generation=generation))
        except OSError as error:
            self._undo(taken, wrote=wrote)
            raise refusal(error) from error
        except BaseException:  # a fault of an engine's: the slot is free all the same
            self._undo(taken, wrote=wrote)
            raise
        self._slabs.written(taken)
        return Stored(taken.place)

    def _undo(self, taken: Taken, *, wrote: bool) -> None:
        """A write that failed: its slot is free again once its record certainly is none."""
        clean = True
        if wrote:
            try:
                taken.slab.write_record(taken.slot, ChunkHeader(generation=taken.generation))
            except OSError:
                clean = False  # what its record says is not known: the slot waits for a restart
                self._notes.add("lost_slots")
        self._slabs.not_written(taken, reuse=clean)

    # -- get ------------------------------------------------------------------------------------

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        with self._slabs.using(place) as (slab, slot):
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
                    raise refusal(error) from error
                raise Refused(Answer.MISS, detail="its slab was cut by somebody else") from error

    # -- delete ---------------------------------------------------------------------------------

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        return [self._delete(place, State.FREE) for _, place in items]

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        self._delete(place, State.QUARANTINED)

    def _delete(self, place: Place, state: State) -> Answer:
        """Its record says so first; then the slot is free."""
        slab = self._slabs.enter(place)
        if slab is None:
            return Answer.MISS
        problem = ""
        try:
            if not self._directory.read_only:
                record = ChunkHeader(state=state, generation=place.generation)
                slab.write_record(place.at & 0xFFFFFFFF, record)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem and state is State.FREE:
            self._slabs.leave(slab)
            log.warning("tier nvme: a record of %s can't be freed: %s", slab.path, problem)
            return Answer.FAILED
        self._slabs.deleted(slab, place, reuse=not problem)
        return Answer.OK

    # -- when an engine fails -------------------------------------------------------------------

    def _move(self, slab: Slab, what: str, slot: int, memory: memoryview) -> None:
        """Pre: the caller is in the slab."""
        at = slab.geometry.slot_at(slot)
        if slab.engine is not self._slabs.engine:
            self._slabs.reopen(slab)
        file = slab.file
        try:
            if what == "write":
                self._write(file, at, memory)
            else:
                file.read(at, memory)
        except OSError as error:
            below = _below(slab.engine, error, what)
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
        if self._slabs.fall_back(was, below):
            log.warning(
                "tier nvme: %s failed (%s), goes on with %s", was.name, error.strerror, below.name
            )

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        try:
            if not self._directory.still_ours():
                self._directory.release()
                self._directory.claim()
            if write and self._directory.read_only:
                self._write_again()
            path = self._directory.path / PROBE_NAME
            if write:
                path = make_probe(self._directory.path)
            if path.exists():
                compare(self._slabs.engine, path, write=write)
        except OSError as error:
            raise refusal(error) from error
        return ProbeReport(self.engine, f"{self._directory.path}: {self.engine} works")

    def _write_again(self) -> None:
        """It could only be read at the start, and may be written by now. OSError if not."""
        directory = self._directory
        if not directory.take_for_writing():
            raise OSError(errno.EROFS, "the file system is read-only")
        make_probe(directory.path)
        config = self._config
        engine, _ = choose(config.engine, directory.path, threads=config.threads)
        self._slabs.write_again(engine)
        directory.read_only = False
        log.info("tier nvme: %s can be written again: %s", directory.path, engine.name)

    # -- telling --------------------------------------------------------------------------------

    def cost(self, length: int) -> int:
        return pages(length) + HEADER_BYTES

    def room(self, length: int) -> int:
        return self._slabs.room(length)

    def to_empty(self, length: int) -> tuple[Place, ...]:
        return self._slabs.to_empty(length)

    def usage(self) -> Usage:
        return self._slabs.usage()

    def notes(self) -> dict[str, int]:
        return self._notes.counts()

    def close(self) -> None:
        self._slabs.close()
        self._directory.release()


def _below(engine: Engine, error: OSError, what: str) -> Engine | None:
    """The engine to try when this one fails so; None if it is the disk's failure. A file system
    that has become read-only may refuse direct reads and no others: Linux looks for dirty pages
    first, and ext4 answers that with EROFS."""
    if engine.name in ("cufile", "kvikio-posix"):
        return PosixEngine(direct=True)
    if engine.name == "o_direct" and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return PosixEngine(direct=False)
    if engine.name == "o_direct" and error.errno == errno.EROFS and what == "read":
        return PosixEngine(direct=False)
    return None
