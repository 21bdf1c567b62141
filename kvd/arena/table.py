"""The record table of an arena: who lies where. Only the daemon writes it.

The law of this module: a record is whole or absent, also after SIGKILL at any instruction (the
redo record, see layout.py); its generation is stored first, as one aligned 8-byte store, so that a
reader that compares it after its last byte can't miss a change; no write to the table can meet a
page that the file system has no memory for, because pages are reserved before a slab is assigned,
and stay: nor can a reader.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import NamedTuple

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvd.arena.layout import (
    CLEAN,
    EPOCH,
    HORIZON,
    MAX_SLABS,
    REDO,
    REDO_AT,
    REGISTRY_AT,
    REGISTRY_BYTES,
    RESERVED,
    RESERVED_SLOT,
    SLABS_AT,
    SUPER_WORDS,
    Geometry,
    pack_descriptor,
    unpack_descriptor,
)
from kvd.arena.mapping import Mapping
from kvd.chunk import (
    HEADER_BYTES,
    IDENTITY_DTYPE,
    RECORD_DTYPE,
    ChunkHeader,
    verify_table,
)
from kvd.chunk.header import CHECK_AT, check_of
from kvd.errors import ArenaError

_BATCH = 16384  # records read at a time in a scan: 8 MiB
_AT: dict[str, int] = {name: place[1] for name, place in (RECORD_DTYPE.fields or {}).items()}
_STATE_AT, _GENERATION_AT, _FLAGS_AT, _DIGEST_AT = (
    _AT[name] for name in ("state", "generation", "flags", "digest")
)
_U32 = struct.Struct("<I")
_REGISTRY_HALF = REGISTRY_BYTES // 2
_REGISTRY_HEAD = struct.Struct("<QQQ")  # sequence, length, check of both and the body


class Scan(NamedTuple):
    """What a table holds. Records are copies, in the order of their index."""

    records: NDArray[np.void]  # IDENTITY_DTYPE: those that hold and fit their slot, free ones too
    indices: NDArray[np.uint32]  # their record numbers
    invalid: NDArray[np.uint32]  # record numbers of those that were written but do not hold
    bad_slabs: tuple[int, ...]  # slabs whose descriptor did not hold; they are unassigned now


class Registry(NamedTuple):
    """Names for digests, so that what was adopted can be shown and is known again."""

    namespaces: list[str]
    specs: list[bytes]  # encoded KVSpecs


class RecordTable:
    """The table file, mapped read-write by its one owner."""

    __deletable__ = ("records", "_words", "_slabs")  # says the compiler's own rule

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self._fd = fd
        self._geometry = geometry
        self._mapping = Mapping(fd, geometry.table_bytes, writable=True)
        raw = self._mapping.bytes
        self._raw = raw.data
        self._quads: memoryview[int] = self._raw[: len(raw) // 8 * 8].cast("Q")
        # the record that is on its way in
        self._redo = self._raw[REDO_AT : REDO_AT + HEADER_BYTES]
        self._redo_words: memoryview[int] = self._redo.cast("Q")
        self._checked = self._redo[:CHECK_AT]
        self._records = geometry.records
        self._per_slab = geometry.records_per_slab
        self._begin = geometry.record_at(0)
        self._words = raw[: 8 * SUPER_WORDS].view("<u8")
        self._slabs = raw[SLABS_AT : SLABS_AT + 8 * MAX_SLABS].view("<u8")[: geometry.slab_count]
        self.records: NDArray[np.void] = raw[self._begin :].view(RECORD_DTYPE)
        self._sizes = [0] * geometry.slab_count
        self._slots = [0] * geometry.slab_count
        self._bad_slabs: list[int] = []

    def close(self) -> None:
        self._checked.release()
        self._redo_words.release()
        self._redo.release()
        self._quads.release()
        self._raw.release()
        del self.records, self._words, self._slabs
        self._mapping.close()

    # -- words of the superblock ----------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return int(self._words[EPOCH])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._words[EPOCH] = value

    @property
    def lease_horizon(self) -> int:
        return int(self._words[HORIZON])

    @lease_horizon.setter
    def lease_horizon(self, value: int) -> None:
        self._words[HORIZON] = value

    @property
    def reserved(self) -> int:
        return int(self._words[RESERVED])

    @reserved.setter
    def reserved(self, value: int) -> None:
        self._words[RESERVED] = value

    @property
    def clean(self) -> bool:
        return bool(self._words[CLEAN])

    @clean.setter
    def clean(self, value: bool) -> None:
        self._words[CLEAN] = int(value)

    # -- records --------------------------------------------------------------------------------

    def write(self, record: int, header: ChunkHeader) -> None:
        """Replace the record of a slot. ArenaError if no assigned slab has such a slot, ValueError
        if a field does not fit."""
        self._check(record)
        self._redo[:] = header.pack()
        self._store(record)

    def patch(
        self,
        record: int,
        state: int | None = None,
        generation: int | None = None,
        flags: int | None = None,
        digest: bytes | None = None,
    ) -> None:
        """Change some fields of a record that is there. ArenaError if none was ever written."""
        self._check(record)
        at = self._begin + record * HEADER_BYTES
        raw, words = self._redo, self._redo_words
        raw[:] = self._raw[at : at + HEADER_BYTES]
        if not words[0]:
            raise ArenaError(f"record {record} was never written, so it can't be changed")
        if state is not None:
            raw[_STATE_AT] = state
        if generation is not None:
            words[_GENERATION_AT >> 3] = generation
        if flags is not None:
            _U32.pack_into(raw, _FLAGS_AT, flags)
        if digest is not None:
            if len(digest) != 16:
                raise ValueError(f"a payload digest has 16 bytes, got {len(digest)}")
            raw[_DIGEST_AT : _DIGEST_AT + 16] = digest
        words[CHECK_AT >> 3] = check_of(self._checked)
        self._store(record)

    def recover(self) -> None:
        """Take over from an owner that was killed: finish the record that it was writing, and
        unassign slabs whose descriptor does not hold."""
        pending = int(self._words[REDO])
        raw = self._raw[REDO_AT : REDO_AT + HEADER_BYTES]
        if 1 <= pending <= self._geometry.records and verify_table(
            np.frombuffer(raw, RECORD_DTYPE)
        ):
            at = self._geometry.record_at(pending - 1)
            self._raw[at : at + HEADER_BYTES] = bytes(raw)
        self._words[REDO] = 0
        for slab, word in enumerate(self._slabs):
            try:
                self._sizes[slab] = unpack_descriptor(slab, int(word), self._geometry)
                self._slots[slab] = self._geometry.slots(self._sizes[slab])
            except ValueError:
                self._slabs[slab] = self._sizes[slab] = 0
                self._bad_slabs.append(slab)

    def _store(self, record: int) -> None:
        """What was made ready as the redo record goes into the table. Until its number is there, it
        may be anything."""
        # Against SIGKILL, program order is enough: what this process stored stays in the page.
        # Against readers on other CPUs Python has no barrier to give: x86 keeps stores in order;
        # on weaker machines the reply that follows through a socket orders them.
        quads, at = self._quads, self._begin + record * HEADER_BYTES
        quads[REDO] = record + 1
        quads[(at + _GENERATION_AT) >> 3] = self._redo_words[_GENERATION_AT >> 3]
        self._raw[at : at + HEADER_BYTES] = self._redo
        quads[REDO] = 0

    def _check(self, record: int) -> None:
        if not 0 <= record < self._records:
            raise ArenaError(f"record {record} is beyond the table's {self._records}")
        # Only the records of a class's slots have memory; touching others could be SIGBUS.
        slab = record // self._per_slab
        if record - slab * self._per_slab >= self._slots[slab]:
            raise ArenaError(
                f"record {record} is of no slot: slab {slab} has {self._slots[slab]} slots now"
            )

    # -- slabs ----------------------------------------------------------------------------------

    def slot_sizes(self) -> list[int]:
        """Slot size of each slab, 0 where none is assigned."""
        return list(self._sizes)

    def assign(self, slab: int, slot_size: int) -> None:
        """Give a slab a class (0: none). Its records are cleared and their pages reserved.
        ArenaError if the class is impossible, or if the file system is full: the slab is then
        unassigned."""
        geometry = self._geometry
        if not 0 <= slab < geometry.slab_count:
            raise ArenaError(f"slab {slab} is beyond the arena's {geometry.slab_count}")
        slots = geometry.slots(slot_size)
        if slot_size and not slots:
            raise ArenaError(
                f"slot size {slot_size} is not possible: it must be a multiple of 4096 and at "
                f"most {geometry.slab_size}, the slab size"
            )
        before = self._slots[slab] * HEADER_BYTES
        # If we are killed from here on, the next owner finds nothing half cleared.
        self._slabs[slab] = self._sizes[slab] = self._slots[slab] = 0
        begin, kept = self.reserve(slab, slots)
        # Pages of a class of smaller slots stay: a client may look at one of its old records at
        # any time, and a look at a hole takes memory, which is SIGBUS when there is none.
        self._mapping.bytes[begin : begin + max(kept, before)] = 0
        self._slabs[slab] = pack_descriptor(slab, slot_size)
        self._sizes[slab] = slot_size
        self._slots[slab] = slots

    def reserve(self, slab: int, records: int = 0) -> tuple[int, int]:
        """Take memory for a slab's first records (at least those of large slots). Returns offset
        and bytes in the table file."""
        geometry = self._geometry
        records = max(records, geometry.slots(RESERVED_SLOT), 1)
        begin = geometry.record_at(slab * geometry.records_per_slab)
        length = records * HEADER_BYTES
        try:
            os.posix_fallocate(self._fd, begin, length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise ArenaError(f"can't reserve records: {error.strerror}") from error
            raise ArenaError(
                f"no room for the {length} bytes of records of slab {slab}: free space in the "
                f"arena's file system, or make the arena smaller"
            ) from error
        return begin, length

    # -- adoption -------------------------------------------------------------------------------

    def scan(self) -> Scan:
        """All records of assigned slabs that hold. Touches only the records that a slab's class
        uses, and reads by pread: a look through the mapping would take memory for every hole."""
        geometry = self._geometry
        sizes = self.slot_sizes()
        used = [geometry.slots(size) for size in sizes]
        # Room for all; what is not filled is never touched, so it costs nothing.
        records: NDArray[np.void] = np.empty(sum(used), dtype=IDENTITY_DTYPE)
        rows = records.view(np.uint8).reshape(-1, IDENTITY_DTYPE.itemsize)
        buffer: NDArray[np.void] = np.empty(min(_BATCH, max(used)), dtype=RECORD_DTYPE)
        indices: NDArray[np.uint32] = np.empty(sum(used), dtype=np.uint32)
        invalid: list[NDArray[np.uint32]] = []
        filled = 0
        for slab, count in enumerate(used):
            first = slab * geometry.records_per_slab
            for at in range(first, first + count, _BATCH):
                size = min(_BATCH, first + count - at)
                batch = buffer[:size]
                self._read(at, batch)
                written = batch["generation"] != 0
                written |= batch["check"] != 0
                if not written.any():
                    continue
                holds = verify_table(batch)
                holds &= batch["length"] <= sizes[slab]
                numbers = np.arange(at, at + size, dtype=np.uint32)
                broken = written & ~holds
                if broken.any():
                    invalid.append(numbers[broken])
                good = numbers[holds]
                whole = batch.view(np.uint8).reshape(size, HEADER_BYTES)
                rows[filled : filled + good.size] = whole[holds, : IDENTITY_DTYPE.itemsize]
                indices[filled : filled + good.size] = good
                filled += good.size
        none: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        return Scan(
            records[:filled],
            indices[:filled],
            np.concatenate(invalid) if invalid else none,
            tuple(self._bad_slabs),
        )

    def _read(self, record: int, into: NDArray[np.void]) -> None:
        target = into.view(np.uint8).data
        offset = self._geometry.record_at(record)
        while target.nbytes:
            got = os.preadv(self._fd, [target], offset)
            if got == 0:
                raise ArenaError("the record table is shorter than its superblock says")
            target, offset = target[got:], offset + got

    # -- registry -------------------------------------------------------------------------------

    def registry_load(self) -> Registry:
        """The registry that was stored last; an empty one if none holds."""
        for _, body in sorted(self._registry_halves(), reverse=True):
            try:
                names, specs = msgpack.unpackb(body, raw=False)
            except (ValueError, TypeError, msgpack.UnpackException):
                continue
            return Registry(list(names), list(specs))
        return Registry([], [])

    def registry_store(self, namespaces: list[str], specs: list[bytes]) -> int:
        """Keep names and encoded specs. Two copies alternate, so that one always holds. Returns
        how many entries had no room (the oldest go first): those are shown by digest only, until
        their engines register again."""
        room = _REGISTRY_HALF - _REGISTRY_HEAD.size - 64
        kept: tuple[list[str], list[bytes]] = ([], [])
        dropped = 0
        for spec in reversed(specs):
            room -= len(spec) + 5
            if room < 0:
                break
            kept[1].insert(0, spec)
        for name in reversed(namespaces):
            room -= len(name.encode()) + 5
            if room < 0:
                break
            kept[0].insert(0, name)
        dropped = len(specs) - len(kept[1]) + len(namespaces) - len(kept[0])
        body = msgpack.packb(kept)
        sequence = 1 + max((s for s, _ in self._registry_halves()), default=0)
        raw = _REGISTRY_HEAD.pack(sequence, len(body), _registry_check(sequence, body)) + body
        # pwrite, not the mapping: a full file system is then an error and no SIGBUS
        try:
            os.pwrite(self._fd, raw, REGISTRY_AT + sequence % 2 * _REGISTRY_HALF)
        except OSError as error:
            raise ArenaError(f"can't store the registry: {error.strerror}") from error
        return dropped

    def _registry_halves(self) -> list[tuple[int, bytes]]:
        halves = []
        for at in (REGISTRY_AT, REGISTRY_AT + _REGISTRY_HALF):
            head = os.pread(self._fd, _REGISTRY_HEAD.size, at)
            sequence, length, check = _REGISTRY_HEAD.unpack(head)
            if not sequence or length > _REGISTRY_HALF - _REGISTRY_HEAD.size:
                continue
            body = os.pread(self._fd, length, at + _REGISTRY_HEAD.size)
            if len(body) == length and _registry_check(sequence, body) == check:
                halves.append((sequence, body))
        return halves


def _registry_check(sequence: int, body: bytes) -> int:
    check: int = xxhash.xxh3_64_intdigest(struct.pack("<QQ", sequence, len(body)) + body)
    return check
