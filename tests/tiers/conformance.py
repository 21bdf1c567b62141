"""The conformance suite: what the contract says, asked of every tier, with and without faults.

A tier's test file subclasses Conformance and gives a `medium` fixture: an object whose `backend()`
makes a backend over the same storage each time (a restart), with at least `LIMIT` bytes of room
for chunks. The naive tier in memory is the oracle of the random runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from tiers_kit import CONFIG, SECOND, Chunk, Rig, chunks, in_

from kvd.chunk import HeaderFlag, payload_digest
from kvd.tiers.backend import Backend
from kvd.tiers.base import NOWHERE, Answer, Place, Probe, Reason, State
from kvd.tiers.faults import Fault
from kvd.tiers.memory import MemoryBackend

SMALL = 10_000
REFUSALS = [
    Fault.EIO, Fault.ENOSPC, Fault.EROFS, Fault.EACCES, Fault.ESTALE, Fault.RESET, Fault.SKEW,
    Fault.HTTP_403, Fault.HTTP_404, Fault.HTTP_409, Fault.HTTP_412, Fault.HTTP_429,
    Fault.HTTP_500, Fault.HTTP_503,
]  # fmt: skip
PRESENT = (Answer.OK, Answer.EXISTS)


class Medium(Protocol):
    limit: int

    def backend(self) -> Backend: ...


class Conformance:
    """Subclass it, and give a `medium`."""

    @pytest.fixture
    def rig(self, medium: Medium) -> Iterator[Rig]:
        rig = Rig(medium.backend()).start()
        assert rig.recovered() == {}
        yield rig
        rig.close()

    # -- bytes ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [1, 511, 512, 4095, 4096, 4097, 65_536, 300_001])
    def test_what_was_written_is_read_bit_for_bit(self, rig: Rig, length: int) -> None:
        """K58: any length goes in and comes out, aligned or not."""
        chunk = Chunk(1, length)
        written = rig.one(chunk.write())
        assert written.answer is Answer.OK and written.nbytes == length
        read = rig.one(job := chunk.read(written.place))
        assert read.answer is Answer.OK
        assert bytes(job.into) == bytes(chunk.memory)
        assert read.header is not None
        kept = ("kind", "namespace_digest", "spec", "chunk", "parent", "shard", "shard_count",
                "index", "tokens", "fingerprint", "pos0", "length", "digest")  # fmt: skip
        for name in kept:
            assert getattr(read.header, name) == getattr(chunk.header, name), name

    def test_memory_that_is_not_aligned_serves_too(self, rig: Rig) -> None:
        chunk = Chunk(1, 9_000)
        odd = bytearray(9_100)
        odd[3:9_003] = chunk.memory
        written = rig.one(chunk.write()._replace(source=memoryview(odd)[3:9_003]))
        assert written.answer is Answer.OK
        read = rig.one(chunk.read(written.place, memoryview(odd)[77:9_077]))
        assert read.answer is Answer.OK and odd[77:9_077] == chunk.memory

    def test_nothing_beyond_the_buffer_is_touched(self, rig: Rig) -> None:
        chunk = Chunk(1, 5_001)
        place = rig.one(chunk.write()).place
        room = bytearray(b"\xee" * 20_000)
        assert rig.one(chunk.read(place, memoryview(room)[4_096:9_097])).answer is Answer.OK
        assert room[:4_096] == b"\xee" * 4_096 and room[9_097:] == b"\xee" * (20_000 - 9_097)

    def test_many_at_once_are_each_answered_once(self, rig: Rig) -> None:
        many = list(chunks(30))
        written = rig.do([c.write() for c in many])
        assert {d.answer for d in written} == {Answer.OK}
        jobs = [c.read(d.place) for c, d in zip(many, written, strict=True)]
        for chunk, job, done in zip(many, jobs, rig.do(jobs), strict=True):
            assert done.answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
        assert rig.tier.usage().chunks == 30
        assert {
            d.answer
            for d in rig.do([c.delete(d.place) for c, d in zip(many, written, strict=True)])
        } == {Answer.OK}
        assert rig.tier.usage().chunks == 0 and rig.tier.usage().used_bytes == 0

    # -- absence --------------------------------------------------------------------------------

    def test_what_was_never_written_is_a_miss(self, rig: Rig) -> None:
        for place in (NOWHERE, Place(1, 1), Place(2**63, 2**63)):
            assert rig.one(Chunk(1).read(place)).answer is Answer.MISS
            assert rig.one(Chunk(1).delete(place)).answer is Answer.MISS
        assert rig.tier.state is State.READY

    def test_deleting_twice_is_no_error_and_frees_once(self, rig: Rig) -> None:
        """K55: delete is idempotent, and the accounting is right after each step."""
        one, two = Chunk(1), Chunk(2)
        first, second = rig.do([one.write(), two.write()])
        used = rig.tier.usage().used_bytes
        assert rig.one(one.delete(first.place)).answer is Answer.OK
        assert rig.one(one.delete(first.place)).answer is Answer.MISS
        assert rig.tier.usage().used_bytes == used - rig.tier.cost(SMALL)
        assert rig.one(one.read(first.place)).answer is Answer.MISS
        assert rig.one(two.read(second.place)).answer is Answer.OK

    def test_a_place_given_to_another_chunk_is_a_miss_for_the_first(self, rig: Rig) -> None:
        old = Chunk(1)
        place = rig.one(old.write()).place
        rig.one(old.delete(place))
        rig.do([c.write() for c in chunks(5, first=10)])
        assert rig.one(old.read(place)).answer is Answer.MISS
        assert rig.one(old.delete(place)).answer is Answer.MISS
        assert rig.tier.usage().chunks == 5

    def test_another_length_than_the_records_is_a_miss(self, rig: Rig) -> None:
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        for length in (1, SMALL - 1, SMALL + 1):
            assert rig.one(chunk.read(place, memoryview(bytearray(length)))).answer is Answer.MISS
        assert rig.one(chunk.read(place)).answer is Answer.OK

    # -- limits ---------------------------------------------------------------------------------

    def test_what_can_never_fit_is_too_large_and_changes_nothing(
        self, rig: Rig, medium: Medium
    ) -> None:
        """K43: refused before anything is deleted for it; residents stay."""
        there = Chunk(1)
        place = rig.one(there.write()).place
        huge = Chunk(2, medium.limit + 1)
        assert rig.tier.room(huge.length) == -1
        before = rig.tier.usage()
        assert rig.one(huge.write()).answer is Answer.TOO_LARGE
        assert rig.tier.usage() == before
        assert rig.one(there.read(place)).answer is Answer.OK

    def test_the_limit_holds_and_a_delete_makes_room(self, rig: Rig, medium: Medium) -> None:
        """K57: bytes never pass the limit, whatever is asked for."""
        length = medium.limit // 8
        done = rig.do([c.write() for c in chunks(12, length)])
        kept = [d for d in done if d.answer is Answer.OK]
        assert {d.answer for d in done} == {Answer.OK, Answer.NO_SPACE}
        assert len(kept) >= 4
        usage = rig.tier.usage()
        assert usage.used_bytes <= usage.held_bytes <= usage.limit_bytes or rig.tier.by_key
        assert usage.used_bytes <= usage.limit_bytes
        assert rig.tier.room(length) == 0 and rig.tier.state is State.READY
        rig.one(kept[0].job.token.delete(kept[0].place))  # type: ignore[attr-defined]
        assert rig.tier.room(length) == 1
        assert rig.one(Chunk(99, length).write()).answer is Answer.OK

    # -- integrity ------------------------------------------------------------------------------

    def test_a_source_that_does_not_hold_its_digest_is_not_written(self, rig: Rig) -> None:
        chunk = Chunk(1)
        chunk.memory[100] ^= 1
        assert rig.one(chunk.write()).answer is Answer.CORRUPT
        assert rig.tier.usage().chunks == 0

    def test_an_unsealed_chunk_is_not_written(self, rig: Rig) -> None:
        chunk = Chunk(1, flags=HeaderFlag.NONE)
        assert rig.one(chunk.write()).answer is Answer.CORRUPT
        assert rig.tier.usage().chunks == 0

    @pytest.mark.parametrize("fault", [Fault.WRONG_BYTES, Fault.WRONG_RECORD])
    def test_wrong_bytes_are_never_a_hit_and_are_quarantined(self, rig: Rig, fault: Fault) -> None:
        """K35: what does not hold is a counted miss, is not shown again, and a new store heals."""
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.faults.add("get", fault)
        assert rig.one(chunk.read(place)).answer is Answer.CORRUPT
        rig.faults.clear()
        assert rig.one(chunk.read(place)).answer is Answer.MISS
        assert rig.tier.stat().notes["quarantined"] == 1
        assert rig.tier.usage().chunks == 0
        again = rig.one(chunk.write())
        assert again.answer is Answer.OK
        assert rig.one(chunk.read(again.place)).answer is Answer.OK

    def test_bytes_that_were_wrong_once_are_read_again_before_anybody_is_blamed(
        self, rig: Rig
    ) -> None:
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.faults.add("get", Fault.WRONG_BYTES, times=1)
        job = chunk.read(place)
        assert rig.one(job).answer is Answer.OK and bytes(job.into) == bytes(chunk.memory)
        assert rig.tier.stat().notes["mended_reads"] == 1

    def test_a_torn_write_is_found_at_its_read(self, rig: Rig) -> None:
        """K25: a medium that says yes and keeps half never gives half to anybody."""
        chunk = Chunk(1)
        rig.faults.add("put", Fault.TORN_WRITE, times=1)
        place = rig.one(chunk.write()).place
        assert rig.one(chunk.read(place)).answer is Answer.CORRUPT
        assert rig.one(chunk.read(place)).answer is Answer.MISS

    def test_a_lost_write_is_a_miss(self, rig: Rig) -> None:
        chunk = Chunk(1)
        rig.faults.add("put", Fault.LOST_WRITE, times=1)
        place = rig.one(chunk.write()).place
        assert rig.one(chunk.read(place)).answer is Answer.MISS

    # -- refusals -------------------------------------------------------------------------------

    @pytest.mark.parametrize("fault", REFUSALS)
    def test_a_failed_write_leaves_no_trace(self, rig: Rig, fault: Fault) -> None:
        """K25, K30: presence comes from the real result of each chunk; a second try writes only
        what is missing."""
        many = list(chunks(6))
        bad = many[3].key
        rig.faults.add("put", fault, where=lambda key: key == bad, times=1)
        done = rig.do([c.write() for c in many])
        rig.faults.clear()
        assert [d.answer in PRESENT for d in done] == [True, True, True, False, True, True] or (
            rig.tier.stat().state is not State.READY  # a permanent fault opens the breaker
        )
        assert rig.tier.usage().chunks == sum(d.answer in PRESENT for d in done)
        rig.until(lambda: rig.tier.state is State.READY)
        missing = [c for c, d in zip(many, done, strict=True) if d.answer not in PRESENT]
        again = {d.job.token: d.place for d in rig.do([c.write() for c in missing])}  # type: ignore[attr-defined]
        places = [again.get(c, d.place) for c, d in zip(many, done, strict=True)]
        jobs = [c.read(p) for c, p in zip(many, places, strict=True)]
        assert [d.answer for d in rig.do(jobs)] == [Answer.OK] * 6

    @pytest.mark.parametrize("fault", [*REFUSALS, Fault.SHORT_READ, Fault.LATE_ERROR])
    def test_each_failed_read_is_named_and_only_those(self, rig: Rig, fault: Fault) -> None:
        """K26, K64: exactly the chunks whose read failed are failed, each is answered, and a later
        read of the same chunk works."""
        many = list(chunks(8))
        places = [d.place for d in rig.do([c.write() for c in many])]
        rig.faults.add("get", fault, where=lambda key: key == many[3].key, times=1)
        jobs = [c.read(p) for c, p in zip(many, places, strict=True)]
        done = rig.do(jobs)
        rig.faults.clear()
        assert done[3].answer not in PRESENT and done[3].header is None
        for i, (chunk, job, answer) in enumerate(zip(many, jobs, done, strict=True)):
            assert answer.answer in (Answer.OK, Answer.OFF) or i == 3
            if answer.answer is Answer.OK:
                assert bytes(job.into) == bytes(chunk.memory)
        rig.until(lambda: rig.tier.state is State.READY)
        assert rig.one(many[3].read(places[3])).answer is Answer.OK

    @pytest.mark.parametrize(
        ("op", "fault"),
        [
            ("put", Fault.HTTP_404), ("get", Fault.ENOSPC),
            ("delete", Fault.HTTP_404), ("delete", Fault.ENOSPC),
        ],
    )  # fmt: skip
    def test_a_job_ends_as_the_contract_says_whatever_the_medium_says(
        self, rig: Rig, op: str, fault: Fault
    ) -> None:
        """A server may answer a write that nothing is there, and a read that it is full: who handed
        the job over knows no such end of it."""
        chunk = Chunk(1)
        place = NOWHERE if op == "put" else rig.one(chunk.write()).place
        jobs = {"put": chunk.write(), "get": chunk.read(place), "delete": chunk.delete(place)}
        rig.faults.add(op, fault, times=1)
        done = rig.one(jobs[op])
        assert done.answer is Answer.FAILED and done.reason is not Reason.NONE and done.detail
        assert rig.one(jobs[op]).answer is Answer.OK

    def test_a_write_that_fails_late_leaves_nothing(self, rig: Rig) -> None:
        rig.faults.add("put", Fault.LATE_ERROR, times=1)
        chunk = Chunk(1)
        assert rig.one(chunk.write()).answer is Answer.FAILED
        assert rig.tier.usage().used_bytes == 0

    def test_an_open_breaker_answers_at_once_and_heals_by_itself(self, rig: Rig) -> None:
        """K64, K73: a broken medium is a quick miss; when it works again, so does the tier, with no
        traffic needed."""
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.faults.add("get", Fault.EIO)
        rig.faults.add("probe", Fault.EIO)
        answers = [rig.one(chunk.read(place)).answer for _ in range(4)]
        assert answers == [Answer.FAILED] * 3 + [Answer.OFF]
        assert rig.tier.state is State.DEGRADED
        stat = rig.tier.stat()
        assert "injected eio" in stat.last_error and stat.reasons["io"] >= 3
        assert rig.one(Chunk(2).write()).answer is Answer.OK  # writes have a breaker of their own
        rig.faults.clear()
        rig.until(lambda: rig.tier.state is State.READY)
        assert rig.one(chunk.read(place)).answer is Answer.OK

    def test_a_medium_that_can_not_be_written_still_reads(self, rig: Rig) -> None:
        """K61: writes are refused, old chunks are read, and it recovers."""
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.faults.add("put", Fault.EROFS)
        rig.faults.add("probe", Fault.EROFS)
        assert rig.one(Chunk(2).write()).answer is Answer.FAILED
        assert rig.one(Chunk(2).write()).answer is Answer.OFF
        assert rig.one(chunk.read(place)).answer is Answer.OK
        rig.faults.clear()
        rig.until(lambda: rig.tier.state is State.READY)
        assert rig.one(Chunk(2).write()).answer is Answer.OK

    # -- time -----------------------------------------------------------------------------------

    def test_a_deadline_that_has_passed_is_a_timeout_without_effect(self, rig: Rig) -> None:
        assert rig.one(Chunk(1).write(deadline=1)).answer is Answer.TIMEOUT
        assert rig.one(Chunk(1).read(deadline=1)).answer is Answer.TIMEOUT
        assert rig.tier.usage().chunks == 0

    def test_jobs_behind_a_medium_that_hangs_end_at_their_deadline(self, rig: Rig) -> None:
        """K65: what is queued is answered in time although every worker hangs; what is in the
        medium is answered when the buffer is free again, not before."""
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.faults.add("get", Fault.HANG)
        hung = [chunk.read(place, deadline=in_(0.2)) for _ in range(CONFIG.workers)]
        queued = [chunk.read(place, deadline=in_(0.4)) for _ in range(3)]
        rig.tier.submit([*hung, *queued])
        assert {d.answer for d in rig.wait(list(queued), 5)} == {Answer.TIMEOUT}
        assert rig.tier.stat().pending == CONFIG.workers
        rig.faults.release()
        rig.wait(list(hung))

    def test_a_spare_worker_serves_beside_those_that_hang(self, rig: Rig) -> None:
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.faults.add("get", Fault.HANG, times=CONFIG.workers)
        hung = [chunk.read(place, deadline=in_(0.1)) for _ in range(CONFIG.workers)]
        rig.tier.submit(hung)
        assert rig.one(chunk.read(place, deadline=in_(10))).answer is Answer.OK
        assert rig.tier.stat().overdue == CONFIG.workers
        rig.faults.release()
        rig.wait(list(hung))

    def test_closing_answers_all_that_is_queued(self, rig: Rig) -> None:
        rig.faults.add("put", Fault.LATENCY, seconds=0.1)
        jobs = [c.write() for c in chunks(12)]
        rig.tier.submit(jobs)
        rig.tier.close()
        done = rig.wait(list(jobs), 5)
        assert {d.answer for d in done} <= {Answer.OK, Answer.OFF} and done[-1].answer is Answer.OFF
        assert rig.one(Chunk(1).write()).answer is Answer.OFF
        assert rig.tier.state is State.OFF

    # -- probe and counters ---------------------------------------------------------------------

    def test_a_probe_tells_whether_it_works(self, rig: Rig) -> None:
        done = rig.one(Probe("p", in_(10)))
        assert done.answer is Answer.OK and done.detail
        rig.faults.add("probe", Fault.EIO, times=1)
        assert rig.one(Probe("p", in_(10))).answer is Answer.FAILED

    def test_a_probe_that_looks_after_something_else_hides_no_failures(self, rig: Rig) -> None:
        """A small object goes through where chunks do not."""
        look = Probe("p", in_(10), heals=False)
        place = rig.one(Chunk(1).write()).place
        rig.faults.add("get", Fault.EIO)
        for _ in range(3):
            assert rig.one(Chunk(1).read(place)).answer is Answer.FAILED
            if rig.tier.state is State.READY:
                assert rig.one(look).answer is Answer.OK
        assert rig.one(Chunk(1).read(place)).answer is not Answer.OK
        assert rig.tier.stat().reasons["io"] == 3
        rig.faults.clear()

    def test_counters_say_what_happened(self, rig: Rig) -> None:
        chunk = Chunk(1)
        place = rig.one(chunk.write()).place
        rig.do([chunk.read(place), chunk.read(place), Chunk(2).read()])
        stat = rig.tier.stat()
        assert stat.answers["write"] == {"ok": 1}
        assert stat.answers["read"] == {"ok": 2, "miss": 1}
        assert (stat.bytes_written, stat.bytes_read) == (SMALL, 2 * SMALL)
        assert stat.engine not in ("", "?") and stat.state is State.READY
        assert stat.pending == 0 and stat.overdue == 0

    # -- restarts -------------------------------------------------------------------------------

    def test_a_restart_finds_what_was_written_and_nothing_else(
        self, rig: Rig, medium: Medium
    ) -> None:
        """K85, K86: entries describe themselves; usage is right before the first new store."""
        if not rig.tier.durable:
            pytest.skip("this tier ends with its process")
        many = [*chunks(9), Chunk(50, 70_000), Chunk(51, 1)]
        places = {
            c.key: d.place for c, d in zip(many, rig.do([c.write() for c in many]), strict=True)
        }
        gone = many.pop(2)
        rig.one(gone.delete(places.pop(gone.key)))
        before = rig.tier.usage()
        rig.tier.close()
        after = Rig(medium.backend()).start()
        try:
            assert after.recovered() == places
            assert after.tier.usage()[:2] == before[:2] and after.tier.usage().chunks == len(many)
            for chunk in many:
                job = chunk.read(places[chunk.key])
                assert after.one(job).answer is Answer.OK
                assert bytes(job.into) == bytes(chunk.memory)
            assert after.one(gone.read()).answer is Answer.MISS
            for chunk in many:
                assert after.one(chunk.delete(places[chunk.key])).answer is Answer.OK
            assert after.tier.usage().used_bytes == 0
        finally:
            after.close()

    # -- the oracle -----------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", [1, 2])
    @pytest.mark.parametrize("faulty", [False, True])
    def test_random_work_agrees_with_the_oracle(
        self, rig: Rig, medium: Medium, seed: int, faulty: bool
    ) -> None:
        """What the tier answers is what the naive tier in memory answers; under faults it may know
        less, never more and never other bytes."""
        oracle = Rig(MemoryBackend(1 << 30)).start()
        try:
            self._random_work(rig, oracle, random.Random(seed), faulty)
        finally:
            oracle.close()

    def _random_work(self, rig: Rig, oracle: Rig, rng: random.Random, faulty: bool) -> None:
        pool = [Chunk(n, rng.choice([1, 700, 4096, 20_000])) for n in range(12)]
        mine: dict[Any, Place] = {}
        theirs: dict[Any, Place] = {}
        if faulty:
            for op, fault in (("put", Fault.EIO), ("get", Fault.EIO), ("get", Fault.WRONG_BYTES),
                              ("get", Fault.SHORT_READ), ("put", Fault.TORN_WRITE)):  # fmt: skip
                rig.faults.add(op, fault, chance=0.06)
        for _ in range(120):
            chunk = rng.choice(pool)
            what = rng.random()
            if what < 0.4 and chunk.key not in mine:
                done = rig.one(chunk.write())
                if done.answer is Answer.OK:
                    mine[chunk.key] = done.place
                    theirs[chunk.key] = oracle.one(chunk.write()).place
                else:
                    assert faulty
            elif what < 0.75:
                job, twin = (
                    chunk.read(mine.get(chunk.key, NOWHERE)),
                    chunk.read(theirs.get(chunk.key, NOWHERE)),
                )
                answer, right = rig.one(job), oracle.one(twin)
                if faulty and answer.answer is not Answer.OK:
                    if answer.answer is Answer.CORRUPT:
                        mine.pop(chunk.key)
                        oracle.one(chunk.delete(theirs.pop(chunk.key)))
                    continue
                assert answer.answer is right.answer
                if answer.answer is Answer.OK:
                    assert bytes(job.into) == bytes(twin.into)
                    assert payload_digest(job.into) == chunk.header.digest
            else:
                answer = rig.one(chunk.delete(mine.pop(chunk.key, NOWHERE)))
                right = oracle.one(chunk.delete(theirs.pop(chunk.key, NOWHERE)))
                if answer.answer is Answer.OFF:
                    assert faulty
                    rig.until(lambda: rig.tier.state is State.READY)
                    return
                assert answer.answer is right.answer
            if faulty:
                rig.until(lambda: rig.tier.state is State.READY)
        assert rig.tier.usage().chunks == len(mine)


__all__ = ["SECOND", "Conformance", "Medium"]
