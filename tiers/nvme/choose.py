"""Which engine moves the bytes: tried out on the real directory, never guessed.

The law of this module: an engine is chosen only after it wrote, read back and compared bytes in
the very directory of the tier. kvikio is tried in a child process with a time limit, because its
drivers have been seen to crash, abort and hang; whatever happens to the child, the daemon goes on
with plain system calls, and says why.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kvd.errors import ConfigError
from kvd.tiers.nvme.kvikio import KvikioEngine
from kvd.tiers.nvme.layout import PAGE
from kvd.tiers.nvme.posix import Engine, PosixEngine

ENGINES = ("auto", "cufile", "kvikio", "direct", "buffered")
PROBE_NAME = "kvd-probe"
CHILD_S = 8.0  # what a child may take to try kvikio


class Chosen(NamedTuple):
    engine: Engine
    why: str  # what was tried before and did not work; empty if nothing


def choose(wanted: str, directory: Path, *, threads: int = 4, child_s: float = CHILD_S) -> Chosen:
    """The best engine of those that work, or the wanted one and those below it. `auto` takes
    kvikio only for GPUDirect Storage: without it, plain O_DIRECT does the same with less. Needs a
    probe file (see `make_probe`). OSError if not even buffered I/O works; ConfigError if kvikio is
    asked for by name and is not installed."""
    if wanted not in ENGINES:
        raise ConfigError(f"tier nvme: engine {wanted!r} is none of {', '.join(ENGINES)}")
    tried = []
    path = directory / PROBE_NAME
    if wanted in ("auto", "cufile", "kvikio"):
        engine, why = _try_kvikio(wanted, path, threads, child_s)
        if engine is not None:
            return Chosen(engine, "")
        if why:
            tried.append(why)
    if wanted != "buffered":
        direct = PosixEngine(direct=True)
        try:
            compare(direct, path)
            return Chosen(direct, "; ".join(tried))
        except OSError as error:
            tried.append(f"O_DIRECT: {error.strerror or error}")
    buffered = PosixEngine(direct=False)
    compare(buffered, path)
    return Chosen(buffered, "; ".join(tried))


def make_probe(directory: Path, size: int = 4 * PAGE) -> Path:
    """The file that engines are tried on. Kept, so that a later probe needs no space."""
    path = directory / PROBE_NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, 0)
            os.pwrite(fd, bytes(size), 0)
    finally:
        os.close(fd)
    return path


def compare(engine: Engine, path: Path, *, write: bool = True) -> None:
    """Write, read back, compare: whole pages and a broken one. OSError for any difference."""
    memory = memoryview(mmap.mmap(-1, 8 * PAGE))
    source, into = memory[: 4 * PAGE], memory[4 * PAGE :]
    file = engine.open(path)
    try:
        for length in (4 * PAGE, 2 * PAGE + 1, 511):
            source[:length] = random.randbytes(length)
            if write:
                file.write(0, source[:length])
            file.read(0, into[:length])
            if write and into[:length] != source[:length]:
                raise OSError(5, f"{engine.name} did not read back what it wrote")
    finally:
        file.close()


def measure(engine: Engine, directory: Path, size: int) -> tuple[float, float]:
    """GB/s of writing and reading `size` bytes once, by one thread; the file is gone after."""
    path = directory / f"{PROBE_NAME}.tmp"
    memory = memoryview(mmap.mmap(-1, min(size, 4 << 20)))
    memory[:] = random.randbytes(len(memory))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
        file = engine.open(path)
        try:
            rates = []
            for move in (file.write, file.read):
                began = time.perf_counter_ns()
                for at in range(0, size - len(memory) + 1, len(memory)):
                    move(at, memory)
                rates.append(size / max(1, time.perf_counter_ns() - began))
        finally:
            file.close()
    finally:
        path.unlink(missing_ok=True)
    return rates[0], rates[1]


# -- kvikio -------------------------------------------------------------------------------------


def _try_kvikio(wanted: str, path: Path, threads: int, child_s: float) -> tuple[Engine | None, str]:
    if wanted == "auto" and not _cuda_driver():
        return None, ""
    if importlib.util.find_spec("kvikio") is None:
        if wanted != "auto":
            raise ConfigError(
                f"tier nvme: engine {wanted!r} needs kvikio: pip install 'kvd[gpu]', or use "
                f'engine = "auto"'
            )
        return None, ""
    found, why = _ask_child(path, child_s)
    if found is None:
        return None, f"kvikio: {why}"
    if not found["gds"]:
        if wanted == "auto":
            return None, "no GPUDirect Storage"
        if wanted == "cufile":
            return None, "cufile: no GPUDirect Storage"
    try:
        engine = KvikioEngine(gds=bool(found["gds"]) and wanted != "kvikio", threads=threads)
        compare(engine, path)
    except (OSError, RuntimeError, ImportError) as error:
        return None, f"kvikio: {error}"
    return engine, ""


def _cuda_driver() -> bool:
    """Whether the driver's library can be loaded. Loading it does not start it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _ask_child(path: Path, child_s: float) -> tuple[dict[str, bool] | None, str]:
    """Whether kvikio works on this file, by a process that may crash or hang."""
    command = [sys.executable, "-m", "kvd.tiers.nvme.kvikio_probe", str(path)]
    try:
        child = subprocess.run(
            command, capture_output=True, timeout=child_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"its probe did not end within {child_s:g} s"
    except OSError as error:
        return None, f"its probe could not be started: {error.strerror}"
    if child.returncode < 0:
        return None, f"its probe was killed by signal {-child.returncode}"
    try:
        answer = json.loads(child.stdout.decode().strip().splitlines()[-1])
        if answer["ok"]:
            return {"gds": bool(answer["gds"])}, ""
        return None, str(answer["why"])[:200]
    except (ValueError, KeyError, IndexError, TypeError):
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no answer"]
        return None, f"its probe ended with {child.returncode}: {lines[-1][:200]}"
