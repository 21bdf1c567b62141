"""KvdConnector: the class that vLLM sees.

The law of this module: it translates between vLLM's hooks and the two sides, and nothing more. A
configuration that can't be meant raises at the start; an engine that kvd can't serve runs without
it, with one warning that says why; after that no hook raises. One object has one role, and the
other side's objects do not exist in it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd.client import Client
from kvd.connectors.vllm.config import Options, chunk_size, read_options
from kvd.connectors.vllm.identity import check_engine, check_hashing, group_secret, spec_of
from kvd.connectors.vllm.metadata import RankShape, StepPlan, WorkerReport
from kvd.connectors.vllm.metrics import KvdPromMetrics, KvdStats
from kvd.connectors.vllm.ranks import rank_shape, worker_pages
from kvd.connectors.vllm.room import Room
from kvd.connectors.vllm.scheduler import SchedulerSide
from kvd.connectors.vllm.worker import WorkerSide
from kvd.errors import ConfigError, KvdError

__all__ = ["KvdConnector"]

log = logging.getLogger("vllm.kvd")

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class KvdStep(KVConnectorMetadata):
    plan: StepPlan


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):
    shape: RankShape


@dataclass
class KvdReport(KVConnectorWorkerMetadata):
    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return KvdReport(self.report.merged(other.report))


def _hook(otherwise: Callable[[], Any]) -> Callable[[_F], _F]:
    """A hook of the engine: an unexpected error in it is logged and counted, and the engine gets
    `otherwise()`. With the option `measure`, its CPU time is counted too."""

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: KvdConnector, *args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time() if self._options.measure else 0.0
            try:
                return method(self, *args, **kwargs)
            except Exception:  # the engine must not die of its cache
                log.exception("kvd: unexpected error in %s; going on", method.__name__)
                self._count("errors")
                return otherwise()
            finally:
                if begun:
                    self._count("hook_cpu_seconds", time.thread_time() - begun)

        return call  # type: ignore[return-value]

    return wrap


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """Reuses and stores KV through a kvd daemon on this machine. See docs/engines.md."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """ConfigError (a start that is refused) for settings that can't be meant."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: Options = read_options(
            transfer.kv_connector_extra_config, str(transfer.kv_role)
        )
        check_hashing(vllm_config.cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._block_tokens = [int(group.kv_cache_spec.block_size) for group in groups]
        self._hash_block = int(kv_cache_config.hash_block_size or min(self._block_tokens))
        self._chunk = chunk_size(self._options.chunk_tokens, self._block_tokens, self._hash_block)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._shape: RankShape | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    'kvd: kv_load_failure_policy is "%s": a load that fails would fail its '
                    'request. Set it to "recompute"', transfer.kv_load_failure_policy
                )  # fmt: skip
            self._scheduler = SchedulerSide(
                self._options, self._new_client(memory=False), chunk_tokens=self._chunk,
                block_tokens=self._block_tokens, hash_block=self._hash_block,
                room=self._room_for_loads(),
            )  # fmt: skip

    def _room_for_loads(self) -> Room | None:
        """None where vLLM lets a request in only if all of it fits."""
        if self._vllm_config.scheduler_config.scheduler_reserve_full_isl:
            return None
        null = 1  # block 0 is nobody's
        return Room(int(self._kv_cache_config.num_blocks) - null, self._block_tokens)

    def _new_client(self, *, memory: bool) -> Client:
        options = self._options
        token = None
        if options.token_file:
            try:
                with open(options.token_file, "rb") as file:
                    token = file.read()
            except OSError as error:
                raise ConfigError(f"token_file can't be read: {error}") from error
        return Client(
            options.socket,
            timeout_s=max(options.load_deadline_s, options.store_deadline_s),
            name="vllm-worker" if memory else "vllm-scheduler",
            group=group_secret(str(self._kv_transfer_config.engine_id)),
            token=token,
            expected_instance=options.instance or None,
            map_memory=memory,
            prefault=memory and options.prefault,
        )

    def _count(self, name: str, number: float = 1) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.counts.add(name, number)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdStats | None:
        return KvdStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvdPromMetrics:
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_hook(lambda: None)
    def get_kv_connector_stats(self) -> KvdStats | None:
        side = self._scheduler or self._worker
        taken = side.counts.take() if side is not None else {}
        return KvdStats(data=taken) if taken else None

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None

    # -- the worker's hooks ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Look at the pages; a layout that kvd does not keep turns it off for this engine."""
        try:
            check_engine(self._vllm_config)
            pages = worker_pages(self._vllm_config, self._kv_cache_config, kv_caches, self._chunk)
        except KvdError as error:
            self._shape = rank_shape(self._vllm_config, self._kv_cache_config, None, str(error))
            return
        shape = rank_shape(self._vllm_config, self._kv_cache_config, pages, "")
        self._shape = shape
        self._worker = WorkerSide(
            self._options, self._new_client(memory=True), pages,
            shard=(shape.pp, shape.tp // shape.replicas), writes=shape.tp % shape.replicas == 0,
        )  # fmt: skip

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return KvdHandshake(self._shape) if self._shape is not None else None

    @_hook(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.plan)

    @_hook(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request is scheduled: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Chunks are stored whole, over all layers, after the forward."""

    @_hook(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.submit_stores(self._get_connector_metadata().plan)

    @_hook(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.results()
        several = len(self._kv_cache_config.kv_cache_groups) > 1
        # Block ids name a block within one group only; with several the request fails as a whole.
        self._invalid = set() if several else results.invalid
        return KVConnectorTransferResults(
            finished_recving=results.received, failed_recving=results.failed if several else set()
        )

    _invalid: set[int] = set()  # noqa: RUF012 - replaced, never changed

    @_hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    @_hook(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.report() if self._worker is not None else None
        return KvdReport(report) if report is not None else None

    # -- the scheduler's hooks ------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have told their shapes: the identity is known, or why there is none."""
        if self._scheduler is None:
            return
        ranks = {key: told.shape for key, told in metadata.items()}
        seed = resolve_none_hash_seed(None)
        try:
            spec = spec_of(
                self._vllm_config, self._options, ranks, self._chunk, len(self._block_tokens),
                seed, vllm.__version__,
            )  # fmt: skip
        except (KvdError, OSError) as error:
            log.warning("kvd: this engine runs without kvd: %s", error)
            return
        self._scheduler.start(spec, len(ranks), seed)

    @_hook(lambda: None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_hook(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    @_hook(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        ids = blocks.get_block_ids() if num_external_tokens else ()
        try:
            self._scheduler.allocated(request, ids, num_external_tokens)
        except Exception:
            if num_external_tokens:  # the engine now waits for this load
                self._scheduler.break_load(request, ids)
            raise

    @_hook(lambda: KvdStep(StepPlan()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return KvdStep(StepPlan())
        return KvdStep(self._scheduler.plan(scheduler_output))

    @_hook(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.worker_output(
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            connector_output.invalid_block_ids or (),
            meta.report if meta is not None else None,
        )

    @_hook(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @_hook(bool)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_push_work

    def take_events(self) -> Iterable[Any]:
        """None: only the daemon knows what it evicts, and a router that hears of stores alone
        predicts hits that are gone."""
        return ()

    @_hook(bool)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else None
