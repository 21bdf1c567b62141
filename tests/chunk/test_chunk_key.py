"""Keys and namespaces: no two identities share a name."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from chunk_vectors import SPEC
from hypothesis import given
from hypothesis import strategies as st

from kvd.chunk import ChunkKey, Kind, check_hash, check_namespace, namespace_digest
from kvd.errors import BadKey

CHUNK = bytes(range(32))


def test_every_part_of_a_key_is_in_its_storage_name() -> None:
    key = ChunkKey(Kind.PREFIX, "default", SPEC.digest, CHUNK, 0)
    keys = [
        key,
        key._replace(kind=Kind.CONTENT),
        key._replace(namespace="other"),
        key._replace(spec=bytes(32)),
        key._replace(chunk=bytes(32)),
        key._replace(shard=1),
        key._replace(spec=CHUNK, chunk=SPEC.digest),
    ]
    assert len({k.storage_name() for k in keys}) == len(keys)


ALIKE = ["a_b", "a/b", "a--b", "a%2Fb", "a b", "A/B", "A/b", "a", "á", "a\u0301", "..", "."]


def test_names_that_look_alike_never_meet() -> None:
    """K20: separators, case, composed and decomposed letters, names that differ at the end."""
    models = [*ALIKE, "org/a-SEP-b", "org/a/b", "x" * 300 + "1", "x" * 300 + "2"]
    names = {
        ChunkKey(Kind.PREFIX, "default", replace(SPEC, model=m).digest, CHUNK, 0).storage_name()
        for m in models
    }
    assert len(names) == len(models)
    assert all(n == n.lower() and len(n) == 64 for n in names)
    spaces = [*ALIKE, "x" * 127 + "1", "x" * 127 + "2"]
    for a, b in combinations(spaces, 2):
        assert namespace_digest(a) != namespace_digest(b)


@given(st.text(min_size=1, max_size=200))
def test_a_namespace_is_kept_as_it_is_or_refused(name: str) -> None:
    """K23"""
    try:
        assert check_namespace(name) == name
    except BadKey:
        surrogate = any("\ud800" <= c <= "\udfff" for c in name)
        assert surrogate or "\0" in name or len(name.encode()) > 128


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "has 0 bytes"), ("ü" * 65, "has 130 bytes"), ("a\0b", "NUL"), ("\udc80", "Unicode")],
)
def test_a_namespace_that_can_not_be_is_refused(name: str, message: str) -> None:
    """K23"""
    with pytest.raises(BadKey, match=message):
        namespace_digest(name)


@pytest.mark.parametrize("name", [7, None, b"default"])
def test_a_namespace_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(BadKey, match="must be text"):
        check_namespace(name)
    with pytest.raises(BadKey, match="must be text"):
        ChunkKey(Kind.PREFIX, name, SPEC.digest, CHUNK, 0).storage_name()


@pytest.mark.parametrize(("kind", "shard"), [(Kind.PREFIX, -1), (256, 0), ("x", 0), (1, None)])
def test_a_key_of_no_kind_or_shard_has_no_storage_name(kind: Any, shard: Any) -> None:
    with pytest.raises(BadKey, match=r"kind .* shard"):
        ChunkKey(kind, "default", SPEC.digest, CHUNK, shard).storage_name()


@pytest.mark.parametrize("value", [b"", b"x" * 31, b"x" * 33, "x" * 32, -1, 2**64 - 1])
def test_a_hash_that_is_not_32_bytes_is_refused(value: object) -> None:
    """K23"""
    with pytest.raises(BadKey, match="must be 32 bytes"):
        check_hash(value)  # type: ignore[arg-type]
    with pytest.raises(BadKey):
        ChunkKey(Kind.PREFIX, "default", SPEC.digest, value, 0).storage_name()  # type: ignore[arg-type]
