"""The records of slots: what has to stand in the table for a cell.

The law of this module: it changes nothing. A record is made whole from what is known of
the chunk, its space and its cell at this moment; whoever asked for it sends it where it goes.
"""

from __future__ import annotations

from typing import Final

from kvd.chunk import ChunkHeader, State
from kvd.chunk.header import FLAG_SEALED
from kvd.core import columns as col
from kvd.core.actions import WriteRecord
from kvd.core.columns import Cells, Chunks
from kvd.core.config import SECOND_NS, CoreConfig
from kvd.core.spaces import Space, Spaces
from kvd.native import named

_NO_ID: Final = bytes(16)
# A member is looked up in its class at every mention.
_WRITING: Final = State.WRITING


class Headers:
    """Makes records."""

    def __init__(self, config: CoreConfig, chunks: Chunks, cells: Cells, spaces: Spaces) -> None:
        self._epoch = config.epoch
        self._chunks = chunks
        self._cells = cells
        self._spaces = spaces

    def of(self, cell: int, state: State, generation: int) -> ChunkHeader:
        """The record of a cell whose slot is no writer's."""
        row = self._cells.chunk[cell]
        space = self._spaces.of(self._chunks.space[row])
        shard = cell - self._chunks.cell[row]
        return self._make(row, space, shard, cell, state, generation, _NO_ID)

    def written(self, cell: int, state: State) -> WriteRecord:
        """What puts the record of a cell into the table."""
        cells = self._cells
        header = self.of(cell, state, cells.generation[cell])
        return named(WriteRecord, (cells.record[cell], header))

    def granted(
        self,
        row: int,
        space: Space,
        shard: int,
        cell: int,
        record: int,
        generation: int,
        session: bytes,
    ) -> WriteRecord:
        """The same for a slot that was granted just now, by who knows all about it."""
        header = self._make(row, space, shard, cell, _WRITING, generation, session)
        return named(WriteRecord, (record, header))

    def _make(
        self,
        row: int,
        space: Space,
        shard: int,
        cell: int,
        state: State,
        generation: int,
        session: bytes,
    ) -> ChunkHeader:
        chunks, cells = self._chunks, self._cells
        sealed = cells.marks[cell] & col.SEALED
        index = chunks.index[row]
        pos0 = index * space.chunk_tokens
        if chunks.odd_pos0:
            pos0 = chunks.odd_pos0.get(row, pos0)
        values = (
            space.kind,
            state,
            space.namespace_digest,
            space.digest,
            chunks.key_of(row),
            chunks.parent_key_of(row),
            shard,
            space.shards,
            index,
            chunks.tokens[row],
            chunks.print_of(row),
            pos0,
            chunks.flags[row] | (FLAG_SEALED if sealed else 0),
            space.nbytes[shard],
            generation,
            self._epoch,
            session,
            chunks.born[row] * SECOND_NS,
            cells.digest_of(cell) if sealed else _NO_ID,
            0,
        )
        return named(ChunkHeader, values)
