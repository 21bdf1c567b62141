"""CRF that chooses its own half-life.

The law of this module: every expert scores every chunk, one of them rules. An expert is a
half-life; its shadow cache is not simulated but read off its scores: it would hold the chunks
whose score is among the best C of all that are known, resident or ghost, C being how many are
resident. So a use is a hit of the expert if the score before it was at least that C-th best. All
uses count, none are sampled; only the bars are estimated from a sample. Whoever has more hits,
decayed, takes over; the heaps move to its scores in small steps while the old order still holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappush
from math import exp2, log2, nan
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly
from kvd.eviction.crf import FAR
from kvd.eviction.ghosts import Ghosts
from kvd.eviction.leaves import SAME_USE_S, LeafPolicy, worth
from kvd.native import mypyc_attr

# A half-life of a millisecond orders by the last use: LRU is one of the experts.
HALF_LIVES_S = (0.001, 60.0, 300.0, 1200.0)

_SAMPLE: Final = 2048  # chunks from which the bars are estimated
_STEP: Final = 64  # ids that one call moves to the new ruler's heaps
_LOWEST: Final = float("-inf")


@mypyc_attr(allow_interpreted_subclasses=True)
class Adaptive(LeafPolicy):
    """Score: the ruling expert's S, in its half-lives. `value` and `coldness` are in seconds of
    recency, so that they mean the same whoever rules."""

    name: ClassVar[str] = "adaptive"

    def __init__(
        self,
        half_lives_s: Sequence[float] | None = None,  # else compiled, no options are told
        ghost_factor: float = 2.0,
        period_s: float = 60.0,
        decay: float = 0.8,
        margin: float = 0.01,
        same_use_s: float = SAME_USE_S,
    ) -> None:
        super().__init__(same_use_s)
        half_lives_s = HALF_LIVES_S if half_lives_s is None else half_lives_s
        self._half_ns = [h * 1e9 for h in half_lives_s]
        self._columns_of = [array("d") for _ in half_lives_s]
        self._ruler = 0
        self._score = self._columns_of[0]
        self._factor = ghost_factor
        self._ghosts = Ghosts(len(half_lives_s) + 1)  # every S, and the last use
        self._peak = 0
        self._bars = [_LOWEST] * len(half_lives_s)
        self._hits = [0.0] * len(half_lives_s)
        self._uses = 0  # since the bars were estimated
        self._period_ns = int(period_s * 1e9)
        self._decay, self._margin = decay, margin
        self._judge_at = self._period_ns
        # The heaps of an expert that is about to rule: ids below `_moved` are in them.
        self._heir = -1
        self._moved = 0
        self._heir_heaps: dict[int, list[tuple[float, int]]] = {}
        self._heir_entry = array("d")

    def _columns(self) -> list[tuple[array[Any], float | int]]:
        rest = [c for c in super()._columns() if c[0] is not self._score]
        return [*rest, *((column, 0.0) for column in self._columns_of)]

    # -- uses -----------------------------------------------------------------------------------

    def _first(self, chunk: int, ghost: int, size: int, time: int) -> float:
        self._peak = max(self._peak, self._len)
        old = self._ghosts.take(ghost)
        same = old is not None and time - old[-1] < self._same_ns
        for e, column in enumerate(self._columns_of):
            x = time / self._half_ns[e]
            if old is None:
                column[chunk] = x
            elif same:
                column[chunk] = max(old[e], x)
            else:
                gap = old[e] - x
                self._hits[e] += old[e] >= self._bars[e]
                column[chunk] = x + log2(1.0 + exp2(gap)) if gap < FAR else old[e]
        self._after(time, 1)
        return self._score[chunk]

    def touch(self, chain: Sequence[int], now: int) -> None:
        time = self._clock(now)
        if self._late or self._over:
            self._recall(chain)
        known, home, used, same_ns = len(self._home), self._home, self._used, self._same_ns
        fresh: list[int] = []
        again: list[int] = []
        for chunk in chain:
            if 0 <= chunk < known and home[chunk] >= 0:
                (again if time - used[chunk] < same_ns else fresh).append(chunk)
                used[chunk] = time
        for e, column in enumerate(self._columns_of):
            x, bar, hits = time / self._half_ns[e], self._bars[e], 0
            for chunk in fresh:
                old = column[chunk]
                hits += old >= bar
                gap = old - x
                if gap < -FAR:
                    column[chunk] = x
                elif gap < FAR:
                    column[chunk] = x + log2(1.0 + exp2(gap))
            for chunk in again:
                if column[chunk] < x:
                    column[chunk] = x
            self._hits[e] += hits
        self._after(time, len(fresh))

    def _came(self, chunks: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        for half_ns, column in zip(self._half_ns, self._columns_of, strict=True):
            np.frombuffer(column)[chunks] = times / half_ns
        self._peak = max(self._peak, self._len)

    def _gone(self, chunk: int, evicted: bool) -> None:
        if chunk < len(self._heir_entry):
            self._heir_entry[chunk] = nan
        if evicted:
            values = (*(column[chunk] for column in self._columns_of), self._used[chunk])
            self._ghosts.put(self._digest[chunk], values, int(self._factor * self._peak))

    # -- choosing -------------------------------------------------------------------------------

    def _after(self, time: int, uses: int) -> None:
        self._uses += uses
        if self._uses * 32 >= self._len:
            self._uses = 0
            self._measure()
        if self._heir >= 0:
            self._move(_STEP)
        elif time >= self._judge_at:
            self._judge_at = time + self._period_ns
            self._judge()

    def _measure(self) -> None:
        """Estimate every expert's bar: the C-th best score among residents and ghosts."""
        ghosts = len(self._ghosts)
        if not ghosts or not self._len:
            return
        stride = 1 + (self._len + ghosts) // _SAMPLE
        home = np.frombuffer(self._home, dtype=np.int32)[::stride] >= 0
        remembered = self._ghosts.values()[::stride]
        share = self._len / (self._len + ghosts)
        for e, column in enumerate(self._columns_of):
            scores = np.concatenate([np.frombuffer(column)[::stride][home], remembered[:, e]])
            if len(scores):
                place = min(int((1.0 - share) * len(scores)), len(scores) - 1)
                self._bars[e] = float(np.partition(scores, place)[place])

    def _judge(self) -> None:
        """Let the expert with the most hits rule, if it is clearly better."""
        best = max(range(len(self._hits)), key=lambda e: self._hits[e])
        if self._hits[best] > self._hits[self._ruler] * (1.0 + self._margin) + 1.0:
            self._heir, self._moved = best, 0
            self._heir_heaps = {}
            self._heir_entry = array("d", [nan]) * len(self._home)
        self._hits = [h * self._decay for h in self._hits]

    def _move(self, step: int) -> None:
        """Bring the leaves among the next `step` ids into the heir's heaps; crown it at the end."""
        end = min(self._moved + step, len(self._home))
        if len(self._heir_entry) < len(self._home):
            more = len(self._home) - len(self._heir_entry)
            self._heir_entry.extend(array("d", [nan]) * more)
        for chunk in range(self._moved, end):
            if self._home[chunk] >= 0 and not self._kids[chunk] and chunk != self._newest:
                self._push_heir(chunk)
        self._moved = end
        if end == len(self._home):
            self._ruler, self._heir = self._heir, -1
            self._score = self._columns_of[self._ruler]
            self._heaps, self._entry = self._heir_heaps, self._heir_entry
            self._heir_heaps, self._heir_entry = {}, array("d")
            self._late.clear()  # all leaves are in the heaps
            self._soon.clear()
            self._over.clear()

    def _push_heir(self, chunk: int) -> None:
        score = self._columns_of[self._heir][chunk]
        if self._heir_entry[chunk] == score:
            return
        self._heir_entry[chunk] = score
        heappush(self._heir_heaps.setdefault(self._home[chunk], []), (score, chunk))

    def _expose(self, chunk: int) -> None:
        super()._expose(chunk)
        if self._heir >= 0 and chunk < self._moved:
            self._push_heir(chunk)

    # -- the contract ---------------------------------------------------------------------------

    def value(self, chunk: int, now: int) -> float:
        if not self.resident(chunk):
            return 0.0
        return worth(self._peek(now) - self._score[chunk] * self._half_ns[self._ruler])

    # -- restart --------------------------------------------------------------------------------

    def _kept(self) -> list[array[Any]]:
        return self._columns_of

    def snapshot(self) -> dict[str, Any]:
        return {
            **super().snapshot(),
            "half_ns": self._half_ns,
            "ruler": self._ruler,
            "peak": self._peak,
            "bars": self._bars,
            "hits": self._hits,
            "judge_at": self._judge_at,
        }

    def ghosts(self, begin: int, count: int) -> Ghostly | None:
        return self._ghosts.part(begin, count)

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        if state["half_ns"] != self._half_ns:  # every S counts half-lives
            raise ValueError("snapshot was taken with other half-lives")
        super().restore(state, ghosts, now)
        self._ruler = range(len(self._half_ns))[int(state["ruler"])]
        self._score = self._columns_of[self._ruler]
        self._peak, self._judge_at = int(state["peak"]), int(state["judge_at"])
        for mine, told in ((self._bars, state["bars"]), (self._hits, state["hits"])):
            mine[:] = [float(number) for number in told]
            if len(mine) != len(self._half_ns):
                raise ValueError("snapshot of another number of experts")
        self._ghosts.restore(*ghosts)
