"""Where `model.generate` and kvd meet.

The law of this module: a call of `generate` goes through kvd only when the KV of its prompt
depends on its token ids alone and lies in one plain DynamicCache row. `why_not` says, in words,
why another call does not; such a call still generates, just without kvd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

__all__ = ["AfterFirstToken", "why_not"]

# Arguments of `generate` that steer it and are no part of a GenerationConfig. Whatever is neither
# one of these nor a setting goes into the model's forward, and may change KV.
_STEERING = frozenset(
    {
        "attention_mask",
        "generation_config",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "tokenizer",
    }
)

# Settings with more than one row of KV, with another cache, or with a forward of their own.
_PLAIN: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "prompt_lookup_num_tokens": (None,),
    "token_healing": (None, False),
}


def why_not(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> str | None:
    """Why this call of `generate` can't use kvd, or None when it can."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        return f"input_ids of shape {tuple(input_ids.shape)}, not one row"
    settings = arguments.get("generation_config") or model.generation_config
    known = GenerationConfig().to_dict().keys()
    for name in arguments:
        if name not in _STEERING and name not in known:
            return f"the argument {name!r} may change the KV of the prompt"
    for name, plain in _PLAIN.items():
        value = arguments.get(name, getattr(settings, name, None))
        if value not in plain:
            return f"{name}={value!r}"
    mask = arguments.get("attention_mask")
    if mask is None:
        # `generate` then masks padding that it finds in the prompt itself
        pad = arguments.get("pad_token_id", settings.pad_token_id)
        end = arguments.get("eos_token_id", settings.eos_token_id)
        ends = end if isinstance(end, (list, tuple)) else [end]
        if pad is not None and pad not in ends and bool((input_ids == pad).any()):
            return "padding in the prompt"
    elif tuple(mask.shape) != tuple(input_ids.shape) or not bool((mask == 1).all()):
        return "an attention mask that hides tokens"
    return None


class AfterFirstToken(BaseStreamer):
    """Calls `then` once, as soon as the first new token is out, and hands all on to `inner`.

    At that moment the cache holds the whole prompt, and whoever waits for the first token has it.
    """

    def __init__(self, then: Callable[[], None], inner: BaseStreamer | None) -> None:
        self._then, self._inner = then, inner
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        if self._inner is not None:
            self._inner.put(value)
        self._puts += 1
        if self._puts == 2:  # the first is the prompt itself
            self._then()

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()
