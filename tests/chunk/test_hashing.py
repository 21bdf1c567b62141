"""kvd's own hashes: content only, all of the content, and hard to collide."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvd.chunk import (
    NO_FINGERPRINT,
    NO_PARENT,
    chain_fingerprints,
    chain_hashes,
    content_hash,
    fingerprint,
)
from kvd.chunk.hashing import MAX_SALT_BYTES
from kvd.errors import BadKey

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(tokens, st.integers(0, 100), st.integers(1, 20))
def test_a_longer_prompt_keeps_the_hashes_of_its_prefix(ids: list[int], cut: int, n: int) -> None:
    whole, part = chain_hashes(ids, n), chain_hashes(ids[:cut], n)
    assert len(whole) == len(ids) // n  # the last partial chunk has none
    assert whole[: len(part)] == part


@given(tokens, st.integers(1, 5), st.integers(1, 20))
def test_a_chain_goes_on_from_any_of_its_chunks(ids: list[int], at: int, n: int) -> None:
    whole, marks = chain_hashes(ids, n), chain_fingerprints(ids, n)
    if len(whole) > at:
        rest = ids[at * n :]
        assert chain_hashes(rest, n, parent=whole[at - 1]) == whole[at:]
        assert chain_fingerprints(rest, n, parent=marks[at - 1]) == marks[at:]


@given(tokens, tokens, st.integers(1, 20))
def test_chunks_share_a_hash_only_with_equal_tokens_before_them(
    a: list[int], b: list[int], n: int
) -> None:
    for i, (x, y) in enumerate(zip(chain_hashes(a, n), chain_hashes(b, n), strict=False)):
        assert (x == y) == (a[: (i + 1) * n] == b[: (i + 1) * n])


SOME = [(i * 7919) % 50000 for i in range(130)]


@pytest.mark.parametrize(
    "made",
    [
        SOME,
        tuple(SOME),
        array("i", SOME),
        np.array(SOME),
        np.array(SOME, dtype=np.int32),
        np.array(SOME, dtype=np.uint16),
        np.array(SOME, dtype=">i8"),
        np.array(SOME * 2).reshape(2, -1)[0],
        np.repeat(np.array(SOME), 2)[::2],
    ],
    ids=str,
)
def test_the_container_of_the_tokens_does_not_matter(made: Any) -> None:
    """K24: writer and reader may hold them differently."""
    assert chain_hashes(made, 64) == chain_hashes(SOME, 64)
    assert content_hash(made) == content_hash(SOME)
    assert fingerprint(made) == fingerprint(SOME)


BAD: list[Any] = [
    [-1],
    [2**32],
    [2**64 - 1],
    [1.0],
    ["1"],
    [None],
    np.array([-1]),
    np.array([2**32]),
    np.array([2**64 - 1], dtype=np.uint64),
    np.array([1.5]),
    np.array([[1, 2]]),
    np.array([True]),
    "text",
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_what_is_no_token_id_is_refused(bad: Any) -> None:
    """K23"""
    for make in (
        lambda: chain_hashes(bad, 16),
        lambda: content_hash(bad),
        lambda: fingerprint(bad),
    ):
        with pytest.raises(BadKey):
            make()


def test_other_parts_that_can_not_be_are_refused() -> None:
    """K23"""
    with pytest.raises(BadKey, match="32 bytes, got 16"):
        chain_hashes([1] * 16, 16, parent=bytes(16))
    with pytest.raises(BadKey, match="16 bytes, got 32"):
        chain_fingerprints([1] * 16, 16, parent=bytes(32))
    with pytest.raises(BadKey, match="chunk_tokens is 0"):
        chain_hashes([1] * 16, 0)
    with pytest.raises(BadKey, match="salt must be bytes"):
        content_hash([1], salt="s")  # type: ignore[arg-type]
    with pytest.raises(BadKey, match="pass its digest"):
        content_hash([1], salt=bytes(MAX_SALT_BYTES + 1))
    for span in [(-1, 1, b"x"), (0, 0, b"x"), (0, 1, b""), (0, 1, "x")]:
        with pytest.raises(BadKey):
            content_hash([1], media=[span])  # type: ignore[list-item]


ROW = list(range(32))


@pytest.mark.parametrize("value", [None, "16", 16.0, [16]], ids=repr)
def test_parts_of_a_wrong_type_are_refused_as_such(value: Any) -> None:
    for chain in (chain_hashes, chain_fingerprints):
        with pytest.raises(BadKey, match="chunk_tokens is"):
            chain(ROW, value)
        with pytest.raises(BadKey, match="parent must be bytes"):
            chain(ROW, 16, parent=value)
    with pytest.raises(BadKey, match="parent must be bytes"):
        fingerprint(ROW, value)
    for make in (
        lambda **parts: chain_hashes(ROW, 16, **parts),
        lambda **parts: chain_fingerprints(ROW, 16, **parts),
        lambda **parts: content_hash(ROW, **parts),
        lambda **parts: fingerprint(ROW, **parts),
    ):
        with pytest.raises(BadKey, match="salt must be bytes"):
            make(salt=value)
        for span in [(value, 1, b"x"), (0, value, b"x"), (0, 1, value), (0, 1), value]:
            with pytest.raises(BadKey, match="media"):
                make(media=[span])
        with pytest.raises(BadKey, match="media"):
            make(media=value)


def test_numbers_of_numpy_are_numbers() -> None:
    plain = chain_hashes(ROW, 16, media=[(3, 20, b"x")])
    assert chain_hashes(ROW, np.int64(16), media=[(np.int64(3), np.int64(20), b"x")]) == plain


def test_known_collisions_of_weak_hashes_do_not_collide() -> None:
    """K21: sums and rolling hashes, a published pair of xxh64 inputs, swaps."""
    rolling = [100 + i for i in range(16)]
    seen = {bytes(chain_hashes(rolling, 16)[0])}
    for j in range(15):
        shifted = list(rolling)
        shifted[j] += 31
        shifted[j + 1] -= 1
        seen.add(chain_hashes(shifted, 16)[0])
        swapped = list(rolling)
        swapped[j], swapped[j + 1] = swapped[j + 1], swapped[j]
        seen.add(chain_hashes(swapped, 16)[0])
    assert len(seen) == 31


def _xxh64_pair() -> tuple[bytes, bytes]:
    """Two inputs of 32 bytes that xxh64 (seed 0) can't tell apart, made by inverting the rounds:
    each of its lanes maps 8 bytes by multiplications and a rotation, all of which can be undone,
    and the lanes are then combined so that two lanes' differences can cancel over two stripes."""
    p1, p2, mask = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1

    def step(acc: int, value: int) -> int:
        acc = (acc + value * p2) & mask
        return (((acc << 31) | (acc >> 33)) & mask) * p1 & mask

    first, second = 1, 2  # two values of one lane in stripe 1
    acc0 = (p1 + p2) & mask
    target = step(step(acc0, first), 0)
    # value for stripe 2 that brings the other first value to the same state
    want = target * pow(p1, -1, 1 << 64) & mask
    want = ((want >> 31) | (want << 33)) & mask
    other = (want - step(acc0, second)) * pow(p2, -1, 1 << 64) & mask
    zero = bytes(24)

    def text(a: int, b: int) -> bytes:
        return a.to_bytes(8, "little") + zero + b.to_bytes(8, "little") + zero

    return text(first, 0), text(second, other)


def test_a_pair_that_xxh64_can_not_tell_apart_gets_two_keys() -> None:
    """K21"""
    a, b = _xxh64_pair()
    assert a != b and xxhash.xxh64(a).digest() == xxhash.xxh64(b).digest()
    ids = [np.frombuffer(x, dtype="<u4") for x in (a, b)]
    assert chain_hashes(ids[0], 16) != chain_hashes(ids[1], 16)
    assert content_hash(ids[0]) != content_hash(ids[1])
    assert fingerprint(ids[0]) != fingerprint(ids[1])


def test_a_chunk_depends_on_its_parent_and_swapped_chunks_differ() -> None:
    """K21"""
    a, b = list(range(16)), list(range(16, 32))
    ab, ba, aa = (chain_hashes(x + y, 16) for x, y in [(a, b), (b, a), (a, a)])
    assert len({*ab, *ba, *aa}) == 5  # ab and aa share their first chunk, nothing else
    assert ab[0] == aa[0]
    assert content_hash(a) != ab[0]  # a kind is part of the hash


def test_the_salt_is_part_of_the_identity() -> None:
    made = [chain_hashes(SOME, 64, salt=s) for s in (b"", b"a", b"b", b"\0")]
    assert len({h for chain in made for h in chain}) == 8


def test_two_prompts_under_one_hash_are_told_apart_by_their_fingerprints() -> None:
    """K22: the fingerprint shares no step with the hash, so a collision there is seen here."""
    a, b = chain_fingerprints(SOME, 64), chain_fingerprints([*SOME[:-70], 1, *SOME[-69:]], 64)
    assert a[0] != b[0] and a[1] != b[1]
    hashes = chain_hashes(SOME, 64)
    assert all(mark not in h for mark in a for h in hashes)
    assert fingerprint(SOME[:64], NO_FINGERPRINT) == a[0]
    assert fingerprint(SOME[64:128], a[0]) == a[1]
    # also for an engine's own hashes: tokens, parent and shape
    parent = b"p" * 32
    marks = {
        fingerprint(SOME[:64], parent),
        fingerprint(SOME[:64], b"q" * 32),
        fingerprint(SOME[:63], parent),
        fingerprint(SOME[:64]),
        fingerprint(SOME[:64], NO_FINGERPRINT),
        fingerprint([*SOME[:63], 1], parent),
    }
    assert len(marks) == 6


def test_no_picture_is_taken_for_another() -> None:
    """K18: 20,000 pictures stored, 20,000 others asked for, and ids with the same last digits."""
    rng = random.Random(18)
    text = [7] * 64

    def keys(tail: bytes) -> set[bytes]:
        return {content_hash(text, media=[(0, 64, rng.randbytes(30) + tail)]) for _ in range(20000)}

    stored, fresh = keys(b"\xab\xcd"), keys(b"\xab\xcd")
    assert len(stored) == len(fresh) == 20000
    assert not stored & fresh


def test_a_picture_enters_every_chunk_that_its_span_touches_and_no_other() -> None:
    """K24"""
    prompt = list(range(512)) + [9] * 300 + list(range(700, 1000))
    one, two = (chain_hashes(prompt, 256, media=[(512, 300, p)]) for p in (b"P1", b"P2"))
    plain = chain_hashes(prompt, 256)
    assert one[:2] == two[:2] == plain[:2]
    assert all(a != b for a, b in zip(one[2:], two[2:], strict=True))
    # by its own tokens, each chunk shows which it touches: 512..811 is chunks 2 and 3
    for chunk in range(4):
        ids = prompt[chunk * 256 : (chunk + 1) * 256]
        start = 512 - chunk * 256
        if start < 0:
            continue
        touched = content_hash(ids, media=[(start, 300, b"P1")]) != content_hash(ids)
        assert touched == (chunk == 2)


def test_the_same_picture_at_another_place_in_the_chunk_does_not_hit() -> None:
    """K24: the placeholder tokens are equal, only the picture's place is not."""
    ids = [9] * 64
    made = {content_hash(ids, media=[(at, n, b"P")]) for at in (0, 1, 40) for n in (8, 9)}
    assert len(made) == 6


def test_the_order_in_which_pictures_are_named_does_not_matter() -> None:
    spans = [(3, 4, b"a"), (10, 2, b"b"), (3, 4, b"0")]
    assert content_hash(SOME, media=spans) == content_hash(SOME, media=spans[::-1])
    swapped = [(3, 4, b"b"), (10, 2, b"a"), (3, 4, b"0")]
    assert content_hash(SOME, media=spans) != content_hash(SOME, media=swapped)


def test_a_chain_of_nothing_is_nothing() -> None:
    assert chain_hashes([], 16) == chain_hashes([1] * 15, 16) == chain_fingerprints([], 16) == []
    assert chain_hashes(np.array([]), 16) == []
    assert NO_PARENT == bytes(32) and NO_FINGERPRINT == bytes(16)
