"""ArenaMap: the client's side of the shared memory.

The law of this module: payloads are mapped read-write, records read-only; a reference is checked
against the bounds before it becomes a view, and against generation and epoch after the last byte
was used. A forked child has none of it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvd.arena.layout import EPOCH, PAGE, RESERVED, SUPER_WORDS, Superblock
from kvd.arena.mapping import Mapping
from kvd.chunk import HEADER_BYTES, RECORD_DTYPE, ChunkHeader, SlotRef
from kvd.errors import ArenaError, KvdError

_FIELDS: dict[str, Any] = dict(RECORD_DTYPE.fields or {})
_GENERATION_AT = int(_FIELDS["generation"][1])
_RECORD_QUADS = HEADER_BYTES // 8


class ArenaMap:
    """The arena and table behind two descriptors, which are not kept: close them at will.

    `expected_epoch` is what `check` compares with: the table's at the time of mapping, until the
    session that uses the map sets it to its own. Views stay mapped as long as they live, also
    after `close`.
    """

    def __init__(self, fd_arena: int, fd_table: int, *, arena_id: bytes | None = None) -> None:
        """ArenaError if the files do not belong together, or are not the arena `arena_id`."""
        try:
            block = Superblock.unpack(os.pread(fd_table, 512, 0))
        except ValueError as error:
            raise ArenaError(f"not a record table of kvd: {error}") from error
        if arena_id is not None and block.arena_id != arena_id:
            raise ArenaError(
                f"record table is of arena {block.arena_id.hex()}, expected {arena_id.hex()}"
            )
        if block.arena_inode != os.fstat(fd_arena).st_ino:
            raise ArenaError("arena and record table do not belong together")
        self.id = block.arena_id
        self.instance = block.instance
        self.size, self.slab_size = block.geometry
        self._geometry = block.geometry
        self._payload = Mapping(fd_arena, self.size, writable=True)
        self._table = Mapping(fd_table, block.geometry.table_bytes, writable=False)
        raw = self._table.bytes
        self._word = raw[: SUPER_WORDS * 8].view("<u8")
        self._records: NDArray[np.void] = raw[block.geometry.record_at(0) :].view(RECORD_DTYPE)
        self._generations = self._records["generation"]
        self._quads: memoryview[int] = raw[: len(raw) // 8 * 8].data.cast("Q")
        self._first = (block.geometry.record_at(0) + _GENERATION_AT) // 8
        self._why: KvdError | None = None  # it was closed
        self.expected_epoch = self.epoch()

    @property
    def records(self) -> int:
        """Number of records in the table."""
        return self._geometry.records

    def view(self, ref: SlotRef | np.void) -> memoryview:
        """The payload of a reference, writable, `length` bytes of format "B". ArenaError if it is
        not within the arena; Forked in a child."""
        if isinstance(ref, np.void):
            ref = SlotRef(*ref.item())
        _, record, offset, length, _ = ref
        if not 0 <= record < self._geometry.records:
            raise ArenaError(f"record {record} is beyond the table's {self._geometry.records}")
        if offset % PAGE or length > self.slab_size:
            raise ArenaError(f"reference ({offset}, {length}) is not a slot of this arena")
        return self.view_at(offset, length)

    def view_at(self, offset: int, length: int) -> memoryview:
        """`length` bytes of the arena from `offset`. ArenaError, Forked."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ArenaError(f"range ({offset}, {length}) is outside of {self.size} arena bytes")
        return self._bytes(self._payload)[offset : offset + length].data

    def as_array(self, ref: SlotRef | np.void, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
        """The payload as a flat array of dtype. ArenaError also if its size does not divide."""
        view = self.view(ref)
        kind = np.dtype(dtype)
        if view.nbytes % kind.itemsize:
            raise ArenaError(f"{view.nbytes} payload bytes are no whole number of {kind}")
        return np.frombuffer(view, dtype=kind)

    def epoch(self) -> int:
        """The daemon's epoch as it stands in shared memory now; 0 in an arena that was given up."""
        word = self._word  # before the check: another thread may close it behind that
        self._check_alive()
        return int(word[EPOCH])

    def reserved(self) -> int:
        """Bytes from the arena's start that have memory behind them. Grows up to `size` while the
        daemon reserves; what lies beyond must not be touched."""
        word = self._word
        self._check_alive()
        return int(word[RESERVED])

    def generations(self, records: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        """Generations (u64) of the records with these numbers, as they stand now. ArenaError if
        one is out of range."""
        generations = self._generations
        self._check_alive()
        if records.size and not 0 <= int(records.min()) <= int(records.max()) < self.records:
            raise ArenaError(f"a record number is beyond the table's {self.records}")
        now: NDArray[np.uint64] = generations[records]
        return now

    def check(self, refs: NDArray[np.void], epoch: int | None = None) -> NDArray[np.bool_]:
        """Which references (REF_DTYPE) are still what they were when given out. Call it after the
        last byte was read. `epoch` defaults to `expected_epoch`.

        The daemon changes the generation, or at a restart the epoch, before a slot can be
        reused. On x86 the loads here come after the loads of the payload; on machines with weaker
        ordering Python has no barrier to give, and the reply to the lease's release confirms it.
        """
        generations = self._generations
        self._check_alive()
        records = refs["record"]
        there = records < self._geometry.records
        fresh = there & (generations[np.where(there, records, 0)] == refs["generation"])
        if self.epoch() != (self.expected_epoch if epoch is None else epoch):
            fresh[:] = False
        result: NDArray[np.bool_] = fresh
        return result

    def unchanged(self, refs: Iterable[tuple[int, int, int, int, int]], epoch: int) -> bool:
        """`check` in one answer for a few references, as tuples in the order of SlotRef's fields:
        whether all of them are still what they were."""
        quads, first, records = self._quads, self._first, self._geometry.records
        self._check_alive()
        for ref in refs:
            record = ref[1]
            if record >= records or quads[first + record * _RECORD_QUADS] != ref[4]:
                return False
        return self.epoch() == epoch

    def header(self, record: Any) -> ChunkHeader:
        """A record's header, by any integer: a reference's fields may be numpy's. ArenaError if
        none is there (or it is being written each time)."""
        table = self._bytes(self._table)
        record = operator.index(record)
        if not 0 <= record < self._geometry.records:
            raise ArenaError(f"record {record} is beyond the table's {self._geometry.records}")
        at = self._geometry.record_at(record)
        problem = ""
        for _ in range(3):  # the daemon may be in the middle of writing it
            try:
                return ChunkHeader.unpack(table[at : at + HEADER_BYTES].tobytes())
            except ValueError as error:
                problem = str(error)
        raise ArenaError(f"record {record}: {problem}")

    def prefault(self, offset: int, length: int, write: bool = True) -> None:
        """Fault a range of the arena in, without the GIL; do it in steps, from another thread. It
        changes no byte. ArenaError, Forked."""
        self._check_alive()
        self._payload.populate(offset, length, write=write)

    def close(self, why: KvdError | None = None) -> None:
        """Let go. Idempotent; also safe in a forked child. Whoever uses it afterwards is told
        `why`, else an ArenaError."""
        if self._why is None:
            self._why = why
        self._payload.close()
        self._table.close()
        # An empty slice would keep the mapping alive.
        self._word = np.empty(0, "<u8")
        self._records = np.empty(0, RECORD_DTYPE)
        self._generations = self._records["generation"]
        self._quads = memoryview(b"")

    def _check_alive(self) -> None:
        self._bytes(self._table)

    def _bytes(self, mapping: Mapping) -> NDArray[np.uint8]:
        """Raises why it was closed, if it was; Forked."""
        try:
            return mapping.bytes
        except ArenaError:
            raise self._closed() from None

    def _closed(self) -> KvdError:
        """What to tell whoever uses a closed map: each time a new one, for it gets a traceback."""
        why = self._why
        return ArenaError("the mapping was closed") if why is None else type(why)(str(why))
