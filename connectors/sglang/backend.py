"""KvdHiCache: what SGLang sees.

The law of this module: a thin translation. Each call of HiCacheStorage is answered in the shape
that SGLang expects, with "nothing" where the daemon, the pool or the identity is missing; no error
of kvd leaves it once it is made. A model that keeps more than attention KV is refused as a whole,
by the name of what kvd does not keep: KV without its companions would be wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransferResult,
)

from kvd.client import as_bytes, copy_into, copy_out
from kvd.connectors.sglang.config import read_options
from kvd.connectors.sglang.daemon import Daemon
from kvd.connectors.sglang.identity import server_facts, shard_of, spec_of, weight_version
from kvd.connectors.sglang.keys import page_hashes, place_of
from kvd.connectors.sglang.pages import PageTable, page_table
from kvd.connectors.sglang.stats import Stats
from kvd.connectors.sglang.traffic import Traffic
from kvd.errors import SpecError

__all__ = ["KvdHiCache"]

log = logging.getLogger(__name__)


class KvdHiCache(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """SGLang's HiCache pages in kvd.

    Made by SGLang's dynamic backend; `storage_config.extra_config` are the settings
    (kvd.connectors.sglang.config.Options). ConfigError on one that is unknown or wrong. Nothing is
    stored or found before `register_mem_pool_host`, and nothing at all while `refused` says why.
    `stats` counts what happened. Any thread may call.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._options = read_options(extra)
        self.stats = Stats()
        self.refused = "no host pool is registered yet"
        self._lock = threading.RLock()
        self._pool: Any = None
        self._table: PageTable | None = None
        self._traffic: Traffic | None = None
        self._version = ""
        self._foreign = ""  # a side pool that kvd does not keep
        self._closed = False
        self._daemon = Daemon(self._options, self.stats, f"sglang rank {storage_config.tp_rank}")
        if extra.get("backend_name") and not extra.get("interface_v1"):
            log.warning(
                'kvd: "interface_v1": 1 is not set in hicache-storage-backend-extra-config; every '
                "page is copied once more"
            )

    # -- pools ----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where pages lie, and what they are; make the first contact with the daemon."""
        super().register_mem_pool_host(mem_pool_host)
        with self._lock:
            if mem_pool_host is not self._pool:
                self._pool = mem_pool_host
                self._identify()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """The KV pool once more; any other is refused by its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) == str(PoolName.KV):
            self.register_mem_pool_host(host_pool)
            return
        with self._lock:
            if not self._foreign:
                self._foreign = str(host_pool_name)
                self._refuse(f"the model keeps {host_pool_name} state beside its KV ("
                             f"{type(host_pool).__name__}), which kvd does not keep")  # fmt: skip

    # -- asking ---------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """The number of leading keys that are there now, with this rank's part."""
        traffic = self._ready(len(keys))
        return traffic.leading(self._hashes(keys)) if traffic else 0

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        if not all(self._ours(transfer) for transfer in pool_transfers or ()):
            return PoolTransferResult.empty()
        found = self.batch_exists(keys, extra_info)
        if not found:
            return PoolTransferResult.empty()
        return PoolTransferResult(found, {PoolName.KV: found}, list(range(1, found + 1)))

    # -- zero copy ------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Fill the pages that `host_indices` names; one answer a key. A page that is not True
        may have been written to."""
        return self._zero_copy(keys, host_indices, self._get)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store the pages that `host_indices` names; one answer a key. A rank that is not the
        writer of its pages (MLA) stores nothing, and tells what is there."""

        def store(traffic: Traffic, table: PageTable, hashes: list[bytes], pages: list[int]) -> Any:
            if not self._config.is_storage_writer:
                return traffic.present(hashes)
            fill = _copier(table.save, pages)
            return traffic.store(hashes, fill, place_of(extra_info))

        return self._zero_copy(keys, host_indices, store)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        return {t.name: self._transfer(t, self.batch_get_v1, extra_info) for t in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        return {t.name: self._transfer(t, self.batch_set_v1, extra_info) for t in transfers}

    # -- one tensor a page ------------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        sizes = None if target_sizes is None else [target_sizes]
        found = self.batch_get([key], None if target_location is None else [target_location], sizes)
        return found[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Each page that is there, in its target (or, without targets, in a new flat tensor)."""
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        traffic, table = self._ready(len(keys)), self._table
        if traffic is None or table is None:
            return nothing
        hashes = self._hashes(keys)
        targets = list(target_locations) if target_locations is not None else [
            torch.empty(table.nbytes // table.dtype.itemsize, dtype=table.dtype) for _ in hashes
        ]  # fmt: skip
        good = self._fitting(targets[: len(hashes)], table)
        got = traffic.load(
            hashes[:good], lambda item, slot: copy_out(slot, targets[item]), every=True
        )
        found: list[torch.Tensor | None] = [
            targets[i] if is_there else None for i, is_there in enumerate(got)
        ]
        return found + nothing[len(found) :]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all pages are there now. The interface tells no prefix: see keys.place_of."""
        traffic, table = self._ready(len(keys)), self._table
        if traffic is None or table is None or values is None:
            return not len(keys)
        hashes = self._hashes(keys)
        if not self._config.is_storage_writer:
            return len(hashes) == len(keys) and all(traffic.present(hashes))
        pages = [v.contiguous() if isinstance(v, torch.Tensor) else v for v in values]
        good = self._fitting(pages[: len(hashes)], table)
        stored = traffic.store(
            hashes[:good], lambda item, slot: copy_into(slot, pages[item]), place_of(None)
        )
        return good == len(keys) and all(stored)

    # -- the whole ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Evict all pages of this identity (this model, dtype, layout, stage; all ranks)."""
        traffic = self._ready(0)
        if traffic is not None and not traffic.clear():
            log.warning("kvd: the pages were not cleared, the daemon did not answer")

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics: pages and GiB/s of each batch since the last call. kvd's own
        counters are in `stats`."""
        loads, stores = self.stats.take()
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return StorageMetrics(
            prefetch_pgs=[moved.pages for moved in loads],
            backup_pgs=[moved.pages for moved in stores],
            prefetch_bandwidth=[moved.gib_per_s for moved in loads],
            backup_bandwidth=[moved.gib_per_s for moved in stores],
        )

    def close(self) -> None:
        """End the session; later calls find nothing. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._traffic, self.refused = True, None, "the backend was closed"
        self._daemon.close()
        told = sorted(self.stats.snapshot().items())
        log.info("kvd kept: %s", ", ".join(f"{name} {n}" for name, n in told) or "nothing")

    # -- what it stands on ------------------------------------------------------------------------

    def _identify(self) -> None:
        """Find out what pages are. Anything unknown is said once, and nothing is cached."""
        self._version = weight_version()
        self._traffic = None
        if self._foreign or self._closed:
            return
        try:
            self._table = page_table(self._pool)
            spec = spec_of(self._config, self._pool, self._table, self._options, server_facts(),
                           _release(), self._version)  # fmt: skip
            shard = shard_of(self._config, spec)
        except SpecError as error:
            self._refuse(str(error))
            return
        traffic = Traffic(self._daemon, spec, shard, self._options, self.stats)
        self.refused = ""
        if traffic.start():
            log.info(
                "kvd keeps pages of %d tokens, %d bytes; spec %s, shard %d of %d, layout %s",
                spec.chunk_tokens, self._table.nbytes, spec.digest.hex()[:16], shard,
                len(spec.shards), self._pool.layout,
            )  # fmt: skip
        self._traffic = traffic

    def _refuse(self, reason: str) -> None:
        self._traffic, self.refused = None, reason
        log.warning("kvd is not used: %s", reason)

    def _ready(self, pages: int) -> Traffic | None:
        """The way to the daemon; None while nothing can be cached."""
        traffic = self._traffic
        if traffic is not None and weight_version() != self._version:
            with self._lock:
                if self._traffic is not None and weight_version() != self._version:
                    log.warning("kvd: SGLang's weights have another version now")
                    self._identify()
                traffic = self._traffic
        if traffic is None:
            self.stats.add("refused", pages)
        return traffic

    def _hashes(self, keys: Sequence[str]) -> list[bytes]:
        hashes = page_hashes(keys)
        self.stats.add("odd_keys", len(keys) - len(hashes))
        return hashes

    def _zero_copy(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        move: Callable[[Traffic, PageTable, list[bytes], list[int]], list[bool]],
    ) -> list[bool]:
        traffic, table = self._ready(len(keys)), self._table
        if traffic is None or table is None:
            return [False] * len(keys)
        hashes = self._hashes(keys)
        try:
            pages = table.numbers(host_indices, len(keys))[: len(hashes)]
        except ValueError as error:
            self.stats.add("odd_indices", len(keys))
            log.warning("kvd: pages were not moved: %s", error)
            return [False] * len(keys)
        done = move(traffic, table, hashes, pages)
        return done + [False] * (len(keys) - len(done))

    @staticmethod
    def _get(
        traffic: Traffic, table: PageTable, hashes: list[bytes], pages: list[int]
    ) -> list[bool]:
        return traffic.load(hashes, _copier(table.load, pages), every=False)

    def _transfer(self, transfer: Any, move: Callable[..., list[bool]], extra: Any) -> list[bool]:
        keys = transfer.keys or []
        if not self._ours(transfer) or transfer.host_indices is None:
            return [False] * len(keys)
        return move(keys, transfer.host_indices, extra)

    def _ours(self, transfer: Any) -> bool:
        """Whether it is the KV pool's; the first other one is refused by its name."""
        if str(transfer.name) == str(PoolName.KV):
            return True
        self.stats.add("foreign_pools")
        with self._lock:
            if not self._foreign:
                self._foreign = str(transfer.name)
                self._refuse(f"SGLang asks for pages of the pool {transfer.name}, which kvd does "
                             "not keep")  # fmt: skip
        return False

    def _fitting(self, tensors: Sequence[Any], table: PageTable) -> int:
        """How many leading tensors are one page each: its bytes, in its dtype, on the host."""
        for good, tensor in enumerate(tensors):
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.dtype == table.dtype
                and tensor.is_contiguous()
                and tensor.device.type == "cpu"
                and as_bytes(tensor).nbytes == table.nbytes
            ):
                self.stats.add("odd_values", len(tensors) - good)
                return good
        return len(tensors)


def _copier(
    copy: Callable[[int, memoryview], None], pages: list[int]
) -> Callable[[int, memoryview], None]:
    return lambda item, slot: copy(pages[item], slot)


def _release() -> str:
    import sglang

    return str(sglang.__version__)
