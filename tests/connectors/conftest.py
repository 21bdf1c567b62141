"""Models of a few thousand random weights, and a stand-in for the daemon with faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from kvd.chunk import KVSpec, Outcome  # noqa: E402

# Two threads over such small products cost more than one, and collapse when a core is taken.
torch.set_num_threads(1)

LLAMA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    # large enough that greedy choices of random weights are no near ties
    "initializer_range": 0.3,
}


def make_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})).eval()


def make_prompt(length: int, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, LLAMA["vocab_size"], (1, length), generator=generator)


class MemoryStore:
    """The two client calls that the connector makes, over a dict.

    `fail_with` is raised by every call; `outcomes` replaces the outcome of a chunk by its number in
    the call; `bytes_of(spec)` are the stored payloads.
    """

    def __init__(self) -> None:
        self.chunks: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
        self.fail_with: Exception | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.calls: list[str] = []
        self.closed = False

    def load_chunks(
        self,
        spec: KVSpec,
        hashes: Sequence[bytes],
        take: Callable[[int, memoryview], None],
        *,
        fingerprints: Sequence[bytes],
        **_: Any,
    ) -> list[Outcome]:
        self._call("load")
        found = []
        for i, (key, fingerprint) in enumerate(zip(hashes, fingerprints, strict=True)):
            entry = self.chunks.get((spec.digest, key))
            outcome = Outcome.MISS if entry is None else Outcome.OK
            if entry is not None and entry[0] != fingerprint:
                outcome = Outcome.MISMATCH
            if found and found[-1] is not Outcome.OK:
                outcome = Outcome.SKIPPED
            if outcome is Outcome.OK:
                assert entry is not None
                take(i, memoryview(entry[1]))
                outcome = self.outcomes.get(i, outcome)
            found.append(outcome)
        return found

    def store_chunks(
        self,
        spec: KVSpec,
        hashes: Sequence[bytes],
        fingerprints: Sequence[bytes],
        fill: Callable[[int, memoryview], None],
        **_: Any,
    ) -> list[Outcome]:
        self._call("store")
        found = []
        for i, (key, fingerprint) in enumerate(zip(hashes, fingerprints, strict=True)):
            if (spec.digest, key) in self.chunks:
                found.append(Outcome.EXISTS)
                continue
            slot = bytearray(b"\xee" * spec.chunk_bytes)
            fill(i, memoryview(slot))
            outcome = self.outcomes.get(i, Outcome.OK)
            if outcome is Outcome.OK:
                self.chunks[spec.digest, key] = (fingerprint, bytes(slot))
            found.append(outcome)
        return found

    def close(self) -> None:
        self.closed = True

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_with is not None:
            raise self.fail_with


@pytest.fixture
def llama() -> Callable[..., LlamaForCausalLM]:
    return make_llama


@pytest.fixture
def prompt() -> Callable[..., Any]:
    return make_prompt


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
