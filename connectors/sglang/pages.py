"""Where the bytes of a page lie in SGLang's host memory, in any layout.

The law of this module: nothing is guessed. The pool says where a page's pieces are
(`get_page_buffer_meta`) and what order they have (`get_data_page`); both must name the same bytes,
all bytes that the pool says a token takes, inside of the pool's own tensors, for the first, the
second and the last page. Otherwise the pool is refused. In a slot a page has the order of
`get_data_page`, so the zero-copy and the generic interface read each other's pages.

A page is a few runs: equal pieces at equal distances (page_first: K and V; layer_first: K and V of
each layer). A run is copied by one call, without the GIL and without an intermediate buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvd.errors import SpecError

__all__ = ["PageTable", "Run", "page_table"]

# Pools whose pages this module was tried with. Another one may keep more than what a page shows.
_POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_MEMORY = ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")

_Bytes = NDArray[np.uint8]
_Piece = tuple[int, int]  # address, bytes


class Run(NamedTuple):
    """Equal pieces at equal distances. All numbers are bytes but `memory` and `pieces`."""

    memory: int  # which tensor
    offset: int  # of the first piece of page 0 in it
    page_step: int  # from a page to the next
    piece_step: int  # from a piece to the next
    pieces: int
    piece: int  # size
    slot: int  # of the first piece in a slot

    @property
    def nbytes(self) -> int:
        return self.pieces * self.piece


class PageTable(NamedTuple):
    """One pool's pages."""

    tokens: int  # a page
    pages: int  # in the pool
    nbytes: int  # a page
    dtype: torch.dtype
    flat: bool  # whether SGLang's generic interface can use this layout
    runs: tuple[Run, ...]
    memories: tuple[_Bytes, ...]
    codec: str  # names the order and shape of a page's bytes

    def numbers(self, host_indices: torch.Tensor, count: int) -> list[int]:
        """The page numbers of `count` pages, whose tokens `host_indices` [count * tokens] names.
        ValueError unless each is one whole page of the pool."""
        if host_indices is None or host_indices.numel() != count * self.tokens:
            told = "no" if host_indices is None else host_indices.numel()
            raise ValueError(f"{count} pages of {self.tokens} tokens are due, {told} indices came")
        rows = host_indices.detach().to("cpu", torch.int64).numpy().reshape(count, self.tokens)
        first = rows[:, :1]
        good = (rows == first + np.arange(self.tokens)).all() and not (first % self.tokens).any()
        numbers: list[int] = (first[:, 0] // self.tokens).tolist()
        if not good or any(not 0 <= n < self.pages for n in numbers):
            raise ValueError("the indices are not whole pages of the pool")
        return numbers

    def save(self, page: int, slot: memoryview) -> None:
        """Copy page number `page` into a slot."""
        for there, here in self._pairs(page, slot):
            np.copyto(there, here)

    def load(self, page: int, slot: memoryview) -> None:
        """Copy a slot into page number `page`."""
        for there, here in self._pairs(page, slot):
            np.copyto(here, there)

    def _pairs(self, page: int, slot: memoryview) -> list[tuple[_Bytes, _Bytes]]:
        """(slot, memory) of each run. ValueError if the slot has another size."""
        if slot.nbytes != self.nbytes:
            raise ValueError(f"the slot has {slot.nbytes} bytes, a page {self.nbytes}")
        raw = np.frombuffer(slot, np.uint8)
        pairs = []
        for run in self.runs:
            shape = (run.pieces, run.piece)
            # numpy checks that all of it lies inside of the buffer
            here: _Bytes = np.ndarray(
                shape, np.uint8, self.memories[run.memory], run.offset + page * run.page_step,
                (run.piece_step, 1),
            )  # fmt: skip
            pairs.append((raw[run.slot : run.slot + run.nbytes].reshape(shape), here))
        return pairs


def page_table(pool: Any) -> PageTable:
    """The pages of a host pool of SGLang. SpecError naming what can't be kept, and why."""
    kind = type(pool).__name__
    layout, tokens, dtype = _declared(pool, kind)
    pages = int(pool.page_num)
    memories, bases = _memories(pool, kind)
    probes = sorted({0, min(1, pages - 1), pages - 1})
    told = [_pieces(pool, kind, n * tokens, tokens) for n in probes]
    flat = _flat_pieces(pool, 0) is not None
    if flat:
        ordered = [_flat_pieces(pool, n * tokens) or [] for n in probes]
        for say, order in zip(told, ordered, strict=True):
            if _merged(say) != _merged(order):
                raise SpecError(
                    f"{kind} ({layout}): get_page_buffer_meta and get_data_page name other bytes; "
                    "kvd can't tell what a page is"
                )
        told = ordered
    nbytes = sum(size for _, size in told[0])
    due = int(pool.get_size_per_token()) * tokens
    if nbytes != due:
        raise SpecError(
            f"{kind} ({layout}): a page shows {nbytes} bytes, the pool keeps {due} for its "
            f"{tokens} tokens; kvd keeps whole pages only"
        )
    runs = _runs(told, probes, memories, bases, kind)
    return PageTable(
        tokens, pages, nbytes, dtype, flat, runs, memories, _codec(pool, kind, layout, runs)
    )


def _declared(pool: Any, kind: str) -> tuple[str, int, torch.dtype]:
    """Layout, tokens a page and dtype; SpecError for a pool that is not this process's own,
    whole, and at one place."""
    if kind not in _POOLS:
        raise SpecError(f"host pool {kind} is not supported; kvd knows {', '.join(_POOLS)}")
    if getattr(pool, "kv_buffer", None) is None:
        raise SpecError(f"host pool {kind} holds no memory in this rank (MLA host deduplication)")
    if getattr(pool, "dcp_size", 1) != 1:
        raise SpecError(f"dcp_size is {pool.dcp_size}: a page's tokens lie on several ranks")
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise SpecError(f"host pool {kind} moves its pages about (unified page envelopes)")
    layout, tokens = getattr(pool, "layout", None), getattr(pool, "page_size", None)
    dtype = getattr(pool, "dtype", None)
    if not isinstance(layout, str) or not layout:
        raise SpecError(f"host pool {kind} does not tell its layout")
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"host pool {kind} does not tell its dtype")
    if type(tokens) is not int or not 16 <= tokens <= 4096:
        raise SpecError(
            f"page_size is {tokens}: kvd keeps pages of 16 to 4096 tokens; start SGLang with "
            "--page-size 64"
        )
    return layout, tokens, dtype


def _memories(pool: Any, kind: str) -> tuple[tuple[_Bytes, ...], list[int]]:
    """The pool's tensors as bytes, and their addresses."""
    found: dict[int, _Bytes] = {}
    for name in _MEMORY:
        value = getattr(pool, name, None)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.device.type != "cpu":
                raise SpecError(
                    f"host pool {kind}: {name} lies on {tensor.device}, not on the host"
                )
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            found[storage.data_ptr()] = raw.numpy()
    return tuple(found.values()), list(found)


def _pieces(pool: Any, kind: str, start: int, tokens: int) -> list[_Piece]:
    """What the pool says of the page that begins at token `start`."""
    try:
        told = pool.get_page_buffer_meta(torch.arange(start, start + tokens))
    except (NotImplementedError, ValueError) as error:
        raise SpecError(f"{kind} ({pool.layout}) can't be stored: {error}") from error
    if not told or not told[0]:
        raise SpecError(f"{kind} ({pool.layout}) tells no memory of its pages")
    pointers, sizes = told
    return [(int(p), int(n)) for p, n in zip(pointers, sizes, strict=True) if n]


def _flat_pieces(pool: Any, start: int) -> list[_Piece] | None:
    """The same bytes in the order of the generic interface; None where the pool has none."""
    try:
        view = pool.get_data_page(start, flat=False)
    except (NotImplementedError, ValueError):
        return None
    size = view.element_size()
    inner, dims = size, list(zip(view.shape, view.stride(), strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] * size == inner):
        inner *= dims.pop()[0]
    begin = view.data_ptr()
    steps = [range(0, n * step * size, step * size) if step else (0,) * n for n, step in dims]
    return [(begin + sum(at), inner) for at in itertools.product(*steps)]


def _merged(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The bytes that pieces name, whatever their order and cuts."""
    found: list[_Piece] = []
    for address, size in sorted(pieces):
        if found and sum(found[-1]) == address:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((address, size))
    return found


def _runs(
    told: list[list[_Piece]],
    probes: list[int],
    memories: tuple[_Bytes, ...],
    bases: list[int],
    kind: str,
) -> tuple[Run, ...]:
    """Pieces of page 0 as runs; that they are where a step a page says is checked at all probes."""
    runs: list[Run] = []
    slot = 0
    for number, (address, size) in enumerate(told[0]):
        memory = next(
            (i for i, base in enumerate(bases) if 0 <= address - base < memories[i].nbytes), None
        )
        if memory is None or any(len(t) != len(told[0]) or t[number][1] != size for t in told):
            raise SpecError(f"{kind}: a page has bytes outside of the pool, or pages differ")
        step = told[1][number][0] - address if len(told) > 1 else 0
        for page, pieces in zip(probes, told, strict=True):
            begin = pieces[number][0] - bases[memory]
            if begin != address - bases[memory] + page * step or (
                not 0 <= begin <= memories[memory].nbytes - size
            ):
                raise SpecError(f"{kind}: pages are not at equal distances in the pool's memory")
        single = Run(memory, address - bases[memory], step, size, 1, size, slot)
        slot += size
        joined = _joined(runs[-1], single) if runs else None
        runs[-1:] = [joined] if joined else [*runs[-1:], single]
    return tuple(runs)


def _joined(run: Run, single: Run) -> Run | None:
    """A run with one more piece; None if the piece does not go on with it."""
    if (run.memory, run.page_step, run.piece) != (single.memory, single.page_step, single.piece):
        return None
    step = single.offset - (run.offset + (run.pieces - 1) * run.piece_step)
    if run.pieces > 1 and step != run.piece_step:
        return None
    return run._replace(pieces=run.pieces + 1, piece_step=step)


def _codec(pool: Any, kind: str, layout: str, runs: tuple[Run, ...]) -> str:
    """Everything that gives a byte of a page its meaning, beside dtype and model."""
    shape = "+".join(f"{run.pieces}x{run.piece}" for run in runs)
    sizes = " ".join(
        f"{name}={getattr(pool, name)}"
        for name in ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim",
                     "kv_lora_rank", "qk_rope_head_dim")
        if isinstance(getattr(pool, name, None), int)
    )  # fmt: skip
    device = ",".join(sorted(_device_layouts(pool)))
    tag = getattr(pool, "storage_format_tag", None) or ""
    return f"sglang-page/1 {kind} {layout} {shape} {sizes} device={device} tag={tag}"


def _device_layouts(pool: Any) -> set[str]:
    """Order of axes in the device's pages: the host's have the same within a row."""
    found = set()
    for info in getattr(pool, "_buffer_infos", ()):
        layout = getattr(getattr(info, "buffers", None), "layout", None)
        if layout is not None:
            found.add(str(getattr(layout, "value", layout)))
    return found
