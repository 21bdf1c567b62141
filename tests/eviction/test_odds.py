"""The life table: odds of a use within a horizon, against a slow reading of its definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvd.eviction.odds import BINS, Odds, bin_of, bins_of

S = 1_000_000_000
SMOOTH = 4


def lowest(place: int) -> float:
    """Upper edge of a bin, seconds."""
    return float(2.0 ** ((place + 1) / 6 - 4))


def naive_table(
    hits: list[list[float]], ends: list[list[float]], prior: float, horizon_s: float
) -> list[list[float]]:
    smooth = []
    for row in hits:
        smooth.append(
            [
                sum(row[b] for b in range(n - SMOOTH, n + SMOOTH + 1) if 0 <= b < BINS)
                / (2 * SMOOTH + 1)
                for n in range(BINS)
            ]
        )
    lives = sum(map(sum, smooth)) + sum(map(sum, ends))
    table = []
    for k in range(len(hits)):
        h = [smooth[k][b] + prior * sum(r[b] for r in smooth) / lives for b in range(BINS)]
        e = [ends[k][b] + prior * sum(r[b] for r in ends) / lives for b in range(BINS)]
        row = []
        for b in range(BINS):
            reach = next((n for n in range(BINS) if lowest(n) >= lowest(b) + horizon_s), BINS - 1)
            soon = 0.5 * h[b] + sum(h[b + 1 : reach + 1])
            at_risk = 0.5 * (h[b] + e[b]) + sum(h[b + 1 :]) + sum(e[b + 1 :])
            row.append(soon / at_risk if at_risk > 1e-9 else 0.0)
        table.append(row)
    return table


def test_the_table_is_what_its_definition_says() -> None:
    rng = random.Random(4)
    odds = Odds(3, prior=7.0)
    for k in range(3):
        for _ in range(200):
            odds.hits[k][rng.randrange(BINS)] += 1.0
            odds.ends[k][rng.randrange(BINS)] += 1.0
    living = np.zeros((3, BINS))
    living[1, 50:90] = 2.0
    ends = (np.array(odds.ends) + living).tolist()
    for horizon in (1.0, 60.0, 3000.0):
        odds.refresh(living, horizon * S)
        naive = naive_table(odds.hits, ends, 7.0, horizon)
        for mine, theirs in zip(odds.table, naive, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)


def test_without_history_nothing_is_likely() -> None:
    odds = Odds(2, prior=100.0)
    odds.refresh(np.zeros((2, BINS)), 60.0 * S)
    assert all(value == 0.0 for row in odds.table for value in row)


def test_odds_lie_between_0_and_1() -> None:
    odds = Odds(2, prior=1.0)
    for n in range(BINS):
        odds.hits[0][n] = float(n)
        odds.ends[1][n] = float(BINS - n)
    odds.refresh(np.zeros((2, BINS)), 600.0 * S)
    assert all(0.0 <= value <= 1.0 + 1e-9 for row in odds.table for value in row)


def test_lives_that_still_run_make_late_uses_no_less_likely_than_they_are() -> None:
    """All come back after 100 s. Counting only what has ended, as if nothing else ran, would say
    the same at 50 s; with a thousand running lives of 200 s it is one in eleven."""
    odds = Odds(1, prior=0.0)
    odds.hits[0][bin_of(100 * S)] = 100.0
    living = np.zeros((1, BINS))
    odds.refresh(living, 300.0 * S)
    assert odds.table[0][bin_of(30 * S)] == pytest.approx(1.0)
    living[0, bin_of(200 * S)] = 1000.0
    odds.refresh(living, 300.0 * S)
    assert odds.table[0][bin_of(30 * S)] == pytest.approx(100 / 1100)


def test_many_bins_are_those_of_each() -> None:
    ages = [0.0, 1.0, 0.06 * S, 0.5 * S, 1.0 * S, 59.0 * S, 3600.0 * S, 1e6 * S, 1e12 * S]
    assert bins_of(np.array(ages)).tolist() == [bin_of(age) for age in ages]
    assert bin_of(0) == 0 and bin_of(1e30) == BINS - 1


def test_what_fades_keeps_its_proportions() -> None:
    odds = Odds(1, prior=0.0)
    odds.hits[0][40], odds.ends[0][50] = 8.0, 4.0
    odds.fade(0.25)
    assert (odds.hits[0][40], odds.ends[0][50]) == (2.0, 1.0)


def test_a_group_goes_by_its_own_lives_and_leans_on_those_of_all() -> None:
    """Two groups of one class: in the first all come back, in the second none."""
    for share, spread in ((0.0, (1.0, 0.0)), (100.0, (0.75, 0.25)), (1e9, (0.5, 0.5))):
        odds = Odds(1, prior=0.0, groups=3, share=share)
        odds.hits[0][bin_of(100 * S)] = 100.0
        odds.ends[1][bin_of(100 * S)] = 100.0
        odds.refresh(np.zeros((3, BINS)), 300.0 * S)
        at = bin_of(30 * S)
        assert (odds.table[0][at], odds.table[1][at]) == pytest.approx(spread, abs=1e-6)
        assert odds.table[2][at] == pytest.approx(0.5)  # one without lives is as all are


def test_one_group_alone_is_as_if_there_were_no_groups() -> None:
    rng = random.Random(7)
    alone, among = Odds(2, prior=3.0), Odds(2, prior=3.0, groups=4)
    for _ in range(300):
        kind, place = rng.randrange(2), rng.randrange(BINS)
        alone.hits[kind][place] += 1.0
        among.hits[4 + kind][place] += 1.0  # the third group
    alone.refresh(np.ones((2, BINS)), 60.0 * S)
    living = np.zeros((8, BINS))
    living[4:6] = 1.0
    among.refresh(living, 60.0 * S)
    assert among.table[4:6] == alone.table == among.table[0:2]


def test_of_many_groups_each_has_its_turn() -> None:
    odds = Odds(1, prior=0.0, groups=11, share=0.0)
    for group in range(11):
        odds.hits[group][bin_of(100 * S)] = 10.0 * group
        odds.ends[group][bin_of(100 * S)] = 10.0 * (10 - group)
    for _ in range(3):
        odds.refresh(np.zeros((11, BINS)), 300.0 * S)
    likely = [odds.table[group][bin_of(30 * S)] for group in range(11)]
    assert likely == pytest.approx([group / 10 for group in range(11)])


def test_groups_of_which_nothing_is_known_can_be_left_out() -> None:
    rng = random.Random(8)
    whole, part = (Odds(2, prior=3.0, groups=7) for _ in range(2))
    living = np.zeros((14, BINS))
    for _ in range(400):
        row, place = rng.choice((2, 3, 6, 7, 12, 13)), rng.randrange(BINS)  # of groups 1, 3 and 6
        for odds in (whole, part):
            odds.hits[row][place] += 0.7
            odds.ends[row][-1 - place] += 0.3
        living[row][place] += 1.0
    for _ in range(2):
        whole.refresh(living, 60.0 * S)
        part.refresh(living[[2, 3, 6, 7, 12, 13]], 60.0 * S, [1, 3, 6])
        assert part.table == whole.table
    assert part.table[2:4] != part.table[6:8] != part.table[0:2]
