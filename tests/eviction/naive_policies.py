"""The policies the naive way: records in a dict, every order found by looking at all of them.

A twin keeps its own membership, chains, lists, scores and time. `check` walks a real policy's
victims and says at each step whether that chunk could be next: a leaf of what is left, of the
right list, and of a score that no other candidate undercuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

from kvd.eviction.adaptive import HALF_LIVES_S, Adaptive
from kvd.eviction.base import Policy
from kvd.eviction.ghosts import Ghosts
from kvd.eviction.odds import bin_of
from kvd.eviction.reuse import Reuse

S = 1_000_000_000
NONE = -1
EPSILON = 1e-9


@dataclass
class Record:
    chunk: int
    parent: int
    parent_life: int
    queue: int
    ghost: int
    born: int
    used: int
    uses: int = 1
    list: int = 0
    score: float = 0.0


class Twin:
    """Leaf-first with one list: subclasses say what a use does to the score."""

    def __init__(self) -> None:
        self.here: dict[int, Record] = {}
        self.life: dict[int, int] = {}
        self.newest = NONE
        self.late: list[int] = []  # deferred
        self.over: set[int] = set()  # cooled
        self.origin: int | None = None
        self.time = 0
        self.peak = 0

    # what differs

    def born(self, record: Record) -> None:
        raise NotImplementedError

    def use(self, record: Record, time: int, same: bool) -> None:
        raise NotImplementedError

    def gone(self, record: Record) -> None:
        """Evicted."""

    def settle(self, queue: int, now: int) -> None:
        """What asking for victims changes."""

    def may(self, record: Record, counts: dict[int, int], open_lists: set[int]) -> bool:
        """Whether its list is one to take from now."""
        return True

    # what all share

    def clock(self, now: int) -> int:
        if self.origin is None:
            self.origin = now - 1
        self.time = max(now - self.origin, self.time + 1)
        return self.time

    def insert(self, chunk: int, parent: int, queue: int, ghost: int, now: int) -> None:
        time = self.clock(now)
        life = self.life.get(parent, 0)
        record = Record(chunk, parent, life, queue, ghost, time, time)
        self.here[chunk] = record
        self.newest = chunk
        if (above := self.parent(record)) is not None:
            self.recall(above.chunk)
            self.over.discard(above.chunk)
        self.peak = max(self.peak, len(self.here))
        self.born(record)

    def touch(self, chain: Sequence[int], now: int) -> None:
        time = self.clock(now)
        for chunk in chain:
            record = self.here.get(chunk)
            if record is not None:
                self.recall(chunk)
                self.over.discard(chunk)
                self.use(record, time, time - record.used < S)
                record.used = time

    def recall(self, chunk: int) -> None:
        if chunk in self.late:
            self.late.remove(chunk)

    def cool(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if chunk in self.here:
                self.over.add(chunk)
                if self.newest == chunk:
                    self.newest = NONE

    def cool_leaves(self, leaves: Iterable[int]) -> set[int]:
        """Those that go before all others."""
        return {c for c in leaves if c in self.over and c not in self.late}

    def defer(self, chunks: Iterable[int]) -> None:
        parents = {p.chunk for r in self.here.values() if (p := self.parent(r)) is not None}
        for chunk in chunks:
            if chunk in self.here and chunk not in parents:
                self.recall(chunk)
                self.late.append(chunk)
                if self.newest == chunk:
                    self.newest = NONE

    def forget(self, chunk: int, evicted: bool) -> None:
        record = self.here.get(chunk)
        if record is None:
            return
        if evicted:
            self.gone(record)
        del self.here[chunk]
        self.life[chunk] = self.life.get(chunk, 0) + 1
        if self.newest == chunk:
            self.newest = NONE
        self.recall(chunk)
        self.over.discard(chunk)
        if evicted and self.late:
            del self.late[0]

    def parent(self, record: Record) -> Record | None:
        found = self.here.get(record.parent)
        if found is None or self.life.get(record.parent, 0) != record.parent_life:
            return None
        return found

    def leaves(self, queue: int, named: Iterable[int]) -> list[Record]:
        left = [r for r in self.here.values() if r.chunk not in named]
        parents = {p.chunk for r in left if (p := self.parent(r)) is not None}
        return [r for r in left if r.queue == queue and r.chunk not in parents]

    def check(self, policy: Policy, queue: int, now: int) -> list[int]:
        """Hold the policy's order to the rules; the order."""
        self.settle(queue, now)
        order = list(policy.victims(queue, now))
        if type(policy).first is not Policy.first:  # else it asks for victims once more
            assert policy.first(queue, now) == (order[0] if order else -1)
        named: list[int] = []
        counts: dict[int, int] = {}
        for record in self.here.values():
            if record.queue == queue:
                counts[record.list] = counts.get(record.list, 0) + 1
        for chunk in order:
            leaves = {r.chunk: r for r in self.leaves(queue, named)}
            assert chunk in leaves, f"{chunk} is no leaf of what is left: {order}"
            aside = {self.newest, *self.late}
            choice = [r for r in leaves.values() if r.chunk not in aside]
            if cool := self.cool_leaves(leaves):
                assert chunk in cool, f"{chunk} goes before {cool} in {order}"
                counts[leaves[chunk].list] -= 1
                named.append(chunk)
                continue
            if not choice:
                last = [c for c in (self.newest, *self.late) if c in leaves]
                choice = [leaves[last[0]]]
            choice = self.rank(choice, counts)
            scores = [r.score for r in choice]
            assert chunk in [r.chunk for r in choice], f"{chunk} is not next in {order}"
            assert leaves[chunk].score <= min(scores) + EPSILON, f"{chunk} is too early in {order}"
            counts[leaves[chunk].list] -= 1
            named.append(chunk)
        # All have gone but what a child in another queue keeps.
        assert not self.leaves(queue, named), f"more could go than {order}"
        return order

    def rank(self, choice: list[Record], counts: dict[int, int]) -> list[Record]:
        """The candidates among which the score decides."""
        return choice


class NaiveFifo(Twin):
    def touch(self, chain: Sequence[int], now: int) -> None:
        pass

    def born(self, record: Record) -> None:
        record.score = record.born

    def use(self, record: Record, time: int, same: bool) -> None:
        pass


class NaiveLfuda(Twin):
    age = 0

    def born(self, record: Record) -> None:
        record.score = 1.0 + self.age + record.born * 1e-18

    def use(self, record: Record, time: int, same: bool) -> None:
        record.uses += not same
        record.score = record.uses + self.age + time * 1e-18

    def gone(self, record: Record) -> None:
        self.age = max(self.age, int(record.score))


def log_sum(a: float, b: float) -> float:
    """log2(2^a + 2^b)."""
    high, low = max(a, b), min(a, b)
    return high + log2(1.0 + 2.0 ** (low - high)) if high - low < 1000 else high


class NaiveCrf(Twin):
    def __init__(self, half_life_s: float = 60.0) -> None:
        super().__init__()
        self.half = half_life_s * S
        self.ghosts: dict[int, tuple[float, int]] = {}  # never full in these tests

    def born(self, record: Record) -> None:
        x = record.born / self.half
        old = self.ghosts.pop(record.ghost, None)
        if old is None:
            record.score = x
        elif record.born - old[1] < S:
            record.score = max(old[0], x)
        else:
            record.score = log_sum(old[0], x)

    def use(self, record: Record, time: int, same: bool) -> None:
        x = time / self.half
        record.score = max(record.score, x) if same else log_sum(record.score, x)

    def gone(self, record: Record) -> None:
        self.ghosts[record.ghost] = (record.score, record.used)


class NaiveAdaptive(NaiveCrf):
    """All experts side by side; who rules is asked of the policy under test."""

    def __init__(self, policy: Adaptive) -> None:
        super().__init__()
        self.policy = policy
        self.experts = [NaiveCrf(half) for half in HALF_LIVES_S]

    def insert(self, chunk: int, parent: int, queue: int, ghost: int, now: int) -> None:
        super().insert(chunk, parent, queue, ghost, now)
        for expert in self.experts:
            expert.insert(chunk, parent, queue, ghost, now)

    def touch(self, chain: Sequence[int], now: int) -> None:
        super().touch(chain, now)
        for expert in self.experts:
            expert.touch(chain, now)

    def forget(self, chunk: int, evicted: bool) -> None:
        super().forget(chunk, evicted)
        for expert in self.experts:
            expert.forget(chunk, evicted)

    def settle(self, queue: int, now: int) -> None:
        ruler = self.experts[self.policy._ruler]
        for chunk, record in self.here.items():
            record.score = ruler.here[chunk].score


class NaiveReuse(Twin):
    """Classes and ages its own; the odds are asked of the policy under test (see test_odds)."""

    def __init__(self, policy: Reuse) -> None:
        super().__init__()
        self.policy = policy
        self.ghosts: dict[int, tuple[int, int]] = {}
        self.uses: dict[int, int] = {}  # by chunk, above the first, at most 3
        self.had: dict[int, int] = {}

    def born(self, record: Record) -> None:
        uses = had = 0
        old = self.ghosts.pop(record.ghost, None)
        if old is not None:
            had = old[1] % 2
            uses = min(old[1] // 2 + (record.born - old[0] >= S), 3)
        self.uses[record.chunk], self.had[record.chunk] = uses, had
        parent = self.parent(record)
        if parent is not None:
            self.had[parent.chunk] = 1

    def use(self, record: Record, time: int, same: bool) -> None:
        if not same:
            self.uses[record.chunk] = min(self.uses[record.chunk] + 1, 3)

    def gone(self, record: Record) -> None:
        kind = self.uses[record.chunk] * 2 + self.had[record.chunk]
        self.ghosts[record.ghost] = (record.used, kind)

    def settle(self, queue: int, now: int) -> None:
        next(iter(self.policy.victims(queue, now)), None)  # may refresh the odds
        time = max(now - self.origin, self.time) if self.origin is not None else 0
        for chunk, record in self.here.items():
            record.list = self.uses[chunk] * 2 + self.had[chunk]
            age = time - record.used
            row = self.policy._row(record.queue * 8 + record.list)
            odds = self.policy._odds.table[row][bin_of(age)]
            record.score = odds + 1e-6 / (1.0 + age * 1e-9)

    def rank(self, choice: list[Record], counts: dict[int, int]) -> list[Record]:
        """Of each class only the one that was used least recently."""
        oldest: dict[int, int] = {}
        for record in choice:
            oldest[record.list] = min(oldest.get(record.list, record.used), record.used)
        return [r for r in choice if r.used == oldest[r.list]]


class NaiveArc(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.target = 0.0
        self.ghosts = (Ghosts(0), Ghosts(0))

    def born(self, record: Record) -> None:
        peak = max(self.peak - (len(self.here) == self.peak and self.grown), 1)
        for which in (0, 1):
            if self.ghosts[which].take(record.ghost) is not None:
                mine, other = len(self.ghosts[which]) + 1, len(self.ghosts[1 - which])
                step = max(1.0, other / mine)
                moved = self.target + (step if which == 0 else -step)
                self.target = min(max(moved, 0.0), float(peak))
                record.list = 1
                break
        record.score = record.born

    def insert(self, chunk: int, parent: int, queue: int, ghost: int, now: int) -> None:
        self.grown = len(self.here) + 1 > self.peak
        super().insert(chunk, parent, queue, ghost, now)

    def use(self, record: Record, time: int, same: bool) -> None:
        record.score = time
        if not same:
            record.list = 1

    def gone(self, record: Record) -> None:
        self.ghosts[record.list].put(record.ghost, (), max(self.peak, 1))

    def rank(self, choice: list[Record], counts: dict[int, int]) -> list[Record]:
        once, again = counts.get(0, 0), counts.get(1, 0)
        share = self.target / max(len(self.here), 1)
        return first_of(choice, 0 if once > share * (once + again) else 1)


class NaiveS3Fifo(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.ghosts = Ghosts(0)

    def born(self, record: Record) -> None:
        record.uses = 0
        record.score = record.born
        if self.ghosts.take(record.ghost) is not None:
            record.list = 1
            parent = self.parent(record)
            if parent is not None:
                self.promote(parent, record.born)

    def use(self, record: Record, time: int, same: bool) -> None:
        record.uses = min(record.uses + (not same), 3)

    def gone(self, record: Record) -> None:
        if record.list == 0:
            self.ghosts.put(record.ghost, (), max(self.peak, 1))

    def promote(self, record: Record | None, time: int) -> None:
        while record is not None and record.list == 0:
            record.uses, record.score, record.list = 0, time, 1
            record = self.parent(record)

    def settle(self, queue: int, now: int) -> None:
        while True:
            mine = [r for r in self.here.values() if r.queue == queue]
            small = sum(r.list == 0 for r in mine)
            which = 0 if small > 0.1 * len(mine) or small == len(mine) else 1
            aside = {self.newest, *self.late}
            leaves = [r for r in self.leaves(queue, ()) if r.chunk not in aside]
            if self.cool_leaves(r.chunk for r in leaves):
                return
            choice = first_of(leaves, which)
            if not choice:
                return
            first = min(choice, key=lambda r: (r.score, r.chunk))
            if not first.uses:
                return
            time = self.clock(now)
            if first.list == 0:
                self.promote(first, time)
            else:
                first.uses -= 1
                first.score = time

    def rank(self, choice: list[Record], counts: dict[int, int]) -> list[Record]:
        small, main = counts.get(0, 0), counts.get(1, 0)
        listed = first_of(choice, 0 if small > 0.1 * (small + main) or not main else 1)
        return [r for r in listed if not r.uses] or listed


def first_of(choice: list[Record], which: int) -> list[Record]:
    """Those of a list, or of the other if it has none."""
    return [r for r in choice if r.list == which] or choice


Make = Callable[[], tuple[Policy, Twin]]
