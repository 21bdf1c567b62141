"""How likely a chunk is to be used again soon, by class and age, learned from what happened.

The law of this module: a life table. A use starts a life; a use after it ends it as a hit, and
being lost sight of as unknown, both at an age. Lives that still run count as unknown at their
present age, or short gaps would look likely only because long ones have not come to pass. (The
idea is LHD's, Beckmann et al., NSDI 2018; censoring as in Kaplan and Meier, 1958.)
"""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

_PER_OCTAVE = 6
_OCTAVES = 24  # from 1/16 s to 12 days
_SHIFT = 4.0
BINS = _PER_OCTAVE * _OCTAVES
_FLOOR_S = 1e-3
_SMOOTH = 4  # bins to each side

# Upper edge of each bin, seconds.
_EDGES = 2.0 ** ((np.arange(BINS) + 1.0) / _PER_OCTAVE - _SHIFT)


def bin_of(age_ns: float) -> int:
    """The bin of an age."""
    place = int(_PER_OCTAVE * (log2(age_ns * 1e-9 + _FLOOR_S) + _SHIFT))
    return 0 if place < 0 else min(place, BINS - 1)


def bins_of(ages_ns: NDArray[np.float64]) -> NDArray[np.intp]:
    """`bin_of` for many."""
    places = _PER_OCTAVE * (np.log2(np.maximum(ages_ns, 0.0) * 1e-9 + _FLOOR_S) + _SHIFT)
    return np.clip(places.astype(np.intp), 0, BINS - 1)


class Odds:
    """Odds of a use within a horizon, for `classes` classes. `prior`: so many lives of the
    average class are added to each, which is what a class with little history goes by."""

    def __init__(self, classes: int, prior: float) -> None:
        self._prior = prior
        self.hits = [[0.0] * BINS for _ in range(classes)]
        self.ends = [[0.0] * BINS for _ in range(classes)]
        self.table = [[0.0] * BINS for _ in range(classes)]

    def refresh(self, living: NDArray[np.float64], horizon_ns: float) -> None:
        """Work out `table` anew. `living`: running lives by class and bin."""
        hits = np.array(self.hits)
        ends = np.array(self.ends) + living
        kernel = np.full(2 * _SMOOTH + 1, 1.0 / (2 * _SMOOTH + 1))
        hits = np.stack([np.convolve(row, kernel, "same") for row in hits])
        lives = hits.sum() + ends.sum()
        if lives <= 0.0:
            return
        hits = hits + self._prior * hits.sum(0) / lives
        ends = ends + self._prior * ends.sum(0) / lives
        done = hits + ends
        at_risk = done[:, ::-1].cumsum(1)[:, ::-1] - 0.5 * done
        so_far = np.concatenate([np.zeros((len(hits), 1)), hits.cumsum(1)], axis=1)
        until = np.searchsorted(_EDGES, _EDGES + horizon_ns * 1e-9).clip(0, BINS - 1)
        soon = so_far[:, until + 1] - so_far[:, 1:] + 0.5 * hits
        self.table = (soon / np.maximum(at_risk, 1e-9)).tolist()

    def fade(self, factor: float) -> None:
        """Let what was learned count less."""
        self.hits = [[n * factor for n in row] for row in self.hits]
        self.ends = [[n * factor for n in row] for row in self.ends]
