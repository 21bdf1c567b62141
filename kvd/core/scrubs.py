"""Scrubbing: payloads below are read now and then to see whether they still hold.

The law of this module: one payload of a tier at a time, at a bounded rate, and never one that is in
anybody's hands. A pass goes through all keys by their first 12 bits, so where it is can be said in
one number that means the same after a restart. What does not hold is forgotten, like on any read.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvd.core.actions import ScrubCursor, TierScrub
from kvd.core.config import SECOND_NS
from kvd.core.events import TierAnswer
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs, Pause, Work, spent
from kvd.core.lower import READY, Lower, TierJob
from kvd.core.store import Store

PARTS: Final = 1 << 12
_STRIDE: Final = 1 << 16
_ON_DEMAND: Final = 256 << 20  # bytes a second of a pass that an operator asked for
_IDLE_NS: Final = SECOND_NS


class Scrub:
    """How far a tier's pass has got."""

    def __init__(self, rate: int) -> None:
        self.usual = rate  # bytes a second; 0: off
        self.part = 0
        self.left = 0  # parts of a pass that was asked for
        self.cells: deque[int] = deque()  # of this part
        self.running = False  # a payload is being read, or looked for
        self.passes = 0

    @property
    def rate(self) -> int:
        return max(self.usual, _ON_DEMAND) if self.left else self.usual


class Scrubs:
    """One pass for each tier below."""

    def __init__(self, store: Store, jobs: Jobs, fetches: Fetches) -> None:
        self._store = store
        self._jobs = jobs
        self._fetches = fetches
        self.of = [Scrub(lower.config.scrub) for lower in store.ladder.lowers]
        self._begun = False

    def pump(self) -> None:
        """Begin, once there is a clock."""
        if not self._begun:
            self._begun = True
            for number, scrub in enumerate(self.of):
                if scrub.usual:
                    self._later(number, _IDLE_NS)

    def resume(self, number: int, part: int) -> None:
        """Go on where an earlier life was."""
        self.of[number].part = part % PARTS

    def ask(self, number: int) -> None:
        """A whole pass, now."""
        self.of[number].left = PARTS
        self.due(number)

    def due(self, number: int) -> None:
        """It is time for the next payload of a tier."""
        scrub = self.of[number]
        if not scrub.running and scrub.rate:
            scrub.running = True
            self._jobs.start(self._next(number))

    def _later(self, number: int, ns: int) -> None:
        self._store.timers.add(self._store.now + ns, "scrub", number)

    def _next(self, number: int) -> Work[None]:
        store, scrub = self._store, self.of[number]
        lower = store.ladder.lowers[number]
        for _ in range(PARTS):
            while scrub.cells:
                if self._read(lower, scrub.cells.popleft()):
                    return  # goes on when it is back
            if not lower.chunks or not lower.readable:
                break
            yield from self._look(lower, scrub)
        scrub.running = False
        scrub.left = 0
        if scrub.usual:
            self._later(number, _IDLE_NS)

    def _look(self, lower: Lower, scrub: Scrub) -> Work[None]:
        """Find what the tier has of the next part of all keys."""
        store = self._store
        part = scrub.part
        used = store.cells.used
        for begin in range(0, used, _STRIDE):
            end = min(begin + _STRIDE, used)
            cells = np.flatnonzero(lower.np_state[begin:end] == READY) + begin
            keys = store.chunks.np_key[store.cells.np_chunk[cells], 0]
            scrub.cells.extend(cells[keys & np.uint64(PARTS - 1) == part].tolist())
            if spent(store, 8):
                yield Pause.SLICE
        scrub.part = (part + 1) % PARTS
        scrub.left = max(0, scrub.left - 1)
        if not scrub.part:
            scrub.passes += 1
        if scrub.cells or not scrub.part:
            store.out.append(ScrubCursor(lower.number, part))

    def _read(self, lower: Lower, cell: int) -> bool:
        store, chunks = self._store, self._store.chunks
        row = store.cells.chunk[cell]
        if lower.state[cell] != READY or row in store.pinned or not lower.readable:
            return False
        space = store.spaces.of(chunks.space[row])
        shard = cell - chunks.cell[row]
        within = lower.config.read_ns
        number = store.ladder.begin("scrub", lower, cell, within, None)
        store.out.append(
            TierScrub(
                number,
                lower.number,
                *self._fetches.name(cell),
                lower.at[cell],
                lower.generation[cell],
                space.nbytes[shard],
                store.now + within,
            )
        )
        return True

    def done(self, job: TierJob, answer: TierAnswer, *, fits: bool) -> None:
        """A payload was read, or was not to be had."""
        store, lower, cell = self._store, job.lower, job.cell
        name = "foreign" if answer is TierAnswer.OK and not fits else answer.value
        store.counters.own["shards_scrubbed", name] += 1
        if name == "foreign":
            self._fetches.delete(lower, cell)
        elif answer in (TierAnswer.MISS, TierAnswer.CORRUPT):
            store.ladder.forget(lower, cell)
        space = store.spaces.of(store.chunks.space[job.row])
        nbytes = space.nbytes[cell - store.chunks.cell[job.row]]
        store.ladder.release(job.row)
        scrub = self.of[lower.number]
        scrub.running = False
        if scrub.rate:
            self._later(lower.number, nbytes * SECOND_NS // scrub.rate)
