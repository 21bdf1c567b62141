"""kvd's own chunk hashes and fingerprints, for connectors whose engine has none.

The law of this module: an identity depends on content only, the same in any process, on any host,
Python version and day; it is collision-resistant, covers every token, the parent, the salt and
the whole id of every media item whose span touches the chunk; writer and reader call this one
function. Never Python's hash(), never pickle.

A chunk hash is SHA-256 over a domain, then fields `tag u8 | length u32 LE | value`: kind, parent
(prefix only), salt, tokens (u32 LE each), and per touching media item, in the order of
their spans, offset within the chunk (i64: below 0 when the span began earlier), length (u64), id.
A fingerprint is BLAKE2b-128 over the same fields under another personalisation and its own chain:
no step of it depends on a chunk hash.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.chunk.key import HASH_BYTES
from kvd.chunk.outcome import Kind
from kvd.chunk.spec import MAX_CHUNK_TOKENS
from kvd.errors import BadKey
from kvd.native import Given

NO_PARENT: Final = bytes(HASH_BYTES)  # the parent of a chain's first chunk
FINGERPRINT_BYTES: Final = 16
NO_FINGERPRINT: Final = bytes(FINGERPRINT_BYTES)
MAX_SALT_BYTES: Final = 4096

Tokens = Sequence[int] | NDArray[np.integer[Any]]

_DOMAIN: Final = b"kvd/chunk/1\0"
_PERSON: Final = b"kvd/fingerprint1"
_FIELD: Final = struct.Struct("<BI")
_SPAN: Final = struct.Struct("<qQ")
_KIND, _PARENT, _SALT, _TOKENS, _MEDIA = range(1, 6)


class Media(NamedTuple):
    """A picture, sound or other item whose content is not in its placeholder tokens."""

    start: int  # position of the first placeholder token, from the start of the given tokens
    length: int  # placeholder tokens
    id: bytes  # the whole content digest, not a part of it


MediaItems = Iterable[tuple[int, int, bytes]]


def chain_hashes(
    tokens: Tokens,
    chunk_tokens: Given[int],
    *,
    salt: Given[bytes] = b"",
    parent: Given[bytes] = NO_PARENT,
    media: Given[MediaItems] = (),
) -> list[bytes]:
    """Hashes (32 bytes) of the full chunks of `tokens`; the last partial chunk has none.

    With `parent`, the chain goes on after that chunk and `tokens` (and media positions) start
    there. Raises BadKey for tokens outside 0..2**32-1 and other parts that can't be accepted.
    """
    before = _octets(parent, "parent")
    if len(before) != HASH_BYTES:
        raise BadKey(f"parent must be a chunk hash of {HASH_BYTES} bytes, got {len(before)}")
    head = hashlib.sha256(_DOMAIN + _head(Kind.PREFIX, salt))
    return _chain(head, token_bytes(tokens), _size(chunk_tokens), before, _spans(media))


def content_hash(
    tokens: Tokens, *, salt: Given[bytes] = b"", media: Given[MediaItems] = ()
) -> bytes:
    """Hash (32 bytes) of one chunk by its own tokens only, wherever it stands. Raises BadKey."""
    state = hashlib.sha256(_DOMAIN + _head(Kind.CONTENT, salt))
    _feed(state, token_bytes(tokens), _spans(media))
    return state.digest()


def chain_fingerprints(
    tokens: Tokens,
    chunk_tokens: Given[int],
    *,
    salt: Given[bytes] = b"",
    parent: Given[bytes] = NO_FINGERPRINT,
    media: Given[MediaItems] = (),
) -> list[bytes]:
    """Fingerprints (16 bytes) beside `chain_hashes`, of the same chunks. `parent` is the
    fingerprint (not the hash) of the chunk before. Raises BadKey as chain_hashes."""
    before = _octets(parent, "parent")
    if len(before) != FINGERPRINT_BYTES:
        raise BadKey(
            f"parent must be a fingerprint of {FINGERPRINT_BYTES} bytes, got {len(before)}"
        )
    state = _print_state(_head(Kind.PREFIX, salt))
    return _chain(state, token_bytes(tokens), _size(chunk_tokens), before, _spans(media))


def fingerprint(
    tokens: Tokens,
    parent: Given[bytes] = b"",
    *,
    salt: Given[bytes] = b"",
    media: Given[MediaItems] = (),
) -> bytes:
    """Fingerprint (16 bytes) of one chunk, for connectors whose engine made the chunk hash, and
    for content chunks. `parent` is whatever the connector knows of the chunk before (its
    fingerprint, its hash, or nothing): writer and reader must do the same. With the fingerprint
    of the chunk before (NO_FINGERPRINT at a root) it equals `chain_fingerprints`."""
    before = _octets(parent, "parent")
    kind = Kind.PREFIX if before else Kind.CONTENT
    state = _print_state(_head(kind, salt))
    if before:
        state.update(_field(_PARENT, before))
    _feed(state, token_bytes(tokens), _spans(media))
    digest: bytes = state.digest()
    return digest


def token_bytes(tokens: Tokens) -> memoryview:
    """Tokens as contiguous u32 LE bytes. BadKey unless all are whole numbers in 0..2**32-1."""
    if isinstance(tokens, (list, tuple, range)):
        try:
            packed = array("I", tokens)
        except (TypeError, OverflowError) as error:
            raise BadKey(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error
        if sys.byteorder == "big":  # pragma: no cover
            packed.byteswap()
        return memoryview(packed).cast("B")
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise BadKey(f"token ids must be one row, got an array of shape {values.shape}")
    if values.size == 0:
        return memoryview(b"")
    if values.dtype.kind not in "iu":
        raise BadKey(f"token ids must be whole numbers, got an array of {values.dtype}")
    if values.dtype.kind == "i" and int(values.min()) < 0:
        raise BadKey(f"token ids must be from 0 to 2**32-1, got {int(values.min())}")
    if values.dtype.itemsize > 4 and int(values.max()) > 0xFFFFFFFF:
        raise BadKey(f"token ids must be from 0 to 2**32-1, got {int(values.max())}")
    return np.ascontiguousarray(values, dtype="<u4").data.cast("B")


def _chain(
    head: Any, raw: memoryview, chunk_tokens: int, parent: bytes, spans: list[Media]
) -> list[bytes]:
    step = 4 * chunk_tokens
    prefix, tokens_head = _FIELD.pack(_PARENT, len(parent)), _FIELD.pack(_TOKENS, step)
    hashes: list[bytes] = []
    for chunk in range(len(raw) // step):
        state = head.copy()  # domain, kind and salt are hashed once for the whole chain
        state.update(prefix + parent + tokens_head)
        state.update(raw[chunk * step : (chunk + 1) * step])
        if spans:
            _feed_media(state, spans, chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
        parent = state.digest()
        hashes.append(parent)
    return hashes


def _feed(state: Any, raw: memoryview, spans: list[Media]) -> None:
    state.update(_FIELD.pack(_TOKENS, len(raw)))
    state.update(raw)
    _feed_media(state, spans, 0, len(raw) // 4)


def _feed_media(state: Any, spans: list[Media], begin: int, end: int) -> None:
    for start, length, ident in spans:
        if start < end and start + length > begin:
            state.update(_field(_MEDIA, _SPAN.pack(start - begin, length) + ident))


def _print_state(head: bytes) -> Any:
    return hashlib.blake2b(head, digest_size=FINGERPRINT_BYTES, person=_PERSON)


def _head(kind: Kind, given: object) -> bytes:
    salt = _octets(given, "salt")
    if len(salt) > MAX_SALT_BYTES:
        raise BadKey(f"salt has {len(salt)} bytes, limit {MAX_SALT_BYTES}: pass its digest")
    return _field(_KIND, bytes((kind,))) + _field(_SALT, salt)


def _field(tag: int, value: bytes) -> bytes:
    return _FIELD.pack(tag, len(value)) + value


def _size(given: Any) -> int:
    try:
        chunk_tokens = index(given)
    except TypeError:
        chunk_tokens = 0
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise BadKey(f"chunk_tokens is {given!r}, must be 1 to {MAX_CHUNK_TOKENS}")
    return chunk_tokens


def _octets(value: object, what: str) -> bytes:
    if not isinstance(value, bytes):
        raise BadKey(f"{what} must be bytes, got {type(value).__name__}")
    return value


def _spans(media: Any) -> list[Media]:
    spans = []
    try:
        items = iter(media)
    except TypeError as error:
        raise BadKey(f"media must be items, got {type(media).__name__}") from error
    for item in items:
        try:
            start, length, ident = item
            start, length = index(start), index(length)
        except (TypeError, ValueError) as error:
            raise BadKey(f"media item {item!r} is not (start, length, id): {error}") from error
        if not 0 <= start < 1 << 62 or not 0 < length < 1 << 62:
            raise BadKey(f"media span ({start}, {length}) is not a place in the tokens")
        if not _octets(ident, "media id"):
            raise BadKey(f"media item at token {start} has no id: without one it can't be cached")
        spans.append(Media(start, length, ident))
    return sorted(spans)
