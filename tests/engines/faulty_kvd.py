"""The connector with a fault on demand: while the file $FAULT_FILE exists, every chunk of a load
but its first is taken for broken; while $HOLD_FILE exists, no load ends, so that all that are on
their way then end in one step."""

from __future__ import annotations

import os
from typing import Any

from kvd.connectors.vllm import KvdConnector as Sound
from kvd.connectors.vllm.worker import Results


class KvdConnector(Sound):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self._worker
        take, results = worker._take, worker.results

        def sometimes(transfer: Any, job: Any, index: int) -> bool:
            took = take(transfer, job, index)
            return took and not (index and os.path.exists(os.environ.get("FAULT_FILE", "")))

        def later() -> Results:
            if os.path.exists(os.environ.get("HOLD_FILE", "")):
                return Results(set(), set(), set())
            return results()

        worker._take, worker.results = sometimes, later
