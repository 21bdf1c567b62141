"""The keys of one request's chunks.

The law of this module: a chunk's key is vLLM's own hash of the block that ends it, which chains in
every token before, the salt, the adapter's name and the media; what that hash leaves out and
changes bytes (the adapter's content) is mixed in here, what changes bytes for all requests is in
the KVSpec. Beside it goes kvd's own fingerprint of the tokens, made by another function.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from kvd.chunk import NO_FINGERPRINT, NO_PARENT, chain_fingerprints

__all__ = ["REQUIRED_HASH", "Adapters", "ChunkKeys"]

REQUIRED_HASH = "sha256_cbor"  # the same bytes in every process, and no pickle in it

_DOMAIN = b"kvd/vllm/adapter/1\0"


class ChunkKeys:
    """Keys as far as the request's tokens are hashed; grows with it, never changes."""

    def __init__(
        self, request: Any, chunk_tokens: int, hash_block: int, adapter: bytes | None
    ) -> None:
        """`request`: vLLM's, with block_hashes (each of `hash_block` tokens, append-only) and
        all_token_ids. `adapter`: digest of its LoRA's content; None: it has none."""
        self._request = request
        self._tokens = chunk_tokens
        self._ratio = chunk_tokens // hash_block
        self._adapter = adapter
        self._hashes: list[bytes] = []
        self._prints: list[bytes] = []

    @property
    def available(self) -> int:
        """Chunks whose tokens are all known and hashed."""
        return len(self._request.block_hashes) // self._ratio

    def hashes(self, begin: int, end: int) -> bytes:
        """32 bytes each. `end` is at most `available`."""
        blocks = self._request.block_hashes
        for chunk in range(len(self._hashes), end):
            key = bytes(blocks[(chunk + 1) * self._ratio - 1])
            if self._adapter is not None:
                key = hashlib.sha256(_DOMAIN + self._adapter + key).digest()
            self._hashes.append(key)
        return b"".join(self._hashes[begin:end])

    def fingerprints(self, begin: int, end: int) -> bytes:
        """16 bytes each."""
        known = len(self._prints)
        if end > known:
            tokens = self._request.all_token_ids[known * self._tokens : end * self._tokens]
            parent = self._prints[-1] if known else NO_FINGERPRINT
            self._prints += chain_fingerprints(tokens, self._tokens, parent=parent)
        return b"".join(self._prints[begin:end])

    def parent(self, begin: int) -> bytes:
        """Hash of the chunk before `begin`."""
        return self.hashes(begin - 1, begin) if begin else NO_PARENT


class Adapters:
    """Digests of LoRA adapters. vLLM's block hash has an adapter's name and path only: another
    content under the same name would hit."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int, int, int], ...], bytes] = {}

    def digest(self, lora: Any) -> bytes | None:
        """Of the adapter's files (weights and configuration); None if they can't be read, and the
        request must then go without kvd. Reads them once for each state of the files."""
        try:
            folder = Path(lora.lora_path)
            files = sorted(
                p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".json")
            )
            stats = [(str(p), os.stat(p)) for p in files]
            state = tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
            if not any(p.suffix != ".json" for p in files):
                return None
            if state not in self._known:
                root = hashlib.sha256()
                for path in files:
                    with path.open("rb") as file:
                        content = hashlib.file_digest(file, "sha256").digest()
                    name = path.name.encode()
                    root.update(len(name).to_bytes(8, "little") + name + content)
                self._known[state] = root.digest()
            return self._known[state]
        except (OSError, TypeError):
            return None
