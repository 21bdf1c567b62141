"""KVSpec: what makes two blocks of bytes interchangeable.

The law of this module: whatever changes a byte of a KV chunk, or where a byte lies, is a field of
the spec; the canonical encoding is injective (each field tagged and length-delimited), and only
its digest enters a key. A spec describes the whole model's layout, never the asker's rank. A
connector that can't fill a field must not cache.

Encoding (little-endian): b"KVDSPEC1", then every field once, in tag order, as
`tag u8 | length u32 | value`. Strings are UTF-8, integers u32. `rope` and `extra` are `count u32`
and then, sorted by name, `length u32 | name | length u32 | value`. The shard table is 40 bytes a
shard in table order.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from kvd.errors import SpecError

MAX_SPEC_BYTES: Final = 64 * 1024  # an encoded spec travels in one message and lies in the registry
MAX_FIELD_BYTES: Final = 4096  # one string, in UTF-8
MIN_CHUNK_TOKENS: Final = 16
MAX_CHUNK_TOKENS: Final = 4096
MAX_WORLD: Final = 1 << 16  # pipeline stages, tensor ranks, groups, parts, layers, heads

Pairs = tuple[tuple[str, str], ...]

_MAGIC: Final = b"KVDSPEC1"
_DIGEST_DOMAIN: Final = b"kvd/spec/1\0"
_U32: Final = struct.Struct("<I")
_FIELD: Final = struct.Struct("<BI")
_SHARD: Final = struct.Struct("<8IQ")

_STRINGS = ("model", "revision", "weights", "engine", "dtype", "quantisation", "codec")
_REQUIRED = ("model", "weights", "engine", "dtype", "codec")
_INTEGERS = ("chunk_tokens", "pipeline", "tensor", "groups")
_PAIRS = ("rope", "extra")
# a tag is a field's number in protocol 1 and on disk: append only, never reuse
_TAGS: Final = {name: 1 + i for i, name in enumerate((*_STRINGS, *_INTEGERS, *_PAIRS, "shards"))}


class ShardSpec(NamedTuple):
    """One rank-local part of a chunk: which layers and KV heads of which group, and its size.

    `part` tells apart the tensors that one rank keeps of one group (for example kv and index).
    Data that all tensor ranks hold alike (MLA) is one shard with tp 0. `nbytes` is the payload of
    a full chunk, summed over its layers, which may have different widths and dtypes.
    """

    pp: int
    tp: int
    group: int
    part: int
    layer_begin: int
    layer_end: int  # exclusive
    head_begin: int
    head_end: int  # exclusive
    nbytes: int


@dataclass(frozen=True)
class KVSpec:
    """The identity of a KV layout. Equal digests mean interchangeable bytes.

    `rope` and `extra` are (name, value) pairs, sorted on construction; `canonical_pairs` makes
    them from a mapping. `extra` takes what else changes the bytes: salt, LoRA name and digest.
    Construction checks nothing; `validate()`, `encode()` and `digest` raise SpecError.
    """

    model: str
    revision: str
    weights: str  # digest of the weights
    engine: str  # engine family, where its bytes differ from others'
    dtype: str  # of the stored KV, for example "bfloat16"
    quantisation: str  # scheme of the stored KV; "" or "none" where there is none
    codec: str  # layout of a payload: order of layers, K/V, tokens, heads; CPU or GPU pages
    chunk_tokens: int  # 16..4096
    pipeline: int  # world sizes
    tensor: int
    groups: int  # KV groups (full attention, sliding window, state, ...)
    rope: Pairs
    extra: Pairs
    shards: tuple[ShardSpec, ...]  # a shard's number is its index here

    def __post_init__(self) -> None:
        # A pair's place in the tuple means nothing, so it must not enter equality or the digest.
        for name in _PAIRS:
            object.__setattr__(self, name, tuple(sorted(tuple(p) for p in getattr(self, name))))
        object.__setattr__(self, "shards", tuple(ShardSpec(*s) for s in self.shards))

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _encoded(self) -> bytes:
        self._check_fields()
        parts = [_MAGIC]
        for name, tag in _TAGS.items():
            value = _encode_value(name, getattr(self, name))
            parts += (_FIELD.pack(tag, len(value)), value)
        return b"".join(parts)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 of a domain tag and the canonical encoding."""
        return hashlib.sha256(_DIGEST_DOMAIN + self.encode()).digest()

    @cached_property
    def _shard_index(self) -> dict[tuple[int, int, int, int], int]:
        return {s[:4]: i for i, s in enumerate(self.shards)}

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of a full chunk over all its shards."""
        return sum(s.nbytes for s in self.shards)

    def shard_index(self, pp: int, tp: int, group: int = 0, part: int = 0) -> int:
        """The number of a shard. SpecError if the table has no such shard."""
        index = self._shard_index.get((pp, tp, group, part))
        if index is None:
            raise SpecError(
                f"spec of {self.model!r} has no shard (pp {pp}, tp {tp}, group {group}, part "
                f"{part}); its table has {len(self.shards)} shards"
            )
        return index

    def encode(self) -> bytes:
        """Canonical bytes, at most 64 KiB; equal for equal specs only. SpecError if not valid."""
        encoded = self._encoded
        if len(encoded) > MAX_SPEC_BYTES:
            raise SpecError(
                f"spec of {self.model!r} takes {len(encoded)} bytes encoded, limit "
                f"{MAX_SPEC_BYTES}: shorten the extra fields or merge shards"
            )
        return encoded

    @classmethod
    def decode(cls, data: bytes | memoryview) -> KVSpec:
        """The spec of an encoding. SpecError on all but the canonical bytes of a valid spec."""
        raw = bytes(data[: MAX_SPEC_BYTES + 1])
        if len(raw) > MAX_SPEC_BYTES:
            raise SpecError(f"encoded spec of more than {MAX_SPEC_BYTES} bytes")
        if raw[:8] != _MAGIC:
            raise SpecError(f"not an encoded spec: starts with {raw[:8]!r}, expected {_MAGIC!r}")
        fields: dict[str, Any] = {}
        at = len(_MAGIC)
        for name, tag in _TAGS.items():
            if len(raw) - at < _FIELD.size:
                raise SpecError(f"encoded spec is cut before field {name}")
            got, length = _FIELD.unpack_from(raw, at)
            at += _FIELD.size
            if got != tag:
                raise SpecError(f"encoded spec: tag {got} where {tag} ({name}) is due")
            if length > len(raw) - at:
                raise SpecError(f"encoded spec is cut within field {name}")
            fields[name] = _decode_value(name, raw[at : at + length])
            at += length
        if at != len(raw):
            raise SpecError(f"encoded spec has {len(raw) - at} bytes after its last field")
        spec = cls(**fields)
        if spec.encode() != raw:
            raise SpecError("encoded spec is not canonical: its pairs are not in order")
        return spec

    def validate(self) -> None:
        """SpecError naming the field, the limit and the way out, if anything is wrong."""
        self.encode()

    def _check_fields(self) -> None:
        for name in _STRINGS:
            _check_text(name, getattr(self, name))
        for name in _REQUIRED:
            if not getattr(self, name):
                raise SpecError(
                    f"spec field {name} is empty: a connector that can't fill it must not cache"
                )
        for name in _INTEGERS:
            _check_int(f"spec field {name}", getattr(self, name), 1, MAX_WORLD)
        _check_int("spec field chunk_tokens", self.chunk_tokens, MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS)
        for name in _PAIRS:
            pairs = getattr(self, name)
            for pair in pairs:
                if len(pair) != 2:
                    raise SpecError(f"spec field {name} takes (name, value) pairs, got {pair!r}")
                _check_text(f"{name} name", pair[0])
                _check_text(f"{name} value", pair[1])
            if len({p[0] for p in pairs}) != len(pairs):
                raise SpecError(f"spec field {name} gives a name twice: {[p[0] for p in pairs]}")
        self._check_shards()

    def _check_shards(self) -> None:
        if not self.shards:
            raise SpecError("spec field shards is empty: declare at least one shard")
        for i, s in enumerate(self.shards):
            where = f"shard {i}:"
            _check_int(f"{where} pp", s.pp, 0, self.pipeline - 1)
            _check_int(f"{where} tp", s.tp, 0, self.tensor - 1)
            _check_int(f"{where} group", s.group, 0, self.groups - 1)
            _check_int(f"{where} part", s.part, 0, MAX_WORLD)
            _check_int(f"{where} layer_begin", s.layer_begin, 0, MAX_WORLD)
            _check_int(f"{where} layer_end", s.layer_end, s.layer_begin + 1, MAX_WORLD)
            _check_int(f"{where} head_begin", s.head_begin, 0, MAX_WORLD)
            _check_int(f"{where} head_end", s.head_end, s.head_begin + 1, MAX_WORLD)
            _check_int(f"{where} nbytes", s.nbytes, 1, (1 << 63) - 1)
        if len(self._shard_index) != len(self.shards):
            raise SpecError("spec field shards gives one (pp, tp, group, part) twice")


def canonical_pairs(values: Mapping[str, object] | Iterable[tuple[str, object]]) -> Pairs:
    """(name, value) strings for `rope` and `extra`: text as it is, all else as compact JSON with
    sorted keys (floats in their shortest exact form). SpecError for what JSON can't say."""
    pairs = []
    for name, value in dict(values).items():
        if not isinstance(value, str):
            try:
                value = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise SpecError(f"spec value {name}={value!r} has no canonical form") from error
        pairs.append((name, value))
    return tuple(sorted(pairs))


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise SpecError(f"spec field {name} must be text, got {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise SpecError(f"spec field {name} is not valid Unicode: {value!r}") from error
    if size > MAX_FIELD_BYTES:
        raise SpecError(f"spec field {name} has {size} bytes, limit {MAX_FIELD_BYTES}: shorten it")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SpecError(f"{name} is {value!r}, must be a whole number from {low} to {high}")


def _encode_value(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int):
        return _U32.pack(value)
    assert isinstance(value, tuple)
    if name == "shards":
        return b"".join(_SHARD.pack(*s) for s in value)
    parts = [_U32.pack(len(value))]
    for pair in value:
        for text in pair:
            raw = text.encode()
            parts += (_U32.pack(len(raw)), raw)
    return b"".join(parts)


def _decode_value(name: str, raw: bytes) -> object:
    try:
        if name in _STRINGS:
            return raw.decode()
        if name in _INTEGERS:
            (number,) = _U32.unpack(raw)
            return number
        if name == "shards":
            return tuple(ShardSpec(*s) for s in _SHARD.iter_unpack(raw))
        return _decode_pairs(raw)
    except (struct.error, UnicodeDecodeError) as error:
        raise SpecError(f"encoded spec: field {name} does not hold: {error}") from error


def _decode_pairs(raw: bytes) -> Pairs:
    (count,) = _U32.unpack_from(raw, 0)
    at, texts = 4, []
    while at < len(raw):
        (length,) = _U32.unpack_from(raw, at)
        at += 4
        if length > len(raw) - at:
            raise SpecError("encoded spec: a pair is cut")
        texts.append(raw[at : at + length].decode())
        at += length
    if len(texts) != 2 * count:
        raise SpecError(f"encoded spec: {len(texts)} texts where {count} pairs are announced")
    return tuple(zip(texts[0::2], texts[1::2], strict=True))
