"""What makes the chunks of two vLLM engines interchangeable: the KVSpec.

The law of this module: everything that may change a byte of a page, and that vLLM's block hash
leaves out, is in the spec: checkpoint, configuration, RoPE, dtypes, quantisation, vLLM's release,
the pages' codec, world sizes and shards, and the seed from which block hashes start. An engine
that does something kvd can't name (context parallelism, scales that are found while it runs) is
refused. Only the scheduler makes the spec; workers tell their shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from kvd.chunk import KVSpec, ShardSpec, canonical_pairs
from kvd.connectors.checkpoint import weights_of
from kvd.connectors.vllm.config import Options
from kvd.connectors.vllm.keys import REQUIRED_HASH
from kvd.connectors.vllm.metadata import RankShape
from kvd.errors import ConfigError, SpecError

__all__ = ["check_engine", "check_hashing", "group_secret", "other_seeds", "spec_of"]

_ADVICE = 'set "weights" in kv_connector_extra_config to a name that changes with them'

# RoPE whose frequencies do not depend on how long an engine lets a sequence become.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "none", "mrope")

# What PYTHONHASHSEED mostly is, and vLLM's own where it is not set.
_USUAL_SEEDS = ("vllm-none-hash", "0", "1", "42", "123", "1234", "2024", "2025", "2026")

# Configuration that can't change a byte of KV. What is not listed is part of the identity: an
# unknown field costs a miss at worst.
_NO_KV = frozenset(
    {
        "_commit_hash", "_name_or_path", "architectures", "bos_token_id", "eos_token_id",
        "pad_token_id", "id2label", "label2id", "initializer_range", "output_attentions",
        "output_hidden_states", "problem_type", "transformers_version", "use_cache", "dtype",
        "torch_dtype", "return_dict", "chunk_size_feed_forward",
    }
)  # fmt: skip


def group_secret(engine_id: str) -> bytes:
    """What the sessions of one engine share, so that its workers may use its scheduler's leases:
    vLLM gives all of them the same random engine id."""
    return hashlib.sha256(b"kvd/vllm/group/1\0" + engine_id.encode()).digest()


def check_hashing(cache_config: Any) -> None:
    """ConfigError unless block hashes are the same bytes in every process."""
    algorithm = str(cache_config.prefix_caching_hash_algo)
    if algorithm != REQUIRED_HASH:
        raise ConfigError(
            f"vLLM's block hashes are made by {algorithm!r}, which differs between processes or "
            f"builds on pickle: start vLLM with --prefix-caching-hash-algo {REQUIRED_HASH}"
        )


def check_engine(config: Any) -> None:
    """SpecError naming what this engine does that kvd can't keep."""
    parallel = config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise SpecError(f"{name} is {getattr(parallel, name)}: a block's tokens lie on several "
                            "ranks, which kvd does not keep")  # fmt: skip
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise SpecError("calculate_kv_scales: KV scales that are found while the engine runs are "
                        "no part of a block")  # fmt: skip


def spec_of(
    config: Any, options: Options, ranks: Mapping[tuple[int, int], RankShape], chunk_tokens: int,
    groups: int, seed: str, release: str,
) -> KVSpec:  # fmt: skip
    """The identity of this engine's chunks. `ranks`: what each (pp, tp) rank told; `seed`: of
    vLLM's none-hash. SpecError when a field can't be filled or ranks do not fit together."""
    model = config.model_config
    _check_ranks(config, ranks)
    text = model.hf_config.get_text_config()
    weights = options.weights or weights_of(
        str(model.model),
        getattr(model.hf_config, "_commit_hash", None),
        _load_format(config),
        _ADVICE,
    )
    shapes = [ranks[key] for key in sorted(ranks)]
    rope = _rope(text, model)
    spec = KVSpec(
        model=options.model or str(model.model).rstrip("/").split("/")[-1],
        revision=options.revision or str(getattr(model, "revision", None) or ""),
        weights=weights,
        engine="vllm/" + ".".join(release.split(".")[:2]),
        dtype=_one(shapes, "dtype"),
        quantisation=_one(shapes, "quantisation"),
        codec=_codec(shapes),
        chunk_tokens=chunk_tokens,
        pipeline=int(config.parallel_config.pipeline_parallel_size),
        tensor=int(config.parallel_config.tensor_parallel_size),
        groups=groups,
        rope=canonical_pairs(rope),
        extra=canonical_pairs(
            {
                "block_hash": f"{REQUIRED_HASH} {seed}",
                "config": _digest(model.hf_config.to_dict()),
                "compute_dtype": str(model.dtype),
                "weights_quantisation": str(getattr(model, "quantization", None) or "none"),
                "sliding_window": not getattr(model, "disable_sliding_window", False),
            }
        ),
        shards=tuple(
            ShardSpec(s.pp, s.tp // s.replicas, 0, 0, s.layers[0], s.layers[1],
                      s.tp // s.replicas * s.heads, (s.tp // s.replicas + 1) * s.heads, s.nbytes)
            for s in shapes if s.tp % s.replicas == 0
        ),
    )  # fmt: skip
    spec.validate()
    return spec


def other_seeds(spec: KVSpec, known: Collection[str], own: str) -> list[str]:
    """Seeds of vLLM's none-hash, of those that people use, under which engines with otherwise
    this identity keep chunks. `known`: hex digests of the daemon's specs."""
    found = []
    for seed in _USUAL_SEEDS:
        extra = dict(spec.extra) | {"block_hash": f"{REQUIRED_HASH} {seed}"}
        if seed != own and replace(spec, extra=canonical_pairs(extra)).digest.hex() in known:
            found.append(seed)
    return found


def _check_ranks(config: Any, ranks: Mapping[tuple[int, int], RankShape]) -> None:
    parallel = config.parallel_config
    pipeline, tensor = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    wanted = {(p, t) for p in range(pipeline) for t in range(tensor)}
    if set(ranks) != wanted:
        raise SpecError(f"of {len(wanted)} workers {len(ranks)} told what they hold")
    for shape in ranks.values():
        if shape.refused:
            raise SpecError(shape.refused)
        if tensor % shape.replicas:
            raise SpecError(f"{shape.replicas} replicas do not divide {tensor} tensor ranks")
    for stage in range(pipeline):
        sizes = {s.nbytes for s in ranks.values() if s.pp == stage}
        if len(sizes) != 1:
            raise SpecError(
                f"the tensor ranks of stage {stage} hold chunks of {sorted(sizes)} bytes"
            )


def _one(shapes: list[RankShape], field: str) -> str:
    return "+".join(sorted({getattr(shape, field) for shape in shapes}))


def _codec(shapes: list[RankShape]) -> str:
    """One name for all: that of the pages where they agree, else a digest over the stages."""
    names = sorted({f"{s.pp} {s.codec}" for s in shapes})
    if len({s.codec for s in shapes}) == 1:
        return shapes[0].codec
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return f"vllm-pages/1 {len(names)} kinds {digest}"


def _load_format(config: Any) -> str:
    told = getattr(config.load_config, "load_format", "auto")
    return str(getattr(told, "value", told))


def _rope(text: Any, model: Any) -> dict[str, object]:
    fields = _flat(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
    fields = fields or {"rope_type": "none"}
    kinds = [str(v) for k, v in fields.items() if k.split(".")[-1] in ("rope_type", "type")]
    if any(kind not in _FIXED_ROPE for kind in kinds):
        fields["max_model_len"] = int(model.max_model_len)  # frequencies are chosen by it
    return fields


def _flat(values: Any, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in dict(values or {}).items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = float(value) if type(value) is int else value
    return found


def _digest(config: dict[str, Any]) -> str:
    fields = {name: value for name, value in config.items() if name not in _NO_KV}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
