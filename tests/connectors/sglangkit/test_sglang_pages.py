"""Where the bytes of a page lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_sglang as fake
import pytest
import torch
from sglang_kit import content, fill, wipe

from kvd.connectors.sglang.pages import page_table
from kvd.errors import SpecError

MHA, MLA = fake.MHATokenToKVPoolHost, fake.MLATokenToKVPoolHost
POOLS: dict[str, Callable[..., Any]] = {
    **{
        layout: lambda layout=layout, **more: MHA(layout, **more)
        for layout in ("page_first", "page_first_direct", "layer_first", "page_head")
    },
    **{
        f"mla {layout}": lambda layout=layout, **more: MLA(layout, **more)
        for layout in ("page_first", "page_first_direct", "layer_first", "page_first_kv_split")
    },
    "asymmetric": lambda **more: fake.AsymmetricMHATokenToKVPoolHost(**more),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_page_comes_back_into_another_page_whole_and_alone(name: str) -> None:
    """K80: for each layout, all bytes of a page, at their places, and nothing beside them."""
    pool = POOLS[name]()
    table = page_table(pool)
    fill(pool)
    slots = [bytearray(table.nbytes) for _ in range(3)]
    for page, slot in zip((5, 0, pool.page_num - 1), slots, strict=True):
        table.save(page, memoryview(slot))
    sources = torch.cat([torch.arange(p * 16, p * 16 + 16) for p in (5, 0, pool.page_num - 1)])
    want = content(pool, sources)
    wipe(pool)
    for page, slot in zip((2, 7, 3), slots, strict=True):
        table.load(page, memoryview(slot))
    targets = torch.cat([torch.arange(p * 16, p * 16 + 16) for p in (2, 7, 3)])
    assert content(pool, targets) == want
    others = [p for p in range(pool.page_num) if p not in (2, 7, 3)]
    rest = content(pool, torch.cat([torch.arange(p * 16, p * 16 + 16) for p in others]))
    assert {bytes(page) for page in rest} == {b"\xee" * table.nbytes}


@pytest.mark.parametrize("name", [n for n in POOLS if "split" not in n and n != "asymmetric"])
def test_a_slot_has_the_order_of_the_flat_page(name: str) -> None:
    """What goes in by one interface comes out by the other."""
    pool = POOLS[name]()
    table = page_table(pool)
    fill(pool)
    slot = bytearray(table.nbytes)
    table.save(4, memoryview(slot))
    assert table.flat
    assert bytes(slot) == pool.get_data_page(64).view(torch.uint8).numpy().tobytes()


def test_a_pool_of_one_page_works_and_neighbours_in_memory_do_not_confuse() -> None:
    """With one page K and V touch, so the flat page is a single piece."""
    pool = MHA(pages=1)
    table = page_table(pool)
    fill(pool)
    slot = bytearray(table.nbytes)
    table.save(0, memoryview(slot))
    assert bytes(slot) == pool.get_data_page(0).view(torch.uint8).numpy().tobytes()


def test_a_page_is_one_run_where_the_layout_allows() -> None:
    assert [len(page_table(POOLS[name]()).runs) for name in POOLS] == [1, 1, 1, 1, 1, 1, 1, 3, 2]


def test_layouts_and_shapes_have_codecs_of_their_own() -> None:
    """K80, K11: shapes that tie in bytes are told apart."""
    tables = [
        *(page_table(make()) for make in POOLS.values()),
        page_table(MHA(heads=4, dim=4)),
        page_table(MHA(heads=1, dim=16)),
        page_table(MHA(layers=6, dim=4)),
    ]
    assert len({table.codec for table in tables}) == len(tables)


class Cut(MHA):
    """A pool that shows less than it keeps."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = super().get_page_buffer_meta(indices)
        return pointers[:1], sizes[:1]


class Sidecar(fake.AsymmetricMHATokenToKVPoolHost):
    """A pool with scales beside its pages."""

    def get_size_per_token(self) -> int:
        return super().get_size_per_token() + 4


class Outside(fake.AsymmetricMHATokenToKVPoolHost):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = super().get_page_buffer_meta(indices)
        return [p + (1 << 40) for p in pointers], sizes


class Uneven(fake.AsymmetricMHATokenToKVPoolHost):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = super().get_page_buffer_meta(indices)
        return [p - (64 if int(indices[0]) > 16 else 0) for p in pointers], sizes


class Silent(MHA):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError("scales have no pages")


def changed(**values: Any) -> Callable[[], Any]:
    def make() -> Any:
        pool = MHA()
        for name, value in values.items():
            setattr(pool, name, value)
        return pool

    return make


def named(kind: type) -> Callable[[], Any]:
    """Under the name of a pool that kvd knows: the name alone proves nothing."""
    return type(kind.__mro__[1].__name__, (kind,), {})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (named(Cut), "name other bytes"),
        (named(Sidecar), "keeps whole pages only"),
        (named(Outside), "outside of the pool"),
        (named(Uneven), "equal distances"),
        (named(Silent), "scales have no pages"),
        (Cut, "host pool Cut is not supported"),
        (changed(kv_buffer=None), "holds no memory"),
        (changed(dcp_size=2), "several ranks"),
        (changed(shared_allocation_domain=object()), "moves its pages"),
        (changed(layout=None), "does not tell its layout"),
        (changed(dtype="bfloat16"), "does not tell its dtype"),
        (lambda: MHA(page_size=1), "--page-size 64"),
        (lambda: MHA(page_size=8192, pages=2), "16 to 4096"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(make: Callable[[], Any], reason: str) -> None:
    """K80, K146, K147: a pool that is unknown, that shows less than it keeps or contradicts
    itself, and a page size out of range are refused, and the message says which are legal."""
    with pytest.raises(SpecError, match=reason):
        page_table(make())


@pytest.mark.parametrize(
    "indices",
    [
        None,
        torch.arange(15),
        torch.arange(1, 17),
        torch.arange(16).flip(0),
        torch.arange(64 * 16, 65 * 16),
        torch.arange(-16, 0),
    ],
    ids=["none", "short", "unaligned", "backwards", "beyond", "before"],
)
def test_indices_that_are_no_whole_page_are_an_error(indices: Any) -> None:
    with pytest.raises(ValueError, match="pages"):
        page_table(MHA()).numbers(indices, 1)


def test_a_slot_of_another_size_is_an_error() -> None:
    table = page_table(MHA())
    with pytest.raises(ValueError, match="bytes"):
        table.save(0, memoryview(bytearray(table.nbytes - 1)))
