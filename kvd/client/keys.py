"""What callers give as keys, packed for the wire.

The law of this module: sizes are checked here, before anything is sent; what is packed already is
taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import FINGERPRINT_BYTES, HASH_BYTES, NO_FINGERPRINT, Outcome
from kvd.errors import BadKey

Packed = bytes | bytearray | memoryview
Hashes = Sequence[bytes] | Packed | NDArray[np.uint8]
Numbers = Sequence[int] | Packed | NDArray[np.integer[Any]]

_OUTCOMES = [Outcome.FAILED] * 256
for _outcome in Outcome:
    _OUTCOMES[_outcome] = _outcome


def outcomes(raw: bytes) -> tuple[Outcome, ...]:
    """One Outcome a byte; a number that this version does not know is FAILED."""
    return tuple([_OUTCOMES[byte] for byte in raw])


def _pack(value: Hashes, each: int, what: str) -> bytes:
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, (bytearray, memoryview)):
        data = bytes(value)
    elif isinstance(value, np.ndarray):
        data = value.tobytes()
    else:
        for item in value:
            if len(item) != each:
                raise BadKey(f"{what}: {each} bytes each are due, one has {len(item)}")
        data = b"".join(value)
    if len(data) % each:
        raise BadKey(f"{what}: {len(data)} bytes are no multiple of {each}")
    return data


def pack_hashes(value: Hashes) -> bytes:
    """32 bytes a key. BadKey if sizes do not fit."""
    return _pack(value, HASH_BYTES, "hashes")


def pack_fingerprints(value: Hashes | None, keys: int) -> bytes:
    """16 bytes a key; None: no fingerprint for any. BadKey if they are not `keys`."""
    if value is None:
        return NO_FINGERPRINT * keys
    data = _pack(value, FINGERPRINT_BYTES, "fingerprints")
    if len(data) != keys * FINGERPRINT_BYTES:
        raise BadKey(f"fingerprints: {keys} are due, {len(data) // FINGERPRINT_BYTES} came")
    return data


def pack_numbers(value: Numbers | None, dtype: str, keys: int, what: str) -> bytes | None:
    """Little-endian numbers, one a key. BadKey if they are not `keys` or do not fit."""
    if value is None:
        return None
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    else:
        try:
            data = np.asarray(value).astype(dtype, casting="same_kind").tobytes()
        except (TypeError, OverflowError, ValueError) as error:
            raise BadKey(f"{what}: not all are whole numbers: {error}") from error
    if len(data) != keys * np.dtype(dtype).itemsize:
        raise BadKey(f"{what}: {keys} are due, {len(data) // np.dtype(dtype).itemsize} came")
    return data


def pack_items(items: Iterable[int]) -> bytes:
    """Little-endian u32 a result number."""
    return np.fromiter(items, dtype="<u4").tobytes()
