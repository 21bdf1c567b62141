"""Chunks and their shards as rows of flat arrays.

The law of this module: a chunk is a small integer and so is a cell (one shard of a chunk); what is
known of either stands in arrays, never in an object. Each array is there twice: as numpy array
for whole lookups (`np_...`) and as memoryview for single values, which costs a third of a numpy
scalar. Rows are made of untouched zero pages, so room for many costs nothing.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import NO_PARENT

NONE: Final = -1
_KEY: Final = Struct("32s")  # takes half the time of a slice of a view
_DIGEST: Final = Struct("16s")

# states of a cell
ABSENT: Final = 0
WRITING: Final = 1
READY: Final = 2
BAD: Final = 4  # quarantined

# marks of a cell
SEALED: Final = 1
UNVERIFIED: Final = 2  # adopted with a digest that nobody has compared yet
ADOPTED: Final = 4  # its chunk is of an earlier life
MOVING: Final = 8
SEALING: Final = 16
EARLIER: Final = 32  # its slot is of an earlier life: not to be used again during the hold

# tallies of a chunk
HERE: Final = 1  # has shards or writers in DRAM: counted as a kid of its parent
ALONE: Final = 2  # only in tiers below: counted in its space
BOTH: Final = 4  # here and below: counted for its tenant


def column(rows: int, dtype: Any, fill: int = 0) -> tuple[NDArray[Any], memoryview]:
    """An array of zeros, and the same memory for single values."""
    values = np.zeros(rows, dtype=dtype)
    if fill:
        values[:] = fill
    return values, values.data


class Chunks:
    """One row a chunk id. The row after the last stands for "no parent": it is always there."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        n = rows + 1
        self.np_key = np.zeros((n, 4), np.uint64)  # chunk hash
        self.key = self.np_key.reshape(-1).view(np.uint8).data
        self.word = self.np_key.reshape(-1).data  # four a key
        self.np_print = np.zeros((n, 2), np.uint64)  # fingerprint
        self.print = self.np_print.reshape(-1).view(np.uint8).data
        self.np_parent, self.parent = column(n, np.int32)  # id or NONE
        self.np_child, self.child = column(n, np.int32)  # first child
        self.np_next, self.next = column(n, np.int32)  # sibling
        self.np_prev, self.prev = column(n, np.int32)
        self.np_cell, self.cell = column(n, np.int32)  # first of its cells, or NONE
        self.np_leases, self.leases = column(n, np.int32)
        self.np_hits, self.hits = column(n, np.uint32)
        self.np_index, self.index = column(n, np.uint32)  # place in its chain
        self.np_flags, self.flags = column(n, np.uint32)
        self.np_born, self.born = column(n, np.uint32)  # Unix seconds
        self.np_last, self.last = column(n, np.int64)  # last use, ns
        self.np_tokens, self.tokens = column(n, np.uint16)
        self.np_space, self.space = column(n, np.uint16)  # number of its space; 0: row is free
        self.np_ready, self.ready = column(n, np.uint16)  # shards that are ready
        self.np_writing, self.writing = column(n, np.uint16)
        self.np_bad, self.bad = column(n, np.uint16)  # shards in quarantine
        # only touched where there are tiers below
        self.np_below, self.below = column(n, np.uint16)  # shards that are ready in them, all told
        self.np_full, self.full = column(n, np.uint8)  # bit t: tier t has all shards
        self.np_warm, self.warm = column(n, np.uint8)  # hits while it was not in DRAM for good
        self.np_kids, self.kids = column(n, np.int32)  # children with something in DRAM
        self.np_tally, self.tally = column(n, np.uint8)  # what of it is counted: HERE, ALONE, BOTH
        self.odd_pos0: dict[int, int] = {}  # where pos0 is not index * chunk_tokens
        self._free = array("i")
        self._used = 0
        self.ready[rows] = 1

    @property
    def used(self) -> int:
        """Rows up to here may be in use."""
        return self._used

    def key_of(self, row: int) -> bytes:
        """The 32-byte hash of a row."""
        key: bytes = _KEY.unpack_from(self.key, 32 * row)[0]
        return key

    def parent_key_of(self, row: int) -> bytes:
        """That of its parent, or NO_PARENT."""
        parent = self.parent[row]
        if parent == NONE:
            return NO_PARENT
        return self.key_of(parent)

    def print_of(self, row: int) -> bytes:
        """Its 16-byte fingerprint."""
        told: bytes = _DIGEST.unpack_from(self.print, 16 * row)[0]
        return told

    def set_print(self, row: int, told: bytes) -> None:
        """Pre: 16 bytes."""
        _DIGEST.pack_into(self.print, 16 * row, told)

    def set_key(self, row: int, key: bytes) -> None:
        """Pre: 32 bytes."""
        _KEY.pack_into(self.key, 32 * row, key)

    def take(self) -> int:
        """A free row, or NONE. It has neither shards nor writers."""
        if self._free:
            return self._free.pop()
        row = self._used
        if row >= self.rows:
            return NONE
        self._used = row + 1
        return row

    def take_rows(self, count: int) -> int:
        """The first of `count` rows that were never used, or NONE. For adoption."""
        row = self._used
        if row + count > self.rows:
            return NONE
        self._used = row + count
        return row

    def give(self, row: int) -> None:
        """Pre: it has neither shards nor writers."""
        self.space[row] = 0
        if self.odd_pos0:
            self.odd_pos0.pop(row, None)
        self._free.append(row)


class Cells:
    """One row a shard of a chunk; the shards of a chunk stand together."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.np_record, self.record = column(rows, np.uint32)
        self.np_generation, self.generation = column(rows, np.uint64)
        self.np_chunk, self.chunk = column(rows, np.int32)
        self.np_state, self.state = column(rows, np.uint8)
        self.np_marks, self.marks = column(rows, np.uint8)
        self.np_digest = np.zeros((rows, 16), np.uint8)
        self.digest = self.np_digest.reshape(-1).data
        self._free: dict[int, array[int]] = {}
        self._used = 0

    def take(self, count: int, chunk: int) -> int:
        """The first of `count` absent cells of a chunk, or NONE."""
        free = self._free.get(count)
        if free:
            first = free.pop()
        else:
            first = self._used
            if first + count > self.rows:
                return NONE
            self._used = first + count
        owner = self.chunk
        for cell in range(first, first + count):
            owner[cell] = chunk
        return first

    @property
    def used(self) -> int:
        """Cells up to here may be in use."""
        return self._used

    @property
    def left(self) -> int:
        """Cells that were never used."""
        return self.rows - self._used

    def take_rows(self, count: int) -> int:
        """The first of `count` cells that were never used, or NONE. For adoption."""
        first = self._used
        if first + count > self.rows:
            return NONE
        self._used = first + count
        return first

    def give(self, first: int, count: int) -> None:
        """Pre: all of them are absent."""
        marks = self.marks
        for cell in range(first, first + count):
            marks[cell] = 0
        free = self._free.get(count)
        if free is None:
            free = self._free[count] = array("i")
        free.append(first)

    def digest_of(self, cell: int) -> bytes:
        digest: bytes = _DIGEST.unpack_from(self.digest, 16 * cell)[0]
        return digest

    def set_digest(self, cell: int, digest: bytes) -> None:
        """Pre: 16 bytes."""
        _DIGEST.pack_into(self.digest, 16 * cell, digest)
