"""How the KV of one chunk of tokens lies in a slot.

The law of this module: a slot is [layer][K, V][head][token][dim], contiguous, nothing before or
after it, and `KVLayout.codec` names exactly that. Bytes cross between a slot and a cache in one
copy a layer and part, in either direction; a change of dtype happens inside that copy.

Heads stand outside tokens because a cache layer is [1, head, token, dim]: a chunk is then one
unbroken run a head (256 tokens of 64 fp32: 64 KiB) instead of one a token and head (256 B).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["STORABLE", "ChunkCopier", "KVLayout", "Pairs"]

CODEC = "torch-lkhtd/1"  # layer, K|V, head, token, dim; version of this layout

STORABLE: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_WORDS = {2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}  # by bytes an element

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # K and V of each layer


class KVLayout(NamedTuple):
    """The shape of one chunk: `layers` × (K, V) × `heads` × `tokens` × `dim` of `dtype`."""

    layers: int
    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype

    @property
    def codec(self) -> str:
        """The layout's name in the identity of a chunk."""
        return CODEC

    @property
    def dtype_name(self) -> str:
        return STORABLE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes a token, over all layers, K and V."""
        return self.layers * 2 * self.heads * self.dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a slot's payload."""
        return self.tokens * self.token_bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a slot: layer and part (K of layer 0, V of layer 0, K of layer 1, …), head, token,
        dim."""
        return (2 * self.layers, self.heads, self.tokens, self.dim)

    def words(self, slot: memoryview) -> NDArray[Any]:
        """The slot as integers as wide as an element, in `shape`, over the same bytes.

        numpy has no bfloat16, and a copy needs only the bits. ValueError when the slot is not
        exactly `nbytes` long.
        """
        if slot.nbytes != self.nbytes:
            raise ValueError(f"a slot of {slot.nbytes} B for a chunk of {self.nbytes} B")
        words: NDArray[Any] = np.frombuffer(slot, _WORDS[self.dtype.itemsize][0])
        return words.reshape(self.shape)

    def tensor(self, slot: memoryview) -> torch.Tensor:
        """The slot as a tensor in `shape` over the same bytes, valid as long as the slot is held.
        ValueError as `words`."""
        words = self.words(slot)
        # A loaded slot is a read-only view, and torch knows no such tensors: it would warn that
        # one could be written to. So it is told where the bytes are, not what they may be used for.
        place = (ctypes.c_char * words.nbytes).from_address(words.ctypes.data)
        return torch.frombuffer(place, dtype=self.dtype).view(self.shape)

    def blank(
        self, tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Uninitialised K and V [1, heads, tokens, dim] of each layer, to be filled."""
        shape = (1, self.heads, tokens, self.dim)
        return [
            (
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in range(self.layers)
        ]


class ChunkCopier:
    """Copies chunks between slots and the K and V of one prompt, [1, heads, tokens, dim] a layer.

    On the CPU without a change of dtype it copies words through numpy: torch pays 5 us a call and
    takes twice as long. Otherwise torch copies, converts, and crosses to a device, in one step.
    Not for a cache that grows meanwhile: DynamicCache replaces its tensors when it does.
    """

    def __init__(self, layout: KVLayout, pairs: Pairs) -> None:
        self._layout = layout
        self._wholes = [tensor.detach()[0] for pair in pairs for tensor in pair]
        plain = all(t.dtype is layout.dtype and t.device.type == "cpu" for t in self._wholes)
        word = _WORDS[layout.dtype.itemsize][1]
        self._words = [t.view(word).numpy() for t in self._wholes] if plain else None

    def read(self, chunk: int, slot: memoryview) -> None:
        """Copy a slot out, to the place of chunk number `chunk`."""
        begin, end = self._place(chunk)
        if self._words is not None:
            for part, whole in zip(self._layout.words(slot), self._words, strict=True):
                whole[:, begin:end] = part
        else:
            for part, whole in zip(self._layout.tensor(slot), self._wholes, strict=True):
                whole[:, begin:end].copy_(part)

    def write(self, chunk: int, slot: memoryview) -> None:
        """Copy chunk number `chunk` into a slot."""
        begin, end = self._place(chunk)
        if self._words is not None:
            for part, whole in zip(self._layout.words(slot), self._words, strict=True):
                part[...] = whole[:, begin:end]
        else:
            for part, whole in zip(self._layout.tensor(slot), self._wholes, strict=True):
                part.copy_(whole[:, begin:end])

    def _place(self, chunk: int) -> tuple[int, int]:
        size = self._layout.tokens
        return chunk * size, (chunk + 1) * size
