"""The backend under SGLang's own classes: host pools, factory, page hashes, fault injectors."""

from __future__ import annotations

import importlib.util
import inspect
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

_spec = importlib.util.find_spec("sglang")
if _spec is None or _spec.loader is None:
    pytest.skip("sglang is not installed here: make test-sglang", allow_module_level=True)

import real  # noqa: E402
import torch  # noqa: E402
from daemon import DaemonProcess  # noqa: E402
from sglang.srt.mem_cache import hicache_storage as hs  # noqa: E402

from kvd.connectors.sglang import KvdHiCache, identity  # noqa: E402
from kvd.errors import ConfigError  # noqa: E402

POOLS = {
    **{f"mha {x}": (real.mha, x) for x in ("page_first", "page_first_direct", "layer_first",
                                           "page_head")},
    **{f"mla {x}": (real.mla, x) for x in ("page_first", "page_first_direct", "layer_first",
                                           "page_first_kv_split")},
}  # fmt: skip
FLAT = [name for name in POOLS if "split" not in name]


def pool_of(name: str, seed: int | None = None, **more: Any) -> Any:
    kind, layout = POOLS[name]
    pool = kind(layout, **more)
    if seed is not None:
        real.fill(pool, seed)
    return pool


def chain(pages: int, seed: int = 0) -> list[str]:
    return real.page_hashes([seed * 1000 + n for n in range(pages * 16)])


def test_the_class_is_what_the_factory_wants_and_answers_every_call_of_the_base() -> None:
    assert issubclass(KvdHiCache, hs.HiCacheStorage)
    assert not KvdHiCache.__abstractmethods__
    for name, method in inspect.getmembers(hs.HiCacheStorage, inspect.isfunction):
        mine = list(inspect.signature(getattr(KvdHiCache, name)).parameters)
        assert mine == list(inspect.signature(method).parameters), name
        if name not in ("on_host_pools_registered", "__init__"):
            assert getattr(KvdHiCache, name) is not method, f"{name} is left to the base"


@pytest.mark.parametrize("name", POOLS)
def test_pages_are_byte_identical_by_version_1(make, model: str, name: str) -> None:
    """K37, K80: SGLang's own pools, each layout, into another pool, at other pages."""
    ours, theirs = pool_of(name, 1), pool_of(name, 2)
    mla = name.startswith("mla")
    keys, at = chain(9), ours.alloc(9 * 16)
    writer = make(ours, model=model, is_mla=mla)
    assert not writer.refused
    assert writer.batch_set_v1(keys, at) == [True] * 9
    to = theirs.alloc(20 * 16)[11 * 16 :]
    reader = make(theirs, model=model, is_mla=mla)
    assert reader.batch_exists(keys) == 9
    assert reader.batch_get_v1(keys, to) == [True] * 9
    assert real.content(theirs, to) == real.content(ours, at)


@pytest.mark.parametrize("name", FLAT)
def test_the_generic_interface_reads_what_version_1_wrote_and_back(
    make, model: str, name: str
) -> None:
    """As HiCacheController does it: a flat page out of the pool, a flat page into it."""
    ours, theirs = pool_of(name, 3), pool_of(name, 4)
    mla = name.startswith("mla")
    first, second = (make(p, model=model, is_mla=mla) for p in (ours, theirs))
    keys, at, to = chain(6), ours.alloc(96), theirs.alloc(96)
    assert first.batch_set(keys[:3], [ours.get_data_page(int(at[i * 16])) for i in range(3)])
    assert all(first.batch_set_v1(keys[3:], at[48:]))
    got = second.batch_get(keys, [theirs.get_dummy_flat_data_page() for _ in keys])
    for i, page in enumerate(got):
        theirs.set_from_flat_data_page(int(to[i * 16]), page)
    assert real.content(theirs, to) == real.content(ours, at)
    again = theirs.alloc(96)
    assert all(second.batch_get_v1(keys, again))
    assert real.content(theirs, again) == real.content(ours, at)


@pytest.mark.parametrize("name", POOLS)
def test_version_2_carries_the_kv_pool(make, model: str, name: str) -> None:
    ours, theirs = pool_of(name, 5), pool_of(name, 6)
    mla = name.startswith("mla")
    first, second = (make(p, model=model, is_mla=mla) for p in (ours, theirs))
    keys, at, to = chain(5), ours.alloc(80), theirs.alloc(80)
    kv = hs.PoolName.KV
    first.register_mem_host_pool_v2(ours, kv)
    out, back = (hs.PoolTransfer(name=kv, host_indices=i, keys=keys) for i in (at, to))
    assert first.batch_set_v2([out]) == {kv: [True] * 5}
    assert second.batch_exists_v2(keys).kv_hit_pages == 5
    assert hs.count_pool_hits(second.batch_get_v2([back])) == {kv: 5}
    assert real.content(theirs, to) == real.content(ours, at)
    mamba = hs.PoolTransfer(name=hs.PoolName.MAMBA, host_indices=to, keys=keys)
    assert second.batch_exists_v2(keys, [mamba]) == hs.PoolTransferResult.empty()
    assert "mamba" in second.refused


def test_keys_and_values_of_different_width(make, model: str) -> None:
    ours, theirs = (real.mha("page_first", v_dim=8) for _ in range(2))
    real.fill(ours)
    keys, at, to = chain(4), ours.alloc(64), theirs.alloc(64)
    assert all(make(ours, model=model).batch_set_v1(keys, at))
    assert all(make(theirs, model=model).batch_get_v1(keys, to))
    assert real.content(theirs, to) == real.content(ours, at)


def test_dtypes_of_one_size_and_layouts_do_not_meet(make, model: str) -> None:
    """K11, with SGLang's own pools."""
    pools = [
        *(real.mha("page_first", dtype=d) for d in (torch.bfloat16, torch.float16)),
        *(real.mha("page_first", dtype=d) for d in (torch.float8_e4m3fn, torch.float8_e5m2)),
        *(real.mha(layout) for layout in ("page_first_direct", "layer_first", "page_head")),
    ]
    keys = chain(3)
    for number, pool in enumerate(pools):
        backend = make(pool, model=model)
        assert not backend.refused
        assert backend.batch_exists(keys) == 0, f"pool {number} hits another one's pages"
        assert all(backend.batch_set_v1(keys, pool.alloc(48)))


def test_salts_and_adapters_are_in_sglangs_hashes(make, model: str) -> None:
    """K47: tenant B never finds what tenant A stored of the same tokens; A finds all."""
    pool = pool_of("mha page_first", 1)
    backend = make(pool, model=model)
    tokens = list(range(64))
    tenants = [{"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"extra_key": "b"}]
    chains = [real.page_hashes(tokens, **tenant) for tenant in tenants]
    assert all(backend.batch_set_v1(chains[0], pool.alloc(64)))
    assert [backend.batch_exists(keys) for keys in chains] == [4, 0, 0, 0]
    assert backend.batch_exists(real.page_hashes(tokens)) == 0


def test_pools_without_whole_pages_are_refused_by_name(make, model: str) -> None:
    """K146, K147."""
    backend = make(real.mha("page_first", page_size=1, pages=256), model=model)
    assert "page_size is 1" in backend.refused
    backend = make(pool_of("mha page_first"), model=model, weights="")
    assert '"weights"' in backend.refused


def test_an_unknown_key_stops_the_factory(make, model: str) -> None:
    """K123."""
    with pytest.raises(ConfigError, match="did you mean verify"):
        make(pool_of("mha page_first"), model=model, verfy=True)


def test_the_fields_that_make_the_identity_are_sglangs(monkeypatch) -> None:
    """Renamed in a later release, they would be left out in silence."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    assert identity.server_facts() == {} and identity.weight_version() == ""

    class Args:
        def __getattr__(self, name: str) -> str:
            assert hasattr(ServerArgs, name) or name in ServerArgs.__annotations__ or name in {
                field for base in ServerArgs.__mro__ for field in vars(base).get(
                    "__annotations__", {})
            }, name  # fmt: skip
            return f"the {name}"

    monkeypatch.setattr(runtime_context._CONTEXT, "_server_args", Args())
    assert identity.server_facts()["model_path"] == "the model_path"
    assert hasattr(runtime_context, "get_serving")


def test_injected_failures_and_delays_never_give_wrong_bytes(make, model: str, monkeypatch) -> None:
    """SGLang's own injectors around the backend: what is True is right, the rest is a miss."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    ours, theirs = pool_of("mha layer_first", 7), pool_of("mha layer_first", 8)
    first, second = make(ours, model=model), make(theirs, model=model)
    assert type(first) is hs.HiCacheStorageFailureInjector
    at, to = ours.alloc(64), theirs.alloc(64)
    want, good, bad = real.content(ours, at), 0, 0
    for turn in range(40):
        keys = chain(4, turn)
        stored = first.batch_set_v1(keys, at)
        found = second.batch_exists(keys)
        got = second.batch_get_v1(keys, to)
        assert found in (0, 4) and (all(stored) or not any(got))
        good, bad = good + all(got), bad + (not any(got))
        if all(got):
            assert real.content(theirs, to) == want
        real.fill(theirs, turn)
    assert good and bad and good + bad == 40


def test_a_daemon_that_dies_or_hangs_is_a_miss_within_the_deadline(
    make, model: str, eventually
) -> None:
    """K92: through SGLang's classes; it comes back by itself."""
    short = dict.fromkeys(
        ("start_deadline_s", "lookup_deadline_s", "load_deadline_s", "store_deadline_s"), 0.3
    )
    with DaemonProcess() as other:
        pool = pool_of("mha page_first", 9)
        backend = make(pool, model=model, socket=other.socket, **short)
        keys, at, to = chain(4), pool.alloc(64), pool.alloc(64)
        assert all(backend.batch_set_v1(keys, at))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            other.signal(number)
            begin = time.monotonic()
            for _ in range(20):
                assert backend.batch_exists(keys) == 0
                assert not any(backend.batch_get_v1(keys, to))
                assert not any(backend.batch_set_v1(chain(4, 1), at))
            assert time.monotonic() - begin < 5
            if number == signal.SIGSTOP:
                other.signal(signal.SIGCONT)
            else:
                other.kill()
                other.start()
            eventually(lambda: backend.batch_exists(keys) == 4, timeout_s=20)
            assert all(backend.batch_get_v1(keys, to))
            assert real.content(pool, to) == real.content(pool, at)


def test_metrics_are_sglangs(make, model: str) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    pool = pool_of("mha page_first", 1)
    backend = make(pool, model=model)
    keys, at = chain(3), pool.alloc(48)
    backend.batch_set_v1(keys, at)
    backend.batch_get_v1(keys, at)
    metrics = backend.get_stats()
    assert isinstance(metrics, StorageMetrics)
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([3], [3])
