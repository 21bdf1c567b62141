"""What kvd-bench stands on: its clocks, buffers and layouts, and the bare echo."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvd.tools.bench import machine
from kvd.tools.bench.daemon import Daemon
from kvd.tools.bench.echo import Echo
from kvd.tools.bench.keys import chain, spec
from kvd.tools.bench.layout import BLOCK, LAYERS, LAYOUTS, PAGE, Paged
from kvd.tools.bench.measure import MIB, Buffer, median, percentile, timed


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_are_page_aligned_and_leave_nothing_behind(shared: bool) -> None:
    buffer = Buffer(MIB, shared=shared)
    assert buffer.array.ctypes.data % mmap.PAGESIZE == 0
    buffer.fill(7)
    assert len(np.unique(buffer.array[:4096])) > 200
    buffer.close()


def test_a_folder_with_our_name_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stands beside a clone has one."""
    (tmp_path / "kvd").mkdir()
    monkeypatch.chdir(tmp_path)
    with Daemon(None, "--arena-size", "64MiB") as daemon:
        assert daemon.cpu_s() > 0


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(one) for one in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([3.0], 0.99) == 3
    assert median([1.0, 9.0, 2.0]) == 2


def test_a_sample_has_wall_and_cpu_time() -> None:
    sample = timed(lambda: sum(range(200_000)))
    assert 0 < sample.cpu_s < 10
    assert 0 < sample.wall_s < 60


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_what_is_gathered_comes_back_where_it_was(name: str) -> None:
    chunk_bytes, chunks = 2 * BLOCK, 3
    layout = LAYOUTS[name](chunk_bytes, chunks)
    slot = Buffer(chunk_bytes)
    try:
        assert not any(layout.same(chunk) for chunk in range(chunks))
        for chunk in range(chunks):
            layout.gather(chunk, slot.array)
            layout.scatter(chunk, slot.array)
        assert all(layout.same(chunk) for chunk in range(chunks))
        layout.wipe()
        assert not layout.same(1)
    finally:
        slot.close()
        layout.close()


def test_a_paged_chunk_lies_in_its_slot_layer_by_layer() -> None:
    layout = Paged(2 * BLOCK, 2)
    slot = Buffer(2 * BLOCK)
    try:
        layout.gather(1, slot.array)
        pools = layout._source.array.reshape(LAYERS, 4, PAGE)
        first, second = (int(place) for place in layout._places[1][:2])
        pages = slot.array.reshape(LAYERS, 2, PAGE)
        for layer in (0, 7, LAYERS - 1):
            assert np.array_equal(pages[layer, 0], pools[layer, first])
            assert np.array_equal(pages[layer, 1], pools[layer, second])
        del pools, pages
    finally:
        slot.close()
        layout.close()


def test_a_paged_chunk_is_whole_blocks() -> None:
    with pytest.raises(ValueError, match=str(BLOCK)):
        Paged(BLOCK + 4096, 1)


def test_the_echo_answers_from_a_process_of_its_own_and_ends() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as directory,
        Echo(os.path.join(directory, "echo")) as echo,
    ):
        assert 0 < echo.round_trip(b"x" * 256) < 10
        assert echo.pipelined(b"x" * 256, count=300, window=64) > 100
        assert echo.pipelined(b"x" * 256, count=10, window=64) > 0


def test_keys_are_new_each_time_and_specs_belong_to_nobody_else() -> None:
    one, other = chain(3), chain(3)
    assert one.length == 3 and (len(one.hashes), len(one.fingerprints)) == (96, 48)
    assert one.part(1, 3).part(0, 1) == one.part(1, 2)
    assert one.hashes != other.hashes
    first, second = spec("contiguous", 4096), spec("contiguous", 4096)
    first.validate()
    assert first.digest != second.digest


def test_the_machine_is_described() -> None:
    told = dict(machine.facts())
    assert {"cpu", "memory", "/dev/shm", "load", "kernel", "software"} <= set(told)
    assert all(told.values())
