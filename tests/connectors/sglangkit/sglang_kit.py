"""A daemon for all tests of a file, SGLang's names, and backends that are closed in the end."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fake_sglang as fake  # noqa: E402
from daemon import DaemonProcess  # noqa: E402

fake.install()

_models = itertools.count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(arena_size="64MiB") as process:
        yield process


def config_of(
    extra: dict[str, Any], *, rank: int = 0, ranks: int = 1, stage: int = 0, stages: int = 1,
    mla: bool = False, model: str | None = "m", **more: Any,
) -> fake.HiCacheStorageConfig:  # fmt: skip
    return fake.HiCacheStorageConfig(
        rank, ranks, stage, stages, 0, 1, mla, False, True, model, extra_config=extra, **more
    )


@pytest.fixture
def make(daemon: DaemonProcess) -> Iterator[Callable[..., Any]]:
    """`make(pool, model=…, rank=…, …)`: a backend for a pool; settings go to `extra`."""
    from kvd.connectors.sglang import KvdHiCache

    made: list[Any] = []

    def backend(pool: Any, extra: dict[str, Any] | None = None, **more: Any) -> Any:
        told = {"socket": daemon.socket, "weights": "w", "prefault": False, **(extra or {})}
        told = {key: value for key, value in told.items() if value is not None}
        made.append(KvdHiCache(config_of(told, **more), {}))
        if pool is not None:
            made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield backend
    for one in made:
        one.close()


@pytest.fixture
def model() -> str:
    """A name that no other test uses, so that all may share a daemon."""
    return f"model-{next(_models)}"


def hashes(count: int, seed: str = "") -> list[str]:
    """A chain of page hashes as SGLang makes them."""
    digest, found = hashlib.sha256(seed.encode()).digest(), []
    for number in range(count):
        digest = hashlib.sha256(digest + number.to_bytes(4, "little")).digest()
        found.append(digest.hex())
    return found


def fill(pool: Any, seed: int = 0) -> None:
    """Random bytes in all of the pool's memory; any bit pattern, not only numbers."""
    generator = torch.Generator().manual_seed(seed)
    for raw in memories(pool):
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def wipe(pool: Any) -> None:
    for raw in memories(pool):
        raw.fill_(0xEE)


def memories(pool: Any) -> list[Any]:
    """The pool's tensors as bytes."""
    found = {}
    for name in ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer"):
        value = getattr(pool, name, None)
        for tensor in value if isinstance(value, tuple) else (value,):
            if tensor is not None:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return list(found.values())


def content(pool: Any, indices: Any) -> list[bytes]:
    """The bytes of each page that `indices` names, as SGLang would send them."""
    import ctypes

    pages = indices.reshape(-1, pool.page_size)
    found = []
    for page in pages:
        pointers, sizes = pool.get_page_buffer_meta(page)
        parts = [ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)]
        found.append(b"".join(parts))
    return found
