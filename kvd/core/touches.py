"""Uses of chunks that policies have not been told of yet.

The law of this module: a reply does not wait for recency. A use is noted in a microsecond and told
after the reply, oldest first, in every tier; what has another chunk in its row by then is passed
over. A use is told with all of the chunk's ancestors, but for those that were told of just before
where no tier's policy needs them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.core.columns import NONE
from kvd.eviction.base import LATELY_NS
from kvd.native import named

if TYPE_CHECKING:
    from kvd.core.store import Store

TOUCH_SLICE: Final = 512  # chunks whose recency is applied at once
_TIPS: Final = 16


class Touch(NamedTuple):
    """Uses, or what is said to be over."""

    rows: NDArray[np.int64]
    words: NDArray[np.uint64]  # of each one's key: the row may be another's by then
    when: int
    over: bool


class Use(NamedTuple):
    """The use of one chunk."""

    row: int
    word: int  # as in Touch
    when: int


class Touches:
    """What was noted, in the order of time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._noted: deque[Touch | Use] = deque()
        # The ends of chains that were told of lately: the word of each one's key, and when all of
        # its ancestors were told of last.
        self._tips: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._noted)

    @property
    def waiting(self) -> bool:
        """Whether there is something to be told."""
        return bool(self._noted)

    # -- as they come ---------------------------------------------------------------------------

    def use(self, row: int) -> None:
        """This chunk and all its ancestors were used now."""
        store = self._store
        self._noted.append(named(Use, (row, store.chunks.word[4 * row], store.now)))

    def touch(self, rows: NDArray[np.int64]) -> None:
        """The same of many."""
        if len(rows) == 1:
            self.use(int(rows[0]))
            return
        store = self._store
        self._noted.append(Touch(rows, store.chunks.np_key[rows, 0], store.now, False))

    def over(self, rows: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
        """These chunks, from leaf to root, are said not to be used again: in every tier they go
        first, as soon as the uses before are applied. `words`: of the keys that are meant."""
        self._noted.append(Touch(rows, words, self._store.now, True))

    # -- after the reply ------------------------------------------------------------------------

    def apply(self, budget: int = TOUCH_SLICE) -> int:
        """Tell what was noted, oldest first; what is left of the budget, in chunks."""
        store, chunks, noted = self._store, self._store.chunks, self._noted
        while noted and budget > 0:
            told = noted.popleft()
            if isinstance(told, Use):
                row = told.row
                if chunks.word[4 * row] == told.word and chunks.space[row]:
                    budget -= self._used(row, told.when)
                budget -= 1
                continue
            rows, words, when, over = told
            here = (chunks.np_key[rows, 0] == words) & (chunks.np_space[rows] != 0)
            if over:
                if len(rows) > budget:  # the end, nearest to the root, comes first
                    rest = len(rows) - budget
                    noted.appendleft(Touch(rows[:rest], words[:rest], when, over))
                    rows, here = rows[rest:], here[rest:]
                self._tips.clear()  # the next use of these takes it back, so it must be told
                some = rows[here].tolist()
                budget -= len(some) + 1
                for advice in (store.policy, *(lower.policy for lower in store.ladder.lowers)):
                    advice.cool(some, when)
                continue
            for n, row in enumerate(rows.tolist()):
                if budget <= 0:
                    noted.appendleft(Touch(rows[n:], words[n:], when, over))
                    break
                if here[n]:
                    budget -= self._used(row, when)
                budget -= 1
        return budget

    def _used(self, row: int, when: int) -> int:
        """Tell of a use of a chunk and its ancestors, but for those that were told of just before:
        who stores a prompt batch by batch would else pay for all of it with each. Policies that
        need whole chains are told all the same. How many it is told of."""
        store, tips = self._store, self._tips
        parent, words = store.chunks.parent, store.chunks.word
        policies = [store.policy, *(lower.policy for lower in store.ladder.lowers)]
        whole = any(policy.whole_chains() for policy in policies)
        chain = [row]
        told = when  # when those before were told of, if not now
        at = parent[row]
        while at != NONE:
            tip = None if whole else tips.get(at)
            if tip is not None and tip[0] == words[4 * at] and when - tip[1] < LATELY_NS:
                told = tip[1]
                del tips[at]
                break
            chain.append(at)
            at = parent[at]
        if not whole:
            tips[row] = (words[4 * row], told)
            if len(tips) > _TIPS:
                del tips[next(iter(tips))]
        chain.reverse()
        for policy in policies:
            policy.touch(chain, when)
        return len(chain)
