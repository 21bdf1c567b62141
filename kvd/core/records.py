"""Records of an earlier life, as columns: which chunks they tell of, and what of those.

The law of this module: it judges nothing. Whether a record is taken up is decided where it was
found: in the arena (adoption) or in a tier below (recovery).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.chunk import HeaderFlag
from kvd.core.advice import Advice
from kvd.core.columns import NONE
from kvd.core.config import SECOND_NS
from kvd.core.spaces import Space
from kvd.core.store import Store

Rows = NDArray[np.int64]


class Records:
    """What both ways of taking up records need."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def by_chunk(self, words: NDArray[np.uint64], space: Space) -> tuple[Rows, Rows]:
        """Records by chunk, from their keys as [records, 4] words: (number of each record's
        chunk, first record of each chunk)."""
        mark = self._store.index.mix(words, space.number)
        order = np.argsort(mark, kind="stable")
        mark = mark[order]
        same = mark[1:] == mark[:-1]
        if not same.any():
            return np.arange(len(words)), np.arange(len(words))
        same &= (words[order[1:]] == words[order[:-1]]).all(axis=1)
        starts = np.concatenate(([True], ~same))
        place = np.empty(len(words), np.int64)
        place[order] = np.cumsum(starts) - 1
        return place, order[starts]

    def describe(
        self,
        space: Space,
        records: NDArray[np.void],
        lead: Rows,
        base: int,
        words: NDArray[np.uint64],
    ) -> None:
        """Rows from `base` on are the chunks of these keys, as the record that leads each says."""
        chunks, now = self._store.chunks, self._store.now
        rows = slice(base, base + len(lead))
        chunks.np_space[rows] = space.number
        chunks.np_key[rows] = words
        chunks.np_child[rows] = chunks.np_cell[rows] = NONE
        chunks.np_print[rows] = raw(records["fingerprint"][lead]).view(np.uint64)
        chunks.np_index[rows] = index = records["index"][lead]
        chunks.np_tokens[rows] = records["tokens"][lead]
        chunks.np_flags[rows] = records["flags"][lead] & ~np.uint32(HeaderFlag.SEALED)
        created = records["created_unix_ns"][lead]
        chunks.np_born[rows] = created // SECOND_NS
        last = created.astype(np.int64) - self._store.config.unix_offset_ns
        chunks.np_last[rows] = np.minimum(last, now)
        pos0 = records["pos0"][lead]
        for n in np.flatnonzero(pos0 != index * np.uint64(space.spec.chunk_tokens)).tolist():
            chunks.odd_pos0[base + n] = int(pos0[n])

    def last_uses(self, rows: Rows, advice: Advice) -> None:
        """When chunks were last used, as far as an earlier life has told; their creation stands
        already."""
        store, known = self._store, advice.recollection
        if known is None:
            return
        at, found = known.find(store.ghosts(rows))
        last = np.minimum(known.last[at[found]] - store.config.unix_offset_ns, store.now)
        some = rows[found]
        store.chunks.np_last[some] = np.maximum(store.chunks.np_last[some], last)

    def coldest_first(self, rows: Rows) -> Rows:
        """Rows by the youngest chunk in the subtree of each, deeper ones first: no chunk stands
        before its own descendants."""
        chunks = self._store.chunks
        used = chunks.used
        depth = chunks.np_index[:used].astype(np.int64)
        depth[chunks.np_space[:used] != chunks.np_space[rows[0]]] = -1
        youngest = chunks.np_last[:used].copy()
        parent = chunks.np_parent[:used]
        levels = np.argsort(-depth, kind="stable")
        edges = np.flatnonzero(np.diff(depth[levels], prepend=np.int64(-2))).tolist()
        for begin, end in zip(edges, [*edges[1:], used], strict=True):
            level = levels[begin:end]
            level = level[parent[level] != NONE]
            np.maximum.at(youngest, parent[level], youngest[level])
        order: Rows = rows[np.lexsort((-depth[rows], youngest[rows]))]
        return order


def raw(column: NDArray[Any]) -> NDArray[np.uint8]:
    """A column of n-byte values as [rows, n]."""
    packed = np.ascontiguousarray(column)
    return packed.view(np.uint8).reshape(len(packed), packed.dtype.itemsize)


def pages(nbytes: NDArray[Any]) -> NDArray[Any]:
    """Sizes rounded up to 4 KiB."""
    return -(-nbytes // 4096) * 4096
