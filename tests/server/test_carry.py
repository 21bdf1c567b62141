"""What the carrier does with the core's actions, and when it asks for quiet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.errors import ErrorCode
from kvd.server.carry import Carrier
from kvd.server.counters import Counters


class Answers:
    """A request that keeps what it was answered."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.failures: list[ErrorCode] = []

    def result(self, result: Any) -> None:
        self.results.append(result)

    def fail(self, code: ErrorCode, message: str) -> None:
        self.failures.append(code)


def carrier(actions: list[Any], arena: Any = None) -> tuple[Carrier, list[str]]:
    """A carrier over a core that always wants `actions`; and the times it asked for quiet."""
    hushed: list[str] = []
    core = SimpleNamespace(handle=lambda event, now: actions)
    transfers = SimpleNamespace(hush=lambda: hushed.append("hush"))
    made = Carrier(core, arena, transfers, Counters())  # type: ignore[arg-type]
    return made, hushed


def test_a_reply_behind_a_record_that_could_not_be_written_is_an_error() -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("no memory behind the page")

    before, behind = Answers(), Answers()
    made, _ = carrier(
        [
            ac.Reply(1, before, ac.DoneResult()),
            ac.PatchRecord(3, state=2),
            ac.Reply(1, behind, ac.DoneResult()),
        ],
        SimpleNamespace(patch_record=broken),
    )
    made.feed(ev.Tick())
    assert (before.results, before.failures) == ([ac.DoneResult()], [])
    assert (behind.results, behind.failures) == ([], [ErrorCode.INTERNAL])


def lookup(flags: int) -> ev.Lookup:
    return ev.Lookup(1, Answers(), b"", 1, (0,), b"", None, flags, 0, bytes(32), 0, 0)


@pytest.mark.parametrize(
    "event, quiet",
    [
        (ev.Reserve(1, Answers(), b"", 1, (0,), b"", bytes(32), 0, b"", None, None, 0, 0), True),
        (ev.Commit(1, Answers(), 1, None, None), True),
        (ev.Load(1, Answers(), 1, None, None), True),
        (lookup(LookupFlag.LEASE | LookupFlag.LOAD), True),
        (lookup(LookupFlag.LEASE), False),
        (ev.Stat(1, Answers()), False),
        (ev.Tick(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sealing_waits_where_a_client_copies(event: Any, quiet: bool) -> None:
    made, hushed = carrier([])
    made.feed(event)
    assert bool(hushed) is quiet
