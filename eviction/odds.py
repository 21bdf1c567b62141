"""How likely a chunk is to be used again soon, by class and age, learned from what happened.

The law of this module: a life table. A use starts a life; a use after it ends it as a hit, and
being lost sight of as unknown, both at an age. Lives that still run count as unknown at their
present age, or short gaps would look likely only because long ones have not come to pass. (The
idea is LHD's, Beckmann et al., NSDI 2018; censoring as in Kaplan and Meier, 1958.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log2
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_PER_OCTAVE: Final = 6
_OCTAVES: Final = 24  # from 1/16 s to 12 days
_SHIFT: Final = 4.0
BINS: Final = _PER_OCTAVE * _OCTAVES
_FLOOR_S: Final = 1e-3
_SMOOTH: Final = 4  # bins to each side
_KERNEL: Final = np.full(2 * _SMOOTH + 1, 1.0 / (2 * _SMOOTH + 1))
_AT_A_TIME: Final = 4  # groups worked out in one refresh

# Upper edge of each bin, seconds.
_EDGES: Final = 2.0 ** ((np.arange(BINS) + 1.0) / _PER_OCTAVE - _SHIFT)


def bin_of(age_ns: float) -> int:
    """The bin of an age."""
    place = int(_PER_OCTAVE * (log2(age_ns * 1e-9 + _FLOOR_S) + _SHIFT))
    return 0 if place < 0 else min(place, BINS - 1)


def bins_of(ages_ns: NDArray[np.float64]) -> NDArray[np.intp]:
    """`bin_of` for many."""
    places = _PER_OCTAVE * (np.log2(np.maximum(ages_ns, 0.0) * 1e-9 + _FLOOR_S) + _SHIFT)
    return np.minimum(np.maximum(places.astype(np.intp), 0), BINS - 1)


class Odds:
    """Odds of a use within a horizon, for `classes` classes in each of `groups` groups; row
    `group * classes + class` of every table. `prior`: so many lives of the average class are added
    to each, which is what a class with little history goes by; and `share` lives of its class in
    all groups to a group's own."""

    def __init__(self, classes: int, prior: float, groups: int = 1, share: float = 1000.0) -> None:
        self._classes, self._groups = classes, groups
        self._prior, self._share = prior, share
        rows = classes * groups
        self._hits, self._ends = (array("d", bytes(8 * BINS * rows)) for _ in range(2))
        self.hits, self.ends = _rows(self._hits), _rows(self._ends)
        self._tables: list[list[list[float]] | None] = [None] * groups
        self._turn = 0
        self.table = [[0.0] * BINS for _ in range(rows)]

    def refresh(
        self, living: NDArray[np.float64], horizon_ns: float, groups: Sequence[int] | None = None
    ) -> None:
        """Work out `table` anew. `living`: running lives by row and bin, of `groups` (None: of all)
        alone, for there is nothing of others. Of many groups a few at a time: it has to be
        short."""
        groups = range(self._groups) if groups is None else groups
        shape = (self._groups, self._classes, BINS)
        some = list(groups)
        every_hits = np.frombuffer(self._hits).reshape(shape)[some]
        every_ends = np.frombuffer(self._ends).reshape(shape)[some]
        every_ends += living.reshape(every_ends.shape)
        hits, ends = _smooth(every_hits.sum(0)), every_ends.sum(0)
        total = hits.sum() + ends.sum()
        if total <= 0.0:
            return
        hits = hits + self._prior * hits.sum(0) / total
        ends = ends + self._prior * ends.sum(0) / total
        common = _odds(hits, ends, horizon_ns)
        lives = every_hits.sum((1, 2)) + every_ends.sum((1, 2))
        known = np.flatnonzero(lives).tolist()
        if len(known) > 1:
            weight = self._share / np.maximum((hits + ends).sum(1, keepdims=True), 1e-9)
            for n in range(min(len(known), _AT_A_TIME)):
                group = known[(self._turn + n) % len(known)]
                own_hits = _smooth(every_hits[group]) + weight * hits
                own_ends = every_ends[group] + weight * ends
                self._tables[groups[group]] = _odds(own_hits, own_ends, horizon_ns)
            self._turn = (self._turn + _AT_A_TIME) % len(known)
        self.table = [row for own in self._tables for row in own or common]

    def together(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Hits and ends of each class, all groups together."""
        shape = (self._groups, self._classes, BINS)
        hits, ends = np.frombuffer(self._hits), np.frombuffer(self._ends)
        return hits.reshape(shape).sum(0), ends.reshape(shape).sum(0)

    def fade(self, factor: float) -> None:
        """Let what was learned count less."""
        for counts in (self._hits, self._ends):
            faded = np.frombuffer(counts)
            faded *= factor


def _rows(counts: array[float]) -> list[Any]:
    """Views of the rows, to be counted in: quicker so than a cell of numpy's."""
    view = memoryview(counts)
    return [view[at : at + BINS] for at in range(0, len(counts), BINS)]


def _smooth(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    smooth = np.zeros_like(rows)
    for n in np.flatnonzero(rows.any(1)).tolist():  # as a rule, few classes have any
        smooth[n] = np.convolve(rows[n], _KERNEL, "same")
    return smooth


def _odds(
    hits: NDArray[np.float64], ends: NDArray[np.float64], horizon_ns: float
) -> list[list[float]]:
    done = hits + ends
    at_risk = done[:, ::-1].cumsum(1)[:, ::-1] - 0.5 * done
    so_far = np.concatenate([np.zeros((len(hits), 1)), hits.cumsum(1)], axis=1)
    until = np.searchsorted(_EDGES, _EDGES + horizon_ns * 1e-9).clip(0, BINS - 1)
    soon = so_far[:, until + 1] - so_far[:, 1:] + 0.5 * hits
    table: list[list[float]] = (soon / np.maximum(at_risk, 1e-9)).tolist()
    return table
