"""The connector's counts as vLLM's stats and Prometheus metrics.

The law of this module: what arrives here is plain numbers by declared names; every declared name
is registered, so that no engine dies of a name that its front end does not know.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvd.connectors.vllm.stats import COUNTERS

__all__ = ["KvdPromMetrics", "KvdStats"]


class KvdStats(KVConnectorStats):
    """`data`: name -> what was added in the interval."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {
            f"kvd {name.replace('_', ' ')}": round(number, 3)
            for name, number in sorted(self.data.items())
        }

    def is_empty(self) -> bool:
        return not self.data


class KvdPromMetrics(KVConnectorPromMetrics):
    """`vllm:kvd_NAME_total`, one a declared name."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:kvd_{name}", documentation=told, labelnames=labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, told in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            counter = self._counters.get(name, {}).get(engine_idx)
            if counter is not None and number > 0:
                counter.inc(number)
