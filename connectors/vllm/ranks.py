"""What one worker is and holds, as vLLM tells it.

The law of this module: it reads vLLM's configuration and groups, and changes nothing. All that is
peculiar to one release of vLLM about them is here.
"""

from __future__ import annotations

import re
from typing import Any

from kvd.connectors.vllm.metadata import RankShape
from kvd.connectors.vllm.paging import Pages, pages_of

__all__ = ["rank_shape", "worker_pages"]


def worker_pages(
    config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], chunk_tokens: int
) -> Pages:
    """The registered tensors as pages. LayoutRefused."""
    backends = {name: _backend(config, name) for name in kv_caches}
    return pages_of(kv_caches, kv_cache_config, chunk_tokens, backends)


def _backend(config: Any, layer: str) -> str:
    """The attention backend of a layer and, on a CPU, the instruction set that it packs for."""
    module = config.compilation_config.static_forward_context.get(layer)
    if module is None or not hasattr(module, "get_attn_backend"):
        return "unknown"
    name = str(module.get_attn_backend().get_name())
    isa = getattr(module, "isa", None)
    if isa is None and name.startswith("CPU"):
        isa = _cpu_isa(config, module)
    return f"{name}/{isa}" if isa else name


def _cpu_isa(config: Any, module: Any) -> str:
    import platform

    import torch

    amx = torch.cpu._is_amx_tile_supported()
    return f"{platform.machine()}{'-amx' if amx else ''}"


def rank_shape(config: Any, kv_cache_config: Any, pages: Pages | None, refused: str) -> RankShape:
    """What this rank tells the scheduler; without pages, why not."""
    parallel = config.parallel_config
    tensor = int(parallel.tensor_parallel_size)
    rank = int(getattr(parallel, "rank", 0)) % (tensor * int(parallel.pipeline_parallel_size))
    specs = [_first_spec(group) for group in kv_cache_config.kv_cache_groups]
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    numbers = [int(n[0]) for n in (re.findall(r"\d+", name) for name in names) if n]
    begin = min(numbers, default=0)
    modes = sorted({str(getattr(spec, "kv_quant_mode", 0)) for spec in specs})
    cache_dtype = str(getattr(config.cache_config, "cache_dtype", "auto"))
    return RankShape(
        pp=rank // tensor,
        tp=rank % tensor,
        replicas=int(getattr(kv_cache_config, "kv_tp_replicas", 1)),
        layers=(begin, max(begin + 1, max(numbers, default=0) + 1)),
        heads=max((int(getattr(spec, "num_heads", 1)) for spec in specs), default=1),
        nbytes=pages.chunk_bytes if pages is not None else 0,
        codec=pages.codec if pages is not None else "",
        dtype="+".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs
                               if hasattr(spec, "dtype")})) or "unknown",
        quantisation=f"{cache_dtype} {' '.join(modes)}",
        refused=refused,
    )  # fmt: skip


def _first_spec(group: Any) -> Any:
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return next(iter(each.values())) if each else group.kv_cache_spec
