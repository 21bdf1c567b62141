"""kvd for SGLang's HiCache: a storage backend, `KvdHiCache`, loaded as its dynamic backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "kvd", "module_path": "kvd.connectors.sglang",
        "class_name": "KvdHiCache", "interface_v1": 1}'

The law of this package: kvd may only save time. Whatever the daemon does or fails to do, SGLang
gets its answer within a deadline, and a page is called delivered only after the check that follows
its last byte. Pages whose identity can't be known are never stored and never found.

Importing this package needs neither SGLang nor torch; using the class does. Who does what:
`backend` is the class that SGLang sees, `traffic` moves pages between host memory and the daemon,
`pages` knows where a page's bytes lie, `identity` and `keys` say what a page is, `daemon` decides
whether to ask.
"""

from __future__ import annotations

from typing import Any

from kvd.errors import ConfigError

__all__ = ["KvdHiCache", "SglangMissing"]


class SglangMissing(ConfigError, ImportError):
    """SGLang, which this backend is a part of, can't be imported here."""


def __getattr__(name: str) -> Any:
    if name != "KvdHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import sglang.srt.mem_cache.hicache_storage  # noqa: F401
    except ImportError as error:
        raise SglangMissing(
            f"kvd.connectors.sglang.KvdHiCache is a storage backend of SGLang, which can't be "
            f"imported here ({error}): install sglang (tested: 0.5.23) in this environment, or "
            "install kvd in SGLang's"
        ) from error
    from kvd.connectors.sglang.backend import KvdHiCache

    return KvdHiCache
