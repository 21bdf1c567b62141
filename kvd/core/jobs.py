"""Work that is longer than one event may take.

The law of this module: a job is a generator that does about a millisecond of work between two
yields, keeps nothing across a yield that others may change without checking it again, and ends
by itself. `Store.units` counts what a slice has done: one unit is ten to twenty microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from enum import Enum, auto
from typing import Final, TypeVar

from kvd.core.store import Store
from kvd.native import plain_members

SLICE_UNITS: Final = 32


@plain_members
class Pause(Enum):
    """Why a job gives way."""

    SLICE = auto()  # it has had its time: go on in the next slice
    ROOM = auto()  # until a slab has been emptied, or can't be
    COPY = auto()  # until a copy is done
    DEMOTION = auto()  # until a demotion freed a slot, or took too long


T = TypeVar("T")
Work = Generator[Pause, None, T]
Job = Work[None]


class Jobs:
    """First come, first served, one slice each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ready: deque[Job] = deque()
        self._parked: dict[Pause, list[Job]] = {
            pause: [] for pause in (Pause.ROOM, Pause.COPY, Pause.DEMOTION)
        }

    @property
    def busy(self) -> bool:
        """Whether a job could go on now."""
        return bool(self._ready)

    def start(self, job: Job) -> None:
        """Run the first slice at once."""
        self._run(job)

    def later(self, job: Job) -> None:
        """Run its first slice when it is its turn."""
        self._ready.append(job)

    def step(self) -> bool:
        """Run one slice of one job; False if none is ready."""
        if not self._ready:
            return False
        self._run(self._ready.popleft())
        return True

    def parked(self, pause: Pause) -> bool:
        """Whether somebody waits for this."""
        return bool(self._parked[pause])

    def wake(self, pause: Pause) -> None:
        """What they waited for may have come."""
        self._ready.extend(self._parked[pause])
        self._parked[pause].clear()

    def _run(self, job: Job) -> None:
        try:
            pause = next(job)
        except StopIteration:
            return
        if pause is Pause.SLICE:
            self._ready.append(job)
        else:
            self._parked[pause].append(job)


def spent(store: Store, units: int = 1) -> bool:
    """Count work; whether the slice is over."""
    store.units += units
    return store.units >= SLICE_UNITS
