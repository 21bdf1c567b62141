"""What callers give as keys, packed for the wire.

The law of this module: sizes, kinds and ranges are checked here, before anything is sent, and any
container of integers will do; what is packed already is taken as it is. BadKey for the rest.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import DIGEST_BYTES, FINGERPRINT_BYTES, HASH_BYTES, NO_FINGERPRINT, Outcome
from kvd.errors import BadKey

Packed = bytes | bytearray | memoryview
Hashes = Sequence[bytes] | Packed | NDArray[np.uint8]
Numbers = Sequence[int] | Packed | NDArray[np.integer[Any]]

U32 = 1 << 32

_OUTCOMES = [Outcome.FAILED] * 256
for _outcome in Outcome:
    _OUTCOMES[_outcome] = _outcome


def outcomes(raw: bytes) -> tuple[Outcome, ...]:
    """One Outcome a byte; a number that this version does not know is FAILED."""
    return tuple([_OUTCOMES[byte] for byte in raw])


def where(raw: bytes, value: int) -> list[int]:
    """The places of a byte, in order."""
    count = len(raw)
    if raw.count(value) == count:
        return list(range(count))
    return [at for at, byte in enumerate(raw) if byte == value]


def _pack(value: Hashes, each: int, what: str) -> bytes:
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, (bytearray, memoryview)):
        data = bytes(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind not in "uSV":  # not as numbers of any width, nor as objects
            raise BadKey(f"{what}: an array of bytes is due, not of {value.dtype}")
        data = value.tobytes()
    else:
        data = _join(value, each, what)
    if len(data) % each:
        raise BadKey(f"{what}: {len(data)} bytes are no multiple of {each}")
    return data


def _join(value: Iterable[Any], each: int, what: str) -> bytes:
    """Each may be anything that has bytes: of a `bytes` a compiler would make sure."""
    try:
        items: list[Any] = list(value)
        for item in items:
            if len(item) != each:
                raise BadKey(f"{what}: {each} bytes each are due, one has {len(item)}")
        data = b"".join(items)
    except TypeError as error:
        raise BadKey(f"{what}: {each} bytes each are due: {error}") from None
    if len(data) != each * len(items):  # of wider numbers, which would be several keys
        raise BadKey(f"{what}: {each} bytes each are due, {len(items)} have {len(data)}")
    return data


def pack_hashes(value: Hashes) -> bytes:
    """32 bytes a key. BadKey if sizes do not fit."""
    return _pack(value, HASH_BYTES, "hashes")


def pack_digests(value: Hashes) -> bytes:
    """16 bytes a result. BadKey if sizes do not fit."""
    return _pack(value, DIGEST_BYTES, "digests")


def pack_fingerprints(value: Hashes | None, keys: int) -> bytes:
    """16 bytes a key; None: no fingerprint for any. BadKey if they are not `keys`."""
    if value is None:
        return NO_FINGERPRINT * keys
    data = _pack(value, FINGERPRINT_BYTES, "fingerprints")
    if len(data) != keys * FINGERPRINT_BYTES:
        raise BadKey(f"fingerprints: {keys} are due, {len(data) // FINGERPRINT_BYTES} came")
    return data


def whole(value: Any, what: str, below: int = U32) -> int:
    """Any kind of integer, as an int. BadKey if it is none, or not 0 <= value < below."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError):  # ValueError: an array or tensor of several
        raise BadKey(f"{what}: a whole number is due, not {_shown(value)}") from None
    if not 0 <= number < below:
        raise BadKey(f"{what}: {_shown(number)} is not from 0 to {below - 1}")
    return number


def whole_numbers(value: Any, what: str, below: int = U32) -> list[int]:
    """Integers of any kind in any container. BadKey as for one."""
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    try:
        return [whole(item, what, below) for item in value]
    except TypeError:
        raise BadKey(f"{what}: several whole numbers are due, not {_shown(value)}") from None


def pack_numbers(value: Numbers | None, dtype: str, keys: int, what: str) -> bytes | None:
    """Little-endian unsigned numbers, one a key. BadKey if they are not `keys`, not whole, or out
    of the range of `dtype`."""
    if value is None:
        return None
    each = np.dtype(dtype).itemsize
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    else:
        # From Python's integers: numpy makes floats of 2**63 beside a smaller one.
        data = np.array(whole_numbers(value, what, 1 << 8 * each), dtype=dtype).tobytes()
    if len(data) != keys * each:
        raise BadKey(f"{what}: {keys} are due, {len(data) // each} came")
    return data


def pack_items(items: Iterable[int]) -> bytes:
    """Little-endian u32 a result number. BadKey if one is not such a number."""
    return np.array(whole_numbers(items, "items"), dtype="<u4").tobytes()


def unpack_items(packed: bytes) -> list[int]:
    """The result numbers in a packed array."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def _shown(value: object) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 80:
        return f"a number of {value.bit_length()} bits"
    shown = repr(value) if isinstance(value, (int, float, str, np.generic)) else ""
    return shown if 0 < len(shown) <= 40 else type(value).__name__
