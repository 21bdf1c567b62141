"""`make test-gpu`: what only a machine with a CUDA device can show. Prints one JSON table.

The law of this module: it needs a device and nothing else (no engine, no model, no service), takes
under five minutes, and leaves nothing behind. Each row says what was checked, whether it held, the
figure and its aim. Without a device it says so in a word, and that is no failure.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvd.chunk import ChunkHeader, HeaderFlag, KVSpec, ShardSpec, State, payload_digest
from kvd.client import Client
from kvd.tiers.base import NEVER, Key, Place
from kvd.tiers.borrowing import Borrowed, Export
from kvd.tiers.hbm import HbmBackend, HbmConfig
from kvd.tools.bench.daemon import Daemon

__all__ = ["main"]

MIB = 1 << 20
DEVICE = "cuda:0"
EPOCH = 7
RELEASE_S = 5.0
CHILD_S = 60.0
PORTABLE = 1  # cudaHostRegisterPortable
Row = dict[str, Any]


def main() -> int:
    """0: all held, or there is no device; 1: something did not hold."""
    if sys.argv[1:2] == ["borrow"]:
        return _borrow()
    if sys.argv[1:2] == ["attach"]:
        return _attach(sys.argv[2])
    try:
        import torch
    except ImportError:
        print(json.dumps({"skipped": "torch is not installed: pip install 'kvd[gpu]'"}))
        return 0
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no CUDA device here: torch.cuda.is_available() is false"}))
        return 0
    begun = time.monotonic()
    rows = [
        _guarded(name, check)
        for name, check in (
            ("device round trips are bit-exact", _round_trips),
            ("another process reads by CUDA IPC what is lent", _ipc),
            ("copies from the registered arena", lambda: _registered(to_device=True)),
            ("copies to the registered arena", lambda: _registered(to_device=False)),
            ("GPUDirect Storage, or its announced fallback", _storage),
            ("a killed borrower's device mappings are released", _borrower_killed),
            ("a killed engine's session and arena mapping are released", _engine_killed),
        )
    ]
    ok = all(row["ok"] for row in rows)
    told = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begun, 1),
        "ok": ok,
        "checks": rows,
    }
    print(json.dumps(told, indent=1))
    return 0 if ok else 1


def _guarded(name: str, check: Callable[[], Row]) -> Row:
    try:
        return {"check": name, **check()}
    except Exception as error:  # noqa: BLE001  one check that breaks must not hide the others
        return {"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"}


# -- the tier -------------------------------------------------------------------------------------


def _header(n: int, payload: bytes | memoryview) -> ChunkHeader:
    return ChunkHeader(
        kind=1, state=State.READY, namespace_digest=bytes(32), spec=bytes(32),
        chunk=n.to_bytes(32, "little"), shard_count=1, tokens=16, flags=HeaderFlag.SEALED,
        length=len(payload), digest=payload_digest(payload),
    )  # fmt: skip


def _backend(limit: int = 1024 * MIB) -> HbmBackend:
    backend = HbmBackend(HbmConfig(DEVICE, limit, epoch=EPOCH))
    backend.open()
    return backend


def _put(backend: HbmBackend, n: int, payload: bytes) -> Place:
    header = _header(n, payload)
    return backend.put(Key.of(header), header, memoryview(payload), NEVER).place


def _round_trips() -> Row:
    backend = _backend()
    rng = np.random.default_rng(1)
    sizes = [1, 511, 4095, 4096, 4097, 300_000, 2 * MIB, 32 * MIB, 33 * MIB + 7] * 2
    wrong = 0
    try:
        stored = []
        for n, size in enumerate(sizes):
            payload = rng.integers(0, 256, size, np.uint8).tobytes()
            stored.append((n, payload, _put(backend, n, payload)))
        for n, payload, place in stored:
            into = bytearray(len(payload))
            backend.get(Key.of(_header(n, payload)), place, memoryview(into), NEVER)
            wrong += into != payload
    finally:
        backend.close()
    return {"ok": not wrong, "chunks": len(sizes), "bytes": sum(sizes), "wrong": wrong}


def _child(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvd.tools.gpu", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _lent(export: Export) -> bytes:
    fields = [f.hex() if isinstance(f, bytes) else f for f in export[:-1]]
    return json.dumps([*fields, list(export.place)]).encode() + b"\n"


def _export(line: bytes) -> Export:
    named: Row = dict(zip(Export._fields, json.loads(line), strict=True))
    for name, kind in Export.__annotations__.items():
        if "bytes" in str(kind):
            named[name] = bytes.fromhex(named[name])
    return Export(**{**named, "place": Place(*named["place"])})


def _borrow() -> int:
    """A child: reads an export from stdin, maps it, tells its digest, and holds it."""
    tensor = Borrowed().tensor(_export(sys.stdin.buffer.readline()), EPOCH)
    print(hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest(), flush=True)
    sys.stdin.buffer.read()  # until the parent is done
    return 0


def _gone(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with child:  # closes its pipes and waits
        pass


def _line(child: subprocess.Popen[bytes]) -> str:
    """The child's next line; it is killed if that takes too long."""
    assert child.stdout is not None
    timer = threading.Timer(CHILD_S, child.kill)
    timer.start()
    try:
        return child.stdout.readline().decode().strip()
    finally:
        timer.cancel()


def _borrower(backend: HbmBackend, place: Place) -> tuple[subprocess.Popen[bytes], str]:
    child = _child("borrow")
    assert child.stdin is not None
    child.stdin.write(_lent(backend.lend("engine", place)))
    child.stdin.flush()
    return child, _line(child)


def _ipc() -> Row:
    payload = np.random.default_rng(2).integers(0, 256, 3 * MIB + 5, np.uint8).tobytes()
    backend = _backend()
    try:
        _put(backend, 1, bytes(1 * MIB))  # so that the slot is not the slab's first
        child, told = _borrower(backend, _put(backend, 2, payload))
        _gone(child)
        ok = told == hashlib.sha256(payload).hexdigest()
        return {"ok": ok and backend.take_back("engine") == 1, "bytes": len(payload)}
    finally:
        backend.close()


def _borrower_killed() -> Row:
    """Until the driver has given its context back, and the slot can be used again."""
    import torch

    backend = _backend(64 * MIB)
    try:
        payload = os.urandom(MIB)
        place = _put(backend, 1, payload)
        torch.cuda.synchronize()
        before, _ = torch.cuda.mem_get_info(0)
        child, _ = _borrower(backend, place)
        held, _ = torch.cuda.mem_get_info(0)
        backend.delete([(Key.of(_header(1, payload)), place)], NEVER)
        waiting = backend.notes()["waiting_for_borrowers"]
        begun = time.monotonic()
        child.send_signal(signal.SIGKILL)
        _gone(child)
        backend.take_back("engine")
        free = held
        while time.monotonic() - begun < 2 * RELEASE_S:
            free, _ = torch.cuda.mem_get_info(0)
            if free >= before - 64 * MIB:
                break
            time.sleep(0.02)
        took = time.monotonic() - begun
        usable = backend.notes()["waiting_for_borrowers"] == 0
        return {
            "ok": took <= RELEASE_S and waiting == 1 and usable,
            "seconds": round(took, 3),
            "aim_seconds": RELEASE_S,
            "context_bytes": before - held,
        }
    finally:
        backend.close()


# -- the arena ------------------------------------------------------------------------------------


def _registered(*, to_device: bool) -> Row:
    """Slots of a tmpfs mapping that is registered, as the arena is, against memory that CUDA
    itself pinned; in turns, 32 MiB a copy."""
    import torch

    size, count, rounds = 32 * MIB, 8, 7
    fd, path = tempfile.mkstemp(prefix="kvd-gpu-", dir="/dev/shm")
    os.unlink(path)
    os.posix_fallocate(fd, 0, size * count)
    arena = mmap.mmap(fd, size * count)
    os.close(fd)
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    whole = np.frombuffer(arena, np.uint8)
    some = np.random.default_rng(3).integers(0, 256, 5 * MIB + 3, np.uint8)
    whole[:] = np.resize(some, len(whole))
    cudart = torch.cuda.cudart()
    torch.cuda.init()
    for slot in range(count):
        error = int(cudart.cudaHostRegister(address + slot * size, size, PORTABLE))
        if error:
            raise RuntimeError(f"cudaHostRegister: error {error}; is memlock limited (ulimit -l)?")
    try:
        ours = [torch.from_numpy(whole[n * size : (n + 1) * size]) for n in range(count)]
        theirs = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        device = [torch.empty(size, dtype=torch.uint8, device="cuda:0") for _ in range(count)]
        for pinned, slot in zip(theirs, ours, strict=True):
            pinned.copy_(slot)
        stream = torch.cuda.Stream()

        def run(host: list[Any]) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record(stream)
                for memory, there in zip(host, device, strict=True):
                    if to_device:
                        there.copy_(memory, non_blocking=True)
                    else:
                        memory.copy_(there, non_blocking=True)
                end.record(stream)
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000

        run(theirs), run(ours)
        limit, product = [], []
        for _ in range(rounds):
            limit.append(run(theirs))
            product.append(run(ours))
        same = all(torch.equal(a.cpu(), b) for a, b in zip(device, ours, strict=True))
        best, mine = sorted(limit)[rounds // 2], sorted(product)[rounds // 2]
        total = size * count / 1e9
        return {
            "ok": same and best / mine >= 0.85,
            "ratio": round(best / mine, 3),
            "aim_ratio": 0.85,
            "limit_gbps": round(total / best, 2),
            "gbps": round(total / mine, 2),
        }
    finally:
        for slot in range(count):
            cudart.cudaHostUnregister(address + slot * size)


# -- storage --------------------------------------------------------------------------------------


def _storage() -> Row:
    """The engine that the NVMe tier chooses (in $TMPDIR), by writing, reading and comparing."""
    from kvd.tiers.nvme import NvmeBackend, NvmeConfig

    folder = Path(tempfile.mkdtemp(prefix="kvd-gpu-"))
    backend = NvmeBackend(NvmeConfig(folder / "tier", "gpu", 256 * MIB, reserve_bytes=0))
    try:
        report = backend.open()
        memory = memoryview(mmap.mmap(-1, 8 * MIB))
        memory[:] = os.urandom(8 * MIB)
        header = _header(1, memory)
        place = backend.put(Key.of(header), header, memory, NEVER).place
        into = memoryview(mmap.mmap(-1, 8 * MIB))
        backend.get(Key.of(header), place, into, NEVER)
        return {
            "ok": into == memory and bool(report.engine) and bool(report.detail),
            "engine": report.engine,
            "gds": report.engine == "cufile",
            "said": report.detail,
        }
    finally:
        backend.close()
        shutil.rmtree(folder, ignore_errors=True)


# -- an engine that is killed ---------------------------------------------------------------------

_SPEC = KVSpec(
    "gpu", "", "w", "gpu", "bf16", "", "raw", 16, 1, 1, 1, (), (),
    (ShardSpec(0, 0, 0, 0, 0, 1, 0, 1, 4 * MIB),),
)  # fmt: skip


def _attach(socket: str) -> int:
    """A child, as an engine is: maps the arena, registers a slot, leases it, and stands still."""
    import torch

    with Client(socket, timeout_s=30, name="gpu") as client:
        handle = client.register(_SPEC)
        keys = [bytes([n]) * 32 for n in range(4)]
        data = np.arange(4 * MIB, dtype=np.uint8)
        client.store_chunks(handle, keys, None, [data] * 4)
        with client.lookup(handle, keys, load=True) as found:
            assert found.transfer is not None
            for _ in found.transfer:
                pass
            said = "no device"
            if torch.cuda.is_available():
                torch.cuda.init()
                address = np.frombuffer(found.transfer.view(0), np.uint8).ctypes.data
                error = torch.cuda.cudart().cudaHostRegister(address, 4 * MIB, PORTABLE)
                said = f"registered {int(error)}"
            print(said, flush=True)
            sys.stdin.buffer.read()
    return 0


def _engine_killed() -> Row:
    with Daemon(None, "--arena-size", "256MiB") as daemon:
        with Client(daemon.socket, timeout_s=30) as client:
            child = _child("attach", daemon.socket)
            try:
                told = _line(child)
                leased = client.stat()["tiers"][0]["leased_chunks"]
                begun = time.monotonic()
                child.send_signal(signal.SIGKILL)
                left = leased
                while left and time.monotonic() - begun < 2 * RELEASE_S:
                    left = client.stat()["tiers"][0]["leased_chunks"]
                    time.sleep(0.02)
                took = time.monotonic() - begun
            finally:
                _gone(child)
        return {
            "ok": leased == 4 and left == 0 and took <= RELEASE_S and told == "registered 0",
            "seconds": round(took, 3),
            "aim_seconds": RELEASE_S,
            "registration": told,
        }


if __name__ == "__main__":
    sys.exit(main())
