"""The few names of vLLM 0.32 that the connector imports, for tests without vLLM.

`install()` puts them into sys.modules, unless the real vLLM is there. Signatures and defaults are
those of vLLM's base classes; `tests/engines` shows that the real ones fit too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class CacheHitSource(StrEnum):
    HOST = "host"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA:
    pass


class KVConnectorMetadata:
    pass


class KVConnectorHandshakeMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


class KVConnectorBase_V1:
    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def get_external_cache_hit_sources(self, request: Any, tokens: int) -> dict[Any, int]:
        return {self._cache_hit_source: tokens} if tokens else {}


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        self._counter_cls = next(iter(metric_types.values()))
        self.per_engine_labelvalues = per_engine_labelvalues


class KVConnectorFactory:
    registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @classmethod
    def register_connector(cls, name: str, module: str, attribute: str) -> None:
        if name in cls.registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registry[name] = (module, attribute)


def create_metric_per_engine(metric: Any, values: dict[int, list[object]]) -> dict[int, Any]:
    return {index: metric.labels(*labels) for index, labels in values.items()}


def resolve_none_hash_seed(hash_fn: Any) -> str:
    return os.getenv("PYTHONHASHSEED") or "vllm-none-hash"


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0+fake"},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        c.__name__: c
        for c in (
            KVConnectorBase_V1,
            KVConnectorHandshakeMetadata,
            KVConnectorMetadata,
            KVConnectorRole,
            KVConnectorTransferResults,
            KVConnectorWorkerMetadata,
            SupportsHMA,
        )
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": KVConnectorPromMetrics,
        "KVConnectorStats": KVConnectorStats,
    },
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": KVConnectorFactory},
    "vllm.v1.core.kv_cache_utils": {"resolve_none_hash_seed": resolve_none_hash_seed},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm.v1.metrics.utils": {"create_metric_per_engine": create_metric_per_engine},
}


def install() -> None:
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is not None:
        return
    for name, content in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                module = types.ModuleType(parent)
                # Without a spec, find_spec raises; without a loader, it is not installed.
                module.__spec__ = importlib.machinery.ModuleSpec(parent, None)
                module.__path__ = []  # type: ignore[attr-defined]
                sys.modules[parent] = module
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
