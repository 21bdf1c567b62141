"""Taking over what an earlier life left in the directory.

The law of this module: each file that has the name of a slab or a table is taken up, removed
because it is of no use, or left alone because it is somebody else's, and then its bytes count.
Of two records of one key the younger counts, and the older is erased. A limit that is lower than it
was holds before the first store. In a directory that can only be read nothing is removed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import ChunkHeader
from kvd.tiers.nvme.directory import Contents, Directory
from kvd.tiers.nvme.layout import OtherVersion
from kvd.tiers.nvme.posix import Engine
from kvd.tiers.nvme.slab import Slab, superblock, table_of
from kvd.tiers.tally import Tally

log = logging.getLogger(__name__)


class Adopted(NamedTuple):
    slabs: dict[int, Slab]
    alien: dict[int, int]  # number -> bytes: files that are left alone
    youngest: int  # the highest generation that was found; 0 if none was


class Adoption:
    """Runs once, before the slabs are used. `budget`: bytes that all files may take. `notes`: what
    is counted."""

    def __init__(self, directory: Directory, engine: Engine, budget: int, notes: Tally) -> None:
        self._directory = directory
        self._engine = engine
        self._budget = budget
        self._notes = notes
        self._slabs: dict[int, Slab] = {}
        self._alien: dict[int, int] = {}
        self._youngest = 0

    def run(self, found: Contents) -> Adopted:
        """OSError if it can't be told what lies there; then none of the slabs is open."""
        self._alien.update(dict.fromkeys(found.taken, 0))
        try:
            for number, path in sorted(found.slabs.items()):
                self._adopt(number, path)
            for number in found.tables.keys() - found.slabs.keys():
                self._orphan(number, found.tables[number])
            self._trim()
            self._scan()
        except BaseException:
            for slab in self._slabs.values():
                slab.close()
            raise
        return Adopted(self._slabs, self._alien, self._youngest)

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
            self._notes.add("foreign_slabs")
            return
        except ValueError as error:
            log.warning("tier nvme: %s is of no use and removed: %s", path, error)
            self._notes.add("removed_files")
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
            self._notes.add("removed_files")
        else:
            self._alien[number] = table.stat().st_size
            self._notes.add("foreign_slabs", not ours)

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
            self._notes.add("trimmed_slabs")
            self._notes.add("trimmed_chunks", slab.live)
            self._let_go(slab)

    def _scan(self) -> None:
        """Take up the tables of all slabs."""
        names, places, generations = [], [], []
        for slab in list(self._slabs.values()):
            try:
                name, bad = slab.scan()
            except OSError as error:
                log.warning("tier nvme: %s is lost: %s", slab.path, error.strerror)
                self._let_go(slab)
                self._notes.add("lost_slabs")
                continue
            self._notes.add("bad_records", bad)
            live = np.flatnonzero(slab.generations)
            names.append(name[live])
            places.append(slab.at(live))
            generations.append(slab.generations[live])
        if names:
            self._drop_older(*(np.concatenate(part) for part in (names, places, generations)))

    def _drop_older(
        self, names: NDArray[np.uint64], at: NDArray[np.uint64], generations: NDArray[np.uint64]
    ) -> None:
        if not len(names):
            return
        self._youngest = int(generations.max())
        order = np.lexsort((generations, names))
        older = order[:-1][names[order[:-1]] == names[order[1:]]]
        for place in at[older].tolist():
            slab, slot = self._slabs[place >> 32], place & 0xFFFFFFFF
            generation = int(slab.generations[slot])
            slab.drop(np.array([slot]))
            self._notes.add("older_copies")
            if not self._directory.read_only:
                slab.write_record(slot, ChunkHeader(generation=generation))

    def _let_go(self, slab: Slab) -> None:
        del self._slabs[slab.geometry.number]
        if not self._directory.read_only:
            slab.remove()
        slab.close()


def _size(path: Path) -> int:
    """Bytes of a slab's files."""
    table = table_of(path)
    return path.stat().st_size + (table.stat().st_size if table.exists() else 0)
