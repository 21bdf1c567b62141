"""Fair queuing: who is served next, and that nobody falls behind his share."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.fair import MIN_BYTES, FairQueue, Ticket

KIB = 1024
MIB = 1 << 20


# -- the naive twin -----------------------------------------------------------------------------


class Waiting(NamedTuple):
    order: int
    tenant: str
    nbytes: int
    item: int


class NaiveQueue:
    """The textbook: exact fractions, plain lists, all starts worked out anew for each choice."""

    def __init__(self) -> None:
        self.weights: dict[str, int] = {}
        self.waiting: list[Waiting] = []
        self.finish: dict[str, Fraction] = {}
        self.head_since: dict[str, tuple[Fraction, int]] = {}  # start of its first, and its turn
        self.time = Fraction(0)
        self.turn = 0

    def push(self, tenant: str, nbytes: int, item: int) -> None:
        if not any(w.tenant == tenant for w in self.waiting):
            self._at_the_head(tenant, max(self.time, self.finish.get(tenant, Fraction(0))))
        self.waiting.append(Waiting(item, tenant, max(nbytes, MIN_BYTES), item))

    def _at_the_head(self, tenant: str, start: Fraction) -> None:
        self.turn += 1
        self.head_since[tenant] = (start, self.turn)

    def next(self) -> Waiting:
        tenant = min({w.tenant for w in self.waiting}, key=lambda t: self.head_since[t])
        return next(w for w in self.waiting if w.tenant == tenant)

    def pop(self) -> int:
        first = self.next()
        self.waiting.remove(first)
        start = self.head_since[first.tenant][0]
        self.time = start
        finish = start + Fraction(first.nbytes, self.weights.get(first.tenant, 1))
        self.finish[first.tenant] = finish
        if any(w.tenant == first.tenant for w in self.waiting):
            self._at_the_head(first.tenant, finish)
        self._idle()
        return first.item

    def remove(self, item: int) -> None:
        self.waiting = [w for w in self.waiting if w.item != item]
        self._idle()

    def _idle(self) -> None:
        if not self.waiting:
            self.time, self.finish = Fraction(0), {}


TENANTS = st.sampled_from("abcde")
SIZES = st.sampled_from([0, 1, 4 * KIB, 5_000, 64 * KIB, 1 * MIB, 4 * MIB, 32 * MIB])


class Twins(RuleBasedStateMachine):
    """Any pushes, services, withdrawals and weights: both serve the same one next."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.naive = NaiveQueue()
        self.tickets: dict[int, Ticket[int]] = {}
        self.count = 0

    @rule(tenant=TENANTS, nbytes=SIZES)
    def push(self, tenant: str, nbytes: int) -> None:
        self.count += 1
        self.tickets[self.count] = self.queue.push(tenant, nbytes, self.count)
        self.naive.push(tenant, nbytes, self.count)

    @precondition(lambda self: self.tickets)
    @rule()
    def pop(self) -> None:
        item = self.queue.pop()
        assert item == self.naive.pop()
        assert not self.queue.remove(self.tickets.pop(item))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.tickets)))
        assert self.queue.remove(self.tickets.pop(item))
        self.naive.remove(item)

    @rule(tenant=TENANTS, weight=st.sampled_from([1, 2, 4, 8]))
    def weigh(self, tenant: str, weight: int) -> None:
        self.queue.set_weight(tenant, weight)
        self.naive.weights[tenant] = weight

    @invariant()
    def the_same_is_next(self) -> None:
        assert len(self.queue) == len(self.naive.waiting) == len(self.tickets)
        head = self.queue.peek()
        assert (None if head is None else head.item) == (
            self.naive.next().item if self.naive.waiting else None
        )


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


# -- the law ------------------------------------------------------------------------------------


class Served(NamedTuple):
    begin: int  # bytes of the medium's time
    end: int
    tenant: str
    nbytes: int
    came: int


def serve(arrivals: list[tuple[int, str, int]], weights: dict[str, int]) -> list[Served]:
    """Run a medium that moves one byte a tick. `arrivals`: (when, tenant, bytes)."""
    queue: FairQueue[tuple[int, str, int]] = FairQueue()
    for tenant, weight in weights.items():
        queue.set_weight(tenant, weight)
    todo = sorted(arrivals)
    done: list[Served] = []
    now = 0
    while todo or len(queue):
        while todo and todo[0][0] <= now:
            arrival = todo.pop(0)
            queue.push(arrival[1], arrival[2], arrival)
        if not len(queue):
            now = todo[0][0]
            continue
        came, tenant, nbytes = queue.pop()
        end = now + nbytes
        # what comes meanwhile is queued before the next is chosen
        done.append(Served(now, end, tenant, nbytes, came))
        while todo and todo[0][0] < end:
            arrival = todo.pop(0)
            queue.push(arrival[1], arrival[2], arrival)
        now = end
    return done


def backlogged(served: list[Served], tenant: str) -> list[tuple[int, int]]:
    """When the tenant had something that was not served in full, without a pause."""
    spans: list[tuple[int, int]] = []
    for one in sorted(s for s in served if s.tenant == tenant):
        if spans and one.came <= spans[-1][1]:
            spans[-1] = (spans[-1][0], one.end)
        else:
            spans.append((one.came, one.end))
    return spans


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from("abcd"),
            st.integers(MIN_BYTES // KIB, 40).map(lambda k: k * KIB),
        ).map(lambda a: (a[0] * KIB, a[1], a[2])),
        min_size=1,
        max_size=60,
    ),
    st.fixed_dictionaries({t: st.sampled_from([1, 2, 3, 8]) for t in "abcd"}),
)
def test_who_waits_is_never_behind_his_share_by_more_than_a_request_of_each(
    arrivals: list[tuple[int, str, int]], weights: dict[str, int]
) -> None:
    """Against a fluid that gives each tenant its part of every byte: from any moment on in which a
    tenant waits, it lacks at most one largest request of each other tenant, and the one of its own
    that is being served."""
    served = serve(arrivals, weights)
    tenants = {one.tenant for one in served}
    largest = {t: max(one.nbytes for one in served if one.tenant == t) for t in tenants}
    total = sum(weights[t] for t in tenants)
    for tenant in tenants:
        slack = sum(largest.values())
        for begin, end in backlogged(served, tenant):
            mine = [s for s in served if s.tenant == tenant]
            for a in sorted({begin, *(s.begin for s in served if begin <= s.begin <= end)}):
                for b in (s.end for s in served if a < s.end <= end):
                    got = sum(s.nbytes for s in mine if a <= s.begin and s.end <= b)
                    assert got + slack >= (b - a) * Fraction(weights[tenant], total)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(MIN_BYTES, 64 * KIB), min_size=5, max_size=40),
    st.lists(st.integers(MIN_BYTES, 64 * KIB), min_size=5, max_size=40),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3]),
)
def test_while_two_wait_neither_gets_ahead(
    ones: list[int], others: list[int], weight: int, other: int
) -> None:
    """In every stretch in which both wait, bytes over weight differ by a request of each."""
    arrivals = [(0, "a", n) for n in ones] + [(0, "b", n) for n in others]
    served = serve(arrivals, {"a": weight, "b": other})
    both = min(backlogged(served, "a")[0][1], backlogged(served, "b")[0][1])
    served = [s for s in served if s.end <= both]
    bound = Fraction(max(ones), weight) + Fraction(max(others), other)
    for i in range(len(served)):
        gap = Fraction(0)
        for one in served[i:]:
            part = Fraction(one.nbytes, weight if one.tenant == "a" else other)
            gap += part if one.tenant == "a" else -part
            assert abs(gap) <= bound


def test_nothing_waits_while_the_medium_could_serve() -> None:
    """Work-conserving: who is alone gets all, whatever his weight, and owes nothing for it."""
    queue: FairQueue[int] = FairQueue()
    queue.set_weight("small", 0.001)
    for n in range(100):
        queue.push("small", MIB, n)
    assert [queue.pop() for _ in range(50)] == list(range(50))
    queue.push("big", MIB, 1000)
    order = [queue.pop() for _ in range(51)]
    assert order[0] == 1000 or order[1] == 1000


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


@pytest.mark.parametrize("chunks", [1, 4, 16])
@pytest.mark.parametrize("weight", [1, 3])
def test_a_flood_by_one_tenant_leaves_the_loads_of_the_other_as_on_a_medium_of_his_own(
    chunks: int, weight: int
) -> None:
    """The flood's queue is never empty; the other's load takes, in bytes that the medium
    moves, at most 1.2 times what it would on a medium of its own as fast as its share."""
    size, rng = 4 * MIB, random.Random(7)
    pauses = [rng.randrange(64 * MIB) for _ in range(500)]
    queue: FairQueue[str] = FairQueue()
    queue.set_weight("victim", weight)
    for _ in range(64):
        queue.push("flood", size, "flood")
    now, took = 0, []
    for pause in pauses:
        began = now + pause
        while now < began:  # the flood alone
            assert queue.pop() == "flood"
            queue.push("flood", size, "flood")
            now += size
        for _ in range(chunks):
            queue.push("victim", size, "victim")
        left = chunks
        while left:
            who = queue.pop()
            now += size
            left -= who == "victim"
            if who == "flood":
                queue.push("flood", size, "flood")
        took.append(now - began)
    own = chunks * size * (weight + 1) / weight
    assert quantile(took, 0.99) <= 1.2 * own + size  # the request that is being served goes on
    if chunks == 16:
        assert quantile(took, 0.99) <= 1.2 * own


def test_without_shares_the_flood_would_be_served_first() -> None:
    """The control: one line for all, and the same load waits for the whole flood."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(64):
        queue.push("all", MIB, "flood")
    queue.push("all", MIB, "victim")
    assert [queue.pop() for _ in range(65)].index("victim") == 64


def test_memory_is_what_waits_and_no_more() -> None:
    queue: FairQueue[int] = FairQueue()
    keep = queue.push("stays", MIB, 0)
    for n in range(20_000):
        queue.remove(queue.push(f"t{n}", MIB, n))
    for n in range(20_000):
        queue.remove(queue.push("same", MIB, n))
    assert queue.tenants <= 2 + 64
    assert len(queue._waiting) + len(queue._idle) <= 6 * 64
    first = queue.push("same", MIB, 1)
    for n in range(20_000):
        queue.remove(queue.push("same", MIB, n))
    assert len(first.flow.line) <= 3 * 64
    assert queue.remove(keep) and queue.pop() == 1
    assert queue.tenants == 0 and not len(queue)


def test_a_weight_of_nothing_is_refused() -> None:
    for weight in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            FairQueue[int]().set_weight("a", weight)


def test_a_ticket_of_another_queue_is_refused() -> None:
    one, two = FairQueue[int](), FairQueue[int]()
    ticket = one.push("a", MIB, 1)
    two.push("a", MIB, 2)
    with pytest.raises(ValueError, match="another queue"):
        two.remove(ticket)
    assert len(one) == len(two) == 1 and one.remove(ticket)


def test_an_empty_queue_has_no_next() -> None:
    with pytest.raises(IndexError):
        FairQueue[int]().pop()
    assert FairQueue[int]().peek() is None
