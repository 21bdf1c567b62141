"""What makes pages interchangeable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_sglang as fake
import pytest
import torch
from sglang_kit import config_of

from kvd.connectors.sglang.config import Options
from kvd.connectors.sglang.identity import shard_of, spec_of
from kvd.connectors.sglang.pages import page_table
from kvd.errors import SpecError

MHA, MLA = fake.MHATokenToKVPoolHost, fake.MLATokenToKVPoolHost


def spec(pool: Any = None, options: Options = Options(weights="w"), facts: Any = None, *,  # noqa: B008
         release: str = "0.5.23", version: str = "", **config: Any) -> Any:  # fmt: skip
    pool = pool or MHA()
    table = page_table(pool)
    return spec_of(config_of({}, **config), pool, table, options, facts or {}, release, version)


OTHERS: dict[str, Any] = {
    "dtype": {"pool": MHA(dtype=torch.float16)},
    "fp8 e4m3": {"pool": MHA(dtype=torch.float8_e4m3fn)},
    "fp8 e5m2": {"pool": MHA(dtype=torch.float8_e5m2)},
    "layout": {"pool": MHA("page_first_direct")},
    "page size": {"pool": MHA(page_size=32)},
    "layers": {"pool": MHA(layers=4)},
    "heads": {"pool": MHA(heads=4, dim=4)},
    "pool": {"pool": MLA(), "mla": True},
    "weights": {"options": Options(weights="v")},
    "weights of another version": {"version": "step-100"},
    "revision": {"options": Options(weights="w", revision="r")},
    "model": {"model": "n"},
    "ranks": {"ranks": 2},
    "stages": {"stages": 2},
    "the other stage": {"stages": 2, "stage": 1},
    "release": {"release": "0.6.0"},
    "overrides": {"facts": {"json_model_override_args": '{"rope_theta": 1}'}},
    "compute dtype": {"facts": {"dtype": "float16"}},
    "quantisation": {"facts": {"quantization": "awq"}},
    "context": {"facts": {"context_length": 131072}},
}


def test_whatever_changes_a_byte_changes_the_identity() -> None:
    """K11: dtype, layout, page size, weights, ranks: no two share, though sizes may tie."""
    digests = {name: spec(**change).digest for name, change in OTHERS.items()}
    digests["as it is"] = spec().digest
    assert len(set(digests.values())) == len(digests)
    assert spec().digest == digests["as it is"]


def test_the_first_version_of_the_weights_is_that_of_the_checkpoint() -> None:
    assert spec(version="default").digest == spec(version="").digest


def test_all_tensor_ranks_have_one_identity_and_a_shard_each() -> None:
    specs = [spec(ranks=4, rank=rank) for rank in range(4)]
    assert len({one.digest for one in specs}) == 1
    assert [shard_of(config_of({}, ranks=4, rank=r), specs[0]) for r in range(4)] == [0, 1, 2, 3]
    assert [(s.head_begin, s.head_end) for s in specs[0].shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_mla_is_one_shard_whatever_the_ranks() -> None:
    """K82: what all ranks hold alike is one shard, and engines of other rank counts share it."""
    pool = MLA()
    many = spec(pool, mla=True, ranks=8, rank=5)
    assert many.digest == spec(pool, mla=True).digest
    assert len(many.shards) == 1 and shard_of(config_of({}, mla=True, ranks=8, rank=5), many) == 0
    split = spec(MLA("page_first_kv_split"), mla=True)
    assert split.chunk_bytes == 16 * (3 * 16 + 2 * 6) * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": Options()}, 'set "weights"'),
        ({"model": None}, 'set "model"'),
        ({"options": Options(), "facts": {"model_path": "/nowhere"}}, 'set "weights"'),
        ({"options": Options(), "facts": {"model_path": "x", "custom_weight_loader": ["y"]}},
         "custom_weight_loader"),
        ({"facts": {"quantization_param_path": "/nowhere"}}, "can't be read"),
        ({"facts": {"lora_paths": [SimpleNamespace(lora_path="/nowhere")]}}, "adapter /nowhere"),
        ({"dcp_size": 2}, "dcp_size is 2"),
        ({"rank": None}, "no tp_rank"),
        ({"pool": MLA()}, "has none"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_asked_for(change: dict[str, Any], reason: str) -> None:
    """K146: a connector that can't fill a field must not cache."""
    with pytest.raises(SpecError, match=reason):
        spec(**change)


def test_a_packed_draft_model_needs_a_name_for_the_weights_of_both(tmp_path: Path) -> None:
    pool = MHA(layers=3)
    pool.target_layer_num = 2
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    facts = {"model_path": str(tmp_path)}
    with pytest.raises(SpecError, match="draft"):
        spec(pool, Options(), facts)
    assert spec(pool, Options(weights="both"), facts).weights == "both"


def test_weights_and_configuration_of_a_local_checkpoint_are_found_by_content(
    tmp_path: Path,
) -> None:
    """Other weights under the same name are another identity."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    facts = {"model_path": str(tmp_path)}
    before = spec(None, Options(), facts)
    assert before.weights.startswith("sha256:")
    (tmp_path / "config.json").write_text('{"rope_theta": 5}')
    rope = spec(None, Options(), facts)
    (tmp_path / "model.safetensors").write_bytes(b"trained")
    trained = spec(None, Options(), facts)
    assert len({before.digest, rope.digest, trained.digest}) == 3


def test_adapters_are_told_apart_by_content_not_by_their_path(tmp_path: Path) -> None:
    """SGLang's hash has an adapter's name and path; retrained, it keeps both."""
    file = tmp_path / "adapter_model.safetensors"
    digests = set()
    for content in (b"one", b"two"):
        file.write_bytes(content)
        for told in ([SimpleNamespace(lora_path=str(tmp_path))], [f"a={tmp_path}"]):
            digests.add(spec(facts={"lora_paths": told}).digest)
    file.write_bytes(b"one")
    digests.add(spec(facts={"lora_paths": [f"a={tmp_path}"]}).digest)
    digests.add(spec().digest)
    assert len(digests) == 3


def test_scales_of_quantised_kv_are_part_of_the_identity(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    found = set()
    for content in ("1", "2"):
        file.write_text(content)
        found.add(spec(facts={"quantization_param_path": str(file)}).digest)
    assert len(found) == 2
