"""What the carrier does with the core's actions, and when it asks for quiet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.chunk import ChunkHeader, State, payload_digest
from kvd.core import CoreFault
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.errors import ErrorCode
from kvd.server.carry import Carrier
from kvd.server.counters import Counters

pytestmark = pytest.mark.inside


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
    core = SimpleNamespace(handle=lambda event, now: actions, writing_bytes=5)
    transfers = SimpleNamespace(
        hush=lambda: hushed.append("load"),
        hush_stores=lambda writing: hushed.append(f"store of {writing}"),
    )
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


class Table:
    """What was done to records, in order."""

    def __init__(self, *, refuses: bool = False, broken: bool = False) -> None:
        self.done: list[tuple[Any, ...]] = []
        self._refuses, self._broken = refuses, broken

    def write_record(self, record: int, header: ChunkHeader) -> None:
        if self._refuses:
            raise ValueError("a field does not fit")
        self.done.append(("write", record, header.state))

    def patch_record(self, record: int, state: Any, *more: Any) -> None:
        if self._broken:
            raise OSError("no memory behind the page")
        self.done.append(("patch", record, state))


def given_away(record: int, to: int) -> list[Any]:
    """A chunk goes, and its slot is another's at once."""
    header = ChunkHeader(state=State.WRITING)
    return [ac.PatchRecord(record, State.FREE, 7), ac.WriteRecord(to, header)]


def test_a_slot_that_is_freed_and_given_away_at_once_is_written_once() -> None:
    table = Table()
    more = [ac.PatchRecord(4, State.READY), *given_away(5, 6)]
    made, _ = carrier([*given_away(3, 3), *more, ac.PatchRecord(6, State.FREE, 8)], table)
    made.feed(ev.Tick())
    assert table.done == [
        ("write", 3, State.WRITING),
        ("patch", 4, State.READY),
        ("patch", 5, State.FREE),
        ("write", 6, State.WRITING),
        ("patch", 6, State.FREE),
    ]


def test_a_slot_whose_new_record_can_not_be_written_is_free_all_the_same() -> None:
    table, behind = Table(refuses=True), Answers()
    made, _ = carrier([*given_away(3, 3), ac.Reply(1, behind, ac.DoneResult())], table)
    made.feed(ev.Tick())
    assert table.done == [("patch", 3, State.FREE)]
    assert behind.failures == [ErrorCode.INTERNAL]


def test_the_actions_behind_a_record_that_can_be_neither_written_nor_freed_still_go() -> None:
    table, behind = Table(refuses=True, broken=True), Answers()
    made, _ = carrier([*given_away(3, 3), ac.Reply(1, behind, ac.DoneResult())], table)
    made.feed(ev.Tick())
    assert (table.done, behind.failures) == ([], [ErrorCode.INTERNAL])


def lookup(flags: int) -> ev.Lookup:
    return ev.Lookup(1, Answers(), b"", 1, (0,), b"", None, flags, 0, bytes(32), 0, 0)


@pytest.mark.parametrize(
    "event, quiet",
    [
        (
            ev.Reserve(1, Answers(), b"", 1, (0,), b"", bytes(32), 0, b"", None, None, 0, 0),
            ["store of 5"] * 2,
        ),
        (ev.Commit(1, Answers(), 1, None, None), ["store of 5"] * 2),
        (ev.Load(1, Answers(), 1, None, None), ["load"]),
        (lookup(LookupFlag.LEASE | LookupFlag.LOAD), ["load"]),
        (lookup(LookupFlag.LEASE), []),
        (ev.Stat(1, Answers()), []),
        (ev.Tick(), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sealing_waits_where_a_client_copies(event: Any, quiet: list[str]) -> None:
    made, hushed = carrier([])
    made.feed(event)
    assert hushed == quiet


class Sealing:
    """A core that wants seals once, and a pool that keeps the jobs."""

    def __init__(self, seals: list[ac.Seal]) -> None:
        self.memory = bytearray(range(256)) * 64
        self.wanted: list[Any] = list(seals)
        self.events: list[Any] = []
        self.jobs: list[Any] = []
        core = SimpleNamespace(handle=self.handle)
        pool = SimpleNamespace(hush=lambda: None, submit=self.jobs.append)
        arena = SimpleNamespace(view=memoryview(self.memory))
        self.carrier = Carrier(core, arena, pool, Counters())  # type: ignore[arg-type]

    def handle(self, event: Any, now: int) -> list[Any]:
        self.events.append(event)
        wanted, self.wanted = self.wanted, []
        return wanted

    def digest(self, seal: ac.Seal) -> bytes:
        return payload_digest(self.memory[seal.offset : seal.offset + seal.length])


def test_seals_of_one_commit_are_one_job_and_one_event_and_each_has_its_own_digest() -> None:
    seals = [ac.Seal(n, 100 + n, 256 * n + n, 256) for n in range(5)]
    world = Sealing(seals)
    world.carrier.feed(ev.Tick())
    (job,) = world.jobs
    assert job.background
    job.done(job.run())
    (told,) = world.events[1:]
    assert told == ev.SealedMany(
        [ev.Sealed(seal.record, seal.generation, world.digest(seal)) for seal in seals]
    )


def test_a_seal_that_somebody_waits_for_goes_alone_and_at_once() -> None:
    seals = [ac.Seal(0, 1, 0, 64), ac.Seal(1, 2, 64, 64, urgent=True), ac.Seal(2, 3, 128, 64)]
    world = Sealing(seals)
    world.carrier.feed(ev.Tick())
    assert [job.background for job in world.jobs] == [False, True]
    for job in world.jobs:
        job.done(job.run())
    records = [[one.record for one in event.seals] for event in world.events[1:]]
    assert records == [[1], [0, 2]]


def test_a_seal_that_was_put_off_is_not_taken_again_once_somebody_could_not_wait_for_it() -> None:
    later = [ac.Seal(n, 10 + n, 64 * n, 64) for n in range(3)]
    world = Sealing(later)
    world.carrier.feed(ev.Tick())
    world.wanted = [ac.Seal(1, 11, 64, 64, urgent=True)]
    world.carrier.feed(ev.Tick())
    put_off, urgent = world.jobs
    for job in (urgent, put_off):
        job.done(job.run())
    told = [event.seals for event in world.events if isinstance(event, ev.SealedMany)]
    assert told == [
        [ev.Sealed(1, 11, world.digest(later[1]))],
        [ev.Sealed(n, 10 + n, world.digest(later[n])) for n in (0, 2)],
    ]
    # the slot's next chunk is sealed like any other
    world.wanted = [ac.Seal(1, 20, 64, 64)]
    world.carrier.feed(ev.Tick())
    world.jobs[-1].done(world.jobs[-1].run())
    assert world.events[-1] == ev.SealedMany([ev.Sealed(1, 20, world.digest(later[1]))])


def test_seals_that_were_all_overtaken_tell_nothing() -> None:
    world = Sealing([ac.Seal(1, 11, 64, 64)])
    world.carrier.feed(ev.Tick())
    world.wanted = [ac.Seal(1, 11, 64, 64, urgent=True)]
    world.carrier.feed(ev.Tick())
    events = len(world.events)
    world.jobs[0].done(world.jobs[0].run())
    assert len(world.events) == events


def test_large_payloads_are_sealed_in_several_jobs_so_that_none_takes_long() -> None:
    world = Sealing([ac.Seal(n, n, 0, 16 << 20) for n in range(1, 6)])
    world.carrier.feed(ev.Tick())
    for job in world.jobs:
        job.done(None)  # as if the worker had failed
    told = [[(one.record, one.digest) for one in event.seals] for event in world.events[1:]]
    assert told == [[(1, b""), (2, b"")], [(3, b""), (4, b"")], [(5, b"")]]


class Loading:
    """A core that wants a read before a lookup, or fails; and what was done, in order."""

    def __init__(self, *, before: list[Any], fails: bool = False) -> None:
        self.done: list[str] = []
        self.heard = 0  # lookups of which the tiers heard before anything was done
        self._before, self._fails = before, fails
        self.tiers = ["nvme"]

    def asked(self) -> None:
        assert not self.done
        self.heard += 1

    def forerun(self, event: ev.Lookup, now: int) -> list[Any]:
        self.done.append("forerun")
        if self._fails:
            raise CoreFault(event, self._before)
        return self._before

    def handle(self, event: Any, now: int) -> list[Any]:
        self.done.append(type(event).__name__)
        return []

    def add(self, action: Any) -> None:
        self.done.append("read")

    def flush(self) -> None:
        if self.done[-1] == "read":
            self.done.append("handed over")

    def give_way(self) -> None:
        self.done.append("gave way")

    def scrubbed_to(self, action: Any) -> None:
        raise AssertionError


READ = ac.TierRead(1, 0, 1, bytes(32), bytes(32), bytes(32), 0, 1, 1, 0, 4096, 9, False, b"")


def carrier_of(loading: Loading) -> Carrier:
    return Carrier(
        loading,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        SimpleNamespace(hush=lambda: None),  # type: ignore[arg-type]
        Counters(),
        loading,  # type: ignore[arg-type]
    )


def look_up(loading: Loading, keys: int, flags: LookupFlag) -> list[str]:
    """What was done for a lookup."""
    hashes = bytes(32 * keys)
    carrier_of(loading).feed(
        ev.Lookup(1, 1, bytes(32), 1, (0,), hashes, None, int(flags), 0, bytes(32), 0, 0)
    )
    return loading.done


def test_the_first_read_of_a_load_is_with_a_worker_before_its_lookup_is_carried_out() -> None:
    flags = LookupFlag.LEASE | LookupFlag.LOAD
    begun = ["forerun", "read", "handed over", "gave way", "Lookup"]
    assert look_up(Loading(before=[READ]), 64, flags) == begun
    assert look_up(Loading(before=[]), 64, flags) == ["forerun", "Lookup"]


def test_a_lookup_that_is_soon_done_or_loads_nothing_has_no_forerun() -> None:
    flags = LookupFlag.LEASE | LookupFlag.LOAD
    assert look_up(Loading(before=[READ]), 1, flags) == ["Lookup"]
    assert look_up(Loading(before=[READ]), 64, LookupFlag.LEASE) == ["Lookup"]


def test_tiers_hear_of_a_lookup_before_it_is_carried_out_and_of_nothing_else() -> None:
    loading = Loading(before=[])
    carrier_of(loading).feed(ev.Tick())
    assert (loading.done, loading.heard) == (["Tick"], 0)
    loading.done.clear()
    assert look_up(loading, 1, LookupFlag.LEASE) == ["Lookup"] and loading.heard == 1


def test_a_fault_before_a_lookup_costs_neither_what_was_begun_nor_the_lookup() -> None:
    flags = LookupFlag.LEASE | LookupFlag.LOAD
    done = look_up(Loading(before=[READ], fails=True), 64, flags)
    assert done == ["forerun", "read", "handed over", "gave way", "Lookup"]
