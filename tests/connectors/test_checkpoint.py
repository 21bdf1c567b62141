"""Weights are known by the content of their checkpoint, or have to be named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.connectors.checkpoint import weights_of
from kvd.errors import SpecError

ADVICE = 'set "weights" to a name'
COMMIT = "a" * 40


def known(model: Path | str, commit: str | None = None, load_format: str = "auto") -> str:
    return weights_of(str(model), commit, load_format, ADVICE)


def folder(path: Path, weights: bytes, config: str = "") -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", b"weights" * 100, "one")
    two = folder(tmp_path / "two", b"weights" * 100, "two")
    first = known(one)
    assert first.startswith("sha256:") and first == known(two)
    (two / "model.safetensors").write_bytes(b"weights" * 99 + b"weighty")
    assert first != known(two)


def test_the_names_of_the_files_count_and_so_does_where_one_ends(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", b"ab")
    (one / "z.safetensors").write_bytes(b"c")
    two = folder(tmp_path / "two", b"a")
    (two / "z.safetensors").write_bytes(b"bc")
    three = folder(tmp_path / "three", b"ab")
    (three / "y.safetensors").write_bytes(b"c")
    assert len({known(path) for path in (one, two, three)}) == 3


def test_a_single_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert known(file, None, "gguf").startswith("sha256:")


def test_the_hubs_commit_is_an_identity(tmp_path: Path) -> None:
    assert known("org/model", COMMIT) == f"hub:{COMMIT}"
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert known(snapshot) == f"hub:{COMMIT}"


@pytest.mark.parametrize(
    ("model", "commit", "load_format", "why"),
    [
        ("org/model", None, "auto", "no commit"),
        ("org/model", "main", "auto", "no commit"),
        ("org/model", COMMIT, "dummy", "load_format 'dummy'"),
        ("EMPTY", None, "auto", "no weight files"),
    ],
)
def test_weights_without_an_identity_must_be_named(
    tmp_path: Path, model: str, commit: str | None, load_format: str, why: str
) -> None:
    """K146: the message says what is missing, and what the connector advises."""
    with pytest.raises(SpecError, match=rf"{why}.*: {ADVICE}"):
        known(tmp_path if model == "EMPTY" else model, commit, load_format)
