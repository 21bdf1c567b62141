"""kvd for vLLM's V1 engine: `kv_connector="KvdConnector"`, module path `kvd.connectors.vllm`.

The law of this package: kvd may only save time. Whatever the daemon does or fails to do, the
engine goes on within a deadline, with the same tokens; what was not checked after its last byte is
reported as failed, and each load that was promised is reported exactly once. Importing this
package does nothing and needs neither vLLM nor torch: vLLM's own process parts import it several
times over.

Who does what: `scheduler` decides (it asks the daemon, matches, plans each step), `worker` carries
out (it moves pages, in threads), `connector` is the thin class that vLLM sees.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvdConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "KvdConnector":
        from kvd.connectors.vllm.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make `kv_connector="KvdConnector"` known without a module path: the entry point
    `vllm.general_plugins`, which vLLM calls in each of its processes. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KvdConnector", __name__, "KvdConnector")
    except ValueError:  # this process has done it before
        return
