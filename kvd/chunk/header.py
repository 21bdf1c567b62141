"""ChunkHeader: the fixed 512-byte record that stands for one stored shard.

The law of this module: a record is believed only as a whole. Its check sum covers every byte
before it, reserved ones too, so a torn or foreign record is no record; and a later version may use
the reserved bytes without this one misreading them, because the version is refused first.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvd.native import plain_members

HEADER_BYTES: Final = 512
HEADER_MAGIC: Final = b"KVDCHNK1"
HEADER_VERSION: Final = 1

CHECK_AT: Final = 504
_STRUCT: Final = struct.Struct("<8sHHBBH32s32s32s32sIIII16sQIIQQQ16sQ16s248x")
_CHECKED: Final = struct.Struct(f"<{CHECK_AT}sQ")
_CHECK: Final = struct.Struct("<Q")
check_of: Final = xxhash.xxh3_64_intdigest  # of the bytes before the check sum
assert _STRUCT.size == CHECK_AT and _CHECKED.size == HEADER_BYTES


@plain_members
class State(IntEnum):
    """Where a slot is in its life. Only READY is ever visible to a lookup."""

    FREE = 0
    WRITING = 1
    READY = 2
    CONDEMNED = 3  # its writer's time is over, but the writer may still be copying
    QUARANTINED = 4  # the payload did not match its digest


@plain_members
class HeaderFlag(IntFlag):
    NONE = 0
    SEALED = 1  # `digest` holds the payload's digest
    K_ROTATED = 2  # keys carry their rotary position (pos0 on)


FLAG_SEALED: Final = int(HeaderFlag.SEALED)  # arithmetic with a flag costs a microsecond


_NO_HASH: Final = bytes(32)
_NO_DIGEST: Final = bytes(16)


class ChunkHeader(NamedTuple):
    """One record. Integers are unsigned and little-endian; times are Unix nanoseconds."""

    kind: int = 0
    state: int = State.FREE
    namespace_digest: bytes = _NO_HASH
    spec: bytes = _NO_HASH
    chunk: bytes = _NO_HASH
    parent: bytes = _NO_HASH  # hash of the chunk before in the chain; zeros at a root
    shard: int = 0
    shard_count: int = 0
    # hides tuple.index, which nobody asks of a record
    index: int = 0  # type: ignore[assignment]  # position in the chain, in chunks
    tokens: int = 0
    fingerprint: bytes = _NO_DIGEST
    pos0: int = 0  # position of the first token
    flags: int = HeaderFlag.NONE
    length: int = 0  # payload bytes
    generation: int = 0
    epoch: int = 0
    session: bytes = _NO_DIGEST  # public id of the writer
    created_unix_ns: int = 0
    digest: bytes = _NO_DIGEST  # payload_digest, once SEALED
    codec: int = 0

    def pack(self) -> bytes:
        """512 bytes. ValueError if a field does not fit its width."""
        values: tuple[Any, ...] = self  # by name, compiled code demands their types
        (
            kind, state, ns, spec, chunk, parent, shard, count, index, tokens, print_, pos0, flags,
            length, generation, epoch, session, created, digest, codec,
        ) = values  # fmt: skip
        try:
            # struct would cut or pad them in silence
            if not (len(ns) == len(spec) == len(chunk) == len(parent) == 32):
                raise ValueError(self._misfit())
            if not (len(print_) == len(session) == len(digest) == 16):
                raise ValueError(self._misfit())
            body = _STRUCT.pack(
                HEADER_MAGIC,
                HEADER_VERSION,
                HEADER_BYTES,
                kind,
                state,
                codec,
                ns,
                spec,
                chunk,
                parent,
                shard,
                count,
                index,
                tokens,
                print_,
                pos0,
                flags,
                0,
                length,
                generation,
                epoch,
                session,
                created,
                digest,
            )
        except (struct.error, TypeError) as error:
            raise ValueError(f"header does not fit its record: {error}") from error
        return body + _CHECK.pack(check_of(body))

    def _misfit(self) -> str:
        """The first field that has not its width."""
        for name, size in _FIXED:
            if len(getattr(self, name)) != size:
                break
        return f"header field {name} has {len(getattr(self, name))} bytes, must have {size}"

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> ChunkHeader:
        """The header of exactly 512 bytes. ValueError naming what does not hold."""
        if len(data) != HEADER_BYTES:
            raise ValueError(f"a record has {HEADER_BYTES} bytes, got {len(data)}")
        body, check = _CHECKED.unpack(data)
        if body[:8] != HEADER_MAGIC:
            raise ValueError(f"record magic is {body[:8]!r}, expected {HEADER_MAGIC!r}")
        if check_of(body) != check:
            raise ValueError("record check sum does not hold")
        (_, version, size, kind, state, codec, *rest) = _STRUCT.unpack(body)
        if version != HEADER_VERSION or size != HEADER_BYTES:
            raise ValueError(f"record version {version} of {size} bytes, this kvd reads version 1")
        if kind not in _KINDS or state not in _STATES:
            raise ValueError(f"record of unknown kind {kind} or state {state}")
        (ns, spec, chunk, parent, shard, count, index, tokens, print_, pos0, flags, _, *tail) = rest
        length, generation, epoch, session, created, digest = tail
        return cls(
            kind,
            state,
            ns,
            spec,
            chunk,
            parent,
            shard,
            count,
            index,
            tokens,
            print_,
            pos0,
            flags,
            length,
            generation,
            epoch,
            session,
            created,
            digest,
            codec,
        )


_KINDS: Final = frozenset((0, 1, 2))  # 0: a record that was freed
_STATES: Final = frozenset(int(s) for s in State)
_FIXED = (
    ("namespace_digest", 32),
    ("spec", 32),
    ("chunk", 32),
    ("parent", 32),
    ("fingerprint", 16),
    ("session", 16),
    ("digest", 16),
)

# Bytes are void fields ("V32"), not "S32": numpy cuts trailing zeros off S on access, and a hash
# may end in one. Use .tobytes() on a column for packed bytes, bytes(x) on one value.
RECORD_DTYPE: Final = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u2"),
        ("header_size", "<u2"),
        ("kind", "u1"),
        ("state", "u1"),
        ("codec", "<u2"),
        ("namespace_digest", "V32"),
        ("spec", "V32"),
        ("chunk", "V32"),
        ("parent", "V32"),
        ("shard", "<u4"),
        ("shard_count", "<u4"),
        ("index", "<u4"),
        ("tokens", "<u4"),
        ("fingerprint", "V16"),
        ("pos0", "<u8"),
        ("flags", "<u4"),
        ("reserved", "<u4"),
        ("length", "<u8"),
        ("generation", "<u8"),
        ("epoch", "<u8"),
        ("session", "V16"),
        ("created_unix_ns", "<u8"),
        ("digest", "V16"),
        ("reserved2", "V248"),
        ("check", "<u8"),
    ]
)
assert RECORD_DTYPE.itemsize == HEADER_BYTES

# What is kept of a record that was verified: its first 256 bytes, the same fields by name without
# the reserved ones and the check. Half the memory, and first touching memory is what costs.
IDENTITY_BYTES: Final = 256
IDENTITY_DTYPE: Final = np.dtype(
    RECORD_DTYPE.descr[: (RECORD_DTYPE.names or ()).index("reserved2")]
)
assert IDENTITY_DTYPE.itemsize == IDENTITY_BYTES

_LEAD: Final = np.dtype(
    {
        "names": ["magic", "version", "header_size", "kind", "state"],
        "formats": ["<u8", "<u2", "<u2", "u1", "u1"],
        "offsets": [0, 8, 10, 12, 13],
        "itemsize": HEADER_BYTES,
    }
)
_VERIFY_BATCH: Final = 16384  # 8 MiB: what is copied at a time
_MAGIC_U64: Final = np.frombuffer(HEADER_MAGIC, "<u8")[0]


def verify_table(table: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records hold: what ChunkHeader.unpack accepts, for a 1-d array of RECORD_DTYPE.
    Records that were never written are not hashed. TypeError for another dtype."""
    if table.dtype != RECORD_DTYPE:
        raise TypeError(f"records to verify must be whole (RECORD_DTYPE), got {table.dtype}")
    lead = table.view(_LEAD)
    holds: NDArray[np.bool_] = (
        (lead["magic"] == _MAGIC_U64)
        & (lead["version"] == HEADER_VERSION)
        & (lead["header_size"] == HEADER_BYTES)
        & (lead["kind"] <= 2)
        & (lead["state"] <= max(State))
    )
    some = np.flatnonzero(holds)
    if some.size == 0:
        return holds
    digest = check_of
    for at in range(0, some.size, _VERIFY_BATCH):
        part = some[at : at + _VERIFY_BATCH]
        # One pass over packed bytes is several times faster than hashing slices or scalars.
        dense = int(part[-1]) - int(part[0]) + 1 == part.size  # then there is nothing to copy
        picked = table[part[0] : part[-1] + 1] if dense else table[part]
        pairs = _CHECKED.iter_unpack(np.ascontiguousarray(picked).view(np.uint8).data)
        holds[part] = np.fromiter((digest(b) == c for b, c in pairs), np.bool_, part.size)
    return holds
