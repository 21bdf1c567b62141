"""The connector with a fault on demand: while the file $FAULT_FILE exists, every chunk of a load
but its first is taken for broken."""

from __future__ import annotations

import os
from typing import Any

from kvd.connectors.vllm import KvdConnector as Sound


class KvdConnector(Sound):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self._worker
        take = worker._take

        def sometimes(transfer: Any, job: Any, index: int) -> bool:
            took = take(transfer, job, index)
            return took and not (index and os.path.exists(os.environ["FAULT_FILE"]))

        worker._take = sometimes
