"""ChunkKey: what a shard of a chunk is found by; and namespaces, the part of it that is bound to
a session.

The law of this module: two keys are the same only if every part is. Nothing is cut, joined by a
separator, case-folded or normalised on the way.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final, NamedTuple

from kvd.chunk.outcome import Kind
from kvd.errors import BadKey
from kvd.native import Given

HASH_BYTES: Final = 32
MAX_NAMESPACE_BYTES: Final = 128

_NAMESPACE_DOMAIN: Final = b"kvd/namespace/1\0"
_STORAGE_DOMAIN: Final = b"kvd/storage-name/1\0"
_KEY: Final = struct.Struct("<BI")


class ChunkKey(NamedTuple):
    """Identity of one shard of a chunk. `spec` is a spec digest, `chunk` a chunk hash, 32 bytes
    each; `shard` an index into the spec's shard table."""

    kind: Kind
    namespace: str
    spec: bytes
    chunk: bytes
    shard: int

    def storage_name(self) -> str:
        """64 hex digits that name this shard in a store with restricted names (a file, an
        object): a digest over all parts, so it is injective for any Unicode, on
        case-insensitive and length-limited stores too. BadKey if a part is none."""
        values: tuple[Any, ...] = self  # by name, compiled code demands their types
        kind, namespace, spec, chunk, shard = values
        try:
            head = _KEY.pack(kind, shard)
        except (struct.error, TypeError) as error:
            raise BadKey(f"kind {kind!r} and shard {shard!r} are none of a key: {error}") from error
        body = namespace_digest(namespace) + check_hash(spec, "spec digest") + check_hash(chunk)
        return hashlib.sha256(_STORAGE_DOMAIN + head + body).hexdigest()


def check_namespace(name: Given[str]) -> str:
    """The name, unchanged. BadKey unless it is 1 to 128 bytes of UTF-8 without NUL."""
    if not isinstance(name, str):
        raise BadKey(f"namespace must be text, got {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise BadKey(f"namespace is not valid Unicode: {name!r}") from error
    if not 1 <= size <= MAX_NAMESPACE_BYTES:
        raise BadKey(f"namespace has {size} bytes of UTF-8, must have 1 to {MAX_NAMESPACE_BYTES}")
    if "\0" in name:
        raise BadKey(f"namespace {name!r} contains NUL")
    return name


def namespace_digest(name: Given[str]) -> bytes:
    """32 bytes that stand for the namespace in a record. BadKey as `check_namespace`."""
    return hashlib.sha256(_NAMESPACE_DOMAIN + check_namespace(name).encode()).digest()


def check_hash(value: Given[bytes], what: str = "chunk hash") -> bytes:
    """The hash, unchanged. BadKey unless it is exactly 32 bytes."""
    if not isinstance(value, bytes) or len(value) != HASH_BYTES:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise BadKey(f"{what} must be {HASH_BYTES} bytes, got {got}")
    return value
