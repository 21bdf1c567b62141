"""References: 32 bytes each, and nothing that does not fit them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.chunk import REF_BYTES, SlotRef, pack_refs, unpack_refs

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
REF = SlotRef(1, 2, 4096, 8192, 3)


@given(st.lists(st.builds(SlotRef, u32, u32, u64, u64, u64)))
def test_references_come_back_from_their_bytes(refs: list[SlotRef]) -> None:
    packed = pack_refs(refs)
    assert len(packed) == REF_BYTES * len(refs)
    assert [SlotRef(*row) for row in unpack_refs(packed).tolist()] == refs


@pytest.mark.parametrize(
    "change",
    [{"arena": -1}, {"record": 2**32}, {"offset": 2**64}, {"length": "x"}, {"generation": None}],
    ids=str,
)
def test_a_reference_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack_refs([REF, REF._replace(**change)])


@pytest.mark.parametrize("refs", [REF, (REF,), None, [None], [7], [REF[:4]]], ids=repr)
def test_what_is_no_list_of_references_is_refused(refs: Any) -> None:
    with pytest.raises(ValueError, match="reference"):
        pack_refs(refs)


@pytest.mark.parametrize("length", [1, 31, 33])
def test_bytes_that_are_cut_are_no_references(length: int) -> None:
    with pytest.raises(ValueError):
        unpack_refs(bytes(length))
