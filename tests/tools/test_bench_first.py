"""`kvd-bench tiers`, the first chunk: what is waited for before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from kvd.tools.bench import first
from kvd.tools.bench.first import GROUP, LOOKS, steady


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "PAUSE_S", 0.0)


def taking(seconds: Iterator[float]) -> tuple[Callable[[], float], list[float]]:
    """Reads that take these times, and those that were made so far."""
    made: list[float] = []

    def read() -> float:
        made.append(next(seconds))
        return made[-1]

    return read, made


def test_a_disk_that_still_works_on_earlier_writes_is_waited_for() -> None:
    falling = (0.02 * 0.7**look for look in range(5) for _ in range(GROUP))
    read, made = taking(chain(falling, repeat(0.002)))
    assert steady(read, 60.0)
    assert made[-GROUP * LOOKS :] == [0.002] * (GROUP * LOOKS)


def test_single_slow_reads_are_no_reason_to_wait() -> None:
    read, made = taking(0.5 if n % GROUP == 3 else 0.002 for n in range(1000))
    assert steady(read, 60.0)
    assert len(made) == GROUP * LOOKS


def test_a_disk_that_never_comes_to_rest_is_told() -> None:
    read, made = taking(0.002 * (1 + n // GROUP % 2) for n in range(1 << 30))
    assert not steady(read, 0.05)
    assert len(made) > GROUP * LOOKS
