"""SGLang's own classes. Importing them takes a quarter of a minute."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon import DaemonProcess

_models = itertools.count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="64MiB") as process:
        yield process


@pytest.fixture
def model() -> str:
    """A name that no other test uses, so that all may share a daemon."""
    return f"model-{next(_models)}"


@pytest.fixture
def make(daemon: DaemonProcess) -> Iterator[Callable[..., Any]]:
    """`make(pool, model=…)`: a backend from SGLang's factory, registered as SGLang does it."""
    import real
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made: list[Any] = []

    def backend(pool: Any, **told: Any) -> Any:
        config = real.config_of(told.pop("socket", daemon.socket), **told)
        made.append(StorageBackendFactory.create_backend("dynamic", config, pool))
        made[-1].register_mem_pool_host(pool)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield backend
    for one in made:
        one.close()
