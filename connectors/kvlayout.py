"""How the KV of one chunk of tokens lies in a slot.

The law of this module: a slot is [layer][K, V][head][token][dim], contiguous, nothing before or
after it, and `KVLayout.codec` names exactly that. Bytes cross between a slot and a cache in one
copy a layer and part, in either direction; a change of dtype happens inside that copy.

Heads stand outside tokens because a cache layer is [1, head, token, dim]: a chunk is then one
unbroken run a head (256 tokens of 64 fp32: 64 KiB) instead of one a token and head (256 B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["STORABLE", "KVLayout"]

CODEC = "torch-lkhtd/1"  # layer, K|V, head, token, dim; version of this layout

STORABLE: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


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

    def over(self, slot: memoryview) -> torch.Tensor:
        """The slot as a tensor [layers, 2, heads, tokens, dim] over the same bytes.

        ValueError when the slot is not exactly `nbytes` long.
        """
        if slot.nbytes != self.nbytes:
            raise ValueError(f"a slot of {slot.nbytes} B for a chunk of {self.nbytes} B")
        shape = (self.layers, 2, self.heads, self.tokens, self.dim)
        return torch.frombuffer(slot, dtype=self.dtype).view(shape)

    def blank(
        self, tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Uninitialised K and V [1, heads, tokens, dim] of each layer, to be filled by `read`."""
        shape = (1, self.heads, tokens, self.dim)
        return [
            (
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in range(self.layers)
        ]

    @torch.no_grad()
    def read(
        self,
        slot: memoryview,
        chunk: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy a slot out, to where chunk number `chunk` belongs in `pairs` (see `blank`)."""
        source = self.over(slot)
        begin = chunk * self.tokens
        for layer, (keys, values) in enumerate(pairs):
            keys[0].narrow(1, begin, self.tokens).copy_(source[layer, 0])
            values[0].narrow(1, begin, self.tokens).copy_(source[layer, 1])

    @torch.no_grad()
    def write(
        self,
        slot: memoryview,
        chunk: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Copy chunk number `chunk` of `pairs` (K, V [1, heads, >= tokens, dim]) into a slot."""
        target = self.over(slot)
        begin = chunk * self.tokens
        for layer, (keys, values) in enumerate(pairs):
            target[layer, 0].copy_(keys[0].narrow(1, begin, self.tokens))
            target[layer, 1].copy_(values[0].narrow(1, begin, self.tokens))
