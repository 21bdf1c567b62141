"""What stops a start, and what an engine is told instead of being cached."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from daemon import DaemonProcess
from engine_kit import (
    Engine,
    MambaSpec,
    Shape,
    SlidingWindowSpec,
    vllm_config,
)

from kvd.connectors.vllm.config import Options, chunk_size, read_options
from kvd.connectors.vllm.stats import COUNTERS, Counts
from kvd.errors import ConfigError, SpecError


def test_importing_it_needs_neither_vllm_nor_torch_and_does_nothing() -> None:
    code = (
        "import sys, threading, kvd.connectors.vllm as v; "
        "assert not {'torch', 'vllm', 'zmq', 'numpy'} & set(sys.modules), 'heavy'; "
        "assert threading.active_count() == 1; assert callable(v.register)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_entry_point_makes_it_known_once_and_again() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvd.connectors.vllm import register

    register()
    register()
    assert KVConnectorFactory.registry["KvdConnector"] == ("kvd.connectors.vllm", "KvdConnector")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"sockett": "/x"}, "did you mean socket?"),
        ({"zzzzzz": 1}, "known: socket"),
        ({"chunk_tokens": "256"}, "must be a whole number"),
        ({"chunk_tokens": True}, "must be a whole number"),
        ({"chunk_tokens": 5000}, "from 0 to 4096"),
        ({"lookup_deadline_s": 0}, "from 0.001 to 60"),
        ({"load_policy": "maybe"}, "one of always, never"),
        ({"verify": 1}, "true or false"),
        ({"socket": ""}, "must be a path"),
        ({"namespace": 3}, "must be text"),
    ],
)
def test_a_setting_that_cannot_be_meant_stops_the_start(extra: dict, says: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as caught:
        read_options(extra, "kv_both")
    assert says in str(caught.value)


def test_a_producer_only_stores_and_a_consumer_only_loads() -> None:
    assert read_options({}, "kv_both") == Options()
    assert read_options({}, "kv_producer").load_policy == "never"
    assert read_options({}, "kv_consumer").store_policy == "never"


@pytest.mark.parametrize(
    ("blocks", "chunk"),
    [([16], 256), ([32], 256), ([128], 256), ([400], 400), ([544], 544), ([640], 640), ([8], 256)],
)
def test_a_chunk_is_as_many_blocks_as_fit(blocks: list[int], chunk: int) -> None:
    """K147: the model's block size decides, not a global number."""
    assert chunk_size(0, blocks, blocks[0]) == chunk


def test_a_chunk_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    """K147."""
    with pytest.raises(ConfigError, match=r"multiple of 544.*: 544, 1088, 1632"):
        chunk_size(256, [544], 544)
    assert chunk_size(1088, [544], 544) == 1088
    assert chunk_size(0, [16, 24], 8) == 240
    with pytest.raises(ConfigError, match="none fits"):
        chunk_size(0, [8192], 8192)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "xxhash_cbor"])
def test_block_hashes_that_differ_between_processes_stop_the_start(
    daemon: DaemonProcess, algorithm: str
) -> None:
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256_cbor"):
        Engine(daemon.socket, config={"algorithm": algorithm})


@pytest.mark.parametrize("kind", [MambaSpec, SlidingWindowSpec])
def test_a_kv_group_that_is_not_kept_is_refused_by_name_and_the_engine_runs(
    daemon: DaemonProcess, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(daemon.socket, Shape(spec=kind)) as engine:
        warnings = [r for r in caplog.records if "runs without kvd" in r.getMessage()]
        assert len(warnings) == 1 and kind.__name__ in warnings[0].getMessage()
        assert engine.ask("a", list(range(100))) == 0
        assert engine.counts.get("stored_chunks", 0) == 0


def test_the_engine_says_once_that_failed_loads_would_fail_requests(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(daemon.socket, config={"policy": "fail"}):
        pass
    assert sum('Set it to "recompute"' in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("field", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_is_refused_by_name(field: str) -> None:
    from kvd.connectors.vllm.identity import check_engine

    config = vllm_config({})
    setattr(config.parallel_config, field, 2)
    with pytest.raises(SpecError, match=field):
        check_engine(config)
    config = vllm_config({})
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(SpecError, match="calculate_kv_scales"):
        check_engine(config)


def test_every_count_that_the_code_makes_is_declared_and_registered() -> None:
    counts = Counts()
    counts.add("loads", 2)
    counts.add("loads")
    assert counts.take() == {"loads": 3} and counts.take() == {}
    with pytest.raises(KeyError):
        counts.add("never heard of")

    from kvd.connectors.vllm import KvdConnector

    made: list[str] = []
    seen: list[tuple[str, float]] = []

    class Counter:
        def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
            made.append(name)
            self.name = name

        def labels(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(inc=lambda number: seen.append((self.name, number)))

    metrics = KvdConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), {object: Counter}, ["engine"], {0: ["0"]}
    )
    assert made == [f"vllm:kvd_{name}" for name in COUNTERS]
    metrics.observe({"loads": 3, "unheard": 1, "errors": -1}, 0)
    metrics.observe({"loads": 1}, 7)
    assert seen == [("vllm:kvd_loads", 3)]
    one, two = (KvdConnector.build_kv_connector_stats({"loads": n}) for n in (1, 2))
    assert one.aggregate(two).reduce() == {"kvd loads": 3}
