"""Draining: everything that DRAM has and a tier has not is written there, hottest first.

The law of this module: a million chunks are looked through a stride at a time, and named to the
demotions as fast as those can write, not sooner. "Hottest first" holds between bands of equal
numbers of chunks by their last use, and within each stride of a band.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.lower import Lower
from kvd.core.store import Store

_STRIDE = 1 << 14  # rows looked at at once: a few tenths of a millisecond
_PIECE: Final = 128  # chunks named at once
_BANDS: Final = 16
_SAMPLES: Final = 256  # of a stride, by which the bands are cut
_BAND_LEAST = 1024  # chunks; fewer are one band


class Drains:
    """`name(row, lower)`: write this; `wanted(lower)`: whether more should be named now."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        name: Callable[[int, Lower], None],
        wanted: Callable[[Lower], bool],
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._name = name
        self._wanted = wanted
        self._counting = 0
        self._feeding: dict[int, int] = {}  # by drain: chunks that are not named yet
        self._to: dict[int, Lower] = {}  # by drain

    @property
    def left(self) -> int:
        """Chunks to come, as far as is known; more than 0 while a drain goes on."""
        return self._counting + sum(self._feeding.values())

    def pump(self) -> None:
        """After every event: who waits until more is wanted goes on."""
        if any(map(self._wanted, self._to.values())) and self._jobs.parked(Pause.DEMOTION):
            self._jobs.wake(Pause.DEMOTION)

    def begin(self, lower: Lower) -> Work[int]:
        """How many chunks there are to write; then they are named, beside everything else."""
        store, count = self._store, 0
        samples: list[NDArray[np.int64]] = []
        self._counting += 1
        try:
            for begin in range(0, store.chunks.used, _STRIDE):
                rows = self._some(lower, begin)
                count += len(rows)
                step = -(-len(rows) // _SAMPLES) or 1
                samples.append(store.chunks.np_last[rows[::step]].astype(np.int64))
                if spent(store, 16):
                    yield Pause.SLICE
        finally:
            self._counting -= 1
        if count:
            number = store.handle()
            self._feeding[number], self._to[number] = count, lower
            self._jobs.start(self._feed(number, lower, self._edges(samples, count)))
        return count

    def _some(self, lower: Lower, begin: int) -> NDArray[np.int64]:
        """Rows of a stride that the tier lacks something of."""
        chunks = self._store.chunks
        part = slice(begin, min(begin + _STRIDE, chunks.used))
        ready = chunks.np_ready[part]
        lacks = (ready > 0) & (chunks.np_space[part] != 0) & (lower.np_count[part] < ready)
        rows: NDArray[np.int64] = np.flatnonzero(lacks) + begin
        return rows

    def _edges(self, samples: list[NDArray[np.int64]], count: int) -> list[int]:
        """Last uses that part the bands, the latest first."""
        if count < _BAND_LEAST:
            return []
        some = np.concatenate(samples)
        some = np.sort(some[:: -(-len(some) // 4096) or 1])
        cuts = some[[len(some) * n // _BANDS for n in range(1, _BANDS)]]
        return sorted(set(cuts.tolist()), reverse=True)

    def _feed(self, number: int, lower: Lower, edges: list[int]) -> Work[None]:
        store, chunks = self._store, self._store.chunks
        above: int | None = None
        try:
            for edge in [*edges, None]:
                for begin in range(0, chunks.used, _STRIDE):
                    rows = self._band(lower, begin, edge, above)
                    for at in range(0, len(rows), _PIECE):
                        while not self._wanted(lower):
                            yield Pause.DEMOTION
                        piece = rows[at : at + _PIECE].tolist()
                        for row in piece:
                            self._name(row, lower)
                        self._feeding[number] = max(1, self._feeding[number] - len(piece))
                        if spent(store, 8):
                            yield Pause.SLICE
                    if spent(store, 20):
                        yield Pause.SLICE
                above = edge
        finally:
            del self._feeding[number], self._to[number]

    def _band(
        self, lower: Lower, begin: int, edge: int | None, above: int | None
    ) -> NDArray[np.int64]:
        """Rows of a stride that were last used from `edge` on and before `above`, latest first."""
        rows = self._some(lower, begin)
        last = self._store.chunks.np_last[rows]
        mine = np.ones(len(rows), bool) if edge is None else last >= edge
        if above is not None:
            mine &= last < above
        rows, last = rows[mine], last[mine]
        found: NDArray[np.int64] = rows[np.argsort(-last, kind="stable")]
        return found
