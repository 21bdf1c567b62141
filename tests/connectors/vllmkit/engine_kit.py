"""A small engine without a model: vLLM's order of calls around the connector, over real tensors.

It keeps what makes the real scheduler unforgiving: a pool of blocks that are reused at once, a
local prefix cache, chunked prefill within a token budget, preemption, requests that wait for a
load, hold their blocks and are never preempted, and asserts where vLLM asserts. The "KV" of a block
is bytes that its chained hash gives, a layer's own, so that content proves each block.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

VOCABULARY = 1000


def block_hash(parent: bytes, tokens: list[int], extra: Any) -> bytes:
    return hashlib.sha256(repr((parent, tokens, extra)).encode()).digest()


class Request:
    """What the connector sees of vLLM's Request."""

    def __init__(
        self, name: str, tokens: list[int], *, block: int, new: int = 1, salt: str | None = None,
        lora: Any = None, skip: bool = False, priority: int = 0,
    ) -> None:  # fmt: skip
        self.request_id = name
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.new = new
        self.num_computed_tokens = 0
        self.cache_salt = salt
        self.lora_request = lora
        self.skip_reading_prefix_cache = skip
        self.priority = priority  # the lowest goes first
        self.block_hashes: list[bytes] = []
        self.state = "waiting"
        self.blocks: list[int] = []
        self.preemptions = 0
        self.was_scheduled = False
        self._block = block
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def hash_blocks(self) -> None:
        while (len(self.block_hashes) + 1) * self._block <= self.num_tokens:
            at = len(self.block_hashes)
            parent = self.block_hashes[-1] if at else b"none"
            extra = (self.cache_salt if not at else None, getattr(self.lora_request, "name", None))
            tokens = self.all_token_ids[at * self._block : (at + 1) * self._block]
            self.block_hashes.append(block_hash(parent, tokens, extra))

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.hash_blocks()


class FullAttentionSpec:
    def __init__(self, block: int, heads: int, content: int, dtype: torch.dtype) -> None:
        self.block_size, self.num_heads, self.dtype = block, heads, dtype
        self.page_size_bytes = block * heads * content * dtype.itemsize
        self.kv_quant_mode = 0


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class CacheConfig:
    num_blocks: int
    kv_cache_groups: list[Group]
    kv_cache_layout: str = "LBHNC"
    hash_block_size: int | None = None
    kv_tp_replicas: int = 1


@dataclass
class Shape:
    """The model: `layers` a group, each [blocks, heads, block, content]."""

    block: int = 16
    blocks: int = 64
    layers: int = 2
    heads: int = 2
    content: int = 8
    groups: int = 1
    spec: type = FullAttentionSpec
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # one a layer, repeated
    contents: tuple[int, ...] = ()  # one a layer, repeated; () for `content`

    def cache_config(self, replicas: int = 1) -> CacheConfig:
        groups = []
        for group in range(self.groups):
            names = [f"model.layers.{group * self.layers + i}.attn" for i in range(self.layers)]
            specs = {n: self._spec(i) for i, n in enumerate(names)}
            kinds = {(s.dtype, s.page_size_bytes) for s in specs.values()}
            spec: Any = next(iter(specs.values()))
            if len(kinds) > 1:
                spec = SimpleNamespace(kv_cache_specs=specs, block_size=self.block)
            groups.append(Group(names, spec))
        return CacheConfig(self.blocks, groups, hash_block_size=self.block, kv_tp_replicas=replicas)

    def _spec(self, layer: int) -> Any:
        contents = self.contents or (self.content,)
        return self.spec(
            self.block, self.heads, contents[layer % len(contents)],
            self.dtypes[layer % len(self.dtypes)],
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        made = {}
        for group in self.cache_config().kv_cache_groups:
            for layer, name in enumerate(group.layer_names):
                spec = self._spec(layer)
                content = spec.page_size_bytes // (self.block * self.heads * spec.dtype.itemsize)
                shape = (self.blocks, self.heads, self.block, content)
                raw = torch.zeros(self.blocks * spec.page_size_bytes, dtype=torch.uint8)
                made[name] = raw.view(spec.dtype).view(shape)
        return made


def vllm_config(
    options: dict[str, Any], *, engine_id: str = "engine", tensor: int = 1, rank: int = 0,
    policy: str = "recompute", role: str = "kv_both", algorithm: str = "sha256_cbor",
    reserve: bool = True, **model: Any,
) -> Any:  # fmt: skip
    text = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    hf = SimpleNamespace(
        to_dict=lambda: {"hidden_size": 64, **model},
        get_text_config=lambda: text,
        _commit_hash=None,
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"weights": "w1", **options},
            kv_role=role,
            engine_id=engine_id,
            kv_load_failure_policy=policy,
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=algorithm, cache_dtype="auto", calculate_kv_scales=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=1, rank=rank,
            prefill_context_parallel_size=1, decode_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            model="org/tiny", revision="", dtype=torch.float32, hf_config=hf, max_model_len=4096,
            quantization=None,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(scheduler_reserve_full_isl=reserve),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


class Worker:
    """One rank: its tensors and its side of the connector."""

    def __init__(self, connector: Any, shape: Shape, tensors: dict[str, torch.Tensor]) -> None:
        self.connector, self.shape, self.tensors = connector, shape, tensors
        connector.register_kv_caches(tensors)

    def page(self, name: str, block: int) -> bytes:
        return self.tensors[name][block].contiguous().view(torch.uint8).numpy().tobytes()

    def write(self, block: int, key: bytes) -> None:
        for name, tensor in self.tensors.items():
            page = torch.from_numpy(content(key, name, tensor))
            tensor[block].view(torch.uint8).view(-1).copy_(page)

    def step(self, output: Any, forward: Any) -> Any:
        """The order of vLLM's V1 runner."""
        connector = self.connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        forward(self)
        connector.start_load_kv(None)
        connector.wait_for_save()
        done = connector.get_transfer_results(set())
        result = SimpleNamespace(
            finished_sending=done.finished_sending,
            finished_recving=done.finished_recving,
            failed_recving=done.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return result


def content(key: bytes, name: str, tensor: torch.Tensor) -> np.ndarray:
    """The bytes of one layer's page of the block with this hash."""
    size = tensor[0].numel() * tensor.element_size()
    seed = int.from_bytes(hashlib.sha256(key + name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@dataclass
class Told:
    """What happened in the engine's life."""

    loaded_tokens: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    preemptions: int = 0
    finished: list[str] = field(default_factory=list)


class Engine:
    """Scheduler and workers of one engine. `step()` is one turn of its loop."""

    def __init__(
        self, socket: str, shape: Shape | None = None, *, name: str = "engine", ranks: int = 1,
        replicas: int = 1, budget: int = 256, local_cache: bool = True, connector: Any = None,
        config: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        from kvd.connectors.vllm import KvdConnector

        role = type(self).role()
        self.shape = shape or Shape()
        self.told = Told()
        options = {"socket": socket, "lookup_deadline_s": 5.0, "prefault": False, **options}
        cls = connector or KvdConnector
        setup = {"engine_id": name, "tensor": ranks, **(config or {})}
        cache = self.shape.cache_config(replicas)
        self.connector = cls(vllm_config(options, **setup), role.SCHEDULER, cache)
        self.workers = []
        for rank in range(ranks):
            side = cls(
                vllm_config(options, **setup, rank=rank), role.WORKER,
                self.shape.cache_config(replicas),
            )  # fmt: skip
            self.workers.append(Worker(side, self.shape, self.shape.tensors()))
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, r): w.connector.get_handshake_metadata() for r, w in enumerate(self.workers)}
        )
        self.budget, self.local_cache = budget, local_cache
        self.reserve = setup.get("reserve", True)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.shape.blocks))
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.refs: dict[int, int] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received: set[str] = set()

    @staticmethod
    def role() -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        return KVConnectorRole

    # -- requests -------------------------------------------------------------------------------

    def add(self, name: str, tokens: list[int], **more: Any) -> Request:
        request = Request(name, tokens, block=self.shape.block, **more)
        self.requests[name] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)
        return request

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None or request.state == "finished":
            return
        loading = request.state == "loading" and name not in self.received
        self.received.discard(name)
        self._finish(request, delay=loading)

    def _finish(self, request: Request, delay: bool = False) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.state = "finished"
        self.told.finished.append(request.request_id)
        held, _ = self.connector.request_finished_all_groups(request, (request.blocks,))
        if not delay and not held:
            self._release(request)
            del self.requests[request.request_id]

    # -- blocks ---------------------------------------------------------------------------------

    def _take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            key = self.hash_of.pop(block, None)
            if key is not None and self.cached.get(key) == block:
                del self.cached[key]
            self.refs[block] = 1
            taken.append(block)
        return taken

    def _hold(self, block: int) -> None:
        self.free.pop(block, None)
        self.refs[block] = self.refs.get(block, 0) + 1

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
        request.blocks = []

    def _cache(self, request: Request, tokens: int) -> None:
        if not self.local_cache:
            return
        for i in range(min(tokens // self.shape.block, len(request.block_hashes))):
            key, block = request.block_hashes[i], request.blocks[i]
            if key not in self.cached:
                self.cached[key] = block
                self.hash_of[block] = key

    def _local_hit(self, request: Request) -> list[int]:
        found = []
        most = (request.num_tokens - 1) // self.shape.block
        for key in request.block_hashes[:most]:
            if key not in self.cached:
                break
            found.append(self.cached[key])
        return found

    # -- a step ---------------------------------------------------------------------------------

    def step(self) -> None:
        scheduled: dict[str, int] = {}
        news, old_names, old_blocks, old_computed = [], [], [], []
        resumed: set[str] = set()
        budget = self.budget
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            new = self._grow(request, tokens, scheduled)
            if new is None:
                continue
            scheduled[request.request_id] = tokens
            budget -= tokens
            old_names.append(request.request_id)
            old_blocks.append((new,) * self.shape.groups if new else None)
            old_computed.append(request.num_computed_tokens)
        # Those that hold blocks come before all others, whatever their priorities.
        for request in sorted(self.waiting, key=lambda r: (not r.blocks, r.priority)):
            if not budget:
                break
            if request.state == "loading":
                if request.request_id not in self.received:
                    continue
                self.received.discard(request.request_id)
                self._loaded(request)
            external, asynchronous = 0, False
            if request.num_computed_tokens == 0:
                local = self._local_hit(request) if not request.skip_reading_prefix_cache else []
                matched, asynchronous = self.connector.get_num_new_matched_tokens(
                    request, len(local) * self.shape.block
                )
                assert not (matched == 0 and asynchronous)
                if request.skip_reading_prefix_cache:
                    matched, asynchronous = 0, False
                if matched is None:
                    continue
                external = matched
                assert external >= 0 and external % self.shape.block == 0
                computed = len(local) * self.shape.block + external
                assert computed <= request.num_tokens - 1
                request.blocks = []
                for block in local:
                    self._hold(block)
                request.blocks = local
            else:
                computed = request.num_computed_tokens
            tokens = 0 if asynchronous else min(request.num_tokens - computed, budget)
            need = -(-(computed + tokens) // self.shape.block) - len(request.blocks)
            taken = None
            if self._lets_in(request, asynchronous, need, scheduled):
                taken = self._take(max(0, need))
            if taken is None:
                if request.num_computed_tokens == 0:
                    self._release(request)
                break
            request.blocks = request.blocks + taken
            self.connector.update_state_after_alloc(request, _Blocks(request, self.shape), external)
            self.told.loaded_tokens[request.request_id] = (
                self.told.loaded_tokens.get(request.request_id, 0) + external
            )
            request.num_computed_tokens = computed
            if asynchronous:
                request.state = "loading"
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.state = "running"
            if self.local_cache:
                self._cache(request, computed)
            scheduled[request.request_id] = tokens
            budget -= tokens
            if request.was_scheduled:
                resumed.add(request.request_id)
                old_names.append(request.request_id)
                old_blocks.append((list(request.blocks),) * self.shape.groups)
                old_computed.append(computed)
            else:
                news.append(
                    SimpleNamespace(
                        req_id=request.request_id, num_computed_tokens=computed,
                        block_ids=(list(request.blocks),) * self.shape.groups,
                    )
                )  # fmt: skip
            request.was_scheduled = True
        for name in [n for n in old_names if n not in scheduled]:  # preempted in this very step
            at = old_names.index(name)
            del old_names[at], old_blocks[at], old_computed[at]
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, scheduled_new_reqs=news,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old_names, new_block_ids=old_blocks, num_computed_tokens=old_computed,
                resumed_req_ids=resumed,
            ),
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda n: (list(self.requests[n].blocks),) * self.shape.groups
            ),
        )  # fmt: skip
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        results = [w.step(output, lambda w: self._forward(w, scheduled)) for w in self.workers]
        self._update(scheduled, results)

    def _grow(self, request: Request, tokens: int, scheduled: dict[str, int]) -> list[int] | None:
        """Blocks for more tokens; preempts the youngest when there are none."""
        while True:
            need = -(-(request.num_computed_tokens + tokens) // self.shape.block)
            taken = self._take(max(0, need - len(request.blocks)))
            if taken is not None:
                request.blocks += taken
                return taken
            victim = self.running[-1]
            self._preempt(victim, scheduled)
            if victim is request:
                return None

    def _preempt(self, request: Request, scheduled: dict[str, int]) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.preemptions += 1
        request.state = "waiting"
        self.waiting.insert(0, request)
        scheduled.pop(request.request_id, None)
        self.told.preemptions += 1

    def _lets_in(
        self, request: Request, asynchronous: bool, need: int, scheduled: dict[str, int]
    ) -> bool:
        """vLLM's gate. A load leaves free what requests that are loading or in the middle of their
        prefill still need; with `reserve`, all of a request has to fit."""
        if self.reserve and self._lacks(request) > len(self.free):
            return False
        others = [r for r in self.waiting if r.blocks and r is not request]
        for r in self.running:
            if r.num_computed_tokens + scheduled.get(r.request_id, 0) < r.num_tokens:
                others.append(r)
        kept = sum(map(self._lacks, others)) if asynchronous else 0
        return need <= len(self.free) - kept

    def _lacks(self, request: Request) -> int:
        """Blocks that a request still needs for all of its tokens."""
        return max(0, -(-request.num_tokens // self.shape.block) - len(request.blocks))

    def _loaded(self, request: Request) -> None:
        request.state = "waiting"
        if request.num_computed_tokens == 0:
            self._release(request)
        else:
            self._check(request, request.num_computed_tokens)
            self._cache(request, request.num_computed_tokens)

    def _forward(self, worker: Worker, scheduled: dict[str, int]) -> None:
        block = self.shape.block
        for name, tokens in scheduled.items():
            request = self.requests[name]
            begin, end = request.num_computed_tokens, request.num_computed_tokens + tokens
            for i in range(begin // block, -(-end // block)):
                whole = (i + 1) * block <= end and i < len(request.block_hashes)
                key = request.block_hashes[i] if whole else b"part of " + name.encode()
                worker.write(request.blocks[i], key)

    def _update(self, scheduled: dict[str, int], results: list[Any]) -> None:
        names = [r.finished_recving for r in results]
        for rank, received in enumerate(names):
            self._arrived(rank, received)
        everywhere = {n for n in self._pending if self._pending[n] == len(self.workers)}
        for name in everywhere:
            del self._pending[name]
        failed = set().union(*(r.failed_recving for r in results)) | self._failed
        self._failed = failed - everywhere
        invalid = set().union(*(r.invalid_block_ids for r in results))
        meta = None
        for r in results:
            if r.kv_connector_worker_meta is not None:
                meta = (r.kv_connector_worker_meta if meta is None
                        else meta.aggregate(r.kv_connector_worker_meta))  # fmt: skip
        for request in self.waiting:
            if request.state == "loading":
                known = request.blocks[: request.num_computed_tokens // self.shape.block]
                bad = [i for i, b in enumerate(known) if b in invalid]
                if bad:
                    self.told.recomputed += request.num_computed_tokens - bad[0] * self.shape.block
                    request.num_computed_tokens = bad[0] * self.shape.block
                if request.request_id in failed & everywhere:
                    self.told.recomputed += request.num_computed_tokens
                    request.num_computed_tokens = 0
        self.connector.update_connector_output(
            SimpleNamespace(
                finished_recving=everywhere or None, failed_recving=failed & everywhere,
                invalid_block_ids=invalid, kv_connector_worker_meta=meta,
            )
        )  # fmt: skip
        for name in everywhere:
            assert name in self.requests, "vLLM asserts this"
            request = self.requests[name]
            if request.state == "loading":
                self.received.add(name)
            else:
                assert request.state == "finished"
                self._release(request)
                del self.requests[name]
        for name, tokens in scheduled.items():
            found = self.requests.get(name)
            if found is None or found.state != "running":
                continue
            found.num_computed_tokens += tokens
            self.told.computed[name] = self.told.computed.get(name, 0) + tokens
            self._cache(found, found.num_computed_tokens)
            self._check(found, found.num_computed_tokens)
            if found.num_computed_tokens == found.num_tokens:
                if found.num_tokens - found.num_prompt_tokens >= found.new:
                    self._finish(found)
                else:
                    found.append((sum(found.all_token_ids[-3:]) * 7 + 1) % VOCABULARY)

    _failed: set[str] = set()  # noqa: RUF012

    @property
    def _pending(self) -> dict[str, int]:
        return self.__dict__.setdefault("pending", {})

    def _arrived(self, rank: int, received: set[str]) -> None:
        for name in received:
            self._pending[name] = self._pending.get(name, 0) + 1
            assert self._pending[name] <= len(self.workers), f"{name} was reported twice"

    def _check(self, request: Request, tokens: int) -> None:
        """Every full block holds exactly its own bytes, in every layer and rank."""
        for i in range(min(tokens // self.shape.block, len(request.block_hashes))):
            for worker in self.workers:
                for name, tensor in worker.tensors.items():
                    expected = content(request.block_hashes[i], name, tensor).tobytes()
                    assert worker.page(name, request.blocks[i]) == expected, (
                        f"block {i} of {request.request_id}, {name}: other bytes than its own"
                    )

    # -- for tests ------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nothing is left to do. AssertionError when that never comes."""
        end = time.monotonic() + 30
        while self.requests or self.connector.has_pending_push_work():
            self.step()
            left = [(r.request_id, r.state) for r in self.requests.values()]
            assert time.monotonic() < end, f"stuck: {left}"

    def ask(self, name: str, tokens: list[int], **more: Any) -> int:
        """Serve one request to its end; the tokens that came out of kvd."""
        self.add(name, tokens, **more)
        self.run()
        return self.told.loaded_tokens.get(name, 0)

    def forget(self) -> None:
        """Drop the local prefix cache."""
        self.cached.clear()
        self.hash_of.clear()

    @property
    def counts(self) -> dict[str, float]:
        total: dict[str, float] = {}
        sides = [self.connector._scheduler, *(w.connector._worker for w in self.workers)]
        for side in sides:
            for name, number in side.counts.total.items() if side is not None else ():
                total[name] = total.get(name, 0) + number
        return total

    def close(self) -> None:
        self.connector.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Blocks:
    def __init__(self, request: Request, shape: Shape) -> None:
        self._ids = (list(request.blocks),) * shape.groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._ids
