"""Which sleeping worker is woken, and for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvd.tiers.waking import Waking

WAIT_S = 10.0


class Sleepers:
    """Threads that sleep once each; `awake`: who woke, in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waking = Waking(self.lock)
        self.awake: list[str] = []
        self._threads: list[threading.Thread] = []
        self._asleep = 0

    def sleep(self, name: str, left_s: float | None = None) -> None:
        def run() -> None:
            with self.lock:
                self._asleep += 1
                self.waking.sleep(left_s)
                self.awake.append(name)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        self.until(lambda: self._asleep == len(self._threads))

    def wake(self, *, more: bool = True, held: bool = False) -> None:
        with self.lock:
            self.waking.wake(more=more, held=held)

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while True:
            with self.lock:
                if true():
                    return
            assert time.monotonic() < end
            time.sleep(0.001)

    def end(self) -> None:
        with self.lock:
            self.waking.wake_all()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = Sleepers()
    yield made
    made.end()


def test_for_one_job_one_sleeper_is_woken(sleepers: Sleepers) -> None:
    for name in "abc":
        sleepers.sleep(name)
    sleepers.wake()
    sleepers.until(lambda: sleepers.awake == ["a"])
    time.sleep(0.05)
    assert sleepers.awake == ["a"]


def test_while_one_is_on_its_way_no_other_is_woken(sleepers: Sleepers) -> None:
    for name in "abc":
        sleepers.sleep(name)
    with sleepers.lock:  # the first can't arrive
        for _ in range(3):
            sleepers.waking.wake(more=True, held=False)
    sleepers.until(lambda: bool(sleepers.awake))
    time.sleep(0.05)
    assert sleepers.awake == ["a"]
    sleepers.wake()  # it has arrived: the next one's turn
    sleepers.until(lambda: sleepers.awake == ["a", "b"])


def test_for_nothing_nobody_is_woken(sleepers: Sleepers) -> None:
    sleepers.sleep("a")
    sleepers.wake(more=False)
    time.sleep(0.05)
    assert sleepers.awake == []


def test_one_naps_for_what_is_held_back_and_the_others_sleep_on(sleepers: Sleepers) -> None:
    for name in "ab":
        sleepers.sleep(name, left_s=0.05)
    sleepers.until(lambda: sleepers.awake == ["a"])
    time.sleep(0.1)
    assert sleepers.awake == ["a"]


def test_if_nobody_naps_for_what_is_held_back_one_is_woken_to_do_so(sleepers: Sleepers) -> None:
    sleepers.sleep("a")
    sleepers.sleep("b", left_s=WAIT_S)
    sleepers.wake(more=False, held=True)
    time.sleep(0.05)
    assert sleepers.awake == []  # b naps
    sleepers.wake()
    sleepers.wake()
    sleepers.until(lambda: len(sleepers.awake) >= 1)
    sleepers.wake()
    sleepers.until(lambda: len(sleepers.awake) == 2)
    sleepers.sleep("c")
    sleepers.wake(more=False, held=True)
    sleepers.until(lambda: sleepers.awake[2:] == ["c"])


def test_who_naps_is_disturbed_only_when_no_other_sleeps(sleepers: Sleepers) -> None:
    sleepers.sleep("naps", left_s=WAIT_S)
    sleepers.sleep("sleeps")
    sleepers.wake()
    sleepers.until(lambda: sleepers.awake == ["sleeps"])
    sleepers.wake()
    sleepers.until(lambda: sleepers.awake == ["sleeps", "naps"])


def test_a_nap_that_ends_by_itself_leaves_the_count_right(sleepers: Sleepers) -> None:
    sleepers.sleep("naps", left_s=0.01)
    sleepers.until(lambda: sleepers.awake == ["naps"])
    sleepers.sleep("a")
    sleepers.wake()
    sleepers.until(lambda: sleepers.awake == ["naps", "a"])
