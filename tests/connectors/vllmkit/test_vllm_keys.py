"""Whatever separates two requests or engines separates their keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from daemon import DaemonProcess
from engine_kit import Engine, Request, Shape, vllm_config
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.connectors.vllm.config import Options
from kvd.connectors.vllm.identity import group_secret, spec_of
from kvd.connectors.vllm.keys import Adapters, ChunkKeys
from kvd.connectors.vllm.metadata import RankShape
from kvd.errors import SpecError

BLOCK, CHUNK = 16, 32
TOKENS = list(range(7, 7 + 4 * CHUNK))


def keys(tokens: list[int], adapter: bytes | None = None, **more: Any) -> ChunkKeys:
    return ChunkKeys(Request("r", tokens, block=BLOCK, **more), CHUNK, BLOCK, adapter)


def lora(name: str) -> Any:
    return SimpleNamespace(name=name)


@settings(max_examples=60)
@given(
    at=st.integers(0, len(TOKENS) - 1),
    token=st.integers(0, 2**31),
    salts=st.tuples(st.none() | st.text(max_size=9), st.none() | st.text(max_size=9)),
    names=st.tuples(st.none() | st.text(max_size=5), st.none() | st.text(max_size=5)),
    adapters=st.tuples(st.none() | st.binary(min_size=32, max_size=32),
                       st.none() | st.binary(min_size=32, max_size=32)),
)  # fmt: skip
def test_keys_are_equal_only_if_everything_is(at, token, salts, names, adapters) -> None:
    """K47, and K15's part here: token, salt, adapter and the adapter's content each lead to
    another key from the chunk on in which they differ."""
    changed = [*TOKENS[:at], token, *TOKENS[at + 1 :]]
    one = keys(TOKENS, adapters[0], salt=salts[0], lora=lora(names[0]))
    two = keys(changed, adapters[1], salt=salts[1], lora=lora(names[1]))
    apart = salts[0] != salts[1] or names[0] != names[1] or adapters[0] != adapters[1]
    first = 0 if apart else (at // CHUNK if changed != TOKENS else 4)
    for chunk in range(4):
        same = one.hashes(chunk, chunk + 1) == two.hashes(chunk, chunk + 1)
        assert same == (chunk < first), chunk


def test_a_key_is_vllms_hash_at_the_chunks_last_block_and_grows_with_the_request() -> None:
    request = Request("r", TOKENS[:-1], block=BLOCK)
    found = ChunkKeys(request, CHUNK, BLOCK, None)
    assert found.available == 3
    assert found.hashes(1, 2) == request.block_hashes[3]
    assert found.parent(1) == request.block_hashes[1] and found.parent(0) == bytes(32)
    prints = found.fingerprints(0, 3)
    request.append(TOKENS[-1])
    assert found.available == 4
    assert found.fingerprints(0, 4) == keys(TOKENS).fingerprints(0, 4)
    assert found.fingerprints(0, 4)[:48] == prints and len(found.fingerprints(2, 4)) == 32


def test_tenants_with_other_salts_share_nothing(daemon: DaemonProcess) -> None:
    """K47: salt reaches store and lookup; the other tenant has no hit and so no gain in time."""
    tokens = list(range(1000, 1400))
    with Engine(daemon.socket, Shape(), name="salts", chunk_tokens=CHUNK) as engine:
        assert engine.ask("a1", tokens, salt="a") == 0
        engine.forget()
        assert engine.ask("b1", tokens, salt="b") == 0
        engine.forget()
        assert engine.ask("none", tokens) == 0
        engine.forget()
        assert engine.ask("a2", tokens, salt="a") == 384
        engine.forget()
        assert engine.ask("b2", tokens, salt="b") == 384


def test_an_adapter_counts_by_its_content(tmp_path, daemon: DaemonProcess) -> None:
    adapters = Adapters()
    folders = []
    for name, data in (("x", b"one"), ("y", b"one"), ("z", b"two")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(data)
        (folder / "adapter_config.json").write_text("{}")
        folders.append(SimpleNamespace(name="same", lora_path=str(folder)))
    x, y, z = (adapters.digest(f) for f in folders)
    assert x == y != z
    assert adapters.digest(SimpleNamespace(lora_path="org/not-here")) is None
    tokens = list(range(2000, 2200))
    with Engine(daemon.socket, Shape(), name="lora", chunk_tokens=CHUNK) as engine:
        assert engine.ask("1", tokens, lora=folders[0]) == 0
        engine.forget()
        assert engine.ask("2", tokens, lora=folders[1]) == 192
        engine.forget()
        assert engine.ask("3", tokens, lora=folders[2]) == 0
        engine.forget()
        unknown = SimpleNamespace(name="same", lora_path="org/unknown")
        assert engine.ask("4", tokens, lora=unknown) == 0
        assert engine.counts["bypassed"] == 1


RANK = RankShape(0, 0, 1, (0, 2), 2, 4096, "codec", "float32", "auto 0")


def spec(config: Any = None, rank: RankShape = RANK, options: Options | None = None, **more: Any):
    arguments = {"chunk_tokens": 32, "groups": 1, "seed": "s", "release": "0.32.0", **more}
    return spec_of(
        config or vllm_config({}), options or Options(weights="w"), {(0, 0): rank}, **arguments
    )


def test_every_dimension_of_the_engine_is_in_the_spec() -> None:
    """Another model, weights, revision, dtype, quantisation, codec, chunk size, RoPE, seed of the
    hashes, or release of vLLM is another identity."""
    rope = vllm_config({})
    rope.model_config.hf_config.get_text_config().rope_parameters["rope_theta"] = 1e6
    half = vllm_config({})
    half.model_config.dtype = "bfloat16"
    quantised = vllm_config({})
    quantised.model_config.quantization = "fp8"
    found = [
        spec(),
        spec(options=Options(weights="v")),
        spec(options=Options(weights="w", model="other")),
        spec(options=Options(weights="w", revision="2")),
        spec(vllm_config({}, hidden_size=65)),
        spec(rope),
        spec(half),
        spec(quantised),
        spec(seed="t"),
        spec(release="0.33.1"),
        spec(chunk_tokens=64),
        spec(groups=2),
        spec(rank=RANK._replace(codec="other")),
        spec(rank=RANK._replace(dtype="float16")),
        spec(rank=RANK._replace(quantisation="fp8 1")),
        spec(rank=RANK._replace(nbytes=8192)),
    ]
    assert len({s.digest for s in found}) == len(found)
    assert spec().digest == spec(release="0.32.7").digest


def test_the_length_limit_counts_only_where_rope_depends_on_it() -> None:
    digests = {}
    for kind in ("yarn", "dynamic"):
        for length in (4096, 8192):
            config = vllm_config({})
            config.model_config.hf_config.get_text_config().rope_parameters["rope_type"] = kind
            config.model_config.max_model_len = length
            digests[kind, length] = spec(config).digest
    assert digests["yarn", 4096] == digests["yarn", 8192]
    assert digests["dynamic", 4096] != digests["dynamic", 8192]


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    two = vllm_config({}, tensor=2)
    options = Options(weights="w")
    with pytest.raises(SpecError, match="of 2 workers 1"):
        spec_of(two, options, {(0, 0): RANK}, 32, 1, "s", "0.32")
    with pytest.raises(SpecError, match="chunks of"):
        other = RANK._replace(tp=1, nbytes=1)
        spec_of(two, options, {(0, 0): RANK, (0, 1): other}, 32, 1, "s", "0.32")
    with pytest.raises(SpecError, match="because"):
        spec(rank=RANK._replace(refused="because"))


def test_engines_have_secrets_of_their_own() -> None:
    assert group_secret("a") != group_secret("b") and len(group_secret("a")) == 32


def test_engines_whose_hashes_start_from_another_seed_are_told_so_once(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(3000, 3200))
    with Engine(daemon.socket, Shape(), name="seed", chunk_tokens=CHUNK, weights="s") as engine:
        engine.ask("a", tokens)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with Engine(daemon.socket, Shape(), name="seed7", chunk_tokens=CHUNK, weights="s") as engine:
        assert engine.ask("a", tokens) == 0
    said = [r.getMessage() for r in caplog.records if "share nothing" in r.getMessage()]
    assert len(said) == 1 and "'7'" in said[0] and "'vllm-none-hash'" in said[0]
