"""Which weights an engine serves, without asking the engine for its tensors.

The law of this module: the identity is the content of the checkpoint, by the hub's commit (which
is one) or by a digest of the weight files; never a name or a date. Weights that have no such
identity (made up at random, written by a trainer) must be named in the configuration: how, the
connector knows, so it says it in `advice`.

Cost: one SHA-256 pass over local files, in threads, while they lie in the page cache because the
workers have just read them (1 to 2 GB/s a core).
"""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvd.errors import SpecError

__all__ = ["weights_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_FROM_FILES = ("auto", "hf", "safetensors", "pt", "gguf", "mistral", "fastsafetensors")


def weights_of(model: str, commit: str | None, load_format: str, advice: str) -> str:
    """ "hub:COMMIT" or "sha256:DIGEST" of the checkpoint `model` (a path or a hub id); `commit` is
    what the hub resolved. SpecError when there is no identity; its message ends with `advice`."""
    if load_format not in _FROM_FILES:
        raise SpecError(f"weights of load_format {load_format!r} have no identity: {advice}")
    path = Path(model)
    if not path.exists():
        if commit and _COMMIT.fullmatch(commit):
            return f"hub:{commit}"
        raise SpecError(f"{model} is no folder, and the hub told no commit of it: {advice}")
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return f"hub:{path.name}"
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if _is_weights(p))
    if not files:
        raise SpecError(f"{model} holds no weight files ({', '.join(_WEIGHTS)}): {advice}")
    root = hashlib.sha256(b"kvd checkpoint 1")
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        for file, digest in zip(files, pool.map(_digest, files), strict=True):
            name = file.name.encode()
            root.update(len(name).to_bytes(8, "little") + name + digest)
    return "sha256:" + root.hexdigest()


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS and path.is_file()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
