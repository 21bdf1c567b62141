"""Where the bytes of one shard of a chunk lie in shared memory.

A reference is only a place and a claim: (arena, record, offset, length, generation). Whoever uses
one compares the generation in the record table after its last byte; see docs/protocol.md.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.native import Given

REF_BYTES: Final = 32

REF_DTYPE: Final = np.dtype(
    [
        ("arena", "<u4"),  # number of the arena in this session (told at attach)
        ("record", "<u4"),  # index of the slot's 512-byte record in the arena's table
        ("offset", "<u8"),  # bytes from the start of the arena to the payload, 4 KiB aligned
        ("length", "<u8"),  # payload bytes
        ("generation", "<u8"),  # must equal the record's generation
    ]
)
_REF: Final = Struct("<IIQQQ")
assert _REF.size == REF_DTYPE.itemsize == REF_BYTES


class SlotRef(NamedTuple):
    """One reference, unpacked."""

    arena: int
    record: int
    offset: int
    length: int
    generation: int


def unpack_refs(data: bytes | memoryview) -> NDArray[np.void]:
    """References as a structured array (dtype REF_DTYPE). ValueError if the size is off."""
    return np.frombuffer(data, dtype=REF_DTYPE)


def list_refs(data: Given[bytes | memoryview]) -> list[tuple[int, int, int, int, int]]:
    """References as tuples in the order of SlotRef's fields: where they are few, an array costs
    more than it saves. ValueError if the size is off."""
    try:
        return list(_REF.iter_unpack(data))  # type: ignore[arg-type]
    except (error, TypeError) as misfit:
        raise ValueError(f"no whole number of references: {misfit}") from misfit


def pack_refs(refs: Given[list[SlotRef]]) -> bytes:
    """References as packed bytes, 32 a piece. ValueError if one does not fit its widths."""
    if not isinstance(refs, list):
        raise ValueError(f"references come as a list, not as {type(refs).__name__}")
    try:
        return b"".join([_packed(ref) for ref in refs])
    except (error, TypeError, ValueError) as misfit:
        raise ValueError(f"a reference does not fit its widths: {misfit}") from misfit


def _packed(ref: SlotRef) -> bytes:
    arena, record, offset, length, generation = ref  # compiled, a star would make a list first
    return _REF.pack(arena, record, offset, length, generation)
