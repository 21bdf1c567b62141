"""Specs: what makes bytes interchangeable, one field at a time."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from chunk_vectors import SPEC
from hypothesis import given
from hypothesis import strategies as st

from kvd.chunk import Kind, KVSpec, ShardSpec, canonical_pairs, chain_hashes
from kvd.chunk.key import ChunkKey
from kvd.errors import SpecError

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
required = names.filter(bool)
pairs = st.dictionaries(names, names, max_size=4).map(lambda d: tuple(d.items()))


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    pipeline, tensor, groups = (draw(st.integers(1, 4)) for _ in range(3))
    places = draw(
        st.sets(
            st.tuples(*(st.integers(0, n - 1) for n in (pipeline, tensor, groups, 3))), min_size=1
        )
    )
    shards = []
    for place in sorted(places):
        layer, head = draw(st.integers(0, 100)), draw(st.integers(0, 100))
        size = draw(st.integers(1, 2**40))
        shards.append(ShardSpec(*place, layer, layer + 3, head, head + 1, size))
    return KVSpec(
        *(draw(required), draw(names), draw(required), draw(required)),
        *(draw(required), draw(names), draw(required)),
        *(draw(st.integers(16, 4096)), pipeline, tensor, groups),
        *(draw(pairs), draw(pairs), tuple(shards)),
    )


@given(specs())
def test_a_spec_comes_back_from_its_encoding(spec: KVSpec) -> None:
    """K23"""
    again = KVSpec.decode(spec.encode())
    assert again == spec
    assert again.digest == spec.digest
    assert hash(again) == hash(spec)


@given(specs(), specs())
def test_two_specs_share_an_encoding_only_if_they_are_equal(a: KVSpec, b: KVSpec) -> None:
    assert (a.encode() == b.encode()) == (a == b) == (a.digest == b.digest)


def _others() -> dict[str, Any]:
    return {
        "model": "org/Model-7b",
        "revision": "v2",
        "weights": "sha256:00fe",
        "engine": "vllm",
        "dtype": "float16",
        "quantisation": "fp8-per-head",
        "codec": "kvd/lkvthd/2",
        "chunk_tokens": 128,
        "pipeline": 2,
        "tensor": 3,
        "groups": 2,
        "rope": (("theta", "10000.5"), ("type", "default")),
        "extra": (),
        "shards": (SPEC.shards[0], SPEC.shards[1]._replace(head_begin=1)),
    }


@pytest.mark.parametrize("name", [f.name for f in fields(KVSpec)])
def test_every_field_is_part_of_the_identity(name: str) -> None:
    assert replace(SPEC, **{name: _others()[name]}).digest != SPEC.digest


def test_a_spec_is_hashed_once() -> None:
    """Clients ask for the digest in every call."""
    spec = replace(SPEC, model="m")
    assert spec.digest is spec.digest


def test_the_order_of_pairs_means_nothing() -> None:
    turned = replace(SPEC, rope=tuple(reversed(SPEC.rope)))
    assert turned == SPEC
    assert turned.digest == SPEC.digest


def test_a_field_boundary_can_not_be_moved() -> None:
    """K20"""
    digests = {
        replace(SPEC, model=model, revision=revision).digest
        for model, revision in [("ab", "c"), ("a", "bc"), ("abc", ""), ("a\0b", "c")]
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float16", "bfloat16"),
        ("float16", "int16"),
        ("float8_e4m3", "float8_e5m2"),
        ("float8_e4m3", "int8"),
        ("int8", "uint8"),
    ],
)
def test_another_dtype_of_the_same_size_is_another_key(stored: str, asked: str) -> None:
    """K11"""
    a, b = replace(SPEC, dtype=stored), replace(SPEC, dtype=asked)
    assert a.chunk_bytes == b.chunk_bytes
    chunk = chain_hashes(range(64), 64)[0]
    keys = [ChunkKey(Kind.PREFIX, "default", s.digest, chunk, 0) for s in (a, b)]
    assert keys[0] != keys[1]
    assert keys[0].storage_name() != keys[1].storage_name()
    assert replace(a, quantisation="per-token").digest != a.digest


def _split(tensor: int) -> KVSpec:
    heads = 8 // tensor
    shards = tuple(
        ShardSpec(0, r, 0, 0, 0, 32, r * heads, (r + 1) * heads, 4 << 20) for r in range(tensor)
    )
    return replace(SPEC, tensor=tensor, shards=shards)


def test_another_tensor_parallel_size_is_another_key_even_at_equal_sizes() -> None:
    """K13"""
    one, two, four = _split(1), _split(2), _split(4)
    assert {s.shards[0].nbytes for s in (one, two, four)} == {4 << 20}
    assert len({s.digest for s in (one, two, four)}) == 3
    assert [two.shard_index(0, rank) for rank in (0, 1)] == [0, 1]
    with pytest.raises(SpecError, match=r"no shard \(pp 0, tp 2, group 0, part 0\)"):
        two.shard_index(0, 2)


def test_a_rank_holding_other_heads_is_another_layout() -> None:
    """K13"""
    two = _split(2)
    swapped = tuple(
        s._replace(head_begin=o.head_begin, head_end=o.head_end)
        for s, o in zip(two.shards, reversed(two.shards), strict=True)
    )
    assert replace(two, shards=swapped).digest != two.digest


def test_an_adapter_is_part_of_the_identity_and_its_integer_id_is_not() -> None:
    """K15"""

    def under(adapter: dict[str, str]) -> bytes:
        return replace(SPEC, extra=canonical_pairs(adapter)).digest

    base = under({})
    a = under({"lora": "A", "lora_digest": "11"})
    b = under({"lora": "B", "lora_digest": "22"})
    a_changed = under({"lora": "A", "lora_digest": "12"})
    assert len({base, a, b, a_changed}) == 4
    assert under({"lora_digest": "11", "lora": "A"}) == a  # loaded again, under whatever number


def test_sizes_of_mixed_widths_are_summed_over_the_shards_and_replicas_count_once() -> None:
    """K82: 61 layers of 576 bf16, 61 of 132 uint8 and one of 64 fp32, alike on 8 tensor ranks."""
    chunk = 256
    shards = (
        ShardSpec(0, 0, 0, 0, 0, 61, 0, 1, chunk * 61 * 576 * 2),
        ShardSpec(0, 0, 1, 0, 0, 61, 0, 1, chunk * 61 * 132),
        ShardSpec(0, 0, 2, 0, 61, 62, 0, 1, chunk * 64 * 4),
    )
    spec = replace(SPEC, chunk_tokens=chunk, tensor=8, groups=3, shards=shards)
    spec.validate()
    assert spec.chunk_bytes == 256 * (61 * 576 * 2 + 61 * 132 + 64 * 4)
    assert [spec.shard_index(0, 0, group) for group in range(3)] == [0, 1, 2]
    assert len(chain_hashes(range(300), chunk)) == 1
    assert KVSpec.decode(spec.encode()).shards == shards


WEIRD = ["a@b#c", "a b", "'\"", "line\nbreak", "nul\0", "😀", "\u202eright-to-left", "x" * 4096]


@pytest.mark.parametrize("model", WEIRD)
def test_any_text_is_a_model_name_and_comes_back(model: str) -> None:
    """K23"""
    assert KVSpec.decode(replace(SPEC, model=model).encode()).model == model


@pytest.mark.parametrize("name", ["model", "weights", "engine", "dtype", "codec"])
def test_a_connector_that_can_not_fill_a_field_must_not_cache(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} is empty.*must not cache"):
        replace(SPEC, **{name: ""}).validate()


SHARD = SPEC.shards[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "x" * 4097}, "model has 4097 bytes, limit 4096"),
        ({"model": "\ud800"}, "model is not valid Unicode"),
        ({"model": 7}, "model must be text, got int"),
        ({"chunk_tokens": 15}, "chunk_tokens is 15, must be a whole number from 16 to 4096"),
        ({"chunk_tokens": 4097}, "chunk_tokens is 4097"),
        ({"chunk_tokens": 64.0}, "chunk_tokens is 64.0"),
        ({"tensor": True}, "tensor is True"),
        ({"pipeline": 0}, "pipeline is 0"),
        ({"rope": (("a", "1"), ("a", "2"))}, "rope gives a name twice"),
        ({"extra": (("a",),)}, "takes .name, value. pairs"),
        ({"shards": ()}, "shards is empty"),
        ({"shards": (SHARD, SHARD)}, "twice"),
        ({"shards": (SHARD._replace(tp=2),)}, "shard 0: tp is 2, must be .* from 0 to 1"),
        ({"shards": (SHARD._replace(layer_end=0),)}, "shard 0: layer_end is 0"),
        ({"shards": (SHARD._replace(head_end=-1),)}, "shard 0: head_end is -1"),
        ({"shards": (SHARD._replace(nbytes=0),)}, "shard 0: nbytes is 0"),
        ({"extra": tuple((f"{i}", "x" * 4000) for i in range(20))}, "limit 65536"),
    ],
)
def test_a_spec_that_is_not_valid_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, **changes).validate()


def test_pairs_are_canonical_text() -> None:
    made = canonical_pairs(
        {"theta": 1e4, "type": "llama3", "on": True, "list": [1, 2.5], "n": None}
    )
    assert made == (
        ("list", "[1,2.5]"),
        ("n", "null"),
        ("on", "true"),
        ("theta", "10000.0"),
        ("type", "llama3"),
    )
    for bad in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(SpecError, match="no canonical form"):
            canonical_pairs(bad)


def test_an_encoding_cut_at_any_length_is_refused() -> None:
    raw = SPEC.encode()
    for length in range(len(raw)):
        with pytest.raises(SpecError):
            KVSpec.decode(raw[:length])
    with pytest.raises(SpecError, match="after its last field"):
        KVSpec.decode(raw + b"\0")


def test_an_encoding_with_any_byte_changed_is_refused_or_another_spec() -> None:
    raw = SPEC.encode()
    for at in range(len(raw)):
        for flip in (0x01, 0x80, 0xFF):
            broken = bytearray(raw)
            broken[at] ^= flip
            try:
                spec = KVSpec.decode(bytes(broken))
            except SpecError:
                continue
            assert spec != SPEC and spec.digest != SPEC.digest


@given(st.binary(max_size=300))
def test_noise_is_no_spec(noise: bytes) -> None:
    with pytest.raises(SpecError):
        KVSpec.decode(b"KVDSPEC1" + noise)


def test_an_encoding_that_is_not_canonical_is_refused() -> None:
    raw = SPEC.encode()
    turned = raw.replace(
        b"\x05\0\0\0theta\x07\0\0\x0010000.0\x04\0\0\0type\x07\0\0\0default",
        b"\x04\0\0\0type\x07\0\0\0default\x05\0\0\0theta\x07\0\0\x0010000.0",
    )
    assert turned != raw
    with pytest.raises(SpecError, match="not canonical"):
        KVSpec.decode(turned)
