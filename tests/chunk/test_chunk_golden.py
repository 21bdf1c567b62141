"""Identity and formats to the byte, against fixed vectors and against a second way to make them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import chunk_vectors as vectors
import pytest
import xxhash

from kvd.chunk import (
    NO_FINGERPRINT,
    NO_PARENT,
    RECORD_DTYPE,
    ChunkHeader,
    KVSpec,
    chain_fingerprints,
    chain_hashes,
    payload_digest,
)

HERE = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((HERE / "golden.json").read_text())


def test_every_vector_is_what_it_was_on_the_first_day() -> None:
    """K10"""
    assert vectors.vectors() == GOLDEN


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_keys_are_the_same_in_any_process_and_with_any_hash_seed(seed: str | None) -> None:
    """K10"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, str(HERE / "chunk_vectors.py")],
        env=env,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == GOLDEN


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def _fields(parent: bytes, start: int, media: list[tuple[int, int, bytes]]) -> bytes:
    """The hashed fields of the chunk of 64 golden tokens from `start`, by the format's text."""
    tokens = vectors.TOKENS[start : start + 64]
    text = _field(2, parent) + _field(4, struct.pack("<64I", *tokens))
    for at, length, ident in media:
        if at < start + 64 and at + length > start:
            text += _field(5, struct.pack("<qQ", at - start, length) + ident)
    return text


def test_a_chain_is_what_the_format_says() -> None:
    head = _field(1, b"\x01") + _field(3, b"pepper")
    parent, mark = NO_PARENT, NO_FINGERPRINT
    hashes, marks = [], []
    for start in (0, 64, 128):
        text = head + _fields(parent, start, vectors.MEDIA)
        parent = hashlib.sha256(b"kvd/chunk/1\0" + text).digest()
        hashes.append(parent)
        text = head + _fields(mark, start, vectors.MEDIA)
        mark = hashlib.blake2b(text, digest_size=16, person=b"kvd/fingerprint1").digest()
        marks.append(mark)
    made = chain_hashes(vectors.TOKENS, 64, salt=b"pepper", media=vectors.MEDIA)
    assert made == hashes
    made = chain_fingerprints(vectors.TOKENS, 64, salt=b"pepper", media=vectors.MEDIA)
    assert made == marks


def test_a_payload_digest_is_what_the_format_says() -> None:
    raw = vectors.payload((5 << 19) + 3)
    blocks = [raw[at : at + (1 << 20)] for at in range(0, len(raw), 1 << 20)]
    text = b"".join(struct.pack("<Q", xxhash.xxh3_64(b).intdigest()) for b in blocks)
    text += struct.pack("<Q", len(raw))
    assert payload_digest(raw) == xxhash.xxh3_128(text).digest()


def test_a_spec_digest_is_of_the_encoding_under_its_own_domain() -> None:
    encoding = bytes.fromhex(GOLDEN["spec_encoding"])
    assert hashlib.sha256(b"kvd/spec/1\0" + encoding).hexdigest() == GOLDEN["spec_digest"]
    assert KVSpec.decode(encoding) == vectors.SPEC


# the record's layout as documented: name, offset, bytes
LAYOUT = [
    ("magic", 0, 8),
    ("version", 8, 2),
    ("header_size", 10, 2),
    ("kind", 12, 1),
    ("state", 13, 1),
    ("codec", 14, 2),
    ("namespace_digest", 16, 32),
    ("spec", 48, 32),
    ("chunk", 80, 32),
    ("parent", 112, 32),
    ("shard", 144, 4),
    ("shard_count", 148, 4),
    ("index", 152, 4),
    ("tokens", 156, 4),
    ("fingerprint", 160, 16),
    ("pos0", 176, 8),
    ("flags", 184, 4),
    ("reserved", 188, 4),
    ("length", 192, 8),
    ("generation", 200, 8),
    ("epoch", 208, 8),
    ("session", 216, 16),
    ("created_unix_ns", 232, 8),
    ("digest", 240, 16),
    ("reserved2", 256, 248),
    ("check", 504, 8),
]


def test_a_record_has_each_field_where_the_format_says() -> None:
    assert RECORD_DTYPE.itemsize == 512
    assert RECORD_DTYPE.fields is not None
    assert [
        (name, RECORD_DTYPE.fields[name][1], RECORD_DTYPE.fields[name][0].itemsize)
        for name in RECORD_DTYPE.names or ()
    ] == LAYOUT
    raw = bytes.fromhex(GOLDEN["header"])
    for name, at, size in LAYOUT:
        value = getattr(vectors.HEADER, name, None)
        if isinstance(value, bytes):
            assert raw[at : at + size] == value, name
        elif value is not None:
            assert int.from_bytes(raw[at : at + size], "little") == value, name
    assert raw[504:] == struct.pack("<Q", xxhash.xxh3_64(raw[:504]).intdigest())
    assert ChunkHeader.unpack(raw) == vectors.HEADER
