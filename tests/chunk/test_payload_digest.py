"""Payload digests: any bit, any length, any range of blocks."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.chunk import (
    BLOCK_BYTES,
    block_digests,
    copy_with_digest,
    payload_digest,
    root_digest,
    verify_blocks,
)

SIZE = 3 * BLOCK_BYTES + 12345
PAYLOAD = random.Random(1).randbytes(SIZE)


def test_a_payload_changed_at_any_place_has_another_digest() -> None:
    good = payload_digest(PAYLOAD)
    broken = bytearray(PAYLOAD)
    edges = [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES, SIZE - 1]
    for i, at in enumerate(edges + [SIZE * k // 64 for k in range(1, 60)]):
        broken[at] ^= 1 << i % 8
        assert payload_digest(broken) != good
        broken[at] ^= 1 << i % 8
    assert payload_digest(broken) == good


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_payloads_share_a_digest_only_if_they_are_equal(a: bytes, b: bytes) -> None:
    assert (payload_digest(a) == payload_digest(b)) == (a == b)


def test_a_payload_cut_or_grown_has_another_digest() -> None:
    sizes = [0, 1, 2, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES]
    assert len({payload_digest(bytes(n)) for n in sizes}) == len(sizes)


def test_swapped_blocks_have_another_digest() -> None:
    a, b = PAYLOAD[:BLOCK_BYTES], PAYLOAD[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert payload_digest(a + b) != payload_digest(b + a)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.complex64])
def test_bytes_count_whatever_the_type_of_the_buffer(dtype: type) -> None:
    raw = PAYLOAD[: 1 << 16]
    made = np.frombuffer(raw, dtype=dtype)
    assert payload_digest(made.data) == payload_digest(raw)
    assert payload_digest(made.reshape(64, -1).data) == payload_digest(bytearray(raw))


def test_values_that_compare_equal_or_unequal_are_only_bytes() -> None:
    """K37: every fp8 byte, NaNs with payload bits, both zeros, denormals: bits decide."""
    fp8 = bytes(range(256))
    assert payload_digest(fp8) == payload_digest(bytes(fp8))
    halves = [0x7E00, 0x7E01, 0xFE00, 0x7C01, 0x7C00, 0x0000, 0x8000, 0x0001, 0x8001]
    brains = [0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0x7F80, 0x0000, 0x8000, 0x0001, 0x8001]
    for words in (halves, brains):
        digests = {payload_digest(struct.pack("<H", w) * 64) for w in words}
        assert len(digests) == len(words)
    nan = np.full(64, np.nan, dtype=np.float32)
    assert payload_digest(nan.data) == payload_digest(nan.copy().data)
    zero = np.zeros(64, dtype=np.float32)
    assert payload_digest(zero.data) != payload_digest((-zero).data)


def test_a_range_of_blocks_is_checked_without_the_rest() -> None:
    blocks = block_digests(PAYLOAD)
    assert len(blocks) == 4 * 8
    assert root_digest(blocks, SIZE) == payload_digest(PAYLOAD)
    part = PAYLOAD[BLOCK_BYTES : 3 * BLOCK_BYTES]
    assert verify_blocks(part, blocks, first=1)
    assert verify_blocks(PAYLOAD[3 * BLOCK_BYTES :], blocks, first=3)
    assert not verify_blocks(part, blocks, first=0)
    assert not verify_blocks(part[:-1], blocks, first=1)
    assert not verify_blocks(b"", blocks)
    assert not verify_blocks(PAYLOAD + bytes(BLOCK_BYTES), blocks)


@pytest.mark.parametrize(
    ("blocks", "length"), [("x" * 8, 1), (bytes(8), "1"), (bytes(8), 1.0), (b"", -1)]
)
def test_what_is_no_block_digests_or_no_length_is_refused(blocks: Any, length: Any) -> None:
    with pytest.raises(ValueError, match="block digests"):
        root_digest(blocks, length)


def test_block_digests_that_do_not_fit_the_length_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        root_digest(block_digests(PAYLOAD), SIZE + BLOCK_BYTES)


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(TypeError):
        payload_digest(memoryview(PAYLOAD[:64])[::2])


@pytest.mark.parametrize("size", [0, 1, 4096, (512 << 10) + 1, 1 << 20, (2 << 20) + 5, 3 << 20])
def test_a_copy_that_hashes_on_its_way_copies_and_hashes_the_same(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(size, np.uint8)
    assert copy_with_digest(target, source) == payload_digest(source.data)
    assert np.array_equal(target, source)


def test_a_copy_that_hashes_refuses_arrays_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="one length"):
        copy_with_digest(np.zeros(4, np.uint8), np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        copy_with_digest(np.zeros(4, np.uint8), np.zeros(4, np.int8))
