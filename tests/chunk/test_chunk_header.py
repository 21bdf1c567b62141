"""Records: believed as a whole or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from chunk_vectors import HEADER
from hypothesis import given
from hypothesis import strategies as st

from kvd.chunk import (
    IDENTITY_DTYPE,
    RECORD_DTYPE,
    ChunkHeader,
    Kind,
    State,
    verify_table,
)
from kvd.chunk.header import CHECK_AT, check_of

RAW = HEADER.pack()


def table_of(raw: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(raw, dtype=RECORD_DTYPE)


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
b16, b32 = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)
headers = st.builds(
    ChunkHeader,
    *(st.sampled_from([0, *Kind]), st.sampled_from(State), b32, b32, b32, b32),
    *(u32, u32, u32, u32, b16, u64, u32, u64, u64, u64, b16, u64, b16, st.integers(0, 2**16 - 1)),
)


@given(headers)
def test_a_header_comes_back_from_its_record(header: ChunkHeader) -> None:
    raw = header.pack()
    assert len(raw) == 512
    assert ChunkHeader.unpack(raw) == header
    table = table_of(raw)
    assert verify_table(table).tolist() == [True]
    for name in ("namespace_digest", "chunk", "fingerprint", "digest"):
        assert table[name].tobytes() == getattr(header, name)  # trailing zeros too
    for name in ("index", "generation", "length", "epoch", "pos0"):
        assert int(table[name][0]) == getattr(header, name)


def test_a_record_with_any_byte_changed_is_no_record() -> None:
    broken = bytearray(RAW * 512)
    for at in range(512):
        broken[512 * at + at] ^= 1 << at % 8
    assert not verify_table(table_of(bytes(broken))).any()
    for at in range(512):
        with pytest.raises(ValueError):
            ChunkHeader.unpack(broken[512 * at : 512 * (at + 1)])


def test_a_record_cut_or_grown_is_no_record() -> None:
    for length in range(512):
        with pytest.raises(ValueError, match="512 bytes"):
            ChunkHeader.unpack(RAW[:length])
    with pytest.raises(ValueError, match="512 bytes"):
        ChunkHeader.unpack(RAW + b"\0")


def test_a_record_torn_at_any_place_is_no_record() -> None:
    newer = HEADER._replace(chunk=b"n" * 32, generation=9, created_unix_ns=1, digest=b"e" * 16)
    raw = newer.pack()
    for at in range(8, 512, 8):
        torn = raw[:at] + RAW[at:]
        if torn in (raw, RAW):
            continue
        assert not verify_table(table_of(torn))[0], at


def _signed(raw: bytearray) -> bytes:
    raw[CHECK_AT:] = check_of(raw[:CHECK_AT]).to_bytes(8, "little")
    return bytes(raw)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(8, 2, "version 2"), (11, 1, "version 1 of 256"), (12, 3, "kind 3"), (13, 5, "state 5")],
)
def test_a_record_of_a_later_version_is_refused_though_its_check_holds(
    at: int, value: int, message: str
) -> None:
    raw = bytearray(RAW)
    raw[at] = value
    signed = _signed(raw)
    with pytest.raises(ValueError, match=message):
        ChunkHeader.unpack(signed)
    assert not verify_table(table_of(signed))[0]


def test_a_patched_record_holds_again() -> None:
    raw = bytearray(RAW)
    raw[13] = State.CONDEMNED
    assert not verify_table(table_of(bytes(raw)))[0]
    assert ChunkHeader.unpack(_signed(raw)).state == State.CONDEMNED


@given(st.lists(st.sampled_from(["good", "zero", "noise", "flip"]), max_size=40), st.randoms())
def test_a_table_is_judged_record_by_record_as_each_alone(kinds: list[str], rng: Any) -> None:
    parts = []
    for kind in kinds:
        raw = bytearray(HEADER._replace(generation=rng.randrange(2**64)).pack())
        if kind == "zero":
            raw = bytearray(512)
        elif kind == "noise":
            raw = bytearray(rng.randbytes(512))
        elif kind == "flip":
            raw[rng.randrange(512)] ^= 1 << rng.randrange(8)
        parts.append(bytes(raw))
    alone = []
    for part in parts:
        try:
            ChunkHeader.unpack(part)
            alone.append(True)
        except ValueError:
            alone.append(False)
    assert verify_table(table_of(b"".join(parts))).tolist() == alone
    assert alone == [kind == "good" for kind in kinds]


def test_a_strided_table_is_judged_too() -> None:
    table = table_of(RAW + bytes(512) + RAW + bytes(512))
    assert verify_table(table[::2]).tolist() == [True, True]
    assert verify_table(table[1::2]).tolist() == [False, False]


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": b"x" * 31},
        {"digest": b"x" * 17},
        {"session": b""},
        {"shard": -1},
        {"shard": 2**32},
        {"length": 2**64},
        {"kind": 256},
        {"epoch": "x"},
        {"length": None},
        {"state": 2.0},
        {"chunk": "x" * 32},
        {"spec": 7},
        {"digest": None},
    ],
    ids=str,
)
def test_a_field_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        HEADER._replace(**change).pack()


def test_a_header_of_numpy_numbers_is_the_same_record() -> None:
    numbers = {n: v for n, v in HEADER._asdict().items() if isinstance(v, int)}
    assert HEADER._replace(**{n: np.uint64(v) for n, v in numbers.items()}).pack() == RAW


def test_a_record_written_over_by_foreign_bytes_of_the_same_magic_is_no_record() -> None:
    """A check sum of anything shorter than the whole would let this pass."""
    raw = bytearray(RAW)
    raw[300] = 1  # reserved
    assert not verify_table(table_of(bytes(raw)))[0]
    assert xxhash.xxh3_64_intdigest(RAW[:504]) == int.from_bytes(RAW[504:], "little")


def test_what_is_kept_of_a_verified_record_has_the_same_fields() -> None:
    kept = np.frombuffer(RAW[:256], dtype=IDENTITY_DTYPE)
    whole = table_of(RAW)
    names = IDENTITY_DTYPE.names or ()
    assert [n for n in RECORD_DTYPE.names or () if n not in names] == ["reserved2", "check"]
    for name in names:
        assert kept[name].tobytes() == whole[name].tobytes()
    with pytest.raises(TypeError, match="must be whole"):
        verify_table(kept)  # what is not there can't be checked again
