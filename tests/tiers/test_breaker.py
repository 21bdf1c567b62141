"""The circuit breaker, by its own clock."""

from __future__ import annotations

from kvd.tiers.breaker import Breaker, BreakerConfig, BreakerState

CONFIG = BreakerConfig(failures=3, window=8, pause_ns=100, max_pause_ns=400)


def breaker() -> Breaker:
    return Breaker(CONFIG, chance=lambda: 0.0)


def test_failures_in_a_row_open_it() -> None:
    it = breaker()
    for now in (1, 2):
        it.failure(now)
        assert it.allow(now)
    it.failure(3)
    assert it.state is BreakerState.OPEN and not it.allow(4) and it.opened == 1


def test_a_success_between_starts_the_row_again() -> None:
    it = breaker()
    for now in range(4):
        it.failure(now)
        it.success()
    assert it.state is BreakerState.CLOSED


def test_more_than_half_of_the_window_opens_it() -> None:
    it = breaker()
    for n in range(12):
        it.failure(n) if n % 3 else it.success()
    assert it.state is BreakerState.OPEN


def test_after_the_pause_one_attempt_goes_through_and_decides() -> None:
    it = breaker()
    it.trip(0)
    assert not it.due(99) and it.due(100)
    assert it.allow(100) and not it.allow(100), "exactly one"
    it.success()
    assert it.state is BreakerState.CLOSED and it.allow(101)


def test_the_pause_doubles_up_to_its_most() -> None:
    it = breaker()
    it.trip(0)
    pauses = []
    for _ in range(4):
        now = it.until
        assert it.allow(now)
        it.failure(now)
        pauses.append(it.until - now)
    assert pauses == [200, 400, 400, 400]
    assert it.allow(it.until)
    it.success()
    it.trip(0)
    assert it.until == 100


def test_chance_shortens_the_pause_by_a_quarter_at_most() -> None:
    it = Breaker(CONFIG, chance=lambda: 1.0)
    it.trip(0)
    assert it.until == 75


def test_an_attempt_that_says_nothing_leaves_the_decision_to_the_next() -> None:
    it = breaker()
    it.trip(0)
    assert it.allow(100)
    it.abandon()
    assert it.allow(100)


def test_late_news_from_before_it_opened_change_nothing() -> None:
    it = breaker()
    it.trip(0)
    it.success()
    it.failure(1)
    it.trip(2)
    assert it.state is BreakerState.OPEN and it.until == 100 and it.opened == 1


def test_a_longest_pause_bounds_the_first_one_too() -> None:
    short = BreakerConfig.up_to(40)
    assert (short.pause_ns, short.max_pause_ns) == (40, 40)
    usual = BreakerConfig()
    assert BreakerConfig.up_to(usual.max_pause_ns) == usual
