"""What a slab looks like, to the byte. Pure.

The law of this module: a slab is two files, its table of 512-byte records and its slots, each
beginning at a multiple of 4 KiB. Two, because a buffered write of a record would wait for every
O_DIRECT write into the same file, and hold up the next ones: a file system locks a file at a time.
Both begin with the same superblock. All numbers are in it, so that a slab is read as it was made,
whatever the configuration says today.

    0        superblock: 8s magic, u16 version, u16 size, u32 slab number, u64 bytes of both,
             u64 slot bytes, u64 slots, u64 payload offset, 16s tier id, …zeros, u64 check at 120
    4096     kvd-table-NNNNN: records, 512 bytes each (kvd.chunk.ChunkHeader)
    4096     kvd-slab-NNNNN: slots
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvd.chunk import HEADER_BYTES

PAGE = 4096
MAGIC = b"KVDSLAB1"
VERSION = 1
SUPER_BYTES = 128
_SUPER = struct.Struct("<8sHHIQQQQ16s56x")
_CHECK = struct.Struct("<Q")
assert _SUPER.size == SUPER_BYTES - _CHECK.size


def pages(length: int) -> int:
    """Length rounded up to whole pages, in bytes; at least one."""
    return max(PAGE, -(-length // PAGE) * PAGE)


class OtherVersion(ValueError):
    """A slab of another version of kvd: not ours to touch."""


class Geometry(NamedTuple):
    number: int
    file_bytes: int  # of both files
    slot_bytes: int
    slots: int
    payload_at: int
    tier: bytes  # id of the directory, 16 bytes

    @classmethod
    def of(cls, number: int, slot_bytes: int, file_bytes: int, tier: bytes) -> Geometry:
        """The most slots of `slot_bytes` that fit into `file_bytes`. ValueError if none does."""
        slots = (file_bytes - 2 * PAGE) // (slot_bytes + HEADER_BYTES)
        while slots > 0 and _total(slots, slot_bytes) > file_bytes:
            slots -= 1
        if slots < 1:
            raise ValueError(f"no slot of {slot_bytes} bytes fits into a slab of {file_bytes}")
        return cls(number, file_bytes, slot_bytes, slots, PAGE, tier)

    @property
    def table_bytes(self) -> int:
        return PAGE + pages(self.slots * HEADER_BYTES)

    @property
    def payload_bytes(self) -> int:
        return self.file_bytes - self.table_bytes

    def record_at(self, slot: int) -> int:
        """In the table."""
        return PAGE + slot * HEADER_BYTES

    def slot_at(self, slot: int) -> int:
        return self.payload_at + slot * self.slot_bytes

    def pack(self) -> bytes:
        body = _SUPER.pack(
            MAGIC,
            VERSION,
            SUPER_BYTES,
            self.number,
            self.file_bytes,
            self.slot_bytes,
            self.slots,
            self.payload_at,
            self.tier,
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes) -> Geometry:
        """ValueError for what is no slab, OtherVersion for another kvd's."""
        if len(data) != SUPER_BYTES or data[:8] != MAGIC:
            raise ValueError("no slab")
        _, version, size, number, file_bytes, slot_bytes, slots, payload_at, tier = _SUPER.unpack(
            data[: _SUPER.size]
        )
        if version != VERSION:
            raise OtherVersion(f"a slab of version {version}, this kvd reads version {VERSION}")
        if _CHECK.unpack(data[_SUPER.size :])[0] != xxhash.xxh3_64_intdigest(data[: _SUPER.size]):
            raise ValueError("the superblock's check sum does not hold")
        found = cls(number, file_bytes, slot_bytes, slots, payload_at, tier)
        if (
            size != SUPER_BYTES
            or slot_bytes % PAGE
            or not slot_bytes
            or found != cls.of(number, slot_bytes, file_bytes, tier)
        ):
            raise ValueError("the superblock's numbers do not fit each other")
        return found


def _total(slots: int, slot_bytes: int) -> int:
    return 2 * PAGE + pages(slots * HEADER_BYTES) + slots * slot_bytes


def slab_bytes(slot_bytes: int, usual: int) -> int:
    """Size of a slab's files: the usual one, or what one slot needs if that is more."""
    return max(usual, _total(1, slot_bytes))
