"""From a key to its row, in flat arrays.

The law of this module: a row is found by its space and all 32 bytes of its key, never by a part of
them. The table is open-addressed with linear probing, at most a quarter full, and holds row
numbers only; the keys stand in the rows. It grows by halves of a step at a time: while it does,
there are two tables, and each change moves a few entries on, so no single event pays for it. A
million keys cost 16 bytes each here, against 130 in a dictionary of bytes objects, and many keys
are looked up at once. Where an entry goes depends on `seed`, so nobody can choose keys that meet.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.core.columns import NONE, Chunks
from kvd.native import i64

Rows = NDArray[np.int64]

# Signed, and 63 bits of a hash: what a register holds, compiled. Bits that a product or a sum
# carries beyond the 63rd change none below.
_WORDS: Final = Struct("<4q")
_BITS: Final = 63
_MASK: Final = (1 << _BITS) - 1
_WORD: Final = (1 << 64) - 1
_GONE: Final = -1  # an entry of the old table that was removed
_SMALL: Final = 1 << 12  # slots of a new table
_FULL: Final = 4  # slots an entry, at least
_STEP: Final = 64  # slots of the old table that a change looks at
_FEW: Final = 4  # keys that are looked up one by one


class Index:
    """All keys of all spaces."""

    def __init__(self, chunks: Chunks, seed: int) -> None:
        self._chunks = chunks
        words = np.random.PCG64(seed).random_raw(5) | np.uint64(1)
        self._factors = words[:4]
        signed: list[int] = words.view(np.int64).tolist()
        self._a: i64 = signed[0]
        self._b: i64 = signed[1]
        self._c: i64 = signed[2]
        self._d: i64 = signed[3]
        self._of_space: i64 = signed[4]
        self._space_factor = words[4]
        self._count = 0
        self._make(_SMALL)
        self._old: NDArray[np.int32] | None = None
        self._old_shift: i64 = 0
        self._old_at = 0

    def __len__(self) -> int:
        return self._count

    def _make(self, slots: int) -> None:
        self._table = np.zeros(slots, np.int32)  # row + 1; 0: empty
        self._view = self._table.data
        self._mask: i64 = slots - 1
        self._shift: i64 = _BITS - (slots.bit_length() - 1)

    # -- one key --------------------------------------------------------------------------------

    def _hash(self, space: int, keys: bytes | memoryview, at: int = 0) -> i64:
        """Of the key that stands at `at`."""
        words: tuple[i64, i64, i64, i64] = _WORDS.unpack_from(keys, at)
        a, b, c, d = words
        of_space: i64 = space
        mixed = a * self._a + b * self._b + c * self._c + d * self._d + of_space * self._of_space
        return mixed & _MASK

    def _same(self, row: int, space: int, key: bytes) -> bool:
        chunks = self._chunks
        return bool(chunks.space[row] == space and chunks.key_of(row) == key)

    def hash(self, space: int, key: bytes) -> i64:
        """What `find` and `put` of this key begin with: who does both works it out once."""
        return self._hash(space, key)

    def get(self, space: int, key: bytes) -> int:
        """Row, or NONE."""
        return self.find(self._hash(space, key), space, key)

    def find(self, hash_: i64, space: int, key: bytes) -> int:
        """`get` of a key with this hash."""
        view, mask = self._view, self._mask
        slot = hash_ >> self._shift
        while entry := view[slot]:
            if self._same(entry - 1, space, key):
                row: int = entry - 1
                return row
            slot = (slot + 1) & mask
        if self._old is not None:
            slot = self._find_old(hash_, space, key)
            if slot >= 0:
                return int(self._old[slot]) - 1
        return NONE

    def _find_old(self, hash_: i64, space: int, key: bytes) -> int:
        """Slot of a key in the old table, or -1."""
        old = self._old
        assert old is not None
        mask = len(old) - 1
        slot = hash_ >> self._old_shift
        while entry := int(old[slot]):
            if entry != _GONE and self._same(entry - 1, space, key):
                return slot
            slot = (slot + 1) & mask
        return -1

    def put(self, row: int, hash_: i64 = _GONE) -> None:
        """Enter a row under its space and key, which may be known to have this hash. Pre: the key
        is not here."""
        if _FULL * (self._count + 1) > self._mask + 1:
            self._grow()
        self._put(row, hash_)
        self._count += 1
        if self._old is not None:
            self._move_on()

    def _put(self, row: int, hash_: i64 = _GONE) -> None:
        view, mask = self._view, self._mask
        if hash_ < 0:
            hash_ = self._hash(self._chunks.space[row], self._chunks.key, 32 * row)
        slot = hash_ >> self._shift
        while view[slot]:
            slot = (slot + 1) & mask
        view[slot] = row + 1

    def remove(self, row: int) -> None:
        """Take a row out. Pre: it is here, and its space and key still stand in it."""
        chunks = self._chunks
        space = chunks.space[row]
        hash_ = self._hash(space, chunks.key, 32 * row)
        if self._old is not None:
            slot = self._find_old(hash_, space, chunks.key_of(row))
            if slot >= 0:
                self._old[slot] = _GONE
        view, mask = self._view, self._mask
        slot = hash_ >> self._shift
        while (entry := view[slot]) and entry != row + 1:
            slot = (slot + 1) & mask
        if entry:
            self._close_gap(slot)
        self._count -= 1
        if self._old is not None:
            self._move_on()

    def _close_gap(self, gap: int) -> None:
        """Empty a slot; entries behind it that could stand in it move up."""
        chunks, view, mask, shift = self._chunks, self._view, self._mask, self._shift
        slot = gap
        while True:
            view[gap] = 0
            while True:
                slot = (slot + 1) & mask
                entry = view[slot]
                if not entry:
                    return
                row = entry - 1
                home = self._hash(chunks.space[row], chunks.key, 32 * row) >> shift
                if (slot - home) & mask >= (slot - gap) & mask:
                    break
            view[gap] = entry
            gap = slot

    # -- growth ---------------------------------------------------------------------------------

    def _grow(self) -> None:
        while self._old is not None:  # can't be: a table fills more slowly than it is moved
            self._move_on()
        self._old, self._old_shift, self._old_at = self._table, self._shift, 0
        self._make(2 * len(self._table))

    def _move_on(self) -> None:
        """Move the next few entries of the old table to the new one. They stay in the old one
        too, so that it can still be searched."""
        old = self._old
        assert old is not None
        part = old[self._old_at : self._old_at + _STEP]
        for entry in part[part > 0].tolist():
            self._put(entry - 1)
        self._old_at += _STEP
        if self._old_at >= len(old):
            self._old = None

    # -- many keys ------------------------------------------------------------------------------

    def get_many(self, space: int, hashes: bytes) -> Rows:
        """Rows (or NONE) of packed 32-byte keys."""
        if len(hashes) <= 32 * _FEW:
            get = self.get
            return np.array(
                [get(space, hashes[at : at + 32]) for at in range(0, len(hashes), 32)], np.int64
            )
        words = np.frombuffer(hashes, np.uint64).reshape(-1, 4)
        mixed = self.mix(words, space)
        rows = self._search(self._table, self._shift, mixed, words, space)
        if self._old is not None:
            missing = np.flatnonzero(rows < 0)
            if len(missing):
                rows[missing] = self._search(
                    self._old, self._old_shift, mixed[missing], words[missing], space
                )
        return rows

    def mix(self, words: NDArray[np.uint64], space: int) -> NDArray[np.uint64]:
        """64-bit hashes of keys, given as [keys, 4] words."""
        added = np.uint64(space * int(self._space_factor) & _WORD)
        mixed: NDArray[np.uint64] = words @ self._factors + added
        return mixed & np.uint64(_MASK)

    def _search(
        self,
        table: NDArray[np.int32],
        shift: int,
        mixed: NDArray[np.uint64],
        words: NDArray[np.uint64],
        space: int,
    ) -> Rows:
        chunks = self._chunks
        mask = len(table) - 1
        found = np.full(len(mixed), NONE, np.int64)
        left: Rows | None = None  # positions that are still looked for; None: all
        slot = (mixed >> np.uint64(shift)).astype(np.int64)
        while True:
            entry = table[slot]
            row = entry.astype(np.int64) - 1
            row[row < 0] = NONE  # empty or gone: the last row, which is in no space
            wanted = words if left is None else words[left]
            match = (chunks.np_key[row] == wanted).all(axis=1)
            match &= chunks.np_space[row] == space
            if left is None:
                found[match] = row[match]
                left = np.flatnonzero(~match & (entry != 0))
                slot = slot[left]
            else:
                found[left[match]] = row[match]
                more = ~match & (entry != 0)
                left, slot = left[more], slot[more]
            if not len(left):
                return found
            slot = (slot + 1) & mask

    def load(self, first: int, count: int) -> None:
        """Enter the rows first..first+count-1 at once, for adoption. Pre: their keys differ from
        each other and from those that are here."""
        need = _FULL * (self._count + count)
        if need > len(self._table):
            while self._old is not None:  # single rows before these may have begun a move
                self._move_on()
            entered = self._table[self._table > 0].tolist()
            self._make(1 << (need - 1).bit_length())
            for entry in entered:
                self._put(entry - 1)
        chunks = self._chunks
        rows = np.arange(first, first + count)
        spaces = chunks.np_space[rows].astype(np.uint64)
        mixed = chunks.np_key[rows] @ self._factors
        mixed += spaces * self._space_factor
        slot = ((mixed & np.uint64(_MASK)) >> np.uint64(self._shift)).astype(np.int64)
        while len(rows):
            free = self._table[slot] == 0
            self._table[slot[free]] = rows[free] + 1
            lost = self._table[slot] != rows + 1
            rows, slot = rows[lost], (slot[lost] + 1) & self._mask
        self._count += count
