"""What the policies that learn learn, each shown by requests that reward it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agent_trace import agents, write
from policy_conformance import Cache, insert, prompt

from kvd.eviction.adaptive import HALF_LIVES_S, Adaptive
from kvd.eviction.base import Policy
from kvd.eviction.crf import Crf
from kvd.eviction.lru import Lru
from kvd.eviction.odds import bin_of
from kvd.eviction.registry import factory, make
from kvd.eviction.reuse import Reuse
from kvd.tools.simulate.replay import replay
from kvd.tools.simulate.trace import read_trace

S = 1_000_000_000


def popular_among_scans(policy: Policy) -> float:
    """Sixteen prompts that come back every 40 s among ones that never do, in a cache that holds
    all of 20 s: only who remembers uses keeps them. Share of the last 1,000 s that was a hit."""
    cache = Cache(policy, 60)
    hits = asked = 0
    for second in range(3_000):
        cache.now += S // 2
        cache.use(prompt(("scan", second), 2))
        cache.now += S // 2
        if second % 40 < 16:
            found = cache.use(prompt(("popular", second % 40), 2))
            if second >= 2_000:
                hits += found
                asked += 2
    return hits / asked


def fresh_sessions(policy: Policy) -> float:
    """Agents: each grows by a chunk every few seconds and is then gone for ever; what was used
    most is dead. Share of chunks that were hits in the last half."""
    cache = Cache(policy, 64)
    hits = asked = 0
    for step in range(4_000):
        session, turn = step // 120 * 4 + step % 4, step % 120 // 4
        cache.now += S
        found = cache.use(prompt(("agent", session), turn + 1))
        if step >= 2_000 and turn:
            hits += found
            asked += turn
    return hits / asked


@pytest.mark.parametrize("name", ["default", "adaptive"])
def test_what_comes_back_is_kept_among_what_does_not(name: str) -> None:
    assert popular_among_scans(Lru()) < 0.1
    assert popular_among_scans(make(name)) > 0.8


@pytest.mark.parametrize("name", ["default", "adaptive"])
def test_sessions_that_live_now_win_over_those_that_were_used_most(name: str) -> None:
    least = fresh_sessions(Lru())
    assert fresh_sessions(make(name)) >= least - 0.01
    assert fresh_sessions(Crf(3600.0)) < least - 0.1


@pytest.mark.parametrize("percent", [10, 20])
def test_agents_lose_nothing(tmp_path: Path, percent: int) -> None:
    """Where frequency misleads most: CRF with a fixed half-life loses tens of points here."""
    trace = read_trace(write(tmp_path / "agents.jsonl", agents(sessions=40, seconds=400.0)))
    capacity = [max(1, trace.unique_blocks * percent // 100)]
    least = replay(trace, Lru, capacity).block_hit_pct
    for name in ("default", "adaptive"):
        assert replay(trace, factory(name), capacity).block_hit_pct >= least - 0.7, name
    assert replay(trace, lambda: Crf(300.0), capacity).block_hit_pct < least - 5.0


def test_the_half_life_follows_the_requests() -> None:
    policy = Adaptive()
    popular_among_scans(policy)
    assert HALF_LIVES_S[policy._ruler] > 1.0
    policy = Adaptive()
    fresh_sessions(policy)
    assert HALF_LIVES_S[policy._ruler] < 100.0


def test_a_bar_is_the_worst_score_among_the_best() -> None:
    """As many as are resident, of all that are known: what a shadow cache would hold."""
    policy = Adaptive()
    cache = Cache(policy, 30)
    for n in range(200):
        cache.now += S
        cache.use(prompt(n % 67, 1 + n % 3))
    policy._measure()
    for e, column in enumerate(policy._columns_of):
        scores = [column[c] for c in range(len(policy._home)) if policy.resident(c)]
        scores += policy._ghosts.values()[:, e].tolist()
        best = sorted(scores, reverse=True)
        place = len(policy)
        near = best[max(place - 3, 0) : place + 3]
        assert min(near) <= policy._bars[e] <= max(near)


def test_a_new_ruler_takes_over_in_small_steps() -> None:
    """No call may look at all chunks; until the new heaps are whole the old order holds."""
    policy = Adaptive()
    count = 2_000
    for chunk in range(count):
        insert(policy, chunk, chunk * S)
    policy.touch(range(0, count, 2), (count + 1) * S)
    before = list(policy.victims(0, (count + 2) * S))
    policy._hits = [0.0, 0.0, 0.0, 1000.0]
    policy._judge()
    calls = 0
    while policy._heir >= 0:
        assert list(policy.victims(0, (count + 2) * S)) == before
        policy.touch([], (count + 3) * S)
        calls += 1
    assert calls >= count // 64
    assert policy._ruler == 3
    order = list(policy.victims(0, (count + 9) * S))
    scores = [policy._columns_of[3][chunk] for chunk in order[:-1]]  # the newest is held back
    assert scores == sorted(scores) and sorted(order) == list(range(count))


def test_odds_are_worked_out_from_a_sample_when_there_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every few chunks stand for all: the table comes out close to that of all of them."""
    import kvd.eviction.reuse as reuse_module

    tables = []
    for sample in (50, 1_000_000):
        monkeypatch.setattr(reuse_module, "_SAMPLE", sample)
        policy = reuse_module.Reuse(prior=10.0)
        popular_among_scans(policy)
        policy._refresh(policy._time)
        tables.append(np.array(policy._odds.table))
    assert np.abs(tables[0] - tables[1]).mean() < 0.05


def test_tenants_teach_nothing_false_to_each_other() -> None:
    """One queue's chunks come back every 40 s once they came back, the other's are then dead: by
    the odds of both together one of them would be evicted wrongly."""
    policy = make("default")
    now, free = 1_000 * S, iter(range(10**6))
    for _ in range(120):
        chunks = [next(free) for _ in range(40)]
        for n, chunk in enumerate(chunks):
            insert(policy, chunk, now + n, queue=n % 2)
        for uses in range(1, 5):
            now += 40 * S
            # of queue 0, those that were used twice go on being used; of queue 1 they are over
            for n, chunk in enumerate(chunks):
                if (n % 2 == 0 and n < 20) or (n % 2 == 1 and uses == 1 and n < 20):
                    policy.touch([chunk], now + n)
        for queue in (0, 1):
            for _ in range(20):
                policy.forget(next(iter(policy.victims(queue, now))), evicted=True)
        now += S
    assert isinstance(policy, Reuse)
    place = bin_of(20 * S)
    again = [policy._odds.table[policy._row(queue * 8 + 2)][place] for queue in (0, 1)]
    assert again[0] > again[1] + 0.2


class EveryGroup(Reuse):
    """Reads all of its tables, also those in which nothing can stand."""

    def _groups(self) -> list[int]:
        return list(range(16))


@pytest.mark.parametrize("queues", [1, 3, 18])
def test_odds_are_those_of_all_groups_however_few_are_read(queues: int) -> None:
    """Before a restart and after it, when what an earlier life learned stands apart."""
    earlier = Reuse(prior=10.0)
    popular_among_scans(earlier)
    tables = []
    for kind in (Reuse, EveryGroup):
        policy = kind(prior=10.0)
        for life in range(2):
            for n in range(40 * queues):
                insert(policy, n, (life * 10_000 + n) * S, queue=n % queues)
                if n % 3 == 0:
                    policy.touch([n // 2], (life * 10_000 + n) * S + S // 2)
            for n in range(0, 40 * queues, 5):
                policy.forget(n, evicted=n % 2 == 0)
            policy._refresh(policy._time)
            tables.append(policy._odds.table)
            state, ghosts = earlier.snapshot(), earlier.ghosts(0, 10_000)
            assert ghosts is not None and len(ghosts[0])
            policy = kind(prior=10.0)
            policy.restore(state, ghosts, 10_000 * S)
    assert tables[0] == tables[2] and tables[1] == tables[3] and tables[0] != tables[1]
