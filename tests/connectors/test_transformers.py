"""The connector against a store in memory: reuse changes no token, no failure reaches a caller."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvd.chunk import Outcome
from kvd.connectors.transformers import KvdCache, UnsupportedModel
from kvd.errors import (
    ArenaError,
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    Draining,
    Forked,
    InternalError,
    LeaseLost,
    LimitExceeded,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    UnknownSession,
    VersionError,
)

Make = Callable[..., Any]
CHUNK = 16
NEW = 12


def connector(model: Any, store: Any, **options: Any) -> KvdCache:
    return KvdCache(model, store, chunk_tokens=CHUNK, **options)


def plain(model: Any, ids: torch.Tensor) -> list[int]:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist()


def with_kvd(kv: KvdCache, ids: torch.Tensor) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were reused."""
    before = kv.counts["reused_tokens"]
    tokens = kv.generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return tokens, kv.counts["reused_tokens"] - before


@pytest.mark.parametrize("heads", [2, 4], ids=["GQA", "MHA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reuse_changes_no_token(
    llama: Make, prompt: Make, store: Any, heads: int, dtype: torch.dtype
) -> None:
    model = llama(num_key_value_heads=heads).to(dtype)
    ids = prompt(100)
    first, second = connector(model, store), connector(model, store)
    cold, nothing = with_kvd(first, ids)
    warm, reused = with_kvd(second, ids)
    assert (nothing, reused) == (0, 96)
    assert cold == plain(model, ids)
    if dtype is torch.float32:  # rounding of other dtypes depends on the shape of a product
        assert warm == cold


def test_what_is_loaded_is_what_was_computed(llama: Make, prompt: Make, store: Any) -> None:
    """Loaded K and V are the stored bits: nothing is rounded, nothing lands on another token."""
    model, ids = llama(), prompt(100)
    computed = connector(model, store).prefill(ids).cache
    loaded, reused = connector(model, store).load(ids)
    assert type(loaded) is DynamicCache and loaded.get_seq_length() == reused == 96
    for layer, other in zip(loaded.layers, computed.layers, strict=True):
        assert torch.equal(layer.keys, other.keys[:, :, :96])
        assert torch.equal(layer.values, other.values[:, :, :96])


@pytest.mark.parametrize(
    "length, reused", [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (47, 32)]
)
def test_at_most_all_but_the_last_token_is_reused(
    llama: Make, prompt: Make, store: Any, length: int, reused: int
) -> None:
    """Something must be computed to know the next token; a partial chunk is never stored."""
    model, ids = llama(), prompt(64)[:, :length]
    kv = connector(model, store)
    assert with_kvd(kv, ids) == (plain(model, ids), 0)
    assert len(store.chunks) == length // CHUNK
    assert with_kvd(kv, ids) == (plain(model, ids), reused)


def test_another_question_reuses_the_document_and_stores_its_own(
    llama: Make, prompt: Make, store: Any
) -> None:
    model, document = llama(), prompt(70)
    kv = connector(model, store)
    ask = [torch.cat([document, prompt(30, seed=s)], dim=1) for s in (7, 8)]
    assert with_kvd(kv, ask[0]) == (plain(model, ask[0]), 0)
    assert with_kvd(kv, ask[1]) == (plain(model, ask[1]), 64)
    assert len(store.chunks) == 6 + 2
    assert with_kvd(kv, ask[1])[1] == 96


def test_a_chunk_that_is_gone_ends_the_prefix_and_comes_back(
    llama: Make, prompt: Make, store: Any
) -> None:
    model, ids = llama(), prompt(100)
    kv = connector(model, store)
    with_kvd(kv, ids)
    gone = list(store.chunks)[2]
    del store.chunks[gone]
    assert with_kvd(kv, ids) == (plain(model, ids), 32)
    assert gone in store.chunks
    assert kv.counts["load.miss"] == 2  # the first run's, and this one
    assert kv.counts["store.exists"] == 3


@pytest.mark.parametrize(
    "outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.STALE, Outcome.DEADLINE, Outcome.MISMATCH]
)
def test_bytes_without_an_ok_are_not_used(
    llama: Make, prompt: Make, store: Any, outcome: Outcome
) -> None:
    """A chunk counts only when its own transfer was checked after its last byte."""
    model, ids = llama(), prompt(100)
    kv = connector(model, store)
    with_kvd(kv, ids)
    store.outcomes = {3: outcome}
    for key, (fingerprint, data) in list(store.chunks.items())[3:4]:
        store.chunks[key] = (fingerprint, b"\x7f" * len(data))
    assert with_kvd(kv, ids) == (plain(model, ids), 48)
    assert kv.counts[f"load.{outcome.name.lower()}"] == 1


def test_tokens_that_share_a_hash_by_accident_are_a_miss(
    llama: Make, prompt: Make, store: Any
) -> None:
    model, ids = llama(), prompt(100)
    kv = connector(model, store)
    with_kvd(kv, ids)
    for key, (_, data) in store.chunks.items():
        store.chunks[key] = (b"\0" * 16, data)
    assert with_kvd(kv, ids) == (plain(model, ids), 0)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no daemon"),
        DeadlineExceeded("late"),
        UnknownSession("who"),
        StaleEpoch("another life"),
        LeaseLost("over"),
        Draining("going"),
        LimitExceeded("too many"),
        ProtocolError("garbage"),
        VersionError("2 and 1"),
        ArenaError("no memory"),
        InternalError("oops"),
        ClientClosed("closed"),
        Forked("a child"),
        OSError(12, "cannot map"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_reaches_the_caller(
    llama: Make, prompt: Make, store: Any, error: Exception
) -> None:
    """What goes wrong with the cache is a miss to the engine."""
    model, ids = llama(), prompt(50)
    kv = connector(model, store)
    store.fail_with = error
    assert with_kvd(kv, ids) == (plain(model, ids), 0)
    assert kv.prefill(ids).reused_tokens == 0
    assert kv.counts[f"load.{type(error).__name__}"] >= 1
    store.fail_with = None
    fresh = connector(model, store)
    with_kvd(fresh, ids)
    assert with_kvd(fresh, ids)[1] == 48


def test_a_daemon_that_is_away_is_asked_once_and_then_left_alone(
    llama: Make, prompt: Make, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("kvd.connectors.transformers.time.monotonic", lambda: now[0])
    kv = connector(llama(), store)
    store.fail_with = Unavailable("no daemon")
    for _ in range(5):
        kv.prefill(prompt(50))
    assert store.calls == ["load"]
    now[0] += 1.01  # one trial; it fails, and the next pause is twice as long
    kv.prefill(prompt(50))
    now[0] += 1.01
    kv.prefill(prompt(50))
    assert store.calls == ["load", "load"]
    store.fail_with = None
    now[0] += 1.0
    kv.prefill(prompt(50))
    assert store.calls[2:] == ["load", "store"]
    assert kv.prefill(prompt(50)).reused_tokens == 48


def test_a_full_store_is_counted_and_stops_nothing(llama: Make, prompt: Make, store: Any) -> None:
    model, ids = llama(), prompt(50)
    kv = connector(model, store)
    store.outcomes = {1: Outcome.NO_SPACE, 2: Outcome.NO_SPACE}
    assert with_kvd(kv, ids) == (plain(model, ids), 0)
    assert kv.counts["stored_chunks"] == 1
    assert kv.counts["store.no_space"] == 2


def test_prefill_leaves_one_token_for_generate(llama: Make, prompt: Make, store: Any) -> None:
    model, ids = llama(), prompt(50)
    kv = connector(model, store)
    for reused in (0, 48):
        cache, found = kv.prefill(ids)
        assert (found, cache.get_seq_length()) == (reused, 49)
        tokens = model.generate(ids, cache=cache, max_new_tokens=NEW, do_sample=False)
        assert tokens[0].tolist() == plain(model, ids)


def test_the_prompt_is_stored_when_the_first_token_is_out(
    llama: Make, prompt: Make, store: Any
) -> None:
    """Others can use a document while the answer is still being written; and the caller's streamer
    sees each token before anything is stored."""
    model, ids = llama(), prompt(50)
    seen = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.append((value.numel(), len(store.chunks)))

        def end(self) -> None:
            seen.append((0, len(store.chunks)))

    kv = connector(model, store)
    kv.generate(ids, max_new_tokens=3, do_sample=False, streamer=Streamer())
    assert seen == [(50, 0), (1, 0), (1, 3), (1, 3), (0, 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"salt": b"tenant b"},
        {"revision": "v2"},
        {"weights": "sha256:other"},
        {"storage_dtype": torch.bfloat16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_identity_never_hits(
    llama: Make, prompt: Make, store: Any, change: dict[str, Any]
) -> None:
    """K47: a salt reaches every operation, so that who shall not share does not."""
    model, ids = llama(), prompt(50)
    with_kvd(connector(model, store), ids)
    other = connector(model, store, **change)
    assert with_kvd(other, ids)[1] == 0
    assert len(store.chunks) == 6
    assert with_kvd(other, ids)[1] == 48


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), 1e99, -1.0])
def test_a_deadline_that_is_none_is_refused_at_once(
    llama: Make, store: Any, deadline_s: float
) -> None:
    with pytest.raises(ConfigError, match=r"deadline_s: .* from 0 to 2592000"):
        connector(llama(), store, deadline_s=deadline_s)


def test_rounded_storage_says_what_it_costs(
    llama: Make, prompt: Make, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = llama(), prompt(50)
    with caplog.at_level(logging.WARNING):
        kv = connector(model, store, storage_dtype=torch.bfloat16)
    assert re.search(r"stored as bfloat16: 384 B a token, rounded by up to 3\.9e-03", caplog.text)
    computed = kv.prefill(ids).cache
    loaded, _ = kv.load(ids)
    want = computed.layers[1].keys[:, :, :48]
    assert torch.equal(loaded.layers[1].keys, want.to(torch.bfloat16).float())
    with pytest.raises(UnsupportedModel, match="storage_dtype"):
        connector(model, store, storage_dtype=torch.int8)


def test_weights_that_change_change_the_identity(llama: Make, prompt: Make, store: Any) -> None:
    """A model that was trained on does not get the KV of the one it was."""
    model, ids = llama(), prompt(50)
    kv = connector(model, store)
    with_kvd(kv, ids)
    before = kv.spec
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.25)
    assert with_kvd(kv, ids) == (plain(model, ids), 0)
    assert kv.spec != before
    assert with_kvd(kv, ids)[1] == 48


def test_a_model_that_becomes_unfit_is_computed_without_kvd(
    llama: Make, prompt: Make, store: Any
) -> None:
    """K15: an adapter is no part of the digest, so a model with one attached uses no cache."""
    model, ids = llama(), prompt(50)
    kv = connector(model, store)
    with_kvd(kv, ids)
    model.add_module("lora_A", torch.nn.Linear(2, 2))
    model.peft_config = {"default": object()}
    assert with_kvd(kv, ids) == (plain(model, ids), 0)
    assert kv.spec is None and kv.counts["bypass"]
    del model.lora_A, model.peft_config
    assert with_kvd(kv, ids)[1] == 48

    model.train()
    assert kv.load(ids).reused_tokens == 0
    model.eval()
    assert with_kvd(kv, ids)[1] == 48


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"position_ids": torch.arange(50)[None] + 3},
        {"attention_mask": torch.tensor([[0] * 5 + [1] * 45])},
        {"pad_token_id": 11},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_calls_that_kvd_cannot_serve_are_generated_without_it(
    llama: Make, prompt: Make, store: Any, arguments: dict[str, Any]
) -> None:
    model, ids = llama(), prompt(50)
    ids[0, 0] = 11
    kv = connector(model, store)
    with_kvd(kv, prompt(50))
    store.calls.clear()
    torch.manual_seed(0)
    want = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **arguments})
    torch.manual_seed(0)
    got = kv.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **arguments})
    assert torch.equal(got, want)
    assert store.calls == [] and kv.counts["bypass"] == 1


def test_several_rows_are_generated_together_and_not_cached(
    llama: Make, prompt: Make, store: Any
) -> None:
    model, ids = llama(), torch.cat([prompt(50), prompt(50, seed=9)])
    kv = connector(model, store)
    want = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=NEW, do_sample=False), want)
    assert store.calls == []
    with pytest.raises(ValueError, match=r"one row \[1, n\]"):
        kv.prefill(ids)
    with pytest.raises(ValueError, match="at least one token"):
        kv.load(ids[:1, :0])


def test_an_unsupported_model_is_refused_at_once(llama: Make, store: Any) -> None:
    with pytest.raises(UnsupportedModel, match="training mode"):
        connector(llama().train(), store)
    assert store.calls == []


def test_a_client_that_was_given_stays_open(llama: Make, store: Any) -> None:
    with connector(llama(), store):
        pass
    assert not store.closed


def test_without_a_daemon_everything_is_computed(llama: Make, prompt: Make, tmp_path: Any) -> None:
    model, ids = llama(), prompt(50)
    with KvdCache(model, str(tmp_path / "none.sock"), chunk_tokens=CHUNK, deadline_s=0.2) as kv:
        assert with_kvd(kv, ids) == (plain(model, ids), 0)
        assert kv.counts["load.Unavailable"] == 1
