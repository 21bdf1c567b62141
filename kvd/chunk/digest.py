"""The digest of a payload: a root over the digests of its 1 MiB blocks.

The law of this module: a payload that differs in length or in any bit has another digest, and a
range of whole blocks can be checked without the rest. xxh3 guards against faults, not against
forgery: whoever can write the arena can also write what it holds.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvd.native import Given

BLOCK_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 16

_STEP_BYTES: Final = 512 << 10  # what a copy leaves in a core's cache for the hash behind it

_LENGTH: Final = struct.Struct("<Q")

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


def root_digest(blocks: Given[bytes], length: Given[int]) -> bytes:
    """The payload digest (16 bytes) from its block digests and its length in bytes. ValueError if
    they are not that, or not of one payload."""
    if not isinstance(blocks, bytes) or not isinstance(length, int):
        raise ValueError(
            f"block digests are bytes and a length is an int, not {type(blocks).__name__} "
            f"and {type(length).__name__}"
        )
    if length < 0 or len(blocks) != 8 * -(-length // BLOCK_BYTES):
        raise ValueError(f"{len(blocks)} bytes of block digests do not fit {length} payload bytes")
    root: bytes = xxhash.xxh3_128_digest(blocks + _LENGTH.pack(length))
    return root


def payload_digest(view: Buffer) -> bytes:
    """16 bytes for a C-contiguous buffer of any length and format (bytes count, never values)."""
    return root_digest(block_digests(view), memoryview(view).nbytes)


def copy_with_digest(target: NDArray[Any], source: NDArray[Any]) -> bytes:
    """Copy a payload and return the digest of what arrived. Both are flat uint8 arrays of one
    length. Each piece is hashed while it is still in the cache: a copy and a hash of the whole,
    one after the other, read memory once more."""
    if target.dtype != np.uint8 or source.dtype != np.uint8 or target.shape != source.shape:
        raise ValueError(
            f"flat uint8 arrays of one length are due, not {target.dtype}{target.shape} "
            f"and {source.dtype}{source.shape}"
        )
    blocks = []
    for block in range(0, target.nbytes, BLOCK_BYTES):
        digest = xxhash.xxh3_64()
        end = min(block + BLOCK_BYTES, target.nbytes)
        for at in range(block, end, _STEP_BYTES):
            to = min(at + _STEP_BYTES, end)
            np.copyto(target[at:to], source[at:to])
            digest.update(target[at:to].data)
        blocks.append(digest.intdigest().to_bytes(8, "little"))
    return root_digest(b"".join(blocks), target.nbytes)


def verify_blocks(view: Buffer, blocks: Buffer, first: Given[int] = 0) -> bool:
    """Whether a range that starts at block `first` matches the payload's block digests. The range
    must end at a block's end or at the payload's."""
    begin: Any = first
    got = block_digests(view)
    return bool(got) and blocks[8 * begin : 8 * begin + len(got)] == got
