"""The arenas that a client has mapped.

The law of this module: a mapping outlives the session that gave it as long as the arena is the
same one (an adopted arena keeps its id), and lives as long as any view of it does. What a
reference says is believed only within the bounds, and a view only as long as its check holds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvd.arena import ArenaMap
from kvd.chunk import HeaderFlag, list_refs
from kvd.client.link import Link
from kvd.errors import ArenaError, ClientClosed, ProtocolError, StaleEpoch, Unavailable
from kvd.wire.attach import FDS_PER_ARENA

PREFAULT_STEP = 32 << 20  # bytes at a time: what a prefault may delay others' page faults by

Maps = dict[int, ArenaMap]  # number in this session -> map
Ref = tuple[int, int, int, int, int]  # the fields of a SlotRef


class Memory:
    """Owns the maps, and the thread that prefaults them if that is wanted."""

    def __init__(self, *, prefault: bool) -> None:
        self._prefault = prefault
        self._by_id: dict[bytes, ArenaMap] = {}
        self.maps: Maps = {}
        self._stop = threading.Event()
        self._faulter: threading.Thread | None = None
        self.prefaulted = 0  # bytes so far

    def adopt(self, link: Link) -> None:
        """Map what this link brought. ArenaError if it does not fit together."""
        attached = link.attached
        if attached is None or not link.fds:
            self.maps = {}
            return
        fds = link.fds
        by_id: dict[bytes, ArenaMap] = {}
        maps: Maps = {}
        fresh: list[ArenaMap] = []
        for index, told in enumerate(attached.arenas):
            known = self._by_id.get(told.arena_id)
            if known is None:
                fd_arena, fd_table = fds[FDS_PER_ARENA * index : FDS_PER_ARENA * (index + 1)]
                known = ArenaMap(fd_arena, fd_table, arena_id=told.arena_id)
                fresh.append(known)
            if known.size != told.size:
                raise ArenaError(
                    f"arena {told.arena_id.hex()} has {known.size} bytes, {told.size} were told"
                )
            known.expected_epoch = link.epoch
            by_id[told.arena_id] = known
            maps[told.number] = known
        for arena_id, old in self._by_id.items():
            if arena_id not in by_id:
                # views that are still in use keep the memory
                old.close(StaleEpoch("the daemon has another arena now: look the keys up again"))
        self._by_id = by_id
        self.maps = link.maps = maps
        for fd in fds:
            os.close(fd)
        link.fds = []
        if self._prefault and fresh:
            self._start(fresh)

    def close(self) -> None:
        """Let go of all maps; views that are in use stay valid memory."""
        self._stop.set()
        thread = self._faulter
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        for known in self._by_id.values():
            known.close(ClientClosed("the client was closed"))
        self._by_id, self.maps = {}, {}

    def _start(self, maps: Sequence[ArenaMap]) -> None:
        self._faulter = threading.Thread(
            target=self._run, args=(maps,), name="kvd-prefault", daemon=True
        )
        self._faulter.start()

    def _run(self, maps: Sequence[ArenaMap]) -> None:
        for known in maps:
            # A slow first pass is all that an error, or a map that was closed, costs.
            with contextlib.suppress(ArenaError, ClientClosed, StaleEpoch):
                self._fault_in(known)

    def _fault_in(self, known: ArenaMap) -> None:
        """Step by step, never beyond what the daemon has reserved: that memory would be ours."""
        offset = 0
        while offset < known.size:
            length = min(PREFAULT_STEP, known.size - offset)
            if offset + length > known.reserved():
                if self._stop.wait(0.1):
                    return
                continue
            if self._stop.is_set():
                return
            known.prefault(offset, length, write=True)
            self.prefaulted += length
            offset += length


class Slots:
    """References of one answer and the maps that they point into: views by result number, which
    may be any integer (`Any`, so that no compiler asks for Python's own)."""

    __slots__ = ("_refs", "epoch", "maps")

    def __init__(self, maps: Maps, epoch: int, count: int) -> None:
        self.maps = maps
        self.epoch = epoch
        self._refs: list[Ref | None] = [None] * count

    def fill(self, items: Sequence[int], packed: bytes) -> None:
        """References for these results, in order. ProtocolError if one is out of bounds."""
        refs = list_refs(packed)
        if len(refs) != len(items):
            raise ProtocolError(f"{len(refs)} references for {len(items)} results")
        number, slab_size, size, records = -1, 0, 0, 0
        for index, ref in zip(items, refs, strict=True):
            if ref[0] != number:  # as a rule all are of one arena
                number = ref[0]
                known = self.maps.get(number)
                if known is None:
                    raise ProtocolError(f"a reference names arena {number}, which is not mapped")
                slab_size, size, records = known.slab_size, known.size, known.records
            if ref[3] > slab_size or ref[2] + ref[3] > size or ref[1] >= records:
                raise ProtocolError("a reference points outside of its arena")
            self._refs[index] = ref

    def ref(self, index: Any) -> Ref:
        """Of one result: arena, record, offset, length, generation. KeyError if it has none."""
        found: Ref | None = self._refs[index] if 0 <= index < len(self._refs) else None
        if found is None:
            raise KeyError(f"result {index} has no slot")
        return found

    def view(self, index: Any) -> memoryview:
        """The payload of one result, writable. KeyError if it has none."""
        ref = self.ref(index)
        return self._map(ref[0]).view_at(ref[2], ref[3])

    def array(self, index: Any, dtype: DTypeLike, shape: Sequence[int] | None) -> NDArray[Any]:
        """The same as an array. ValueError if dtype and shape do not fit the bytes."""
        flat: NDArray[Any] = np.frombuffer(self.view(index), dtype=dtype)
        return flat if shape is None else flat.reshape(shape)

    def tensor(self, index: Any, dtype: Any, shape: Sequence[int] | None) -> Any:
        """The same as a torch tensor on the CPU; `dtype` is a torch dtype."""
        import torch

        flat = torch.frombuffer(self.view(index), dtype=dtype)
        return flat if shape is None else flat.reshape(tuple(shape))

    def fresh(self, index: Any = None) -> bool:
        """Whether this result (all that have a slot, if None) is still what it was: epoch and
        generations unchanged. To be asked after the last byte."""
        if index is not None:
            refs = [self.ref(index)]
        else:
            refs = [ref for ref in self._refs if ref is not None]
        for number in {ref[0] for ref in refs}:
            if not self._map(number).unchanged([r for r in refs if r[0] == number], self.epoch):
                return False
        return True

    def digest(self, index: Any) -> bytes | None:
        """The root digest in the record of one result; None while it is not sealed."""
        arena, record, _, length, generation = self.ref(index)
        header = self._map(arena).header(record)
        if header.generation != generation or header.length != length:
            return None
        return header.digest if header.flags & HeaderFlag.SEALED else None

    def _map(self, number: int) -> ArenaMap:
        known = self.maps.get(number)
        if known is None:
            raise Unavailable("the answer's memory is not mapped here")
        return known
