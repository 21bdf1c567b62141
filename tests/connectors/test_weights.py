"""The digest of the weights follows their bytes, and changes are noticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvd.connectors.weights import WeightWatch, weights_digest

Make = Callable[..., torch.nn.Module]


def test_equal_weights_have_one_digest_and_others_another(llama: Make) -> None:
    digest = weights_digest(llama())
    assert digest == weights_digest(llama())
    assert digest.startswith("sha256:") and len(digest) == 71
    assert digest != weights_digest(llama(seed=1))
    assert digest != weights_digest(llama().to(torch.bfloat16))


def test_one_changed_element_changes_the_digest(llama: Make) -> None:
    model = llama()
    before = weights_digest(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    assert weights_digest(model) != before


def test_the_digest_does_not_depend_on_how_tensors_lie(llama: Make) -> None:
    model = llama()
    before = weights_digest(model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert weights_digest(model) == before


def test_a_digest_is_the_same_in_another_process(llama: Make, tmp_path: Path) -> None:
    """K10: an identity must not depend on a process."""
    llama().save_pretrained(tmp_path)
    here = weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A;"
        "from kvd.connectors.weights import weights_digest as d;"
        "print(d(A.from_pretrained(sys.argv[1]).eval()))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == here


def in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)


def behind_torch(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data += 0.25 * torch.ones_like(weight)


def replaced(model: torch.nn.Module) -> None:
    model.model.norm.weight = torch.nn.Parameter(torch.zeros_like(model.model.norm.weight))


def added(model: torch.nn.Module) -> None:
    model.model.layers[0].extra = torch.nn.Linear(2, 2)


def cast(model: torch.nn.Module) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [in_place, behind_torch, replaced, added, cast])
def test_a_change_is_noticed(llama: Make, change: Callable[[torch.nn.Module], None]) -> None:
    model = llama()
    watch = WeightWatch(model)
    model(torch.tensor([[1, 2, 3]]))
    assert not watch.changed(model)
    change(model)
    assert watch.changed(model)
