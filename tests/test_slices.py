"""Threads that mostly wait have a short slice, where the kernel has such."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon import DaemonProcess

from kvd import slices
from kvd.client.link import new_context

pytestmark = pytest.mark.skipif(
    not slices.now_ns() > slices.SHORT_NS, reason="this kernel has no slices of one's own"
)


def in_a_thread(ask: Callable[[], int]) -> int:
    told: list[int] = []
    thread = threading.Thread(target=lambda: told.append(ask()))
    thread.start()
    thread.join()
    return told[0]


def named(pid: int, name: str) -> list[int]:
    """Threads of a process whose name begins so."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(t.name) for t in tasks.iterdir() if (t / "comm").read_text().startswith(name)]


def test_threads_that_are_made_meanwhile_have_a_short_one_and_the_maker_has_its_own_again() -> None:
    usual = slices.now_ns()
    with slices.short():
        assert slices.now_ns() == slices.SHORT_NS
        assert in_a_thread(slices.now_ns) == slices.SHORT_NS
    assert slices.now_ns() == usual
    assert in_a_thread(slices.now_ns) == usual


def test_a_thread_of_another_policy_is_left_as_it_is() -> None:
    def batch() -> int:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        assert not slices.set_ns(slices.SHORT_NS)
        with slices.short():
            return os.sched_getscheduler(0)

    assert in_a_thread(batch) == os.SCHED_BATCH


def test_niceness_stays() -> None:
    def nice() -> int:
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, 5)
        assert slices.set_ns(slices.SHORT_NS)
        return os.getpriority(os.PRIO_PROCESS, me)

    assert in_a_thread(nice) == 5


def test_a_clients_own_threads_are_short_and_the_engines_are_not() -> None:
    def threads() -> set[int]:
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}

    before = threads()
    context = new_context()
    try:
        made = threads() - before
        assert made  # by whatever name: they take theirs only once they run
        assert {slices.now_ns(thread) for thread in made} == {slices.SHORT_NS}
        assert slices.now_ns() > slices.SHORT_NS
    finally:
        context.term()


def test_the_daemons_loop_is_short() -> None:
    with DaemonProcess() as daemon:
        assert slices.now_ns(daemon.pid) == slices.SHORT_NS
