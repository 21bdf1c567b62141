"""A chunk crosses between a cache and a slot unchanged, and lies there as the codec says."""

from __future__ import annotations

import pytest
import torch

from kvd.connectors.kvlayout import STORABLE, ChunkCopier, KVLayout

GQA = KVLayout(layers=3, heads=2, tokens=16, dim=8, dtype=torch.float32)
MHA = KVLayout(layers=2, heads=4, tokens=32, dim=4, dtype=torch.float32)


def random_pairs(layout: KVLayout, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = layout.blank(tokens, layout.dtype, "cpu")
    for keys, values in pairs:
        keys.normal_()
        values.normal_()
    return pairs


@pytest.mark.parametrize("dtype", STORABLE)
@pytest.mark.parametrize("layout", [GQA, MHA])
def test_every_chunk_comes_back_bit_for_bit(layout: KVLayout, dtype: torch.dtype) -> None:
    layout = layout._replace(dtype=dtype)
    pairs = random_pairs(layout, 3 * layout.tokens)
    back = layout.blank(3 * layout.tokens, dtype, "cpu")
    out, into = ChunkCopier(layout, pairs), ChunkCopier(layout, back)
    for chunk in (1, 0, 2):
        slot = memoryview(bytearray(layout.nbytes))
        out.write(chunk, slot)
        into.read(chunk, slot.toreadonly())
    for before, after in zip(pairs, back, strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])


def test_a_slot_is_layer_part_head_token_dim() -> None:
    """The codec's name fixes the bytes: whoever changes the order must change the name."""
    assert GQA.codec == "torch-lkhtd/1"
    pairs = GQA.blank(GQA.tokens, torch.float32, "cpu")
    wanted = []
    for layer, pair in enumerate(pairs):
        for part, tensor in enumerate(pair):
            for head in range(GQA.heads):
                for token in range(GQA.tokens):
                    for dim in range(GQA.dim):
                        number = float(
                            (((layer * 2 + part) * GQA.heads + head) * GQA.tokens + token) * GQA.dim
                            + dim
                        )
                        tensor[0, head, token, dim] = number
                        wanted.append(number)
    slot = memoryview(bytearray(GQA.nbytes))
    ChunkCopier(GQA, pairs).write(0, slot)
    assert slot.cast("f").tolist() == wanted


@pytest.mark.filterwarnings("error")
def test_a_change_of_dtype_happens_in_the_copy() -> None:
    half = GQA._replace(dtype=torch.bfloat16)
    assert half.nbytes * 2 == GQA.nbytes
    pairs = random_pairs(GQA, GQA.tokens)
    slot = memoryview(bytearray(half.nbytes))
    ChunkCopier(half, pairs).write(0, slot)
    back = half.blank(GQA.tokens, torch.float32, "cpu")
    ChunkCopier(half, back).read(0, slot.toreadonly())
    assert torch.equal(back[1][0], pairs[1][0].to(torch.bfloat16).float())


def test_a_slot_of_another_size_is_refused() -> None:
    for nbytes in (GQA.nbytes - 1, GQA.nbytes + 4, 0):
        with pytest.raises(ValueError, match="slot of"):
            GQA.words(memoryview(bytearray(nbytes)))
        with pytest.raises(ValueError, match="slot of"):
            GQA.tensor(memoryview(bytearray(nbytes)))


def test_a_copy_by_words_and_a_copy_by_torch_are_the_same_bytes() -> None:
    """A cache on a device goes the second way; a wider dtype on the CPU shows it here."""
    half = GQA._replace(dtype=torch.float16)
    rounded = [(k.half(), v.half()) for k, v in random_pairs(GQA, GQA.tokens)]
    by_words, by_torch = bytearray(half.nbytes), bytearray(half.nbytes)
    ChunkCopier(half, rounded).write(0, memoryview(by_words))
    ChunkCopier(half, [(k.float(), v.float()) for k, v in rounded]).write(0, memoryview(by_torch))
    assert by_words == by_torch


def test_a_cache_that_wants_gradients_leaves_none_in_the_slot() -> None:
    pairs = [(k.requires_grad_(), v.requires_grad_()) for k, v in random_pairs(GQA, GQA.tokens)]
    slot = memoryview(bytearray(GQA.nbytes))
    ChunkCopier(GQA, pairs).write(0, slot)
    assert torch.equal(GQA.tensor(slot)[0], pairs[0][0][0])
