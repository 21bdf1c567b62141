"""Device memory that the daemon owns, and lends to engines by CUDA IPC.

The law of this module: the memory is allocated once, in slabs, and never given back while the
daemon lives, so that no engine's mapping can ever point into something else. What changes is what
lies in it: a slot has a generation, and a slot that somebody was shown is not used again before
that somebody gave it back or died. The same code runs on `cpu` tensors, without the lending.

torch is imported when the tier is started, and not before. Copies run on a stream of the thread's
own and end with it: a completion means that the bytes have arrived.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.chunk import IDENTITY_DTYPE, ChunkHeader
from kvd.errors import ConfigError
from kvd.tiers.backend import Backend, Found, Refused, Stored, failed
from kvd.tiers.base import Answer, Key, Place, ProbeReport, Reason, Recovered, Usage
from kvd.tiers.borrowing import Export

PAGE = 4096
MIB = 1 << 20
_PROBE = 4 * MIB


class HbmConfig(NamedTuple):
    """`device`: cuda:N, or cpu for tests. `slab_bytes` None: a 32nd of the limit, 1 to 512 MiB.
    `reserve_bytes` of the device are left to the engines beside us."""

    device: str
    limit_bytes: int
    slab_bytes: int | None = None
    reserve_bytes: int = 512 * MIB
    epoch: int = 0


class _Slab:
    def __init__(self, number: int, memory: Any, slot_bytes: int) -> None:
        self.number = number
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.slots: int = memory.numel() // slot_bytes
        self.free = list(range(self.slots))[::-1]
        self.records: dict[int, tuple[int, bytes]] = {}  # slot -> generation, record
        self.shared: tuple[Any, ...] | None = None

    @property
    def empty(self) -> bool:
        return bool(len(self.free) == self.slots)


class HbmBackend(Backend):
    durable = False

    def __init__(self, config: HbmConfig) -> None:
        usual = config.slab_bytes or min(512 * MIB, max(MIB, config.limit_bytes // 32))
        self._usual = usual // PAGE * PAGE
        if self._usual < PAGE or config.limit_bytes < self._usual:
            raise ConfigError(
                f"tier hbm: limit {config.limit_bytes} is too small for one slab of {usual} bytes"
            )
        self._config = config
        self._torch: Any = None
        self._device: Any = None
        self._lock = threading.Lock()
        self._local = threading.local()
        self._slabs: dict[int, _Slab] = {}
        self._lent: dict[tuple[int, int], Counter[str]] = {}  # (slab, slot) -> owner -> times
        self._waiting: set[tuple[int, int]] = set()  # deleted, but still lent
        self._held = 0
        self._used = 0
        self._chunks = 0
        self._generation = 1

    @property
    def engine(self) -> str:
        return f"torch {self._config.device}"

    # -- opening --------------------------------------------------------------------------------

    def check(self) -> None:
        self._choose()

    def open(self) -> ProbeReport:
        self._torch, self._device = self._choose()
        return self.probe(0, write=True)

    def _choose(self) -> tuple[Any, Any]:
        """torch and the device. ConfigError."""
        try:
            import torch
        except ImportError as error:
            raise ConfigError("tier hbm needs torch: pip install 'kvd[gpu]'") from error
        try:
            device = torch.device(self._config.device)
        except RuntimeError as error:
            raise ConfigError(
                f"tier hbm: device {self._config.device!r}: give cuda:N, or cpu"
            ) from error
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(f"tier hbm: device {self._config.device!r}: give cuda:N, or cpu")
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError("tier hbm: there is no CUDA device here: leave the tier out")
            if (device.index or 0) >= torch.cuda.device_count():
                raise ConfigError(
                    f"tier hbm: {self._config.device} is not there: this machine has "
                    f"{torch.cuda.device_count()} devices"
                )
            device = torch.device("cuda", device.index or 0)
        return torch, device

    def probe(self, deadline: int, *, write: bool) -> ProbeReport:
        torch = self._torch
        if torch is None:
            raise failed(Reason.OTHER, "not open")
        source = torch.randint(0, 256, (_PROBE,), dtype=torch.uint8)
        back = torch.empty_like(source)
        try:
            there = torch.empty(_PROBE, dtype=torch.uint8, device=self._device)
            began = time.perf_counter_ns()
            self._copy(there, source)
            middle = time.perf_counter_ns()
            self._copy(back, there)
            ended = time.perf_counter_ns()
        except RuntimeError as error:
            raise self._refusal(error) from error
        if not torch.equal(source, back):
            raise failed(Reason.IO, "the device did not give back what it got")
        to, fro = _PROBE / max(1, middle - began), _PROBE / max(1, ended - middle)
        name = "cpu"
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        return ProbeReport(self.engine, f"{name}: {to:.1f} GB/s in, {fro:.1f} GB/s out", to, fro)

    def _copy(self, target: Any, source: Any) -> None:
        """Blocks until the bytes are there. The GIL is free meanwhile."""
        if self._device.type != "cuda":
            target.copy_(source)
            return
        torch = self._torch
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._local.stream):
            target.copy_(source, non_blocking=True)
        self._local.stream.synchronize()

    def _host(self, view: memoryview) -> Any:
        """A tensor over a buffer; without a copy, unless it is read-only (torch knows none)."""
        array = np.frombuffer(view, np.uint8)
        return self._torch.from_numpy(array.copy() if view.readonly else array)

    # -- put, get, delete -----------------------------------------------------------------------

    def put(self, key: Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        slab, slot, generation = self._take(_pages(len(source)))
        begin = slot * slab.slot_bytes
        try:
            self._copy(slab.memory[begin : begin + len(source)], self._host(source))
        except RuntimeError as error:
            with self._lock:
                self._give_back(slab, slot)
            raise self._refusal(error) from error
        with self._lock:
            slab.records[slot] = generation, header._replace(generation=generation).pack()
        return Stored(Place(slab.number << 32 | slot, generation))

    def _take(self, slot_bytes: int) -> tuple[_Slab, int, int]:
        with self._lock:
            slab = next(
                (s for s in self._slabs.values() if s.slot_bytes == slot_bytes and s.free), None
            )
            if slab is None:
                slab = self._grow(slot_bytes)
            slot = slab.free.pop()
            self._used += slot_bytes
            self._chunks += 1
            generation, self._generation = self._generation, self._generation + 1
            return slab, slot, generation

    def _grow(self, slot_bytes: int) -> _Slab:
        """A slab for this class: an empty one of the same bytes, or new memory."""
        size = max(self._usual, slot_bytes)
        for slab in self._slabs.values():
            if slab.empty and slab.memory.numel() == size:
                # The memory stays what it is to whoever has it mapped; its slots are cut anew.
                again = _Slab(slab.number, slab.memory, slot_bytes)
                again.shared = slab.shared
                self._slabs[slab.number] = again
                return again
        if self._held + size > self._config.limit_bytes:
            raise Refused(Answer.NO_SPACE, Reason.NONE, "the tier's limit is reached")
        if self._device.type == "cuda":
            free, _ = self._torch.cuda.mem_get_info(self._device)
            if free - size < self._config.reserve_bytes:
                raise Refused(Answer.NO_SPACE, Reason.SPACE, "the device's reserve is reached")
        try:
            memory = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        except RuntimeError as error:
            raise self._refusal(error) from error
        slab = _Slab(len(self._slabs), memory, slot_bytes)
        self._slabs[slab.number] = slab
        self._held += size
        return slab

    def _give_back(self, slab: _Slab, slot: int) -> None:
        """Pre: the lock is held. A lent slot waits for whoever has it."""
        self._used -= slab.slot_bytes
        self._chunks -= 1
        if (slab.number, slot) in self._lent:
            self._waiting.add((slab.number, slot))
        else:
            slab.free.append(slot)

    def get(self, key: Key, place: Place, into: memoryview, deadline: int) -> Found:
        slab, slot, record = self._find(place)
        header = ChunkHeader.unpack(record)
        if header.length != len(into):
            raise Refused(Answer.MISS, detail="a chunk of another length lies there")
        begin = slot * slab.slot_bytes
        try:
            self._copy(self._host(into), slab.memory[begin : begin + len(into)])
        except RuntimeError as error:
            raise self._refusal(error) from error
        return Found(header)

    def _find(self, place: Place) -> tuple[_Slab, int, bytes]:
        with self._lock:
            slab = self._slabs.get(place.at >> 32)
            slot = place.at & 0xFFFFFFFF
            there = slab.records.get(slot) if slab is not None else None
            if slab is None or there is None or there[0] != place.generation:
                raise Refused(Answer.MISS)
            return slab, slot, there[1]

    def delete(self, items: Sequence[tuple[Key, Place]], deadline: int) -> list[Answer]:
        return [self._delete(place) for _, place in items]

    def quarantine(self, key: Key, place: Place, version: object) -> None:
        self._delete(place)

    def _delete(self, place: Place) -> Answer:
        try:
            slab, slot, _ = self._find(place)
        except Refused:
            return Answer.MISS
        with self._lock:
            if slab.records.get(slot, (0, b""))[0] != place.generation:
                return Answer.MISS
            del slab.records[slot]
            self._give_back(slab, slot)
        return Answer.OK

    def _refusal(self, error: RuntimeError) -> Refused:
        if self._torch is not None and isinstance(error, self._torch.cuda.OutOfMemoryError):
            return Refused(Answer.NO_SPACE, Reason.SPACE, "the device has no memory left")
        return failed(Reason.IO, f"the device: {str(error).splitlines()[0][:200]}")

    # -- lending --------------------------------------------------------------------------------

    def lend(self, owner: str, place: Place) -> Export:
        """Show a chunk's memory to another process, in the name of `owner` (a session). Until
        `take_back` its slot is not used for anything else. Refused MISS; FAILED on cpu."""
        torch = self._torch
        if torch is None or self._device.type != "cuda" or not torch.cuda.is_available():
            raise failed(Reason.OTHER, "only CUDA memory can be lent")
        slab, slot, record = self._find(place)
        with self._lock:
            if slab.shared is None:
                slab.shared = slab.memory.untyped_storage()._share_cuda_()
            self._lent.setdefault((slab.number, slot), Counter())[owner] += 1
        # (device, handle, bytes, offset, ref counter, its offset, event, whether to wait for it)
        device, handle, size, offset, counter, counter_at, event, needed = slab.shared
        return Export(
            self._config.epoch,
            int(device),
            bytes(handle),
            int(size),
            int(offset),
            bytes(counter),
            int(counter_at),
            bytes(event),
            bool(needed),
            slot * slab.slot_bytes,
            ChunkHeader.unpack(record).length,
            place,
        )

    def take_back(self, owner: str, place: Place | None = None) -> int:
        """The owner has done with a place, or (None) is gone, with all it was shown. How many."""
        with self._lock:
            where = None if place is None else (place.at >> 32, place.at & 0xFFFFFFFF)
            found = [
                at
                for at, owners in self._lent.items()
                if owner in owners and (where is None or at == where)
            ]
            for at in found:
                owners = self._lent[at]
                owners[owner] -= 1
                if place is None or owners[owner] <= 0:
                    del owners[owner]
                if not owners:
                    del self._lent[at]
                    if at in self._waiting:
                        self._waiting.discard(at)
                        self._slabs[at[0]].free.append(at[1])
            return len(found)

    # -- telling --------------------------------------------------------------------------------

    def recover(self) -> Iterator[Recovered]:
        """Device memory ends with its process; within one life, what is there."""
        with self._lock:
            there = [
                (slab.number << 32 | slot, generation, record[: IDENTITY_DTYPE.itemsize])
                for slab in self._slabs.values()
                for slot, (generation, record) in slab.records.items()
            ]
        if there:
            at, generation, rows = zip(*there, strict=True)
            yield Recovered(
                np.frombuffer(b"".join(rows), IDENTITY_DTYPE),
                np.array(at, np.uint64),
                np.array(generation, np.uint64),
            )

    def cost(self, length: int) -> int:
        return _pages(length)

    def room(self, length: int) -> int:
        slot_bytes = _pages(length)
        size = max(self._usual, slot_bytes)
        if size > self._config.limit_bytes:
            return -1
        with self._lock:
            slabs = list(self._slabs.values())
            free = sum(len(s.free) for s in slabs if s.slot_bytes == slot_bytes)
            empty = sum(
                s.empty and s.slot_bytes != slot_bytes and s.memory.numel() == size for s in slabs
            )
            more = (self._config.limit_bytes - self._held) // size + empty
        return free + int(more) * (size // slot_bytes)

    def to_empty(self, length: int) -> tuple[Place, ...]:
        slot_bytes = _pages(length)
        size = max(self._usual, slot_bytes)
        with self._lock:
            slabs = list(self._slabs.values())
            if any(s.records for s in slabs if s.slot_bytes == slot_bytes):
                return ()
            fit = [s for s in slabs if s.memory.numel() == size]
            if not fit:
                return ()
            least = min(fit, key=lambda s: len(s.records) * s.slot_bytes)
            return tuple(
                Place(least.number << 32 | slot, generation)
                for slot, (generation, _) in least.records.items()
            )

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._config.limit_bytes, self._used, self._held, self._chunks)

    def notes(self) -> dict[str, int]:
        with self._lock:
            return {"lent": len(self._lent), "waiting_for_borrowers": len(self._waiting)}

    def close(self) -> None:
        self._slabs.clear()
        self._held = self._used = self._chunks = 0
        if self._torch is not None and self._device.type == "cuda":
            self._torch.cuda.empty_cache()


def _pages(length: int) -> int:
    return max(PAGE, -(-length // PAGE) * PAGE)
