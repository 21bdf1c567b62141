"""A process beside what is measured: a neighbour, a storm, a writer.

The law of this module: it is a process of its own, as an engine is, so that what is measured shares
no interpreter with it; it is under way before anything is measured beside it, and it has ended
before anything is measured without it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from queue import Empty
from typing import Any

from kvd.tools.bench.daemon import BenchError

__all__ = ["Event", "beside"]

ANSWER_S = 60.0  # until it has begun, and until it has ended
_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def beside(work: Callable[..., float], *arguments: object) -> Iterator[list[float]]:
    """Run `work(stop, begun, *arguments)` in a process. It calls `begun()` when it is under way,
    ends soon after `stop` is set, and returns a figure of how it went: that is in the list that
    this yields once the block was left. BenchError with whatever it raised."""
    stop, told = _SPAWN.Event(), _SPAWN.Queue()
    process = _SPAWN.Process(target=_run, args=(work, stop, told, arguments), daemon=True)
    process.start()
    figures: list[float] = []
    try:
        if (said := told.get(timeout=ANSWER_S)) is not None:
            raise BenchError(f"{work.__name__} did not begin: {said}")
        yield figures
        stop.set()
        said = told.get(timeout=ANSWER_S)
        if not isinstance(said, float):
            raise BenchError(f"{work.__name__} ended: {said}")
        figures.append(said)
    except Empty:
        raise BenchError(f"{work.__name__} does not answer") from None
    finally:
        stop.set()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _run(work: Callable[..., float], stop: Event, told: Any, arguments: tuple[object, ...]) -> None:
    """In the process: tells None once it has begun, then its figure, or what went wrong."""
    try:
        told.put(float(work(stop, lambda: told.put(None), *arguments)))
    except Exception as error:  # noqa: BLE001 - told by whoever waits for the process
        told.put(f"{type(error).__name__}: {error}")
