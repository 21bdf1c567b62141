"""SIGKILL at random moments, a warm start with a million chunks, and engines that bring down what
tries them."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from nvme_kit import MIB, disk, du, rig, script
from tiers_kit import Chunk, Rig

from kvd.chunk import RECORD_DTYPE
from kvd.chunk.header import CHECK_AT, check_of
from kvd.errors import ConfigError
from kvd.tiers.base import Answer, Key, Place, Read
from kvd.tiers.nvme import choose
from kvd.tiers.nvme.layout import Geometry

WRITER = """
import os, sys, random
sys.path.insert(0, os.environ["PYTHONPATH"])
from pathlib import Path
from nvme_kit import rig, MIB
from tiers_kit import Chunk
from kvd.tiers.base import Answer, Place

it, seed = rig(Path(sys.argv[1]), 8 * MIB), int(sys.argv[2])
rng, there = random.Random(seed), {}
out = os.fdopen(1, "wb", 0)
list(it.tier.recover())
print("ready", flush=True)
for n in range(100_000):
    number = seed * 100_000 + n
    batch = [Chunk(number * 10 + k, rng.choice([3_000, 50_000, 200_000])) for k in range(4)]
    for done in it.do([c.write() for c in batch]):
        chunk = done.job.token
        if done.answer is Answer.OK:
            there[chunk] = done.place
            out.write(b"+ %d %d %d %d\\n" % (chunk.number, chunk.length, *done.place))
    while len(there) > 30:
        chunk = rng.choice(list(there))
        place = there.pop(chunk)
        out.write(b"- %d %d %d %d\\n" % (chunk.number, chunk.length, *place))
        it.one(chunk.delete(place))
        out.write(b"x %d %d %d %d\\n" % (chunk.number, chunk.length, *place))
"""


def test_sigkill_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """K25, K56, K85, K87: a journal outside, written only after each acknowledgement, says what
    must be there; what was being deleted may be there whole; nothing else is believed."""
    rng = random.Random(11)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    must: dict[tuple[int, int], Place] = {}
    for life in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(life)],
            stdout=subprocess.PIPE, env=environ,
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.02, 0.4))
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split(b"\n")[:-1]
        child.stdout.close()
        child.wait()
        may: dict[tuple[int, int], Place] = {}
        for line in lines:
            what, number, length, at, generation = line.split()
            name, place = (int(number), int(length)), Place(int(at), int(generation))
            if what == b"+":
                must[name] = place
            elif what == b"-":
                may[name] = must.pop(name)
            else:
                del may[name]
        it = rig(tmp_path)
        there = it.recovered()
        assert du(tmp_path) <= 8 * MIB
        usage = it.tier.usage()
        assert usage.chunks == len(there)
        assert usage.held_bytes <= usage.limit_bytes
        for (number, length), place in must.items():
            chunk = Chunk(number, length)
            assert there.pop(chunk.key) == place
            job = chunk.read(place)
            assert it.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
        assert len(there) <= 4 + len(may), "only what was in flight may be there besides"
        # What was written and not acknowledged is whole.
        for key, place in there.items():
            length = _length(it, key, place)
            done = it.one(Read(None, key, place, memoryview(bytearray(length))))
            assert done.answer is Answer.OK
            it.one(Chunk(0).delete(place)._replace(key=key))
        it.close()


def _length(it: Rig, key: Key, place: Place) -> int:
    for batch in it.tier.recover():
        for i in range(len(batch.records)):
            if batch.place(i) == place:
                assert batch.key(i) == key
                return int(batch.records[i]["length"])
    raise AssertionError("a recovered place is not told twice")


def test_of_two_copies_of_a_key_the_younger_counts_and_the_older_never_comes_back(
    tmp_path: Path,
) -> None:
    it = rig(tmp_path)
    chunk = Chunk(1)
    first, second = (it.one(chunk.write()).place for _ in range(2))
    it.close()
    it = rig(tmp_path)
    assert it.recovered() == {chunk.key: second}
    assert it.one(chunk.read(first)).answer is Answer.MISS
    it.one(chunk.delete(second))
    it.close()
    it = rig(tmp_path)
    assert it.recovered() == {}
    it.close()


@pytest.mark.slow
def test_a_million_chunks_are_there_within_seconds(tmp_path: Path) -> None:
    """Ready in 10 s at most, without reading a payload: slots are sparse here."""
    backend = disk(tmp_path, 8 << 30, preallocate=False, slab_bytes=1 << 30, reserve_bytes=0)
    backend.open()
    backend.close()
    tier = bytes.fromhex((tmp_path / "kvd-tier").read_text().rpartition("id=")[2].strip())
    left, number = 1_000_000, 0
    template = Chunk(1, 4000).header._replace(generation=1).pack()
    while left:
        geometry = Geometry.of(number, 4096, 1 << 30, tier)
        count = min(left, geometry.slots)
        rows = np.frombuffer(template * count, np.uint8).reshape(count, 512).copy()
        table = rows.view(RECORD_DTYPE).reshape(-1)
        table["generation"] = np.arange(1, count + 1) + number * 1_000_000
        hashes = np.zeros((count, 32), np.uint8)
        names = table["generation"] * np.uint64(0x9E3779B97F4A7C15)
        hashes[:, :8] = names.view(np.uint8).reshape(-1, 8)
        rows[:, 80:112] = hashes
        raw = bytearray(rows.tobytes())
        view = memoryview(raw)
        for at in range(0, len(raw), 512):
            check = check_of(view[at : at + CHECK_AT])
            view[at + CHECK_AT : at + 512] = check.to_bytes(8, "little")
        with open(tmp_path / f"kvd-slab-{number:05d}", "wb") as file:
            file.truncate(geometry.payload_bytes)
            file.write(geometry.pack())
        with open(tmp_path / f"kvd-table-{number:05d}", "wb") as file:
            file.truncate(geometry.table_bytes)
            file.write(geometry.pack())
            file.seek(4096)
            file.write(raw)
        left -= count
        number += 1
    backend = disk(tmp_path, 8 << 30, preallocate=False, slab_bytes=1 << 30, reserve_bytes=0)
    began = time.monotonic()
    backend.open()
    ready = time.monotonic() - began
    told = sum(len(batch.records) for batch in backend.recover())
    took = time.monotonic() - began
    assert backend.usage().chunks == told == 1_000_000
    backend.close()
    print(f"ready after {ready:.2f} s, all told after {took:.2f} s")
    assert took < 10


# -- kvikio -------------------------------------------------------------------------------------

STUB = """
#define CU(name) int name(void) { return 3; }
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 12000; return 0; }
"""
CALLS = """
cuMemHostAlloc cuMemFreeHost cuMemHostRegister cuMemHostUnregister cuMemcpyHtoD cuMemcpyDtoH
cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyBatchAsync cuPointerGetAttribute cuPointerGetAttributes
cuCtxPushCurrent cuCtxPopCurrent cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent
cuMemGetAddressRange cuGetErrorName cuGetErrorString cuGetProcAddress
cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid
cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxGetState
cuStreamCreate cuStreamDestroy cuStreamSynchronize cuStreamGetCtx cuLaunchHostFunc
cuEventCreate cuEventDestroy cuEventRecord cuEventSynchronize cuEventQuery
cuCtxCreate_v2 cuCtxDestroy_v2 cuMemcpyAsync
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver that says that there is no device: enough for kvikio to serve host memory."""
    pytest.importorskip("kvikio")
    names = {name + version for name in CALLS.split() for version in ("", "_v2", "_v3")}
    home = tmp_path_factory.mktemp("stub")
    target = home / "libcuda.so.1"
    probe = choose.make_probe(home)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(home)}
    for _ in range(20):  # another version of kvikio asks for other calls
        (home / "stub.c").write_text(STUB + "".join(f"CU({name})\n" for name in sorted(names)))
        command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, "-o", target, home / "stub.c"], check=True)
        ask = [sys.executable, "-m", "kvd.tiers.nvme.kvikio_probe", str(probe)]
        said = subprocess.run(ask, capture_output=True, text=True, env=environ, check=False)
        missing = re.search(r"undefined symbol: (cu\w+)", said.stdout)
        if missing is None:
            return target
        names.add(missing[1])
    raise AssertionError(said.stdout)


KVIKIO = """
import os, sys
sys.path.insert(0, os.environ["PYTHONPATH"])
from pathlib import Path
from nvme_kit import rig
from tiers_kit import Chunk, chunks
from kvd.tiers.base import Answer, Probe
it = rig(Path(sys.argv[1]), engine=sys.argv[2])
print(it.report.engine, "|", it.report.detail)
for length in (1, 511, 4095, 4096, 4097, 100_000, 700_001):
    chunk = Chunk(length, length)
    job = chunk.read(it.one(chunk.write()).place)
    assert it.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory), length
many = list(chunks(40, 60_000))
places = [d.place for d in it.do([c.write() for c in many])]
assert {d.answer for d in it.do([c.read(p) for c, p in zip(many, places)])} == {Answer.OK}
assert it.one(Probe("p")).answer is Answer.OK
print(it.tier.stat().engine, it.tier.stat().notes.get("fallbacks", 0))
it.close()
"""


def test_kvikios_engine_moves_the_same_bytes(tmp_path: Path, libcuda: Path) -> None:
    """K76: the real engine of kvikio on its POSIX path, with a driver that has no device."""
    done = script(KVIKIO, str(tmp_path), "kvikio", environ={"LD_LIBRARY_PATH": str(libcuda.parent)})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("kvikio-posix |") and lines[1] == "kvikio-posix 0"
    it = rig(tmp_path)  # what it wrote is a slab like any other
    assert len(it.recovered()) == 47
    it.close()


def test_without_gds_plain_o_direct_is_taken_and_says_so(tmp_path: Path, libcuda: Path) -> None:
    """K76, K84: a driver, but no GPUDirect Storage."""
    done = script(KVIKIO, str(tmp_path), "auto", environ={"LD_LIBRARY_PATH": str(libcuda.parent)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("o_direct |") and "no GPUDirect Storage" in done.stdout


def test_kvikio_without_any_driver_falls_back(tmp_path: Path) -> None:
    """K84: no libcuda at all; asked for by name or not, the tier is up, and says why."""
    pytest.importorskip("kvikio")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        it = rig(tmp_path, engine="kvikio")
        assert it.report.engine == "o_direct" and "kvikio: " in it.report.detail
        it.close()
    else:
        pytest.skip("there is a driver here")


@pytest.mark.parametrize(
    ("child", "says"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import os; os.abort()", "killed by signal 6"),
        ("import time; time.sleep(60)", "did not end within"),
        ("raise SystemExit(7)", "ended with 7"),
        ("print('nonsense')", "ended with 0"),
        ('print(\'{"ok": false, "why": "cuFile error 5030"}\')', "cuFile error 5030"),
    ],
)
def test_a_probe_that_crashes_or_hangs_does_not_bring_the_daemon_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, says: str
) -> None:
    """K84: the optional engine is tried in a child with a time limit."""
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{child}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(choose.sys, "executable", str(fake))
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())
    choose.make_probe(tmp_path)
    chosen = choose.choose("kvikio", tmp_path, child_s=0.5)
    assert chosen.engine.name in ("o_direct", "buffered") and says in chosen.why


def test_an_engine_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvd\[gpu\]'"):
        disk(tmp_path, engine="cufile").open()
    rig(tmp_path, engine="auto").close()
