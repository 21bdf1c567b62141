"""The few keys that are used most, found in bounded memory.

The law of this module: one use in `_STRIDE` is looked at, and at most `_TABLE` keys are counted
(Misra and Gries, 1982), so a key that has more than `SHARE` of all uses is found, and what is found
has nearly that much. What was long ago counts less and less.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SHARE: Final = 0.002
_TABLE: Final = 1024
_STRIDE: Final = 17  # prime: no length of a request keeps step with it
_REVIEW: Final = 2048  # looks between two lists of the hot, in the end
_FEW: Final = 8  # looks that make nothing hot
_MOST: Final = 1 << 16  # looks that count


class Hot:
    """Keys with at least `SHARE` of all uses."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._looks = 0
        self._skip = 0  # uses until the next look
        self._review = _REVIEW // 16
        self._words = np.empty(0, np.uint64)  # the hot, sorted

    def __len__(self) -> int:
        return len(self._words)

    def told(self, keys: NDArray[np.uint64]) -> bool:
        """These were used. Whether the list of the hot is another now."""
        count = len(keys)
        if self._skip >= count:
            self._skip -= count
            return False
        counts = self._counts
        for key in keys[self._skip :: _STRIDE].tolist():
            self._looks += 1
            self._review -= 1
            if key in counts:
                counts[key] += 1
            elif len(counts) < _TABLE:
                counts[key] = 1
            else:
                self._counts = counts = {k: n - 1 for k, n in counts.items() if n > 1}
        self._skip = (self._skip - count) % _STRIDE
        if self._review > 0:
            return False
        self._review = min(self._looks, _REVIEW)
        least = max(SHARE * self._looks, _FEW)
        words = np.array(sorted(k for k, n in counts.items() if n >= least), np.uint64)
        changed = not np.array_equal(words, self._words)
        self._words = words
        if self._looks >= _MOST:
            self._looks //= 2
            self._counts = {k: n // 2 for k, n in counts.items() if n > 1}
        return changed

    def uses(self) -> dict[int, float]:
        """The hot, and about how often each was used of late."""
        return {key: float(self._counts.get(key, 0) * _STRIDE) for key in self._words.tolist()}

    def among(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
        """Which of these are hot; None: none is."""
        words = self._words
        if not len(words):
            return None
        at = np.searchsorted(words, keys)
        at[at == len(words)] = 0
        hot: NDArray[np.bool_] = words[at] == keys
        return hot if hot.any() else None
