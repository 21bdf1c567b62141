"""Where an engine keeps the bytes of a chunk: in one piece, or spread over pages.

The law of this module: the limit and the product run the very same function over the same
source; only the memory that they write to is another one.

`paged` is the layout of a serving engine: for each of 32 layers a pool [blocks, 2, 16, 8, 128] of
two-byte numbers (K and V, 16 tokens, 8 heads, 128 wide), so a block is one page of 64 KiB in each
layer's pool, and 16 tokens are 32 pages = 2 MiB. In its slot a chunk lies as [layer][block], pages
opaque. The pools stand in one allocation, as engines make them, so a chunk is one gather.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvd.tools.bench.measure import Buffer, Bytes

LAYERS = 32
PAGE = 2 * 16 * 8 * 128 * 2  # bytes of a block in one layer
BLOCK = LAYERS * PAGE  # bytes of 16 tokens in all layers
_WORDS = PAGE // 8


class Layout(ABC):
    """The engine's side of a benchmark: `chunks` chunks of `chunk_bytes` each in own memory."""

    name: str

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = chunks

    @abstractmethod
    def gather(self, chunk: int, slot: Bytes) -> None:
        """Copy a chunk out of the engine's memory into a slot."""

    @abstractmethod
    def scatter(self, chunk: int, slot: Bytes) -> None:
        """Copy a slot to where the engine keeps that chunk (other memory than gather reads)."""

    @abstractmethod
    def same(self, chunk: int) -> bool:
        """Whether what was scattered equals what is gathered: the figures are of right bytes."""

    @abstractmethod
    def wipe(self) -> None:
        """Forget what was scattered."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""


class Contiguous(Layout):
    """Each chunk in one piece, page-aligned."""

    name = "contiguous"

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        super().__init__(chunk_bytes, chunks)
        self._source = Buffer(chunk_bytes * chunks)
        self._source.fill(1)
        self._target = Buffer(chunk_bytes * chunks)
        size = chunk_bytes
        self.sources = [self._source.array[at * size : (at + 1) * size] for at in range(chunks)]
        self.targets = [self._target.array[at * size : (at + 1) * size] for at in range(chunks)]

    def gather(self, chunk: int, slot: Bytes) -> None:
        np.copyto(slot, self.sources[chunk])

    def scatter(self, chunk: int, slot: Bytes) -> None:
        np.copyto(self.targets[chunk], slot)

    def same(self, chunk: int) -> bool:
        return bool(np.array_equal(self.sources[chunk], self.targets[chunk]))

    def wipe(self) -> None:
        self._target.array.fill(0)

    def close(self) -> None:
        self.sources.clear()
        self.targets.clear()
        self._source.close()
        self._target.close()


class Paged(Layout):
    """Each chunk's blocks at random places of every layer's pool."""

    name = "paged"

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        super().__init__(chunk_bytes, chunks)
        if chunk_bytes % BLOCK:
            raise ValueError(f"a paged chunk is whole blocks of {BLOCK} bytes")
        blocks = chunk_bytes // BLOCK * chunks
        self._source = Buffer(BLOCK * blocks)
        self._source.fill(1)
        self._target = Buffer(BLOCK * blocks)
        self._pages = self._source.array.view(np.uint64).reshape(LAYERS * blocks, _WORDS)
        self._target_pages = self._target.array.view(np.uint64).reshape(LAYERS * blocks, _WORDS)
        order = np.random.default_rng(2).permutation(blocks).reshape(chunks, -1)
        layers = np.arange(LAYERS, dtype=np.intp)[:, None] * blocks
        self._places: list[NDArray[np.intp]] = [
            (layers + order[chunk][None, :]).ravel() for chunk in range(chunks)
        ]

    def gather(self, chunk: int, slot: Bytes) -> None:
        # mode="clip": the default mode copies through a buffer when `out` is given
        out = slot.view(np.uint64).reshape(-1, _WORDS)
        np.take(self._pages, self._places[chunk], axis=0, out=out, mode="clip")

    def scatter(self, chunk: int, slot: Bytes) -> None:
        self._target_pages[self._places[chunk]] = slot.view(np.uint64).reshape(-1, _WORDS)

    def same(self, chunk: int) -> bool:
        places = self._places[chunk]
        return bool(np.array_equal(self._pages[places], self._target_pages[places]))

    def wipe(self) -> None:
        self._target.array.fill(0)

    def close(self) -> None:
        del self._pages, self._target_pages
        self._source.close()
        self._target.close()


LAYOUTS: dict[str, type[Layout]] = {"contiguous": Contiguous, "paged": Paged}
