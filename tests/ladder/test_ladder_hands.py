"""The server's side of the ladder, over tiers in plain memory."""

from __future__ import annotations

import hashlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvd.chunk import ChunkHeader, HeaderFlag, Kind, State, payload_digest
from kvd.core import TierConfig
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.server.ladder import Ladder
from kvd.server.tiers import TierPlan
from kvd.server.transfers import Transfers
from kvd.tiers import base as t
from kvd.tiers.backend import Found, Stored, failed
from kvd.tiers.memory import MemoryBackend
from kvd.tiers.pool import PooledTier
from kvd.tiers.waiting import tenant_of

SIZE = 8192
NEVER = (1 << 63) - 1


def plan(name: str, cursor: Path | None = None) -> TierPlan:
    return TierPlan(
        TierConfig(name, 1 << 20),
        lambda done: PooledTier(name, MemoryBackend(1 << 20), done),
        cursor,
    )


class Hands:
    """A Ladder, and the events that it feeds."""

    def __init__(self, beside: Path, plans: list[TierPlan] | None = None) -> None:
        self.view = bytearray(4 * SIZE)
        plans = plans or [plan("near", beside.with_name("own-cursor")), plan("far")]
        self.ladder = Ladder(plans, memoryview(self.view), beside)
        self.events: list[Any] = []
        self.ladder.feed = self.take
        self.react: Any = lambda event: None
        self.transfers = Transfers(1, stuck_s=30.0)
        self.ladder.start()

    def take(self, event: Any) -> None:
        self.events.append(event)
        self.react(event)

    def do(self, *actions: Any) -> Any:
        """Hand actions over and wait for the answer to the last."""
        for action in actions:
            self.ladder.add(action)
        self.ladder.flush()
        return self.answer(actions[-1].job)

    def answer(self, job: int) -> Any:
        while True:
            for event in self.events:
                if getattr(event, "job", None) == job:
                    return event
            assert select.select([self.ladder.completions], [], [], 20)[0]
            self.ladder.drain()
            self.ladder.flush()

    def close(self) -> None:
        self.transfers.close(5)
        self.ladder.close()


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    made = Hands(tmp_path / "arena")
    yield made
    made.close()


def header(payload: bytes) -> ChunkHeader:
    return ChunkHeader(
        kind=Kind.PREFIX, state=State.READY, namespace_digest=b"n" * 32, spec=b"s" * 32,
        chunk=hashlib.sha256(payload).digest(), shard_count=1, tokens=16,
        flags=HeaderFlag.SEALED, length=len(payload), digest=payload_digest(payload),
    )  # fmt: skip


def test_a_payload_goes_from_one_tier_to_the_next_without_the_arena(hands: Hands) -> None:
    payload = b"abcdefgh" * (SIZE // 8)
    hands.view[SIZE : 2 * SIZE] = payload
    known = header(payload)
    put = hands.do(ac.TierWrite(1, 0, known, SIZE, SIZE, NEVER))
    assert put.answer is ev.TierAnswer.OK
    hands.view[:] = bytes(len(hands.view))
    name = (known.kind, known.namespace_digest, known.spec, known.chunk, 0)

    def hand_on(event: Any) -> None:
        if getattr(event, "job", 0) == 2:
            hands.ladder.add(ac.TierWrite(3, 1, event.header, 0, SIZE, NEVER, kept=2))

    hands.react = hand_on
    hands.do(ac.TierScrub(2, 0, *name, put.at, put.generation, SIZE, NEVER, keep=True))
    down = hands.answer(3)
    assert down.answer is ev.TierAnswer.OK
    got = hands.do(ac.TierRead(4, 1, *name, down.at, down.generation, 0, SIZE, NEVER))
    assert got.answer is ev.TierAnswer.OK and hands.view[:SIZE] == payload
    assert not any(hands.view[SIZE:]) and not hands.ladder._kept


def test_a_kept_payload_that_nobody_hands_on_is_let_go(hands: Hands) -> None:
    payload = b"12345678" * (SIZE // 8)
    hands.view[:SIZE] = payload
    known = header(payload)
    put = hands.do(ac.TierWrite(1, 0, known, 0, SIZE, NEVER))
    name = (known.kind, known.namespace_digest, known.spec, known.chunk, 0)
    read = hands.do(ac.TierScrub(2, 0, *name, put.at, put.generation, SIZE, NEVER, keep=True))
    assert read.answer is ev.TierAnswer.OK and not hands.ladder._kept


def test_each_tiers_scrub_goes_on_in_the_next_life(hands: Hands, tmp_path: Path) -> None:
    core = type("Core", (), {"recovered": lambda self: None})()
    hands.ladder.recover(core, lambda actions: None, hands.transfers)
    assert not [e for e in hands.events if isinstance(e, ev.TierScrubbedTo)]
    hands.ladder.scrubbed_to(ac.ScrubCursor(0, 17))
    hands.ladder.scrubbed_to(ac.ScrubCursor(1, 4000))
    notes = {tmp_path / "own-cursor": "17\n", tmp_path / "arena.scrub-far": "4000\n"}
    while not all(path.exists() and path.read_text() == text for path, text in notes.items()):
        time.sleep(0.01)  # the test's own timeout ends it
    again = Hands(tmp_path / "arena")
    try:
        again.ladder.recover(core, lambda actions: None, again.transfers)
        told = [e for e in again.events if isinstance(e, ev.TierScrubbedTo)]
        assert told == [ev.TierScrubbedTo(0, 17), ev.TierScrubbedTo(1, 4000)]
    finally:
        again.close()


def test_what_was_completed_is_told_in_shares_and_nothing_is_forgotten(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.server.ladder.SHARE_NS", -1)
    known = [header(bytes([n]) * SIZE) for n in range(4)]
    for n, one in enumerate(known):
        hands.view[n * SIZE : (n + 1) * SIZE] = bytes([n]) * SIZE
        hands.ladder.add(ac.TierWrite(n + 1, 0, one, n * SIZE, SIZE, NEVER))
    hands.ladder.flush()
    told = 0
    while told < 4:
        assert select.select([hands.ladder.completions], [], [], 20)[0]
        hands.ladder.drain()
        written = [e for e in hands.events if isinstance(e, ev.TierWritten)]
        assert len(written) <= told + 1
        told = len(written)
    assert sorted(e.job for e in written) == [1, 2, 3, 4]


def test_who_asked_pays_in_the_tiers_queue_too(hands: Hands) -> None:
    known = header(b"abcdefgh")
    name = (known.kind, known.namespace_digest, known.spec, known.chunk, 0)
    read = ac.TierRead(1, 0, *name, 0, 0, 0, SIZE, NEVER)
    assert tenant_of(hands.ladder._job(read)) == known.namespace_digest
    assert tenant_of(hands.ladder._job(read._replace(tenant=b"a" * 32))) == b"a" * 32


def completed(hands: Hands, *jobs: t.Job) -> list[int]:
    """In what order completions that lie there together are told, in shares of one."""
    hands.ladder.completions.take()
    hands.events.clear()
    for job in jobs:
        hands.ladder.completions.put(t.Completion(job, t.Answer.OK))
    while select.select([hands.ladder.completions], [], [], 0)[0]:
        hands.ladder.drain()
    return [event.job for event in hands.events if hasattr(event, "job")]


def test_what_an_engine_waits_for_is_told_first_and_holds_up_the_rest_for_one_only(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.server.ladder.SHARE_NS", -1)
    known = header(b"abcdefgh")
    name = (known.kind, known.namespace_digest, known.spec, known.chunk, 0)
    writes = [hands.ladder._job(ac.TierWrite(n, 0, known, 0, 8, NEVER)) for n in (1, 2, 3)]
    ahead = hands.ladder._job(ac.TierRead(4, 0, *name, 0, 0, 0, 8, NEVER, ahead=True))
    loads = [hands.ladder._job(ac.TierRead(n, 0, *name, 0, 0, 0, 8, NEVER)) for n in (5, 6, 7)]
    assert completed(hands, *writes, ahead, *loads) == [5, 1, 6, 2, 7, 3, 4]


# -- media that are elsewhere --------------------------------------------------------------------


class Elsewhere(MemoryBackend):
    """Finds by key alone, and has some things to take back."""

    by_key = True

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.at: dict[t.Key, t.Place] = {}
        self.left = 0
        self.probes: list[int] = []
        self.fails = 0
        self.go_on = threading.Event()
        self.deleting = threading.Event()

    @property
    def untidy(self) -> int:
        return self.left

    def probe(self, deadline: int, *, write: bool) -> t.ProbeReport:
        self.probes.append(self.left)
        if self.fails:
            self.fails -= 1
            raise failed(t.Reason.SLOW, "not now")
        self.left = max(0, self.left - 3)
        return super().probe(deadline, write=write)

    def put(self, key: t.Key, header: ChunkHeader, source: memoryview, deadline: int) -> Stored:
        if key not in self.at:
            self.at[key] = super().put(key, header, source, deadline).place
        return Stored(t.NOWHERE)

    def get(self, key: t.Key, place: t.Place, into: memoryview, deadline: int) -> Found:
        return super().get(key, self.at.get(key, place), into, deadline)

    def delete(self, items: Sequence[tuple[t.Key, t.Place]], deadline: int) -> list[t.Answer]:
        self.deleting.set()
        assert self.go_on.wait(20)
        return super().delete([(key, self.at.pop(key, t.NOWHERE)) for key, _ in items], deadline)


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def remote(tmp_path: Path, elsewhere: Elsewhere) -> Iterator[Hands]:
    far = TierPlan(
        TierConfig("far", 1 << 20), lambda done: PooledTier("far", elsewhere, done), None
    )
    made = Hands(tmp_path / "arena", [far])
    yield made
    elsewhere.go_on.set()
    made.close()


def until(hands: Hands, true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        select.select([hands.ladder.completions], [], [], 0.005)
        hands.ladder.drain()


def owed(hands: Hands, elsewhere: Elsewhere, known: ChunkHeader) -> tuple[Any, ...]:
    """A chunk that lies there, and whose owed deletion is under way."""
    name = (known.kind, known.namespace_digest, known.spec, known.chunk, 0)
    assert hands.do(ac.TierWrite(1, 0, known, 0, SIZE, NEVER)).answer is ev.TierAnswer.OK
    deletion = ac.TierDelete(2, 0, *name, 0, 0, NEVER)
    job = hands.ladder._job(deletion)
    hands.ladder.completions.put(t.Completion(job, t.Answer.OFF))
    until(hands, elsewhere.deleting.is_set)
    return name


def test_what_is_written_anew_waits_for_an_owed_deletion_that_is_under_way(
    remote: Hands, elsewhere: Elsewhere
) -> None:
    """Else it is found to be there, and deleted after that."""
    payload = b"abcdefgh" * (SIZE // 8)
    remote.view[:SIZE] = payload
    known = header(payload)
    name = owed(remote, elsewhere, known)
    remote.ladder.add(ac.TierWrite(3, 0, known, 0, SIZE, NEVER))
    remote.ladder.flush()
    time.sleep(0.2)
    remote.ladder.drain()
    assert not [e for e in remote.events if getattr(e, "job", 0) == 3]
    elsewhere.go_on.set()
    assert remote.answer(3).answer is ev.TierAnswer.OK
    read = remote.do(ac.TierRead(4, 0, *name, 0, 0, SIZE, SIZE, NEVER))
    assert read.answer is ev.TierAnswer.OK and remote.view[SIZE : 2 * SIZE] == payload
    assert not remote.ladder._owed[0].any


def test_who_waits_for_an_owed_deletion_is_answered_at_its_deadline(
    remote: Hands, elsewhere: Elsewhere
) -> None:
    payload = b"abcdefgh" * (SIZE // 8)
    remote.view[:SIZE] = payload
    known = header(payload)
    owed(remote, elsewhere, known)
    soon = time.monotonic_ns() + 50_000_000
    remote.ladder.add(ac.TierWrite(3, 0, known, 0, SIZE, soon))
    remote.ladder.flush()
    until(remote, lambda: [e for e in remote.events if getattr(e, "job", 0) == 3])
    assert remote.answer(3).answer is ev.TierAnswer.TIMEOUT
    elsewhere.go_on.set()
    until(remote, lambda: not remote.ladder._owed[0].any)
    assert not elsewhere.at


def test_what_is_to_be_taken_back_is_looked_for_until_nothing_is_left(
    remote: Hands, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without traffic; a probe that fails is not the last one."""
    monkeypatch.setattr("kvd.server.ladder.LOOK_NS", 1_000_000)
    until(remote, lambda: remote.ladder._look_at[0] > 0)
    elsewhere.left, elsewhere.fails = 8, 2
    until(remote, lambda: not elsewhere.left)
    assert elsewhere.probes == [8, 8, 8, 5, 2]
    until(remote, lambda: remote.ladder._look_at[0] != t.NEVER)
    time.sleep(0.05)
    remote.ladder.drain()
    assert len(elsewhere.probes) == 5, "nothing is left, nothing is asked"


def test_what_can_not_be_taken_back_is_looked_for_less_and_less(
    remote: Hands, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.server.ladder.LOOK_NS", 1_000_000)
    monkeypatch.setattr("kvd.server.ladder.LOOK_MOST_NS", 60_000_000)
    elsewhere.left, elsewhere.fails = 8, 1000
    times: list[float] = []
    for n in range(1, 9):
        until(remote, lambda n=n: len(elsewhere.probes) >= n)  # type: ignore[misc]
        times.append(time.monotonic())
    pauses = [b - a for a, b in pairwise(times)]
    assert pauses[-1] > 0.05 and sum(pauses) > 0.12
