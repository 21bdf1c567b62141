"""Only models whose KV a DynamicCache holds in full are accepted; what differs has another spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from kvd.connectors.hfmodel import KVShape, UnsupportedModel, inspect_model, spec_of
from kvd.connectors.kvlayout import KVLayout
from kvd.connectors.weights import weights_digest
from kvd.errors import SpecError

Make = Callable[..., Any]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen2(**changes: Any) -> PreTrainedModel:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, num_key_value_heads=2, **changes)).eval()


def neox() -> PreTrainedModel:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)).eval()


def gpt2() -> PreTrainedModel:
    config = hf.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return hf.GPT2LMHeadModel(config).eval()


def test_gqa_and_mha_models_are_accepted_with_the_shape_of_their_cache(llama: Make) -> None:
    cpu = torch.device("cpu")
    assert inspect_model(llama()) == KVShape(3, 2, 16, torch.float32, cpu)
    assert inspect_model(llama(num_key_value_heads=4)).heads == 4
    assert inspect_model(qwen2()) == KVShape(2, 2, 16, torch.float32, cpu)
    assert inspect_model(neox()) == KVShape(2, 4, 16, torch.float32, cpu)
    assert inspect_model(gpt2()) == KVShape(2, 4, 16, torch.float32, cpu)
    for dtype in (torch.bfloat16, torch.float16):
        assert inspect_model(llama().to(dtype)).dtype is dtype


def mistral() -> PreTrainedModel:
    config = hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16)
    return hf.MistralForCausalLM(config).eval()


def gemma2() -> PreTrainedModel:
    config = hf.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16)
    return hf.Gemma2ForCausalLM(config).eval()


def mamba() -> PreTrainedModel:
    config = hf.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2)
    return hf.MambaForCausalLM(config).eval()


def lfm2() -> PreTrainedModel:
    config = hf.Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    return hf.Lfm2ForCausalLM(config).eval()


def deepseek() -> PreTrainedModel:
    sizes = dict(
        SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes)).eval()


def t5() -> PreTrainedModel:
    config = hf.T5Config(vocab_size=128, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
    return hf.T5ForConditionalGeneration(config).eval()


def bert() -> PreTrainedModel:
    return hf.BertLMHeadModel(hf.BertConfig(**SIZES, is_decoder=False)).eval()


@pytest.mark.parametrize(
    "make, reason",
    [
        (mistral, "layer 0 is 'sliding_attention'"),
        (
            lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layer 1 is 'sliding_attention'",
        ),
        (gemma2, "layer 0 is 'sliding_attention'"),
        (mamba, "layer 0 is 'linear_attention'"),
        (lfm2, "layer 0 is 'conv'"),
        (deepseek, "multi-head latent attention"),
        (t5, "encoder-decoder"),
        (bert, "depends on later tokens"),
    ],
)
def test_what_a_dynamic_cache_cannot_represent_is_refused_by_name(
    make: Callable[[], PreTrainedModel], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        inspect_model(make())
    assert "can't be cached by kvd" in str(caught.value)


def test_rope_that_follows_the_length_of_the_prompt_is_refused(llama: Make) -> None:
    for rope in (
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ):
        with pytest.raises(UnsupportedModel, match=f"RoPE type '{rope['rope_type']}'"):
            inspect_model(llama(rope_parameters=rope))


def test_caches_of_another_kind_are_refused(llama: Make) -> None:
    for implementation in ("quantized", "static", "offloaded"):
        model = llama()
        model.generation_config.cache_implementation = implementation
        with pytest.raises(UnsupportedModel, match=implementation):
            inspect_model(model)


def test_a_model_that_is_not_itself_now_is_refused(llama: Make) -> None:
    with pytest.raises(UnsupportedModel, match="training mode"):
        inspect_model(llama().train())
    adapted = llama()
    adapted.peft_config = {"default": object()}
    with pytest.raises(UnsupportedModel, match="adapter"):
        inspect_model(adapted)
    with pytest.raises(UnsupportedModel, match="float64"):
        inspect_model(llama().to(torch.float64))


def test_a_refusal_is_an_error_of_the_spec() -> None:
    assert issubclass(UnsupportedModel, SpecError)


def spec(model: PreTrainedModel, *, storage: torch.dtype | None = None, revision: str = "") -> Any:
    shape = inspect_model(model)
    layout = KVLayout(shape.layers, shape.heads, 64, shape.dim, storage or shape.dtype)
    weights = weights_digest(model)
    return spec_of(model, layout, shape.dtype, weights=weights, revision=revision)


def test_the_same_model_has_the_same_identity(llama: Make) -> None:
    assert spec(llama()).digest == spec(llama()).digest
    told = spec(llama())
    assert told.model == "llama:LlamaForCausalLM"
    assert told.chunk_bytes == 3 * 2 * 2 * 64 * 16 * 4
    assert dict(told.rope)["rope_type"] == "default"


def test_names_that_change_no_byte_do_not_enter_the_identity(llama: Make) -> None:
    """What an engine is told about its output, or where it was loaded from, changes no KV."""
    model, moved = llama(), llama()
    model.config._name_or_path = "/models/a/small"
    moved.config._name_or_path = "/mnt/b/small/"
    moved.config.eos_token_id = 5
    moved.config.output_attentions = False
    assert spec(model).digest == spec(moved).digest
    assert spec(model).model == "small"


def test_whatever_changes_kv_changes_the_identity(llama: Make) -> None:
    """K11: another dtype, revision, RoPE setting, attention or weights never hits."""
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    specs = {
        "plain": spec(llama()),
        "weights": spec(llama(seed=1)),
        "dtype": spec(llama().to(torch.bfloat16)),
        "storage": spec(llama(), storage=torch.bfloat16),
        "revision": spec(llama(), revision="v2"),
        "theta": spec(llama(rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
        "rope": spec(llama(rope_parameters=linear)),
        "factor": spec(llama(rope_parameters={**linear, "factor": 4.0})),
        "epsilon": spec(llama(rms_norm_eps=1e-5)),
        "attention": spec(llama(attn_implementation="eager")),
    }
    digests = {name: s.digest for name, s in specs.items()}
    assert len(set(digests.values())) == len(digests), digests
