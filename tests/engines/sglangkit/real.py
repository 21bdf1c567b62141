"""SGLang's own classes on a CPU: host pools, storage configs, page hashes.

Import this before anything of SGLang. PyPI's torchvision, which SGLang imports, has no operators
that fit torch's CPU build and fails while it declares the shapes of two of them; declared here,
it imports, and nothing that is tested here calls them.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
warnings.filterwarnings("ignore", module="sglang")

from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.pool_host import base as _base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

_base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # otherwise 10 GiB have to stay free

DEVICE_TOKENS = 64
CPU = torch.device("cpu")


def mha(
    layout: str, *, pages: int = 64, page_size: int = 16, layers: int = 4, heads: int = 2,
    dim: int = 16, v_dim: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    """A host pool over a device pool of zeros."""
    v_dim = v_dim or dim
    keys = tuple(torch.zeros(DEVICE_TOKENS, heads, dim, dtype=dtype) for _ in range(layers))
    values = tuple(torch.zeros(DEVICE_TOKENS, heads, v_dim, dtype=dtype) for _ in range(layers))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys, v=values, k_data_ptrs=_pointers(keys), v_data_ptrs=_pointers(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page_size, head_num=heads, head_dim=dim, v_head_dim=v_dim, dtype=dtype,
        device=CPU,
    )  # fmt: skip
    kind = get_mha_host_pool_cls(info)
    return kind(
        info, host_to_device_ratio=8, host_size=0, page_size=page_size, layout=layout,
        pin_memory=False, device="cpu", device_capacity_tokens=DEVICE_TOKENS, start_layer=0,
        end_layer=layers, host_token_capacity=pages * page_size,
    )  # fmt: skip


def mla(
    layout: str, *, pages: int = 64, page_size: int = 16, layers: int = 4, rank: int = 24,
    rope: int = 8, dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    buffers: Any = tuple(
        torch.zeros(DEVICE_TOKENS, 1, rank + rope, dtype=dtype) for _ in range(layers)
    )
    pointers = _pointers(buffers)
    if layout == "page_first_kv_split":
        blocks = DEVICE_TOKENS // page_size
        buffers = MLASplitBuffers(
            k=torch.zeros(layers, blocks, page_size, 1, rank, dtype=dtype),
            v=torch.zeros(layers, blocks, page_size, 1, rope, dtype=dtype),
            index_k=torch.zeros(2, blocks, page_size, 1, 12, dtype=dtype),
            index_scales=None, index_layer_indices=(0, 2), k_width=rank, v_width=rope,
            index_width=12,
        )  # fmt: skip
    info = MLABufferInfo(
        buffers=buffers, data_ptrs=pointers, layer_indices=tuple(range(layers)),
        device_layer_num=layers, page_size=page_size, kv_lora_rank=rank, qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope, dtype=dtype, device=CPU,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, host_to_device_ratio=8, host_size=0, page_size=page_size, layout=layout,
        pin_memory=False, device="cpu", device_capacity_tokens=DEVICE_TOKENS, start_layer=0,
        end_layer=layers, target_layer_num=layers, host_token_capacity=pages * page_size,
    )  # fmt: skip


def config_of(
    socket: str, *, model: str | None = "m", rank: int = 0, ranks: int = 1, is_mla: bool = False,
    **extra: Any,
) -> HiCacheStorageConfig:  # fmt: skip
    """As HiCacheController makes it from the command line that the documentation tells."""
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=is_mla, enable_storage_metrics=False, is_page_first_layout=True,
        model_name=model, extra_config=extra_config(socket, **extra),
    )  # fmt: skip


def extra_config(socket: str, **extra: Any) -> dict[str, Any]:
    told = {
        "backend_name": "kvd",
        "module_path": "kvd.connectors.sglang",
        "class_name": "KvdHiCache",
        "interface_v1": 1,
        "socket": socket,
        "weights": "none: random",
        "prefault": False,
    }
    return {**told, **extra}


def page_hashes(tokens: list[int], page_size: int = 16, **namespace: str) -> list[str]:
    """As SGLang makes them; `namespace`: extra_key, cache_salt."""

    class Key(list[int]):
        extra_key = namespace.get("extra_key")
        cache_salt = namespace.get("cache_salt")

    found: list[str] = get_storage_hash_str(Key(tokens), page_size=page_size)
    return found


def fill(pool: Any, seed: int = 0) -> None:
    """Random bytes in all of the pool's memory."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer"):
        value = getattr(pool, name, None)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if tensor is not None:
                raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def content(pool: Any, indices: torch.Tensor) -> list[bytes]:
    """The bytes of each page, where SGLang says they lie."""
    found = []
    for page in indices.reshape(-1, pool.page_size):
        pointers, sizes = pool.get_page_buffer_meta(page)
        pieces = zip(pointers, sizes, strict=True)
        found.append(b"".join(ctypes.string_at(at, size) for at, size in pieces))
    return found


def _pointers(tensors: Any) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)
