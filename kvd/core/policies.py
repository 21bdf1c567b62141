"""The policies of all tiers: what they knew in an earlier life, and know, and who comes after them.

The law of this module: nothing here is waited for. What policies know is told in parts, between
which others are served, and one pass at a time; a policy that fails is followed by another, which
is told of what is resident in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.advice import Advice
from kvd.core.jobs import Jobs, Pause, Work
from kvd.core.lower import Lower
from kvd.core.recollection import Part, Recollection, parts
from kvd.core.store import Store
from kvd.core.takeover import take_over
from kvd.eviction.base import Policy


class Policies:
    """`make` makes one. That of DRAM comes first, then those below in their order."""

    def __init__(self, store: Store, jobs: Jobs, make: Callable[[], Policy]) -> None:
        self._store = store
        self._jobs = jobs
        self._make = make
        self._remembering = False
        store.policy.begin_load = lambda: self._failed(None)
        for lower in store.ladder.lowers:
            lower.policy.begin_load = partial(self._failed, lower)

    def _advices(self) -> list[Advice]:
        return [self._store.policy, *(low.policy for low in self._store.ladder.lowers)]

    def recall(self, known: Mapping[str, Recollection], now: int) -> list[str]:
        """As `Core.recall`."""
        return [
            advice.tier
            for advice in self._advices()
            if advice.tier in known and advice.recall(self._make, known[advice.tier], now)
        ]

    def all(self) -> Iterator[Part]:
        """As `Core.remember`."""
        while self._store.touches.waiting:
            self._store.touches.apply()
        return filter(None, parts(self._store))

    def remember(self, event: ev.Remember) -> None:
        """Tell what they know, in parts; a pass that is under way is not begun again."""

        def job() -> Work[None]:
            for part in parts(self._store):
                if part:
                    self._store.out.append(ac.Remembered(part))
                yield Pause.SLICE
            self._store.out.append(ac.Remembered(None))
            self._remembering = False

        if not self._remembering:
            self._remembering = True
            self._jobs.later(job())

    def _failed(self, lower: Lower | None) -> None:
        """Another policy follows; `lower`: the tier, None for DRAM."""
        advice = self._store.policy if lower is None else lower.policy
        self._jobs.later(take_over(self._store, advice, lower))
