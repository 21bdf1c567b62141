"""The backend against a real daemon."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import fake_sglang as fake
import pytest
import torch
from sglang_kit import content, fill, hashes, wipe

from kvd.client import Client, Selector

MHA, MLA = fake.MHATokenToKVPoolHost, fake.MLATokenToKVPoolHost
Extra = fake.HiCacheStorageExtraInfo
LAYOUTS = ("page_first", "page_first_direct", "layer_first", "page_head")


def filled(kind: Any = MHA, *args: Any, seed: int = 1, **more: Any) -> Any:
    pool = kind(*args, **more)
    fill(pool, seed)
    return pool


def flat(pool: Any, indices: Any) -> list[torch.Tensor]:
    return [pool.get_data_page(int(i)) for i in indices[:: pool.page_size]]


def same(tensor: Any, page: torch.Tensor) -> bool:
    return tensor is not None and torch.equal(tensor.view(torch.uint8), page.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_identical_to_another_engine(make, model: str, layout: str) -> None:
    """K37: all bytes, whatever they mean as numbers, for each layout."""
    ours, theirs = filled(MHA, layout), MHA(layout)
    keys, at = hashes(9), ours.alloc(9 * 16)
    assert make(ours, model=model).batch_set_v1(keys, at) == [True] * 9
    other = make(theirs, model=model)
    wipe(theirs)
    to = theirs.alloc(20 * 16)[11 * 16 :]
    assert other.batch_exists(keys) == 9
    assert other.batch_get_v1(keys, to) == [True] * 9
    assert content(theirs, to) == content(ours, at)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_mla_pages_too(make, model: str, layout: str) -> None:
    ours, theirs = filled(MLA, layout), MLA(layout)
    keys, at, to = hashes(5), ours.alloc(80), theirs.alloc(80)
    assert all(make(ours, model=model, mla=True).batch_set_v1(keys, at))
    assert all(make(theirs, model=model, mla=True).batch_get_v1(keys, to))
    assert content(theirs, to) == content(ours, at)


@pytest.mark.parametrize("mla", [False, True], ids=["asymmetric", "kv split"])
def test_pages_of_several_tensors_come_back_whole(make, model: str, mla: bool) -> None:
    """K146: K, V and the index of a page are one chunk: all of it, or a miss."""
    split, wide = lambda: MLA("page_first_kv_split"), fake.AsymmetricMHATokenToKVPoolHost
    ours, theirs = (split(), split()) if mla else (wide(), wide())
    fill(ours)
    keys, at, to = hashes(5), ours.alloc(80), theirs.alloc(80)
    assert all(make(ours, model=model, mla=mla).batch_set_v1(keys, at))
    assert all(make(theirs, model=model, mla=mla).batch_get_v1(keys, to))
    assert content(theirs, to) == content(ours, at)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_generic_interface_and_zero_copy_read_each_other(make, model: str, layout: str) -> None:
    pool = filled(MHA, layout)
    backend = make(pool, model=model)
    keys, at = hashes(6), pool.alloc(96)
    pages = [page.clone() for page in flat(pool, at)]
    assert backend.batch_set(keys[:3], pages[:3])
    assert backend.batch_set_v1(keys[3:], at[48:]) == [True] * 3
    got = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    assert all(map(same, got, pages))
    assert all(map(same, backend.batch_get(keys), pages))
    to = pool.alloc(96)
    assert backend.batch_get_v1(keys, to) == [True] * 6
    assert all(map(same, flat(pool, to), pages))


def test_one_page_at_a_time(make, model: str) -> None:
    pool = filled()
    backend = make(pool, model=model)
    key, page = hashes(1)[0], pool.get_data_page(0)
    assert not backend.exists(key)
    assert backend.get(key) is None
    assert backend.set(key, page)
    assert backend.exists(key)
    target = pool.get_dummy_flat_data_page()
    assert backend.get(key, target) is target and same(target, page)


def test_version_2_is_the_kv_pool_and_no_other(make, model: str, caplog) -> None:
    """K146: pages of a model that keeps more than KV are not used without the rest."""
    ours, theirs = filled(), MHA()
    first, second = make(ours, model=model), make(theirs, model=model)
    first.register_mem_host_pool_v2(ours, fake.PoolName.KV)
    keys, at, to = hashes(4), ours.alloc(64), theirs.alloc(64)
    kv = fake.PoolName.KV
    assert first.batch_set_v2([fake.PoolTransfer(kv, at, keys=keys)]) == {kv: [True] * 4}
    found = second.batch_exists_v2([*keys, *hashes(1, "x")])
    assert found == fake.PoolTransferResult(4, {kv: 4}, [1, 2, 3, 4])
    assert second.batch_get_v2([fake.PoolTransfer(kv, to, keys=keys)]) == {kv: [True] * 4}
    assert content(theirs, to) == content(ours, at)

    mamba = fake.PoolTransfer(fake.PoolName.MAMBA, at, keys=keys)
    assert second.batch_exists_v2(keys, [mamba]) == fake.PoolTransferResult.empty()
    assert "mamba" in second.refused
    assert second.batch_exists(keys) == 0

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        first.register_mem_host_pool_v2(object(), fake.PoolName.DRAFT)
        first.register_mem_host_pool_v2(object(), fake.PoolName.MAMBA)
    assert "draft" in first.refused
    assert sum("kvd is not used" in r.message for r in caplog.records) == 1
    both = [fake.PoolTransfer(kv, to, keys=keys), mamba]
    assert first.batch_get_v2(both) == {kv: [False] * 4, fake.PoolName.MAMBA: [False] * 4}
    assert first.batch_set_v2(both) == {kv: [False] * 4, fake.PoolName.MAMBA: [False] * 4}


def test_what_is_there_is_the_leading_run_and_asking_leases_and_touches_nothing(
    make, model: str, daemon
) -> None:
    pool = filled()
    backend = make(pool, model=model)
    keys, at = hashes(12), pool.alloc(192)
    backend.batch_set_v1(keys[:5], at[:80])
    backend.batch_set_v1(keys[6:], at[96:], Extra(keys[:6]))
    with Client(daemon.socket) as client:

        def state() -> tuple[int, list[Any]]:
            rows = client.rows("chunks", Selector(spec=backend._traffic.spec.digest))
            leased = sum(tier["leased_chunks"] for tier in client.stat()["tiers"])
            return leased, sorted((row["hash"], row["hits"]) for row in rows)

        before = state()
        assert before[0] == 0 and len(before[1]) == 11
        assert backend.batch_exists(keys) == 5
        assert backend.batch_exists(keys[1:3]) == 2
        assert backend.batch_exists(keys[5:]) == 0
        assert backend.batch_exists([]) == 0
        assert state() == before


def test_more_keys_than_a_request_may_name_are_asked_for_in_several(make, model: str) -> None:
    """131,072 tokens in pages of 16 are 8,192 keys."""
    pool = filled(pages=256, layers=1, heads=1)
    backend = make(pool, model=model)
    keys = hashes(8192)
    at = pool.alloc(256 * 16)
    for begin in range(0, 5120, 256):
        assert all(backend.batch_set_v1(keys[begin : begin + 256], at, Extra(keys[:begin])))
    assert backend.batch_exists(keys) == 5120


def test_a_load_tells_page_by_page_and_stops_at_the_first_miss(make, model: str, daemon) -> None:
    """K31, K26: only what was delivered is True; the memory of the others is not touched."""
    pool = filled()
    backend = make(pool, model=model)
    keys, at = hashes(10), pool.alloc(160)
    backend.batch_set_v1(keys, at)
    want, to = content(pool, at), pool.alloc(160)
    with Client(daemon.socket) as client:
        spec = backend._traffic.spec.digest
        client.evict(Selector(spec=spec, keys=tuple(bytes.fromhex(k) for k in keys[5:])))
    before = content(pool, to)
    assert backend.batch_get_v1(keys, to) == [True] * 5 + [False] * 5
    assert content(pool, to) == want[:5] + before[5:]
    backend.clear()
    assert backend.batch_get_v1(keys, to) == [False] * 10
    assert backend.batch_get(keys) == [None] * 10
    assert backend.stats["load.miss"] >= 1


def test_prefix_keys_make_one_chain_and_eviction_goes_from_its_leaves(
    make, model: str, daemon
) -> None:
    """K38: pages of later batches hang on those of earlier ones."""
    pool = filled()
    backend = make(pool, model=model)
    keys, at = hashes(9), pool.alloc(9 * 16)
    for begin in range(0, 9, 3):
        told = Extra(prefix_keys=keys[:begin])
        assert all(backend.batch_set_v1(keys[begin : begin + 3], at[:48], told))
    with Client(daemon.socket) as client:
        rows = list(client.rows("chunks", Selector(spec=backend._traffic.spec.digest)))
    by_hash = {row["hash"]: row for row in rows}
    assert [by_hash[key]["index"] for key in keys] == list(range(9))
    assert [by_hash[key]["parent"] for key in keys[1:]] == keys[:-1]


def test_pages_that_lie_in_another_place_of_a_chain_are_found_and_gone_around(
    make, model: str
) -> None:
    """Without prefix keys each batch is a chain of its own: a page is page 0 for one engine and
    page 3 for another. It is there all the same, and what follows it can be stored."""
    pool = filled()
    backend = make(pool, model=model)
    keys, at = hashes(8), pool.alloc(128)
    assert all(backend.batch_set_v1(keys[3:5], at[48:80]))
    assert all(backend.batch_set_v1(keys, at))
    assert backend.stats["elsewhere"] == 5 and backend.stats["stored"] == 8
    assert backend.batch_exists(keys) == 8
    to = pool.alloc(128)
    assert all(backend.batch_get_v1(keys, to))
    assert content(pool, to) == content(pool, at)
    assert all(backend.batch_set_v1(keys[4:], at[64:], Extra(keys[:4])))


def test_a_page_that_another_engine_is_storing_is_waited_for(make, model: str, daemon) -> None:
    pool = filled()
    backend = make(pool, {"busy_wait_s": 0.2}, model=model)
    keys, at = hashes(4), pool.alloc(64)
    spec = backend._traffic.spec
    raw = [bytes.fromhex(k) for k in keys]
    with Client(daemon.socket) as client:
        with client.reserve(spec, raw[1:3], parent=raw[0], index0=1) as reservation:
            assert backend.batch_set_v1(keys, at) == [True, False, False, True]
            assert backend.stats["store.busy"] == 2
            for index, page in enumerate(content(pool, at)[1:3]):
                reservation.view(index)[:] = page
            reservation.commit()
        assert backend.batch_set_v1(keys, at) == [True] * 4
        backend.clear()
        with client.reserve(spec, raw[1:3], parent=raw[0], index0=1):
            pass  # it gives up
        assert backend.batch_set_v1(keys, at) == [True] * 4


def test_every_rank_has_its_own_part(make, model: str) -> None:
    """K102: a rank finds what it stored itself; SGLang takes the least of all ranks."""
    pools = [filled(seed=rank) for rank in range(2)]
    first, second = (make(pool, model=model, ranks=2, rank=r) for r, pool in enumerate(pools))
    keys, at = hashes(5), pools[0].alloc(80)
    assert all(first.batch_set_v1(keys, at))
    assert (first.batch_exists(keys), second.batch_exists(keys)) == (5, 0)
    assert all(second.batch_set_v1(keys[:3], at[:48]))
    assert (first.batch_exists(keys), second.batch_exists(keys)) == (5, 3)
    for backend, pool in ((first, pools[0]), (second, pools[1])):
        want = content(pool, at[:48])
        to = pool.alloc(160)[112:]
        assert all(backend.batch_get_v1(keys[:3], to))
        assert content(pool, to) == want
    assert make(filled(), model=model, ranks=4).batch_exists(keys) == 0


def test_mla_is_written_once_and_read_by_all(make, model: str) -> None:
    """K82: ranks that hold the same store it once; the others tell what is there."""
    pools = [filled(MLA, seed=7) for _ in range(3)]
    ranks = [make(p, model=model, mla=True, ranks=3, rank=r) for r, p in enumerate(pools)]
    keys, at = hashes(5), pools[0].alloc(80)
    assert ranks[1].batch_set_v1(keys, at) == [False] * 5
    assert not ranks[1].batch_set(keys, flat(pools[1], at))
    assert ranks[0].batch_set_v1(keys, at) == [True] * 5
    assert ranks[2].batch_set_v1(keys, at) == [True] * 5
    assert ranks[2].batch_set(keys, flat(pools[2], at))
    assert [rank.stats["stored"] for rank in ranks] == [5, 0, 0]
    for rank, pool in zip(ranks, pools, strict=True):
        to = pool.alloc(160)[80:]
        assert all(rank.batch_get_v1(keys, to))
        assert content(pool, to) == content(pools[0], at)


@pytest.mark.parametrize("other", [
    {"pool": lambda: MHA(dtype=torch.float16)},
    {"pool": lambda: MHA("page_first_direct")},
    {"pool": lambda: MHA(heads=1, dim=16)},
    {"extra": {"weights": "others"}},
    {"model": "another"},
])  # fmt: skip
def test_another_identity_never_hits(make, model: str, other: dict[str, Any]) -> None:
    """K11: equal sizes and equal hashes are not enough."""
    pool = filled()
    keys, at = hashes(4), pool.alloc(64)
    assert all(make(pool, model=model).batch_set_v1(keys, at))
    stranger = other.get("pool", MHA)()
    backend = make(stranger, other.get("extra"), model=other.get("model", model))
    assert not backend.refused
    assert backend.batch_exists(keys) == 0
    assert not any(backend.batch_get_v1(keys, stranger.alloc(64)))


@pytest.mark.parametrize(("told", "reason"), [
    ({"extra": {"weights": None}}, "weights"),
    ({"model": None}, "model"),
    ({"pool": lambda: MHA(page_size=1)}, "page_size is 1"),
    ({"pool": object}, "not supported"),
])  # fmt: skip
def test_what_cannot_be_known_means_no_cache_and_is_said_once(
    make, model: str, told: dict[str, Any], reason: str, caplog
) -> None:
    """K147: the engine runs on without kvd; one warning names the reason."""
    pool = told.get("pool", MHA)()
    with caplog.at_level(logging.WARNING):
        backend = make(pool, told.get("extra"), model=told.get("model", model))
        indices = torch.arange(64)
        keys = hashes(4)
        assert backend.batch_set_v1(keys, indices) == [False] * 4
        assert backend.batch_get_v1(keys, indices) == [False] * 4
        assert backend.batch_get(keys) == [None] * 4
        assert not backend.batch_set(keys, [torch.zeros(1)] * 4)
        assert (backend.batch_exists(keys), backend.exists(keys[0])) == (0, False)
        backend.clear()
    assert reason in backend.refused
    said = [r for r in caplog.records if "kvd is not used" in r.message]
    assert len(said) == 1 and reason in said[0].message
    assert backend.stats["refused"] == 21


def test_nothing_is_cached_before_a_pool_is_registered_and_after_close(make, model: str) -> None:
    backend = make(None, model=model)
    assert backend.batch_exists(hashes(2)) == 0
    assert "no host pool" in backend.refused
    pool = filled()
    backend.register_mem_pool_host(pool)
    at = pool.alloc(32)
    assert all(backend.batch_set_v1(hashes(2), at))
    backend.close()
    backend.close()
    assert backend.batch_exists(hashes(2)) == 0
    assert backend.batch_set_v1(hashes(2), at) == [False, False]
    assert "closed" in backend.refused


def test_new_weights_in_a_running_engine_are_another_identity(
    make, model: str, monkeypatch
) -> None:
    """What was computed with the old weights is not found by the new ones, nor overwritten."""
    from kvd.connectors.sglang import backend as module

    version = ["default"]
    monkeypatch.setattr(module, "weight_version", lambda: version[0])
    pool = filled()
    backend = make(pool, model=model)
    keys, at = hashes(3), pool.alloc(48)
    assert all(backend.batch_set_v1(keys, at))
    version[0] = "step-1"
    assert backend.batch_exists(keys) == 0
    assert all(backend.batch_set_v1(keys[:2], at[:32]))
    version[0] = "default"
    assert backend.batch_exists(keys) == 3


def test_keys_and_values_that_are_no_pages_are_counted_and_not_stored(make, model: str) -> None:
    pool = filled()
    backend = make(pool, model=model)
    good, page = hashes(2), pool.get_data_page(0)
    for odd in ("short", "g" * 64, good[0] + "00", 7, None):
        assert backend.batch_set_v1([odd], torch.arange(16)) == [False]
        assert backend.batch_exists([odd]) == 0
    assert backend.stats["odd_keys"] == 10
    assert backend.batch_set_v1([good[0], "odd", good[1]], torch.arange(48)) == [
        True,
        False,
        False,
    ]
    for wrong in (page.view(torch.float16), page[:-1], page.float(), b"bytes", None):
        assert not backend.set(good[1], wrong)
        assert backend.get(good[0], wrong) is None or wrong is None
    assert backend.batch_set_v1(good, torch.arange(31)) == [False, False]
    assert backend.stats["odd_indices"] == 2 and backend.stats["odd_values"] > 0
    assert not backend.exists(good[1])


def test_clear_takes_this_identity_of_all_ranks_and_no_other(make, model: str) -> None:
    pools = [filled() for _ in range(3)]
    first = make(pools[0], model=model, ranks=2, rank=0)
    second = make(pools[1], model=model, ranks=2, rank=1)
    other = make(pools[2], model=model + "x")
    keys, at = hashes(3), torch.arange(48)
    for backend in (first, second, other):
        assert all(backend.batch_set_v1(keys, at))
    first.clear()
    assert [b.batch_exists(keys) for b in (first, second, other)] == [0, 0, 3]


def test_what_happened_is_counted_and_told_to_sglangs_metrics_once(make, model: str) -> None:
    """K131, K132."""
    pool = filled()
    backend = make(pool, model=model)
    keys, at = hashes(6), pool.alloc(96)
    backend.batch_set_v1(keys[:4], at[:64])
    backend.batch_set_v1(keys[:4], at[:64])
    backend.batch_exists(keys)
    backend.batch_get_v1(keys[:4], at[:64])
    told = Counter(backend.stats.snapshot())
    assert told == {"stored": 4, "present": 4, "asked": 6, "found": 4, "loaded": 4}
    metrics = backend.get_stats()
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([4], [4])
    assert all(rate > 0 for rate in metrics.prefetch_bandwidth + metrics.backup_bandwidth)
    assert backend.get_stats().prefetch_pgs == []
