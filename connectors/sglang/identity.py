"""What makes the pages of two SGLang engines interchangeable: the KVSpec.

The law of this module: everything that may change a byte of a page, and that SGLang's page hash
leaves out, is in the spec: weights, configuration, RoPE, dtypes, KV scales, layout, page size,
ranks, and SGLang's release. What can't be known is asked for by name, and nothing is cached
without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.chunk import KVSpec, ShardSpec, canonical_pairs
from kvd.connectors.checkpoint import weights_of
from kvd.connectors.sglang.config import Options
from kvd.connectors.sglang.pages import PageTable
from kvd.errors import SpecError

__all__ = ["server_facts", "shard_of", "spec_of", "weight_version"]

_ADVICE = 'in --hicache-storage-backend-extra-config set "weights" to a name that changes with them'

_ADAPTER_ADVICE = "load it while SGLang runs (/load_lora_adapter), or name a local folder"

# Fields of SGLang's ServerArgs that change KV and are no weights. As they were given: "auto" on two
# engines means the same only for the same checkpoint on the same kind of device, and then it does.
_FACTS = (
    "dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "context_length",
    "is_embedding", "model_impl",
)  # fmt: skip


def server_facts() -> Mapping[str, Any]:
    """What SGLang was started with, as far as it changes KV; empty outside of a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
    except (ImportError, ValueError):
        return {}
    names = (*_FACTS, "model_path", "revision", "load_format", "quantization_param_path",
             "custom_weight_loader", "lora_paths")  # fmt: skip
    return {name: getattr(args, name, None) for name in names}


def weight_version() -> str:
    """SGLang's name of the weights as they are now: it changes with an update of the weights of a
    running server that names one. "" outside of a server."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except (ImportError, ValueError, AttributeError):
        return ""


def spec_of(
    config: Any, pool: Any, table: PageTable, options: Options, facts: Mapping[str, Any],
    release: str, version: str = "",
) -> KVSpec:  # fmt: skip
    """The identity of the pages that this rank's pipeline stage keeps. `config`: SGLang's
    HiCacheStorageConfig; `version`: of the weights. SpecError when a field can't be filled, naming
    it and the way out."""
    _check(config, pool, options)
    path = str(facts.get("model_path") or "")
    model = options.model or str(config.model_name or "") or Path(path).name
    if not model:
        raise SpecError(
            'SGLang tells no model name: set "model" in --hicache-storage-backend-extra-config'
        )
    ranks = 1 if config.is_mla_model else int(config.tp_size)
    heads = 1 if config.is_mla_model else int(pool.head_num)
    first = int(pool.start_layer or 0)
    spec = KVSpec(
        model=model,
        revision=options.revision or str(facts.get("revision") or ""),
        weights=options.weights or _weights(path, facts),
        engine="sglang/" + ".".join(release.split(".")[:2]),
        dtype=str(table.dtype).removeprefix("torch."),
        quantisation=_scales(facts),
        codec=table.codec,
        chunk_tokens=table.tokens,
        pipeline=int(config.pp_size),
        tensor=ranks,
        groups=1,
        rope=(),  # in the configuration, which is in `extra`
        extra=canonical_pairs(
            {
                "config": _config(path),
                "hash": "sglang sha256",
                "adapters": _adapters(facts.get("lora_paths")),
                "weight_version": "" if version == "default" else version,
                **{name: str(facts[name]) for name in _FACTS if facts.get(name) is not None},
            }
        ),
        shards=tuple(
            ShardSpec(int(config.pp_rank), rank, 0, 0, first, first + int(pool.layer_num),
                      rank * heads, (rank + 1) * heads, table.nbytes)
            for rank in range(ranks)
        ),
    )  # fmt: skip
    spec.validate()
    return spec


def shard_of(config: Any, spec: KVSpec) -> int:
    """The shard that this rank keeps."""
    return spec.shard_index(int(config.pp_rank), 0 if config.is_mla_model else int(config.tp_rank))


def _check(config: Any, pool: Any, options: Options) -> None:
    for name in ("attn_cp_size", "dcp_size"):
        if getattr(config, name, 1) not in (1, None):
            raise SpecError(
                f"{name} is {getattr(config, name)}: a page's tokens lie on several ranks, which "
                "kvd does not keep"
            )
    for name in ("tp_rank", "tp_size", "pp_rank", "pp_size"):
        value = getattr(config, name, None)
        if type(value) is not int or value < 0:
            raise SpecError(f"SGLang tells no {name} (it is {value!r})")
    if not config.is_mla_model and not isinstance(getattr(pool, "head_num", None), int):
        raise SpecError(
            f"SGLang says that every rank has heads of its own, but {type(pool).__name__} has none"
        )
    packed = int(pool.layer_num) - int(getattr(pool, "target_layer_num", pool.layer_num))
    if packed and not options.weights:
        raise SpecError(
            f"the pages hold {packed} layers of a draft model too, whose weights kvd does not "
            f"find by itself: {_ADVICE} and with the draft model's"
        )


def _weights(path: str, facts: Mapping[str, Any]) -> str:
    if not path:
        raise SpecError(f"the weights can't be found outside of a server: {_ADVICE}")
    if facts.get("custom_weight_loader"):
        raise SpecError(f"weights of a custom_weight_loader have no identity: {_ADVICE}")
    commit = None if Path(path).exists() else _commit(path, facts.get("revision"))
    return weights_of(path, commit, str(facts.get("load_format") or "auto"), _ADVICE)


def _commit(repository: str, revision: Any) -> str | None:
    """The hub's commit of a model that SGLang has downloaded."""
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repository, revision=revision, local_files_only=True, allow_patterns="config.json"
        )
    except (ImportError, OSError, ValueError):
        return None
    return Path(folder).name


def _adapters(paths: Any) -> str:
    """A digest of the adapters that were named at the start: SGLang's page hash has their name and
    path only. (One that is loaded later gets an id of its own.)"""
    refs = paths.items() if isinstance(paths, Mapping) else enumerate(paths or ())
    root, found = hashlib.sha256(b"kvd sglang adapters 1"), False
    for name, ref in refs:
        told = ref.get("lora_path") if isinstance(ref, Mapping) else getattr(ref, "lora_path", ref)
        path = str(told).rpartition("=")[2]
        commit = None if Path(path).exists() else _commit(path, None)
        try:
            weights = weights_of(path, commit, "auto", _ADAPTER_ADVICE)
        except SpecError as error:
            raise SpecError(f"the adapter {path} has no identity: {error}") from error
        root.update(f"{name}\0{path}\0{weights}\n".encode())
        found = True
    return root.hexdigest() if found else ""


def _config(path: str) -> str:
    """A digest of the configuration beside local weights; a hub's commit covers it already."""
    file = Path(path, "config.json")
    if not path or not file.is_file():
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _scales(facts: Mapping[str, Any]) -> str:
    """Where the scales of quantised KV come from; those of the checkpoint are in its digest."""
    path = facts.get("quantization_param_path")
    if not path:
        return "none"
    try:
        return "scales " + hashlib.sha256(Path(str(path)).read_bytes()).hexdigest()
    except OSError as error:
        raise SpecError(f"quantization_param_path {path} can't be read: {error}") from error
