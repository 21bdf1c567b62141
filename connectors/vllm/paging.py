"""An engine's paged KV, seen as whole pages of opaque bytes.

The law of this module: a page is copied whole or not at all, and nobody looks into it (a CPU page
packs K transposed; a quantised one holds scales). What may be copied that way is checked against
the registered tensors, never guessed from a shape: the number of blocks, the declared axes, that
the bytes of a page lie together, and that they are as many as the engine's own spec says. What
does not fit is refused by name. Block 0 is vLLM's null block: nothing is read from it or written
to it.

A chunk lies in a slot as [group][layer][block of the chunk][page bytes], layers in the order in
which the engine lists them in each group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.errors import SpecError

__all__ = ["GroupPages", "LayoutRefused", "Pages", "pages_of"]

# Groups of which every block holds the KV of its own tokens, kept as long as the request.
PLAIN_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


class LayoutRefused(SpecError):
    """KV that kvd can't keep; the message names the layer and the reason."""


class GroupPages(NamedTuple):
    """The layers of one KV group. `views`: a uint8 tensor [blocks, page bytes] a layer."""

    block_tokens: int
    blocks_a_chunk: int
    views: tuple[Any, ...]
    page_bytes: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        return self.blocks_a_chunk * sum(self.page_bytes)


class Pages:
    """All pages of one worker, and how one chunk of them lies in a slot."""

    def __init__(self, groups: Sequence[GroupPages], codec: str, blocks: int) -> None:
        self.groups = tuple(groups)
        self.codec = codec
        self.blocks = blocks
        self.chunk_bytes = sum(group.chunk_bytes for group in groups)

    @property
    def device(self) -> Any:
        return self.groups[0].views[0].device

    def rows(self, blocks: Sequence[Sequence[int]], chunk: int) -> list[NDArray[np.int64]]:
        """Block ids of one chunk, a row a group, from the ids of a job (whole chunks of them).
        ValueError for ids that are not there."""
        rows = []
        for group, ids in zip(self.groups, blocks, strict=True):
            width = group.blocks_a_chunk
            row = np.asarray(ids[chunk * width : (chunk + 1) * width], dtype=np.int64)
            if len(row) != width or (len(row) and not 0 <= row.min() <= row.max() < self.blocks):
                raise ValueError(f"chunk {chunk} has no {width} blocks below {self.blocks}: {row}")
            rows.append(row)
        return rows


class HostCopier:
    """Copies between pages in host memory and slots, without the GIL, in the caller's thread."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._views = [[view.numpy() for view in group.views] for group in pages.groups]

    def gather(self, blocks: Sequence[Sequence[int]], chunk: int, slot: memoryview) -> None:
        """One chunk into a slot of exactly `chunk_bytes`. ValueError if a block is the null one."""
        flat = np.frombuffer(slot, dtype=np.uint8)
        rows = self._pages.rows(blocks, chunk)
        if not all(row.all() for row in rows):
            raise ValueError(f"chunk {chunk} has a null block: it is not whole")
        at = 0
        for group, views, row in zip(self._pages.groups, self._views, rows, strict=True):
            for view, page in zip(views, group.page_bytes, strict=True):
                end = at + len(row) * page
                np.take(view, row, axis=0, out=flat[at:end].reshape(-1, page), mode="clip")
                at = end
        if at != flat.nbytes:
            raise ValueError(f"a slot of {flat.nbytes} bytes for a chunk of {at}")

    def scatter(self, slot: memoryview, blocks: Sequence[Sequence[int]], chunk: int) -> None:
        """One chunk out of a slot, to the blocks that are not 0."""
        flat = np.frombuffer(slot, dtype=np.uint8)
        if flat.nbytes != self._pages.chunk_bytes:
            raise ValueError(f"{flat.nbytes} bytes for a chunk of {self._pages.chunk_bytes}")
        rows = self._pages.rows(blocks, chunk)
        at = 0
        for group, views, row in zip(self._pages.groups, self._views, rows, strict=True):
            wanted = np.flatnonzero(row)
            targets = row[wanted]
            for view, page in zip(views, group.page_bytes, strict=True):
                end = at + len(row) * page
                part = flat[at:end].reshape(-1, page)
                view[targets] = part if len(wanted) == len(row) else part[wanted]
                at = end

    def ready(self) -> None:
        """What the forward of this step wrote is in memory: nothing to do on the host."""

    def fence(self) -> None:
        """Copies that were begun are over: they are when the call that began them returned."""

    def finish(self) -> None:
        """All copies of this thread have arrived: so they have."""


def pages_of(
    kv_caches: Mapping[str, Any], config: Any, chunk_tokens: int, backends: Mapping[str, str]
) -> Pages:
    """The pages of the registered tensors. `config`: vLLM's KVCacheConfig; `backends`: name of
    each layer's attention backend and instruction set. LayoutRefused, naming layer and reason."""
    blocks = int(config.num_blocks)
    groups = []
    told: list[str] = [f"layout {config.kv_cache_layout}", f"chunk {chunk_tokens}"]
    for number, group in enumerate(config.kv_cache_groups):
        _check_group(number, group)
        specs = _layer_specs(group)
        views, sizes = [], []
        for name in group.layer_names:
            if name not in kv_caches:
                raise LayoutRefused(f"layer {name} of KV group {number} has no registered tensor")
            spec = specs[name]
            view = page_view(name, kv_caches[name], spec, blocks)
            views.append(view)
            sizes.append(int(view.shape[1]))
            told.append(
                f"{number} {type(spec).__name__} {backends.get(name, '?')} {spec.dtype} "
                f"{getattr(spec, 'kv_quant_mode', 0)!s} {tuple(kv_caches[name].shape[1:])} "
                f"{tuple(kv_caches[name].stride()[1:])} {sizes[-1]}"
            )
        block_tokens = int(group.kv_cache_spec.block_size)
        groups.append(
            GroupPages(block_tokens, chunk_tokens // block_tokens, tuple(views), tuple(sizes))
        )
    strange = set(kv_caches) - {n for g in config.kv_cache_groups for n in g.layer_names}
    shared = {id(kv_caches[n]) for g in config.kv_cache_groups for n in g.layer_names}
    strange = {n for n in strange if not _aliases(kv_caches[n], kv_caches, shared)}
    if strange:
        raise LayoutRefused(f"layers {sorted(strange)} are in no KV group: their KV would be lost")
    if len({str(v.device) for g in groups for v in g.views}) != 1:
        raise LayoutRefused("the layers' pages lie on several devices")
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
    names = "+".join(sorted(set(backends.values()))) or "unknown"
    return Pages(groups, f"vllm-pages/1 {names} {config.kv_cache_layout} {digest[:32]}", blocks)


def _aliases(tensor: Any, kv_caches: Mapping[str, Any], known: set[int]) -> bool:
    """Whether a layer that is in no group uses the KV of one that is (cross-layer sharing)."""
    place = (tensor.data_ptr(), tuple(tensor.shape))
    return any(
        id(other) in known and (other.data_ptr(), tuple(other.shape)) == place
        for other in kv_caches.values()
    )


def _check_group(number: int, group: Any) -> None:
    kinds = {type(spec).__name__ for spec in _layer_specs(group).values()}
    for kind in sorted(kinds - set(PLAIN_SPECS)):
        raise LayoutRefused(
            f"KV group {number} is {kind}; kvd keeps {' and '.join(PLAIN_SPECS)}, whose blocks "
            f"stand for all of their tokens"
        )
    for flag, why in (
        ("is_eagle_group", "holds a draft model's KV"),
        ("host_resident", "lies in the host's pool"),
    ):
        if getattr(group, flag, False):
            raise LayoutRefused(f"KV group {number} {why}, which kvd does not keep")
    if not getattr(group, "enable_kv_transfer", True):
        raise LayoutRefused(f"KV group {number} may not be transferred")


def _layer_specs(group: Any) -> dict[str, Any]:
    """Each layer's own spec: layers of one group may differ in width and dtype."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(each) if each else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def page_view(name: str, tensor: Any, spec: Any, blocks: int) -> Any:
    """The tensor's pages as uint8 [blocks, page bytes], without a copy. LayoutRefused."""
    import torch

    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    size = tensor.element_size()
    where = f"layer {name}, shape {shape}, strides {strides}"
    if len(shape) != 4 or shape[0] % blocks or not shape[0]:
        raise LayoutRefused(f"{where}: not [blocks ({blocks}), heads, tokens, content]")
    ratio = shape[0] // blocks  # kernel blocks in one of the manager's
    if shape[1] != spec.num_heads or shape[2] * ratio != spec.block_size:
        raise LayoutRefused(
            f"{where}: the engine's spec says {spec.num_heads} heads and {spec.block_size} tokens "
            f"a block"
        )
    inner = 1
    for length in shape[1:]:
        inner *= length
    reach = 1 + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
    if reach != inner or min(strides) < 1 or _overlaps(shape[1:], strides[1:]):
        raise LayoutRefused(f"{where}: the bytes of a block do not lie together")
    if ratio > 1 and strides[0] != inner:
        raise LayoutRefused(f"{where}: {ratio} kernel blocks of a block do not lie together")
    page = int(spec.page_size_bytes)
    content = inner * ratio * size
    stride = strides[0] * ratio * size
    if not content <= page <= stride:
        raise LayoutRefused(
            f"{where}: a block has {content} bytes each {stride}, the engine's spec says {page}"
        )
    first = tensor.storage_offset() * size
    storage = tensor.untyped_storage()
    if first + (blocks - 1) * stride + page > storage.nbytes():
        raise LayoutRefused(f"{where}: the last page reaches beyond the allocation")
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, first, (blocks, page), (stride, 1))


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two places of a block are one byte (a broadcast tensor)."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return True
        expected *= length
    return False
