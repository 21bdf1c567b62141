"""The few names of SGLang 0.5.23 that the backend imports, and host pools of the same shape, for
tests without SGLang.

`install()` puts them into sys.modules, unless the real SGLang is there. Signatures and defaults are
those of SGLang's; `tests/engines/sglangkit` shows that the real ones fit too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

VERSION = "0.5.23"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(str, Enum):  # noqa: UP042 - as SGLang's
    KV = "kv"
    MAMBA = "mamba"
    DRAFT = "draft"

    def __str__(self) -> str:
        return self.value


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        return

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: Any, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...


# -- host pools ---------------------------------------------------------------------------------


class _Pool:
    """Whole pages of one or several tensors; a page is a view, and its pieces are what is
    contiguous in the view."""

    dcp_size = 1
    shared_allocation_domain = None
    storage_format_tag = None
    start_layer = 0

    def __init__(self, layout: str, pages: int, page_size: int, layers: int, dtype: torch.dtype):
        self.layout, self.page_num, self.page_size = layout, pages, page_size
        self.size, self.dtype = pages * page_size, dtype
        self.layer_num = self.target_layer_num = self.end_layer = layers
        self._free = list(range(pages))

    def alloc(self, tokens: int) -> torch.Tensor:
        taken = [self._free.pop(0) for _ in range(tokens // self.page_size)]
        rows = [torch.arange(n * self.page_size, (n + 1) * self.page_size) for n in taken]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

    def _tensor(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype)


class MHATokenToKVPoolHost(_Pool):
    def __init__(
        self, layout: str = "page_first", *, pages: int = 64, page_size: int = 16, layers: int = 3,
        heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__(layout, pages, page_size, layers, dtype)
        self.head_num, self.head_dim, self.v_head_dim = heads, dim, dim
        size, page = self.size, page_size
        self.kv_buffer = self._tensor(
            2,
            *{
                "layer_first": (layers, size, heads, dim),
                "page_first": (size, layers, heads, dim),
                "page_first_direct": (pages, layers, page, heads, dim),
                "page_head": (pages, heads, page, layers, dim),
            }[layout],
        )

    k_buffer = property(lambda self: self.kv_buffer[0])
    v_buffer = property(lambda self: self.kv_buffer[1])

    def get_size_per_token(self) -> int:
        return 2 * self.head_dim * self.head_num * self.layer_num * self.dtype.itemsize

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        end, page = index + self.page_size, index // self.page_size
        if self.layout == "layer_first":
            view = self.kv_buffer[:, :, index:end]
        elif self.layout == "page_first":
            view = self.kv_buffer[:, index:end]
        else:
            view = self.kv_buffer[:, page : page + 1]
        return view.flatten() if flat else view

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.get_data_page(0).shape, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        view = self.get_data_page(index, flat=False)
        view.copy_(data.reshape(view.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = [], []
        for index in indices.tolist()[:: self.page_size]:
            view = self.get_data_page(index, flat=False)
            layers = range(self.layer_num) if self.layout == "layer_first" else (None,)
            for layer in layers:
                for side in (0, 1):
                    part = view[side] if layer is None else view[side, layer]
                    assert part.is_contiguous()
                    pointers.append(part.data_ptr())
                    sizes.append(part.nbytes)
        return pointers, sizes


class AsymmetricMHATokenToKVPoolHost(MHATokenToKVPoolHost):
    """K and V of different width, in tensors of their own; no flat pages."""

    def __init__(self, layout: str = "page_first", *, v_dim: int = 4, **more: Any) -> None:
        super().__init__(layout, **more)
        self.v_head_dim = v_dim
        heads, layers = self.head_num, self.layer_num
        self.kv_buffer = (
            self._tensor(self.size, layers, heads, self.head_dim),
            self._tensor(self.size, layers, heads, v_dim),
        )

    def get_size_per_token(self) -> int:
        widths = self.head_dim + self.v_head_dim
        return widths * self.head_num * self.layer_num * self.dtype.itemsize

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError("no flat pages")

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        parts = [
            buffer[index : index + self.page_size]
            for index in indices.tolist()[:: self.page_size]
            for buffer in self.kv_buffer
        ]
        return [p.data_ptr() for p in parts], [p.nbytes for p in parts]


class MLATokenToKVPoolHost(_Pool):
    """Latent KV, the same in all tensor ranks. page_first_kv_split: K, V and an index in tensors
    of their own; the index has fewer layers."""

    def __init__(
        self, layout: str = "page_first", *, pages: int = 64, page_size: int = 16, layers: int = 3,
        rank: int = 12, rope: int = 4, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__(layout, pages, page_size, layers, dtype)
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = rank, rope, rank + rope
        width = rank + rope
        if layout == "page_first_kv_split":
            self.k_buffer = self._tensor(pages, layers, page_size, 1, rank)
            self.v_buffer = self._tensor(pages, layers, page_size, 1, rope)
            self.index_k_buffer = self._tensor(pages, 2, page_size, 1, 6)
            self.kv_buffer = self.k_buffer
            return
        self.kv_buffer = self._tensor(
            *{
                "layer_first": (layers, self.size, 1, width),
                "page_first": (self.size, layers, 1, width),
                "page_first_direct": (pages, layers, page_size, 1, width),
            }[layout]
        )

    def get_size_per_token(self) -> int:
        split = 2 * 6 if self.layout == "page_first_kv_split" else 0
        return (self.kv_cache_dim * self.layer_num + split) * self.dtype.itemsize

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        end, page = index + self.page_size, index // self.page_size
        if self.layout == "page_first_kv_split":
            raise ValueError("no flat pages")
        if self.layout == "layer_first":
            view = self.kv_buffer[:, index:end]
        elif self.layout == "page_first":
            view = self.kv_buffer[index:end]
        else:
            view = self.kv_buffer[page : page + 1]
        return view.flatten() if flat else view

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        parts: list[torch.Tensor] = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "page_first_kv_split":
                page = index // self.page_size
                parts += [b[page] for b in (self.k_buffer, self.v_buffer, self.index_k_buffer)]
                continue
            view = self.get_data_page(index, flat=False)
            parts += list(view) if self.layout == "layer_first" else [view]
        return [p.data_ptr() for p in parts], [p.nbytes for p in parts]


MODULES: dict[str, dict[str, Any]] = {
    "sglang": {"__version__": VERSION},
    "sglang.srt.mem_cache.hicache_storage": {
        c.__name__: c
        for c in (
            HiCacheStorage,
            HiCacheStorageConfig,
            HiCacheStorageExtraInfo,
            PoolName,
            PoolTransfer,
            PoolTransferResult,
        )
    },
    "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
}


def install() -> None:
    found = importlib.util.find_spec("sglang") if "sglang" not in sys.modules else None
    if found is not None and found.loader is not None:
        return
    for name, content in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                module = types.ModuleType(parent)
                # Without a spec, find_spec raises; without a loader, it is not installed.
                module.__spec__ = importlib.machinery.ModuleSpec(parent, None)
                module.__path__ = []  # type: ignore[attr-defined]
                sys.modules[parent] = module
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
