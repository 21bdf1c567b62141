"""The digest of a payload: a root over the digests of its 1 MiB blocks.

The law of this module: a payload that differs in length or in any bit has another digest, and a
range of whole blocks can be checked without the rest. xxh3 guards against faults, not against
forgery: whoever can write the arena can also write what it holds.
"""

from __future__ import annotations

import struct

import xxhash

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16

_LENGTH = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


def block_digests(view: Buffer) -> bytes:
    """8 bytes (xxh3_64, u64 LE) for each 1 MiB block of a C-contiguous buffer, the last one maybe
    shorter; nothing for an empty buffer. Hashes big blocks without the GIL."""
    raw = memoryview(view).cast("B")
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(raw[at : at + BLOCK_BYTES]).to_bytes(8, "little")
        for at in range(0, len(raw), BLOCK_BYTES)
    )


def root_digest(blocks: bytes, length: int) -> bytes:
    """The payload digest (16 bytes) from its block digests and its length in bytes."""
    if len(blocks) != 8 * -(-length // BLOCK_BYTES):
        raise ValueError(f"{len(blocks)} bytes of block digests do not fit {length} payload bytes")
    root: bytes = xxhash.xxh3_128_digest(blocks + _LENGTH.pack(length))
    return root


def payload_digest(view: Buffer) -> bytes:
    """16 bytes for a C-contiguous buffer of any length and format (bytes count, never values)."""
    return root_digest(block_digests(view), memoryview(view).nbytes)


def verify_blocks(view: Buffer, blocks: bytes, first: int = 0) -> bool:
    """Whether a range that starts at block `first` matches the payload's block digests. The range
    must end at a block's end or at the payload's."""
    got = block_digests(view)
    return bool(got) and blocks[8 * first : 8 * first + len(got)] == got
