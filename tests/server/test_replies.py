"""Exactly once: a request id is carried out at most once, and a retry gets the same reply."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.server.replies import MAX_BYTES, MAX_GAPS, IdSet, ReplyCache, Seen


@given(st.lists(st.integers(1, 60), max_size=80))
def test_the_id_set_holds_what_was_added_and_nothing_else(numbers: list[int]) -> None:
    ids = IdSet()
    for number in numbers:
        ids.add(number)
    assert {n for n in range(70) if n in ids} == set(numbers)
    runs = sum(n - 1 not in set(numbers) for n in set(numbers))
    assert len(ids) == runs


def test_a_retry_in_flight_waits_and_afterwards_gets_the_same_bytes() -> None:
    cache = ReplyCache(max_inflight=8, max_kept=8)
    assert cache.take(1, 0).seen is Seen.NEW
    assert cache.take(1, 0).seen is Seen.IN_FLIGHT
    cache.finish(1, [b"reply"])
    assert cache.take(1, 0) == (Seen.ANSWERED, [b"reply"])
    assert cache.inflight == 0


def test_an_acknowledged_reply_is_let_go_and_never_carried_out_anew() -> None:
    cache = ReplyCache(max_inflight=8, max_kept=8)
    cache.take(1, 0)
    cache.finish(1, [b"reply"])
    assert cache.take(2, 1).seen is Seen.NEW
    assert cache.kept == 0
    assert cache.take(1, 1).seen is Seen.GONE


def test_what_changes_nothing_may_be_carried_out_again() -> None:
    cache = ReplyCache(max_inflight=8, max_kept=8)
    cache.take(1, 0, repeatable=True)
    cache.finish(1, [b"big"], keep=False)
    assert cache.take(1, 0, repeatable=True).seen is Seen.NEW


def test_the_cap_on_requests_in_flight_notes_nothing() -> None:
    cache = ReplyCache(max_inflight=2, max_kept=8)
    cache.take(1, 0)
    cache.take(2, 0)
    assert cache.take(3, 0).seen is Seen.TOO_MANY
    cache.finish(1, [b""])
    assert cache.take(3, 0).seen is Seen.NEW


def test_kept_replies_are_bounded_by_number_and_by_bytes() -> None:
    cache = ReplyCache(max_inflight=1000, max_kept=4)
    for request in range(1, 11):
        cache.take(request, 0)
        cache.finish(request, [bytes(8)])
    assert cache.kept == 4
    assert cache.take(6, 0).seen is Seen.GONE
    assert cache.take(7, 0).seen is Seen.ANSWERED
    cache.take(11, 0)
    cache.finish(11, [bytes(MAX_BYTES + 1)])
    assert cache.kept == 0
    assert cache.take(11, 0).seen is Seen.GONE


def test_one_slow_request_does_not_stop_the_ones_after_it() -> None:
    """A long poll keeps the acknowledgement back while thousands of ids pass by."""
    cache = ReplyCache(max_inflight=4, max_kept=4)
    cache.take(1, 0)
    for request in range(2, 20_000):
        assert cache.take(request, 0).seen is Seen.NEW
        cache.finish(request, [b"x"])
    assert cache.take(1, 0).seen is Seen.IN_FLIGHT
    assert cache.take(5, 0).seen is Seen.GONE


def test_ids_that_leave_too_many_gaps_are_refused() -> None:
    cache = ReplyCache(max_inflight=4, max_kept=4)
    for request in range(1, 2 * MAX_GAPS, 2):
        cache.take(request, 0)
        cache.finish(request, [b""])
    assert cache.take(2 * MAX_GAPS + 1, 0).seen is Seen.TOO_SPARSE
