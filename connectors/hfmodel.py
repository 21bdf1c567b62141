"""What kvd must know of a Hugging Face model before it may keep its KV.

The law of this module: a model is accepted only when a prefix's KV is a function of (weights,
configuration, the prefix's tokens) and of nothing else, and when a plain DynamicCache holds all
of it. Both are looked at, not assumed: the configuration is checked by name, then two forwards
over two tokens show the real cache. Everything else is refused with `UnsupportedModel`, which
names the reason. A field that can't be filled refuses too.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any, NamedTuple

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvd.chunk import KVSpec, ShardSpec, canonical_pairs
from kvd.connectors.kvlayout import STORABLE, KVLayout
from kvd.errors import SpecError

__all__ = ["KVShape", "UnsupportedModel", "cache_argument", "inspect_model", "spec_of"]

# RoPE whose frequencies are fixed once the configuration is. "dynamic" and "longrope" choose them
# by the length of the whole sequence: the KV of a prefix then depends on what comes after it.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})

# Configuration that can't change a byte of KV. What is not listed here is part of the identity:
# an unknown field costs a miss at worst.
_NO_KV = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",  # the KV's own dtype and the weights' are in the identity
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class UnsupportedModel(SpecError):
    """A model whose KV kvd can't keep; the message names the model and the reason."""


class KVShape(NamedTuple):
    """One token's KV: `layers` × (K, V) × `heads` × `dim` of `dtype`, on `device`."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this transformers release takes a cache.

    5.24 renamed `past_key_values` to `cache`. UnsupportedModel when `forward` knows neither.
    """
    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise _refusal(model, "its forward takes no key/value cache")


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__} can't be cached by kvd: {reason}")


def _rope_fields(parameters: Any, prefix: str = "") -> dict[str, object]:
    """RoPE parameters, nested by layer type or not, as one flat mapping."""
    fields: dict[str, object] = {}
    for name, value in (parameters or {}).items():
        if isinstance(value, dict):
            fields |= _rope_fields(value, f"{prefix}{name}.")
        elif value is not None:
            # 100000 and 100000.0 are one angle; JSON files write either
            fields[prefix + name] = float(value) if type(value) is int else value
    return fields


def _rope_of(config: Any) -> dict[str, object]:
    return _rope_fields(getattr(config, "rope_parameters", None)) or {"rope_type": "none"}


def _check_config(model: PreTrainedModel) -> None:
    """Refuse by what the configuration says. UnsupportedModel."""
    config = model.config
    if config.is_encoder_decoder:
        raise _refusal(model, "it is an encoder-decoder; only decoder-only models are")
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise _refusal(model, "it is multimodal: its KV depends on more than token ids")
    if getattr(text, "kv_lora_rank", None):
        raise _refusal(model, "multi-head latent attention (kv_lora_rank) is not plain K and V")
    for name, value in _rope_of(text).items():
        if name.split(".")[-1] in ("rope_type", "type"):
            if value not in _FIXED_ROPE | {"none"}:
                raise _refusal(
                    model,
                    f"RoPE type {value!r} can make the K of a prefix depend on the length of the "
                    f"whole prompt (accepted: {', '.join(sorted(_FIXED_ROPE))})",
                )
    generation = getattr(model, "generation_config", None)
    implementation = getattr(generation, "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise _refusal(
            model,
            f"its generation_config asks for the cache implementation {implementation!r} "
            "(quantised, static and offloaded caches are not kept); set it to None",
        )
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            types = getattr(text, "layer_types", None)
            kind = types[index] if types else "sliding_attention"
            raise _refusal(
                model,
                f"layer {index} is {kind!r} ({type(layer).__name__}), which does not keep the "
                "full K and V of every token",
            )


def _probe(model: PreTrainedModel, argument: str, last: int) -> list[tuple[Any, Any]]:
    ids = torch.tensor([[0, last]], device=model.device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{argument: cache})
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or not layer.is_initialized:
            raise _refusal(model, f"layer {index} keeps no K and V ({type(layer).__name__})")
    return [(layer.keys, layer.values) for layer in cache.layers]


def inspect_model(model: PreTrainedModel) -> KVShape:
    """The shape of the model's KV, shown by two forwards over two tokens.

    Raises UnsupportedModel naming what a DynamicCache can't represent, what makes KV depend on
    more than the tokens before, or what would make it random.
    """
    if model.training:
        raise _refusal(model, "it is in training mode (dropout); call model.eval() first")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise _refusal(model, "a PEFT adapter is attached and may be switched; merge it first")
    _check_config(model)
    argument = cache_argument(model)
    first, second = _probe(model, argument, 1), _probe(model, argument, 2)

    keys = first[0][0]
    shape = KVShape(len(first), keys.shape[1], keys.shape[3], keys.dtype, keys.device)
    if shape.dtype not in STORABLE:
        raise _refusal(model, f"its KV is {shape.dtype} (accepted: {', '.join(STORABLE.values())})")
    want = (1, shape.heads, 2, shape.dim)
    near = 16 * torch.finfo(shape.dtype).eps
    for index, (pair, other) in enumerate(zip(first, second, strict=True)):
        for part, tensor, changed in zip(("K", "V"), pair, other, strict=True):
            if tuple(tensor.shape) != want or tensor.dtype != shape.dtype:
                raise _refusal(
                    model,
                    f"{part} of layer {index} is {tuple(tensor.shape)} of {tensor.dtype}, not "
                    f"{want} of {shape.dtype} as K of layer 0",
                )
            if tensor.device != shape.device:
                raise _refusal(model, f"layer {index} lies on {tensor.device}, not {shape.device}")
            before, after = tensor[:, :, 0].float(), changed[:, :, 0].float()
            if torch.dist(before, after) > near * before.norm():
                raise _refusal(model, f"{part} of layer {index} depends on later tokens")
    return shape


def _config_digest(model: PreTrainedModel) -> str:
    fields = {name: value for name, value in model.config.to_dict().items() if name not in _NO_KV}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def spec_of(
    model: PreTrainedModel, layout: KVLayout, compute: torch.dtype, *, weights: str, revision: str
) -> KVSpec:
    """The identity of the model's chunks in `layout`, computed in dtype `compute`.

    Everything that may change a byte is in it: the digest of the weights, the configuration, the
    RoPE parameters, the dtypes, the attention implementation and the release of transformers.
    Where the model was loaded from is in it only by its last name, so that two processes that
    loaded one model from two folders still share.
    """
    config = model.config
    quantisation = getattr(config, "quantization_config", None)
    name = (getattr(config, "_name_or_path", "") or "").rstrip("/").split("/")[-1]
    release = ".".join(transformers.__version__.split(".")[:2])
    spec = KVSpec(
        model=name or f"{config.model_type}:{type(model).__name__}",
        revision=revision or getattr(config, "_commit_hash", None) or "",
        weights=weights,
        engine=f"transformers/{release}",
        dtype=layout.dtype_name,
        quantisation=str(getattr(quantisation, "quant_method", None) or "none"),
        codec=layout.codec,
        chunk_tokens=layout.tokens,
        pipeline=1,
        tensor=1,
        groups=1,
        rope=canonical_pairs(_rope_of(config)),
        extra=canonical_pairs(
            {
                "attention": str(getattr(config, "_attn_implementation", None)),
                "compute_dtype": STORABLE[compute],
                "config": _config_digest(model),
            }
        ),
        shards=(ShardSpec(0, 0, 0, 0, 0, layout.layers, 0, layout.heads, layout.nbytes),),
    )
    spec.validate()
    return spec
