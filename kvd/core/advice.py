"""A policy in the hands of the core: whatever it does, it costs advice and nothing else.

The law of this module: no call here raises, whatever kind of exception a policy does: SystemExit
and others that are no Exception, too, but for KeyboardInterrupt, which is the terminal's. The first
one ends its turn until the daemon's next start, for what it knows may be wrong from then on: it is
counted, told, and a plain LRU takes over, into which all that is resident is loaded in slices
(takeover.py). If that fails too there is no advice any more, and the core goes through its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.core.actions import PolicyFailed
from kvd.core.columns import NONE
from kvd.core.recollection import Recollection
from kvd.eviction.base import Policy
from kvd.eviction.recency import Recency

_TEXT: Final = 200


def _unless_interrupted(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        raise error


class Advice:
    """The policy of one tier, or what stands in for it. `tier`: its name."""

    def __init__(self, policy: Policy, tier: str) -> None:
        self.tier = tier
        self.name = policy.name
        self.policy: Policy | None = policy  # whose turn it is
        self.turn = 0  # raised when that changes, and when what took over knows all
        self.error = ""  # why the turn of the configured one is over
        self.partial = False  # something may be resident that is not known here
        self.recollection: Recollection | None = None  # what an earlier life knew, while needed
        self.failed: Callable[[PolicyFailed], None] = lambda told: None
        self.begin_load: Callable[[], None] = lambda: None

    def recall(self, make: Callable[[], Policy], known: Recollection, now: int) -> bool:
        """Take up what an earlier life knew; whether it could be. Pre: nothing was told yet."""
        if self.policy is None or known.policy != self.name:
            return False
        try:
            self.policy.restore(known.state, (known.ghosts, known.ghost_values), now)
            if self.policy.memory(np.empty(0, np.int64)).shape[1] != known.memory.shape[1]:
                raise ValueError("memory of another width")
        except BaseException as error:  # noqa: BLE001 - it does not hold: a cold policy
            _unless_interrupted(error)
            self.policy = make()
            return False
        self.recollection = known
        return True

    @property
    def turn_of(self) -> str:
        """The name of the policy whose turn it is."""
        return "none" if self.policy is None else self.policy.name

    # -- what the policy is told ----------------------------------------------------------------

    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        while self.policy is not None:
            try:
                self.policy.insert(
                    chunk, parent=parent, queue=queue, size=size, ghost=ghost, now=now
                )
                return
            except BaseException as error:  # noqa: BLE001 - the boundary of a policy
                self.fail("insert", error)

    def load(
        self,
        order: NDArray[np.int64],
        born: NDArray[np.int64],
        *,
        parents: NDArray[np.int64],
        queue: int,
        size: int,
        ghosts: NDArray[np.uint64],
    ) -> None:
        try:
            if self.policy is not None:
                known = self.recollection
                self.policy.load(
                    order,
                    born,
                    parents=parents,
                    queue=queue,
                    size=size,
                    ghosts=ghosts,
                    memory=None if known is None else known.of(ghosts),
                )
        except BaseException as error:  # noqa: BLE001 - the job that takes over loads them
            self.fail("load", error)

    def touch(self, chain: Sequence[int], now: int) -> None:
        try:
            if self.policy is not None:
                self.policy.touch(chain, now)
        except BaseException as error:  # noqa: BLE001
            self.fail("touch", error)

    def defer(self, chunks: Sequence[int], now: int) -> None:
        try:
            if self.policy is not None:
                self.policy.defer(chunks, now)
        except BaseException as error:  # noqa: BLE001
            self.fail("defer", error)

    def cool(self, chunks: Sequence[int], now: int) -> None:
        try:
            if self.policy is not None:
                self.policy.cool(chunks, now)
        except BaseException as error:  # noqa: BLE001
            self.fail("cool", error)

    def forget(self, chunk: int, *, evicted: bool) -> None:
        try:
            if self.policy is not None:
                self.policy.forget(chunk, evicted=evicted)
        except BaseException as error:  # noqa: BLE001
            self.fail("forget", error)

    # -- what it is asked -----------------------------------------------------------------------

    def whole_chains(self) -> bool:
        """Whether `touch` must be told each use from the root on."""
        try:
            return self.policy is not None and self.policy.whole_chains()
        except BaseException as error:  # noqa: BLE001
            self.fail("whole_chains", error)
            return True

    def victims(self, queue: int, now: int) -> Iterator[int]:
        """Ends early where the policy fails: `turn` has changed then."""
        return self._named(queue, now, stays=False)

    def leaves(self, queue: int, now: int) -> Iterator[int]:
        """The same of the policy's `leaves`."""
        return self._named(queue, now, stays=True)

    def _named(self, queue: int, now: int, *, stays: bool) -> Iterator[int]:
        named: Iterator[int] | None = None
        while True:
            try:
                if named is None:
                    if (policy := self.policy) is None:
                        return
                    ask = policy.leaves if stays else policy.victims
                    named = iter(ask(queue, now))
                row = next(named, NONE)
            except BaseException as error:  # noqa: BLE001
                self.fail("leaves" if stays else "victims", error)
                return
            if row == NONE:
                return
            yield row  # outside: who asks no further ends this generator with an exception, too

    def first(self, queue: int, now: int) -> int:
        """The first of `victims`, or NONE. `turn` has changed where the policy fails."""
        try:
            if self.policy is None:
                return NONE
            return self.policy.first(queue, now)
        except BaseException as error:  # noqa: BLE001
            self.fail("victims", error)
            return NONE

    def coldness(self, queue: int, now: int) -> float | None:
        try:
            return None if self.policy is None else self.policy.coldness(queue, now)
        except BaseException as error:  # noqa: BLE001
            self.fail("coldness", error)
            return None

    def value(self, chunk: int, now: int) -> float:
        """0 where there is no advice: nothing is hot then."""
        try:
            return 0.0 if self.policy is None else self.policy.value(chunk, now)
        except BaseException as error:  # noqa: BLE001
            self.fail("value", error)
            return 0.0

    # -- a turn that is over --------------------------------------------------------------------

    def fail(self, method: str, error: BaseException) -> None:
        """An exception of the policy: its turn is over."""
        _unless_interrupted(error)
        what = f"{self.turn_of}.{method}: {type(error).__name__}: {error}"[:_TEXT]
        first = not self.error
        self.error = self.error or what
        self.partial = True
        self.turn += 1
        self.recollection = None
        self.policy = Recency() if first else None
        self.failed(PolicyFailed(self.tier, what, error))
        if first:
            self.begin_load()

    def shown(self) -> dict[str, Any]:
        """For `stat`."""
        return {"policy": self.name, "turn": self.turn_of, "error": self.error}
