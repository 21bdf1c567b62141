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
from kvd.chunk import REF_DTYPE, HeaderFlag
from kvd.client.link import Link
from kvd.errors import ArenaError, ProtocolError, Unavailable
from kvd.wire.attach import FDS_PER_ARENA

PREFAULT_STEP = 32 << 20  # bytes at a time: what a prefault may delay others' page faults by

Maps = dict[int, ArenaMap]  # number in this session -> map


class Memory:
    """Owns the maps, and the thread that prefaults them if that is wanted."""

    def __init__(self, *, prefault: bool) -> None:
        self._prefault = prefault
        self._by_id: dict[bytes, ArenaMap] = {}
        self.maps: Maps = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
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
                old.close()  # views that are still in use keep the memory
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
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        for known in self._by_id.values():
            known.close()
        self._by_id, self.maps = {}, {}

    def _start(self, maps: Sequence[ArenaMap]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(maps,), name="kvd-prefault", daemon=True
        )
        self._thread.start()

    def _run(self, maps: Sequence[ArenaMap]) -> None:
        for known in maps:
            # A slow first pass is all that an error, or a map that was closed, costs.
            with contextlib.suppress(ArenaError):
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
    """References of one answer and the maps that they point into: views by result number."""

    __slots__ = ("epoch", "maps", "of", "refs")

    def __init__(self, maps: Maps, epoch: int, count: int) -> None:
        self.maps = maps
        self.epoch = epoch
        self.refs: NDArray[np.void] = np.zeros(count, dtype=REF_DTYPE)
        self.of = np.zeros(count, dtype=np.bool_)  # which results have a reference

    def fill(self, items: NDArray[np.integer[Any]], packed: bytes) -> None:
        """References for these results, in order. ProtocolError if one is out of bounds."""
        refs = np.frombuffer(packed, dtype=REF_DTYPE)
        numbers = refs["arena"]
        first = int(numbers[0])
        one = bool((numbers == first).all())  # as a rule
        for number in (first,) if one else np.unique(numbers).tolist():
            known = self.maps.get(number)
            mine = refs if one else refs[numbers == number]
            if known is None:
                raise ProtocolError(f"a reference names arena {number}, which is not mapped here")
            length = mine["length"]
            if (
                int(length.max()) > known.slab_size
                or int((mine["offset"] + length).max()) > known.size
                or int(mine["record"].max()) >= known.records
            ):
                raise ProtocolError("a reference points outside of its arena")
        self.refs[items] = refs
        self.of[items] = True

    def view(self, index: int) -> memoryview:
        """The payload of one result, writable. KeyError if it has none."""
        if not 0 <= index < len(self.of) or not self.of[index]:
            raise KeyError(f"result {index} has no slot")
        arena, _, offset, length, _ = self.refs[index].item()
        return self._map(arena).view_at(offset, length)

    def array(self, index: int, dtype: DTypeLike, shape: Sequence[int] | None) -> NDArray[Any]:
        """The same as an array. ValueError if dtype and shape do not fit the bytes."""
        flat: NDArray[Any] = np.frombuffer(self.view(index), dtype=dtype)
        return flat if shape is None else flat.reshape(shape)

    def tensor(self, index: int, dtype: Any, shape: Sequence[int] | None) -> Any:
        """The same as a torch tensor on the CPU; `dtype` is a torch dtype."""
        import torch

        flat = torch.frombuffer(self.view(index), dtype=dtype)
        return flat if shape is None else flat.reshape(tuple(shape))

    def fresh(self, items: NDArray[np.integer[Any]] | None = None) -> bool:
        """Whether these results (all that have a slot, if None) are still what they were: epoch
        and generations unchanged. To be asked after the last byte."""
        refs = self.refs[self.of] if items is None else self.refs[items]
        if not len(refs):
            return True
        numbers = refs["arena"]
        first = int(numbers[0])
        if len(self.maps) == 1 or bool((numbers == first).all()):
            return bool(self._map(first).check(refs, self.epoch).all())
        return all(
            bool(self._map(int(n)).check(refs[numbers == n], self.epoch).all())
            for n in np.unique(numbers)
        )

    def digest(self, index: int) -> bytes | None:
        """The root digest in the record of one result; None while it is not sealed."""
        arena, record, _, length, generation = self.refs[index].item()
        header = self._map(arena).header(record)
        if header.generation != generation or header.length != length:
            return None
        return header.digest if header.flags & HeaderFlag.SEALED else None

    def _map(self, number: int) -> ArenaMap:
        known = self.maps.get(number)
        if known is None:
            raise Unavailable("the answer's memory is not mapped here")
        return known
