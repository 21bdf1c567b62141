"""kvd for Hugging Face transformers: decoder-only models with a DynamicCache.

The law of this module: kvd may only save time. A prompt whose KV can't be had, for whatever
reason, is computed; the reason is counted, a daemon that is away costs at most the deadline, and
no error of kvd reaches the caller. Only what was checked after its last byte was copied becomes
part of a cache.

    model = AutoModelForCausalLM.from_pretrained(...).eval()
    with KvdCache(model) as kv:
        output = kv.generate(input_ids, max_new_tokens=64, do_sample=False)

Two processes that load the same model share through the daemon. Another dtype, revision, RoPE
setting, attention implementation or salt is another identity and never hits.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from kvd.chunk import KVSpec, Outcome, chain_fingerprints, chain_hashes
from kvd.client import Client
from kvd.client.durations import check_timeout
from kvd.connectors.backoff import Backoff
from kvd.connectors.generation import AfterFirstToken, why_not
from kvd.connectors.hfmodel import UnsupportedModel, cache_argument, inspect_model, spec_of
from kvd.connectors.kvlayout import STORABLE, ChunkCopier, KVLayout, Pairs
from kvd.connectors.weights import WeightWatch, weights_digest
from kvd.errors import ClientClosed, DeadlineExceeded, KvdError, SpecError, Unavailable

__all__ = ["KvdCache", "Prefill", "UnsupportedModel"]

log = logging.getLogger(__name__)

_COPY_BYTES_PER_S = 0.5e9  # slower than any copy seen: first touches of memory, cores taken


class Prefill(NamedTuple):
    """A cache for the beginning of a prompt, and how many of its tokens came out of kvd."""

    cache: DynamicCache
    reused_tokens: int


class _Identity(NamedTuple):
    """What the model was when its weights were last looked at."""

    spec: KVSpec
    layout: KVLayout  # of a stored chunk
    dtype: torch.dtype  # of the model's KV
    device: torch.device


class KvdCache:
    """Reuses and stores the KV of prompts for one model.

    `client` is a `kvd.client.Client`, the path of a daemon's socket, or None for the default
    socket; a client that was given stays open on `close`. `salt` (at most 4,096 bytes) separates
    whoever shall not share, `revision` and `weights` replace what is found in the model
    (`weights`: a digest; without one, all weights are hashed now, about 0.6 s a GB and core).

    `storage_dtype` stores KV in another dtype than the model's. `torch.bfloat16` under a float32
    model halves the bytes and costs exactness: K and V that come back are rounded to 8 bits of
    significand (relative error up to 0.4 %), so tokens may differ from a run without kvd. It is
    part of the identity: rounded and exact chunks never stand in for each other.

    `deadline_s` (and 2 s a GB of KV, for the copy) bounds a lookup with its load, and a store.
    After a failure the daemon is left alone for 1 s, doubling up to 30 s. With `verify`, loaded
    payloads are compared with the digests in their records. In a forked child the connector makes
    a client of its own, unless one was given.

    Raises ConfigError for a deadline that is none, and UnsupportedModel for a model whose KV a
    DynamicCache doesn't hold in full, or depends on more than the tokens before. No call after that
    raises an error of kvd; a model that becomes unsupported later (an adapter is attached) is
    computed without kvd.

    `counts` tells what happened, by name: prompts, prompt_tokens, reused_tokens, loaded_chunks,
    stored_chunks, and `load.REASON`, `store.REASON`, `bypass`. The client's methods may be called
    from several threads; so may these.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client | str | None = None,
        *,
        chunk_tokens: int = 256,
        salt: bytes = b"",
        storage_dtype: torch.dtype | None = None,
        deadline_s: float = 2.0,
        revision: str = "",
        weights: str = "",
        verify: bool = False,
    ) -> None:
        self.model = model
        self.counts: Counter[str] = Counter()
        self._chunk_tokens, self._salt, self._verify = chunk_tokens, salt, verify
        self._storage_dtype = storage_dtype
        self._deadline_s = check_timeout(deadline_s, "deadline_s")
        self._revision, self._weights = revision, weights
        self._cache_argument = cache_argument(model)
        self._backoff = Backoff()
        self._clock = time.monotonic  # of the backoff
        self._told: set[str] = set()
        self._identity: _Identity | None = self._identify()
        self._watch = WeightWatch(model)
        if client is None or isinstance(client, str):
            self._socket, self._owner = client, os.getpid()
            self._client = self._connect()
        else:
            self._owner, self._client = 0, client  # the caller's, to close and to fork

    @property
    def spec(self) -> KVSpec | None:
        """The identity of this model's chunks; None while the model can't be cached (see
        `refresh`)."""
        return self._identity.spec if self._identity else None

    def close(self) -> None:
        """Close the client, unless it was given. The model stays as it is."""
        if self._owner:
            self._client.close()

    def __enter__(self) -> KvdCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- using it -------------------------------------------------------------------------------

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """`model.generate` over a prompt [1, n], with the longest stored prefix taken from kvd.

        Takes and returns what `model.generate` does. New full chunks of the prompt are stored when
        the first new token is out. Calls that kvd can't serve (several rows or beams, masked
        tokens, arguments that enter the model's forward) are generated without it.
        """
        reason = why_not(self.model, input_ids, arguments)
        if reason is not None:
            self._bypass(reason)
            return self.model.generate(input_ids, **arguments)
        cache, reused = self.load(input_ids)
        streamer = AfterFirstToken(
            lambda: self._store_beyond(input_ids, cache, reused), arguments.pop("streamer", None)
        )
        arguments[self._cache_argument] = cache
        return self.model.generate(input_ids, streamer=streamer, **arguments)

    def prefill(self, input_ids: torch.Tensor) -> Prefill:
        """A cache of all tokens of a prompt [1, n] but the last, so that
        `model.generate(input_ids, cache=…)` goes on from it.

        The longest stored prefix is loaded, the rest is computed, new full chunks are stored.
        ValueError when `input_ids` is not one row of at least one token.
        """
        cache, reused = self.load(input_ids)
        rest = input_ids[:, reused:-1]
        if rest.shape[1]:
            arguments: dict[str, Any] = {self._cache_argument: cache}
            if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
                arguments["logits_to_keep"] = 1  # nobody reads them, and the head is large
            with torch.no_grad():
                self.model(input_ids=rest.to(self.model.device), use_cache=True, **arguments)
            self._store_beyond(input_ids, cache, reused)
        return Prefill(cache, reused)

    def load(self, input_ids: torch.Tensor) -> Prefill:
        """A cache of the longest stored prefix of a prompt [1, n], at most n - 1 tokens of it.

        Empty (0 tokens) when nothing is stored or the daemon doesn't answer in time.
        ValueError when `input_ids` is not one row of at least one token.
        """
        tokens = _row(input_ids)
        self.counts["prompts"] += 1
        self.counts["prompt_tokens"] += len(tokens)
        cache = DynamicCache(config=self.model.config)
        identity = self._current()
        chunks = (len(tokens) - 1) // self._chunk_tokens
        if identity is None or chunks == 0 or not self._may_ask("load"):
            return Prefill(cache, 0)
        layout = identity.layout
        # Memory that is never written to is never there: a miss costs no pages.
        pairs = layout.blank(chunks * layout.tokens, identity.dtype, identity.device)
        loaded = self._load_chunks(identity, tokens[: chunks * layout.tokens], pairs)
        if loaded:
            _fill(cache, pairs, loaded * layout.tokens)
        self.counts["loaded_chunks"] += loaded
        self.counts["reused_tokens"] += loaded * layout.tokens
        return Prefill(cache, loaded * layout.tokens)

    def store(self, input_ids: torch.Tensor, cache: DynamicCache, begin: int = 0) -> int:
        """Store the full chunks that `cache` holds of `input_ids` [1, n], from token `begin` on
        (rounded up to a chunk), and return how many are stored now that were not before.

        `cache` must be what this model computed for these tokens. Chunks that are there already
        or find no space are counted, not raised.
        """
        tokens = _row(input_ids)
        identity = self._current()
        size = self._chunk_tokens
        first = -(-begin // size)
        end = min(len(tokens), cache.get_seq_length()) // size
        if identity is None or first >= end or not self._may_ask("store"):
            return 0
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        stored = self._store_chunks(identity, tokens[: end * size], first, pairs)
        self.counts["stored_chunks"] += stored
        return stored

    def refresh(self) -> None:
        """Look at the model again. Needed only after writes to weights that can't be noticed (on
        a device, through `.data`); other changes are noticed at the next call."""
        try:
            self._identity = self._identify()
        except SpecError as error:
            self._identity = None
            self._tell(f"kvd is not used: {error}")
        self._watch = WeightWatch(self.model)

    # -- the model ------------------------------------------------------------------------------

    def _identify(self) -> _Identity:
        shape = inspect_model(self.model)
        dtype = self._storage_dtype or shape.dtype
        if dtype not in STORABLE:
            raise UnsupportedModel(
                f"storage_dtype {dtype} is not one of {', '.join(STORABLE.values())}"
            )
        layout = KVLayout(shape.layers, shape.heads, self._chunk_tokens, shape.dim, dtype)
        if dtype != shape.dtype and torch.finfo(dtype).eps > torch.finfo(shape.dtype).eps:
            self._tell(
                f"KV of a {STORABLE[shape.dtype]} model is stored as {layout.dtype_name}: "
                f"{layout.token_bytes} B a token, rounded by up to "
                f"{torch.finfo(dtype).eps / 2:.1e} of each value; tokens may differ from a run "
                "without kvd"
            )
        weights = self._weights or weights_digest(self.model)
        spec = spec_of(self.model, layout, shape.dtype, weights=weights, revision=self._revision)
        return _Identity(spec, layout, shape.dtype, shape.device)

    def _current(self) -> _Identity | None:
        """The identity of the model as it is now; None when it can't be cached now."""
        if self.model.training:
            self._bypass("the model is in training mode")
            return None
        if self._watch.changed(self.model):
            log.info("the weights of %s changed: identifying it anew", type(self.model).__name__)
            self._weights = ""  # a digest that was given is no longer theirs
            self.refresh()
        if self._identity is None:
            self.counts["bypass"] += 1
        return self._identity

    def _store_beyond(self, input_ids: torch.Tensor, cache: DynamicCache, reused: int) -> None:
        self.store(input_ids, cache, reused)

    # -- the daemon -----------------------------------------------------------------------------

    def _load_chunks(self, identity: _Identity, tokens: NDArray[np.int64], pairs: Pairs) -> int:
        """How many leading chunks are whole in `pairs` now."""
        hashes, fingerprints = self._keys(tokens)
        copier = ChunkCopier(identity.layout, pairs)
        try:
            outcomes = self._client.load_chunks(
                identity.spec,
                hashes,
                copier.read,
                fingerprints=fingerprints,
                verify=self._verify,
                timeout_s=self._bound_s(identity, len(hashes)),
            )
        except (KvdError, OSError) as error:
            self._failed("load", error)
            return 0
        self._backoff.worked()
        leading = 0
        while leading < len(outcomes) and outcomes[leading] is Outcome.OK:
            leading += 1
        if leading < len(outcomes):
            self.counts[f"load.{outcomes[leading].name.lower()}"] += 1
        return leading

    def _store_chunks(
        self, identity: _Identity, tokens: NDArray[np.int64], first: int, pairs: Pairs
    ) -> int:
        """How many chunks from number `first` on were stored."""
        hashes, fingerprints = self._keys(tokens)
        copier = ChunkCopier(identity.layout, pairs)
        try:
            outcomes = self._client.store_chunks(
                identity.spec,
                hashes[first:],
                fingerprints[first:],
                lambda item, slot: copier.write(first + item, slot),
                parent=hashes[first - 1] if first else None,
                index0=first,
                timeout_s=self._bound_s(identity, len(hashes) - first),
            )
        except (KvdError, OSError) as error:
            self._failed("store", error)
            return 0
        self._backoff.worked()
        for outcome in outcomes:
            if outcome is not Outcome.OK:
                self.counts[f"store.{outcome.name.lower()}"] += 1
        if Outcome.TOO_LARGE in outcomes:
            self._tell_too_large(identity.layout)
        return sum(outcome is Outcome.OK for outcome in outcomes)

    def _tell_too_large(self, layout: KVLayout) -> None:
        """No chunk of this model will ever be stored in that daemon: that is worth a word."""
        try:
            most = self._client.info().limits.chunk_bytes
        except KvdError as error:
            self._failed("store", error)
            return
        tokens = most // layout.token_bytes // 16 * 16
        fewer = f"chunk_tokens of at most {tokens}" if tokens >= 16 else "a smaller storage_dtype"
        self._tell(
            f"kvd stores nothing of this model: a chunk of {layout.tokens} tokens has "
            f"{layout.nbytes} bytes, and the daemon's slots hold at most {most}; use {fewer}, or "
            "give the daemon a larger arena (--arena-size; a slot is 1/32 of it, or "
            "--arena-slab-size up to 1/16)"
        )

    def _keys(self, tokens: NDArray[np.int64]) -> tuple[list[bytes], list[bytes]]:
        size, salt = self._chunk_tokens, self._salt
        return (
            chain_hashes(tokens, size, salt=salt),
            chain_fingerprints(tokens, size, salt=salt),
        )

    def _connect(self) -> Client:
        """Nothing is connected yet: the client does that when it is first asked."""
        return Client(self._socket, timeout_s=self._deadline_s, name="transformers")

    def _bound_s(self, identity: _Identity, chunks: int) -> float:
        return self._deadline_s + chunks * identity.layout.nbytes / _COPY_BYTES_PER_S

    def _may_ask(self, what: str) -> bool:
        if self._owner not in (0, os.getpid()):
            self._owner, self._client = os.getpid(), self._connect()
        if self._backoff.may_try(self._clock()):
            return True
        self.counts[f"{what}.silent"] += 1
        return False

    def _failed(self, what: str, error: Exception) -> None:
        self.counts[f"{what}.{type(error).__name__}"] += 1
        if isinstance(error, (Unavailable, DeadlineExceeded, ClientClosed, OSError)):
            pause = self._backoff.failed(self._clock())
            log.warning("kvd %s failed, next trial in %.0f s: %s", what, pause, error)
        else:
            log.warning("kvd %s failed: %s", what, error)

    def _bypass(self, reason: str) -> None:
        self.counts["bypass"] += 1
        self._tell(f"kvd is not used: {reason}")

    def _tell(self, message: str) -> None:
        """Say it once."""
        if message not in self._told:
            self._told.add(message)
            log.warning("%s", message)


def _row(input_ids: torch.Tensor) -> NDArray[np.int64]:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids must be one row [1, n] of at least one token, not "
            f"{tuple(input_ids.shape)}: call once for each prompt"
        )
    row: NDArray[np.int64] = input_ids[0].detach().to("cpu", torch.int64).numpy()
    return row


def _fill(cache: DynamicCache, pairs: Pairs, tokens: int) -> None:
    """Make the first `tokens` of `pairs` what the cache's layers hold, without a copy (`update`
    would concatenate, and so copy everything once more)."""
    for layer, (keys, values) in zip(cache.layers, pairs, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, :tokens], values[:, :, :tokens]
