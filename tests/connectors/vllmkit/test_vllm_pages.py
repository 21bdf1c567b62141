"""Pages are moved whole and to their place, or the layout is refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_kit import CacheConfig, FullAttentionSpec, Group, MLAAttentionSpec, Shape

from kvd.connectors.vllm.paging import HostCopier, LayoutRefused, Pages, page_view, pages_of

BLOCKS = 12


def spec(heads: int = 2, block: int = 16, content: int = 8, dtype=torch.float32):
    return FullAttentionSpec(block, heads, content, dtype)


def pages(shape: Shape, tensors: dict, chunk: int) -> Pages:
    return pages_of(tensors, shape.cache_config(), chunk, dict.fromkeys(tensors, "TEST"))


def numbered(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    """Every element says where it is."""
    flat = torch.arange(tensor.numel(), dtype=torch.int64) * 7 + salt
    return (flat % 30000).to(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_axes_within_a_block_goes_round(order: tuple[int, ...]) -> None:
    """K80: the strides that the engine registered decide; each (block, head, token, element) comes
    back at its own place, from blocks 5, 1, 9 to 2, 7, 3."""
    sizes = (2, 16, 8)  # heads, tokens, content
    physical = torch.zeros(BLOCKS, *(sizes[i] for i in order))
    inverse = [order.index(i) + 1 for i in range(3)]
    tensor = physical.permute(0, *inverse)
    tensor.copy_(numbered(tensor, 3))
    before = tensor.clone()
    config = CacheConfig(BLOCKS, [Group(["a"], spec())])
    found = pages_of({"a": tensor}, config, 48, {"a": "T"})
    copier = HostCopier(found)
    slot = bytearray(found.chunk_bytes)
    copier.gather(((5, 1, 9),), 0, memoryview(slot))
    tensor.zero_()
    copier.scatter(memoryview(slot).toreadonly(), ((2, 7, 3),), 0)
    for source, target in zip((5, 1, 9), (2, 7, 3), strict=True):
        assert torch.equal(tensor[target], before[source])
    untouched = [b for b in range(BLOCKS) if b not in (2, 7, 3)]
    assert not tensor[untouched].any()


@pytest.mark.parametrize(
    "layout",
    [
        (2, BLOCKS, 16, 2, 8),  # K and V outermost
        (BLOCKS, 2, 16, 2, 8),  # five axes
        (BLOCKS, 16, 2, 8),  # heads and tokens exchanged
        (BLOCKS - 1, 2, 16, 8),
        (BLOCKS, 2, 16, 7),
    ],
)
def test_a_shape_that_the_spec_does_not_say_is_refused(layout: tuple[int, ...]) -> None:
    """K80: a layout is never guessed from what a shape may also mean."""
    with pytest.raises(LayoutRefused, match="layer a"):
        page_view("a", torch.zeros(layout), spec(), BLOCKS)


def test_equal_shapes_of_other_engines_and_layouts_are_other_identities() -> None:
    """K80: with two heads [blocks, 2, tokens, 2 * dim] may be K and V or heads; the declared
    layout, the backend and the strides are in the codec, so one is never taken for another."""
    tensor = torch.zeros(BLOCKS, 2, 16, 8)
    other = torch.zeros(BLOCKS, 16, 2, 8).permute(0, 2, 1, 3)
    told = set()
    for kv, layout, backend in (
        (tensor, "LBHNC", "FLASH"),
        (tensor, "LBNHC", "FLASH"),
        (tensor, "LBHNC", "CPU_ATTN/vec"),
        (tensor, "LBHNC", "CPU_ATTN/amx"),
        (other, "LBHNC", "FLASH"),
    ):
        config = CacheConfig(BLOCKS, [Group(["a"], spec())], kv_cache_layout=layout)
        told.add(pages_of({"a": kv}, config, 32, {"a": backend}).codec)
    assert len(told) == 5


def test_pages_that_do_not_lie_together_are_refused() -> None:
    heads_outside = torch.zeros(2, BLOCKS, 16, 8).permute(1, 0, 2, 3)
    with pytest.raises(LayoutRefused, match="do not lie together"):
        page_view("a", heads_outside, spec(), BLOCKS)
    broadcast = torch.zeros(BLOCKS, 1, 16, 8).expand(BLOCKS, 2, 16, 8)
    with pytest.raises(LayoutRefused, match="do not lie together"):
        page_view("a", broadcast, spec(), BLOCKS)


def test_blocks_outermost_layers_inside_a_block_works() -> None:
    """One allocation [block][layer][page]: a layer's pages are strided."""
    raw = torch.zeros(BLOCKS, 3, 2, 16, 8)
    layers = {f"l{i}": raw[:, i] for i in range(3)}
    for i, tensor in enumerate(layers.values()):
        tensor.copy_(numbered(tensor, i))
    config = CacheConfig(BLOCKS, [Group(list(layers), spec())], kv_cache_layout="BLHNC")
    found = pages_of(layers, config, 16, dict.fromkeys(layers, "T"))
    copier, slot = HostCopier(found), bytearray(found.chunk_bytes)
    before = raw.clone()
    copier.gather(((4,),), 0, memoryview(slot))
    copier.scatter(memoryview(slot), ((6,),), 0)
    assert torch.equal(raw[6], before[4]) and torch.equal(raw[5], before[5])


def test_kernel_blocks_smaller_than_the_managers_make_one_page() -> None:
    tensor = torch.zeros(BLOCKS * 4, 2, 4, 8)
    tensor.copy_(numbered(tensor, 1))
    view = page_view("a", tensor, spec(), BLOCKS)
    assert view.shape == (BLOCKS, 16 * 2 * 8 * 4)
    assert torch.equal(view[3].view(torch.float32), tensor[12:16].reshape(-1))


def test_layers_of_different_widths_and_types_come_back_bit_exact() -> None:
    """K82: 61 + 61 layers of 576 bf16 and 132 uint8 and one of 64 fp32; sizes are sums over
    layers, not products."""
    block, names, specs, tensors = 16, [], {}, {}
    widths = [(576, torch.bfloat16)] * 61 + [(132, torch.uint8)] * 61 + [(64, torch.float32)]
    for i, (width, dtype) in enumerate(widths):
        names.append(f"layer.{i}")
        specs[names[-1]] = MLAAttentionSpec(block, 1, width, dtype)
        raw = np.random.default_rng(i).integers(0, 256, BLOCKS * block * width * dtype.itemsize)
        data = torch.from_numpy(raw.astype(np.uint8))
        tensors[names[-1]] = data.view(dtype).view(BLOCKS, 1, block, width)
    group = Group(names, SimpleNamespace(kv_cache_specs=specs, block_size=block))
    found = pages_of(tensors, CacheConfig(BLOCKS, [group]), 32, dict.fromkeys(names, "MLA"))
    assert found.chunk_bytes == 32 * (61 * 576 * 2 + 61 * 132 + 64 * 4)
    copier, slot = HostCopier(found), bytearray(found.chunk_bytes)
    before = {name: tensor[[3, 8]].clone() for name, tensor in tensors.items()}
    copier.gather(((3, 8),), 0, memoryview(slot))
    copier.scatter(memoryview(slot), ((10, 1),), 0)
    for name, tensor in tensors.items():
        assert torch.equal(tensor[[10, 1]].view(torch.uint8), before[name].view(torch.uint8))


def test_the_null_block_is_neither_read_nor_written() -> None:
    shape = Shape(blocks=BLOCKS)
    tensors = shape.tensors()
    found = pages(shape, tensors, 48)
    copier, slot = HostCopier(found), bytearray(b"\xff" * found.chunk_bytes)
    with pytest.raises(ValueError, match="null block"):
        copier.gather(((5, 0, 9),), 0, memoryview(slot))
    copier.scatter(memoryview(slot), ((5, 0, 9),), 0)
    for tensor in tensors.values():
        bytes_of = tensor.view(torch.uint8)
        assert (bytes_of[[5, 9]] == 255).all() and not bytes_of[[0, 1, 8]].any()


def test_blocks_that_are_not_there_are_an_error_before_anything_is_copied() -> None:
    shape = Shape(blocks=BLOCKS)
    tensors = shape.tensors()
    copier = HostCopier(pages(shape, tensors, 48))
    slot = bytearray(b"\xff" * copier._pages.chunk_bytes)
    for blocks in (((1, 2, BLOCKS),), ((1, 2, -1),), ((1, 2),)):
        with pytest.raises(ValueError):
            copier.scatter(memoryview(slot), blocks, 0)
    with pytest.raises(ValueError):
        copier.scatter(memoryview(slot)[1:], ((1, 2, 3),), 0)
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_layer_in_no_group_is_refused_unless_it_shares_anothers_kv() -> None:
    """K146: what a slot owns is declared whole, or nothing is kept."""
    shape = Shape(blocks=BLOCKS)
    tensors = shape.tensors()
    with pytest.raises(LayoutRefused, match="in no KV group"):
        pages(shape, tensors | {"index": torch.zeros(BLOCKS, 2, 16, 8)}, 32)
    with pytest.raises(LayoutRefused, match="no registered tensor"):
        pages(shape, dict(list(tensors.items())[:1]), 32)
    pages(shape, tensors | {"shared": tensors["model.layers.0.attn"]}, 32)
