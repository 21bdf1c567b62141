"""Where everything lies in an arena's table file: pure arithmetic and the superblock's bytes.

The law of this module: an offset is computed here and nowhere else. The payload arena has no
header of its own: its byte 0 is slab 0's first slot. All integers are little-endian.

    table file   0 superblock (4 KiB) | 4 KiB slab descriptors, u64 each (32 KiB)
                 | 64 KiB registry (1 MiB) | 2 MiB records, 512 bytes each
    descriptor   0: unassigned; else the slot size in the low 48 bits, and above them 16 bits of
                 xxh3_64 of (slab u64, slot size u64): a slot size that is wrong by one bit would
                 make every record of its slab point at other bytes
    record       slab s owns records [s*R, (s+1)*R), R = slab_size / 4096; slot i of the slab has
                 record s*R + i and lies at s*slab_size + i*slot_size in the arena

    superblock   0 magic "KVDTABL1" | 8 version u32 | 12 bytes of the superblock u32 | 16 arena id
                 | 32 arena size u64 | 40 slab size u64 | 48 slabs u32 | 52 R u32 | 56 offset of
                 the records u64 | 64 epoch u64 | 72 lease horizon u64 (ns, monotonic) | 80 clean
                 u64 | 88 redo u64 | 96 reserved bytes u64 | 104 zero | 128 boot id | 144 inode of
                 the arena u64 | 152 created u64 (Unix ns) | 160 length of the instance u32
                 | 164 instance (UTF-8) | 504 check u64 | 512 redo record (512 bytes)

Bytes 64 to 127 change while the daemon runs, each as one aligned 8-byte store; the check sum
(xxh3_64 of bytes 0 to 503) takes them as zero. `redo` is 0, or 1 + the number of a record whose
new bytes stand complete at 512: a daemon killed while it wrote that record left the whole new
one there, so no record is ever torn.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvd.chunk import HEADER_BYTES
from kvd.errors import ArenaError

PAGE = 4096
MAX_SLABS = 4096
MIN_ARENA = 1 << 20
MIN_DEFAULT_SLAB = 64 * 1024
SLABS_BY_DEFAULT = 32
LARGEST_SLAB_SHARE = 16  # a slab is at most this fraction of the arena

SUPER_BYTES = 4096
SLABS_AT = 4096
REGISTRY_AT = 64 * 1024
REGISTRY_BYTES = 1 << 20
RECORDS_AT = 2 << 20
HEAD_BYTES = REGISTRY_AT + REGISTRY_BYTES  # superblock, descriptors, registry

# Every slab gets record pages for slots of this size together with its payload; a slab of smaller
# slots gets the rest before it is assigned. 0.2 % of the arena.
RESERVED_SLOT = 256 * 1024

# the superblock as u64 words, and which of them change
SUPER_WORDS = 16
EPOCH, HORIZON, CLEAN, REDO, RESERVED = (at // 8 for at in (64, 72, 80, 88, 96))
REDO_AT = 512

_MAGIC = b"KVDTABL1"
_VERSION = 1
_MAX_INSTANCE = 504 - 164
_STRUCT = struct.Struct(f"<8sII16sQQIIQ64x16sQQI{_MAX_INSTANCE}s")
_CHECK = struct.Struct("<Q")
_DESCRIPTOR = struct.Struct("<QQ")
_SIZE_BITS = 48
assert _STRUCT.size == 504


class Geometry(NamedTuple):
    """Sizes of an arena in bytes, and what follows from them."""

    size: int
    slab_size: int

    @property
    def slab_count(self) -> int:
        return self.size // self.slab_size

    @property
    def records_per_slab(self) -> int:
        return self.slab_size // PAGE

    @property
    def records(self) -> int:
        return self.slab_count * self.records_per_slab

    @property
    def table_bytes(self) -> int:
        """Apparent size of the table file; only used pages take memory."""
        return RECORDS_AT + self.records * HEADER_BYTES

    @property
    def reserved_table_bytes(self) -> int:
        """What the table takes at least once the whole arena is reserved."""
        length = max(self.slots(RESERVED_SLOT), 1) * HEADER_BYTES
        pages = -(-length // PAGE) + (self.records_per_slab * HEADER_BYTES % PAGE != 0)
        return HEAD_BYTES + min(self.slab_count * pages * PAGE, self.records * HEADER_BYTES)

    def slots(self, slot_size: int) -> int:
        """Slots in a slab of that class; 0 if the slot size is not possible here."""
        if slot_size < PAGE or slot_size % PAGE or slot_size > self.slab_size:
            return 0
        return self.slab_size // slot_size

    def record_at(self, record: int) -> int:
        """Offset of a record in the table file."""
        return RECORDS_AT + record * HEADER_BYTES


def plan(size: int, slab_size: int | None = None) -> Geometry:
    """The geometry for an arena of `size` bytes, rounded down to whole slabs: no byte is taken that
    nothing can lie in. ArenaError naming the limit when it can't be."""
    size -= size % PAGE
    if size < MIN_ARENA:
        raise ArenaError(f"arena of {size} bytes is too small: give it at least {MIN_ARENA}")
    largest = size // LARGEST_SLAB_SHARE // PAGE * PAGE
    if slab_size is None:
        slab_size = size // SLABS_BY_DEFAULT // PAGE * PAGE
        slab_size = min(max(slab_size, MIN_DEFAULT_SLAB), largest)
    if slab_size < PAGE or slab_size % PAGE or slab_size > largest:
        raise ArenaError(
            f"slab size {slab_size} does not fit an arena of {size} bytes: it must be a multiple "
            f"of {PAGE} and at most {largest} (1/{LARGEST_SLAB_SHARE} of the arena)"
        )
    geometry = Geometry(size // slab_size * slab_size, slab_size)
    if geometry.slab_count > MAX_SLABS:
        raise ArenaError(
            f"slab size {slab_size} makes {geometry.slab_count} slabs of an arena of {size} "
            f"bytes, limit {MAX_SLABS}: choose larger slabs"
        )
    return geometry


def pack_descriptor(slab: int, slot_size: int) -> int:
    """The u64 that says that a slab has slots of `slot_size` bytes (0: unassigned)."""
    if slot_size == 0:
        return 0
    check = xxhash.xxh3_64_intdigest(_DESCRIPTOR.pack(slab, slot_size)) >> _SIZE_BITS
    return check << _SIZE_BITS | slot_size


def unpack_descriptor(slab: int, word: int, geometry: Geometry) -> int:
    """The slot size, 0 if unassigned. ValueError if the word does not hold."""
    slot_size = word & ((1 << _SIZE_BITS) - 1)
    if word != pack_descriptor(slab, slot_size) or (word and not geometry.slots(slot_size)):
        raise ValueError(f"descriptor of slab {slab} does not hold")
    return slot_size


def is_table(head: bytes) -> bool:
    """Whether a file that starts with these 8 bytes is meant as a table, of whatever version."""
    return head[:7] == _MAGIC[:7]


class Superblock(NamedTuple):
    """The part of the superblock that never changes in an arena's life."""

    arena_id: bytes  # 16 bytes, random; kept over adoption
    geometry: Geometry
    boot_id: bytes  # 16 bytes: monotonic times and sessions do not outlive a boot
    arena_inode: int
    created_unix_ns: int
    instance: str

    def pack(self) -> bytes:
        """512 bytes with all changing words zero. ArenaError if the instance is too long."""
        name = self.instance.encode()
        if len(name) > _MAX_INSTANCE:
            raise ArenaError(f"instance name has {len(name)} bytes, limit {_MAX_INSTANCE}")
        geometry = self.geometry
        body = _STRUCT.pack(
            _MAGIC,
            _VERSION,
            SUPER_BYTES,
            self.arena_id,
            geometry.size,
            geometry.slab_size,
            geometry.slab_count,
            geometry.records_per_slab,
            RECORDS_AT,
            self.boot_id,
            self.arena_inode,
            self.created_unix_ns,
            len(name),
            name,
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes) -> Superblock:
        """From the first 512 bytes of a table file. ValueError naming what does not hold."""
        if len(data) != 512:
            raise ValueError(f"superblock has {len(data)} bytes, must have 512")
        body = data[:64] + bytes(64) + data[128:504]
        (magic, version, super_bytes, arena_id, size, slab, slabs, per_slab, records_at, *rest) = (
            _STRUCT.unpack(body)
        )
        if magic != _MAGIC:
            raise ValueError(f"superblock magic is {magic!r}, expected {_MAGIC!r}")
        if _CHECK.unpack_from(data, 504)[0] != xxhash.xxh3_64_intdigest(body):
            raise ValueError("superblock check sum does not hold")
        if version != _VERSION or super_bytes != SUPER_BYTES or records_at != RECORDS_AT:
            raise ValueError(f"table version {version}, this kvd reads version {_VERSION}")
        try:
            geometry = plan(size, slab)
        except ArenaError as error:
            raise ValueError(str(error)) from error
        if (geometry.slab_count, geometry.records_per_slab) != (slabs, per_slab):
            raise ValueError("superblock contradicts itself about slabs and records")
        boot_id, inode, created, length, name = rest
        if length > _MAX_INSTANCE:
            raise ValueError(f"instance name of {length} bytes")
        return cls(arena_id, geometry, boot_id, inode, created, name[:length].decode())
