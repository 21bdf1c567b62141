"""Hints change an order: they remove nothing, end by the clock, and are bounded."""

from __future__ import annotations

from typing import Any

import pytest
from world import KIB, Client, ErrorCode, S, World, chain, spec

from kvd.core import TierConfig
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import HintKind, Selector
from kvd.eviction import POLICIES

ONE = spec("m", 8 * KIB)
SLOTS = 32  # of 8 KiB


def world(policy: str = "lru", **settings: Any) -> World:
    return World(SLOTS * 8 * KIB, 64 * KIB, policy=policy, write_share=1.0, **settings)


def hint(client: Client, hashes: list[bytes], kind: int, *, level: int = 0, within: int = 0) -> Any:
    packed = b"".join(hashes)
    return client.world.ask(ev.Hint(client.number, 0, ONE.digest, 1, packed, kind, level, within))


def full(policy: str = "lru", **settings: Any) -> tuple[World, Client]:
    """Four prompts of eight chunks, 0 the coldest."""
    made = world(policy, **settings)
    client = made.open()
    client.register(ONE)
    for n in range(SLOTS // 8):
        client.store(ONE, chain(n, 8))
        made.advance(2 * S)
    return made, client


def left(client: Client, name: object) -> int:
    return int(client.lookup(ONE, chain(name, 8)).leading)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_session_that_is_over_goes_first(policy: str) -> None:
    made, client = full(policy)
    got = hint(client, chain(3, 8), HintKind.SESSION_END)
    assert got == ac.HintResult(8, 0, 0, 0)
    assert [left(client, n) for n in range(4)] == [8] * 4, "a hint removes nothing"
    client.store(ONE, chain("a", 5))
    assert [left(client, n) for n in range(4)] == [8, 8, 8, 3]
    assert made.counter("policy_errors") == 0


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"fifo"}))
def test_a_use_takes_it_back(policy: str) -> None:
    """A wrong hint costs nothing once the session goes on."""
    _, client = full(policy)
    hint(client, chain(3, 8), HintKind.SESSION_END)
    client.release(client.lease(ONE, chain(3, 8)).lease)
    client.store(ONE, chain("a", 8))
    assert left(client, 3) == 8


def test_a_use_right_after_takes_it_back_of_all_above() -> None:
    """What policies were told of just before the hint is told them again after it."""
    made, client = full("default")
    keys = chain("a", 8)
    client.store(ONE, keys[:4])
    made.now += S // 100
    assert hint(client, keys[:4], HintKind.PRIORITY).taken == 4
    made.now += S // 100
    client.store(ONE, keys[4:], parent=keys[3], index0=4)
    made.settle()
    made.open(admin=True).evict(Selector(keys=tuple(keys[3:])))
    client.store(ONE, chain("b", 8))
    assert left(client, "a") == 3


def test_a_use_before_the_hint_is_no_use_after_it() -> None:
    """Uses are told to the policy after the reply; a hint waits for its turn among them."""
    made, client = full()
    looked = client.lookup_event(ONE, chain(3, 8), 1)
    made.handle(looked._replace(request=900))
    hint(client, chain(3, 8), HintKind.SESSION_END)
    made.settle()
    client.release(made.replies.pop(900).result.lease)  # type: ignore[union-attr]
    client.store(ONE, chain("a", 8))
    assert left(client, 3) == 0


def test_a_hint_is_believed_when_nobody_has_come_back_for_a_while() -> None:
    """An eighth of the time that chunks stay; who goes on meanwhile has not ended."""
    made, client = full()
    for n in range(4, 40):
        client.store(ONE, chain(n, 8))
        made.advance(20 * S)
    store = made.core._store
    stay = store.stay_ns
    assert stay > 20 * S
    hint(client, chain(39, 8), HintKind.SESSION_END)
    hint(client, chain(38, 8), HintKind.SESSION_END)
    client.store(ONE, chain("at once", 2))
    assert [left(client, n) for n in (38, 39)] == [8, 8], "believed at once"
    made.advance(S)
    client.release(client.lease(ONE, chain(38, 8)).lease)
    made.advance(int(stay / 8) + S)
    client.store(ONE, chain("later", 8))
    assert [left(client, n) for n in (38, 39)] == [8, 0]
    assert not made.core._hints._waiting and made.core._hints._rows == 0


def test_what_a_session_shares_is_not_its_to_end() -> None:
    made = world()
    client = made.open()
    client.register(ONE)
    shared = chain("system", 4)
    for name in ("one", "two"):
        client.store(ONE, shared + chain(name, 4))
        made.advance(2 * S)
    assert hint(client, shared + chain("two", 4), HintKind.SESSION_END).taken == 4
    assert hint(client, shared, HintKind.SESSION_END).taken == 0
    assert hint(client, chain("nobody", 3), HintKind.SESSION_END) == ac.HintResult(0, 3, 0, 0)


def test_a_pin_holds_until_its_time_is_over() -> None:
    made, client = full(pin_share=0.5)
    got = hint(client, chain(0, 8), HintKind.PIN, within=60 * S)
    assert got == ac.HintResult(8, 0, 0, 60 * S)
    for n in range(8):
        client.store(ONE, chain(("a", n), 8))
    assert left(client, 0) == 8
    made.advance(61 * S)
    for n in range(8):
        client.store(ONE, chain(("b", n), 8))
    assert left(client, 0) == 0
    assert made.stat()["counters"]["kept_bytes"] == 0


def test_a_pin_ends_when_it_is_taken_back() -> None:
    _, client = full(pin_share=0.5)
    hint(client, chain(0, 8), HintKind.PIN, within=60 * S)
    assert hint(client, chain(0, 8), HintKind.PIN).taken == 8
    client.store(ONE, chain("a", 8))
    assert left(client, 0) == 0


def test_no_pin_is_longer_than_the_longest() -> None:
    made, client = full(pin_share=0.5, pin_max_ns=10 * S)
    assert hint(client, chain(0, 8), HintKind.PIN, within=1 << 62).within_ns == 10 * S
    made.advance(11 * S)
    client.store(ONE, chain("a", 8))
    assert left(client, 0) == 0


def test_no_tenant_pins_more_than_its_share() -> None:
    made, client = full(pin_share=0.25)  # eight slots
    for n in range(4):
        got = hint(client, chain(n, 8), HintKind.PIN, within=60 * S)
        assert (got.taken, got.over) == ((8, 0) if n == 0 else (0, 8))
    # again, what is pinned is no more than it was
    assert hint(client, chain(0, 8), HintKind.PIN, within=90 * S).taken == 8
    assert made.stat()["counters"]["kept_bytes"] == 8 * 8 * KIB
    assert made.counter("hints_over_cap") == 24
    for n in range(8):
        assert set(client.store(ONE, chain(("a", n), 8))) == {1}  # stores go on
    assert left(client, 0) == 8
    made.advance(91 * S)
    assert hint(client, chain(("a", 7), 8), HintKind.PIN, within=S).taken == 8


def test_all_tenants_pin_no_more_than_what_is_for_all() -> None:
    made, client = full(pin_share=0.5, pin_total_share=0.25)
    other = made.open("other")
    other.register(ONE)
    assert hint(client, chain(0, 8), HintKind.PIN, within=60 * S).taken == 8
    other.store(ONE, chain(0, 8))
    assert hint(other, chain(0, 8), HintKind.PIN, within=60 * S).over == 8


def test_a_foreign_key_is_not_there() -> None:
    _, client = full(pin_share=0.5)
    other = client.world.open("other")
    other.register(ONE)
    for kind in HintKind:
        got = hint(other, chain(0, 8), kind, within=60 * S)
        assert (got.taken, got.absent, got.over) == (0, 8, 0)
    client.store(ONE, chain("a", 8))
    assert left(client, 0) == 0, "somebody else's hint is none"


def test_what_is_expected_goes_only_when_nothing_else_can() -> None:
    made, client = full(pin_share=1.0, pin_total_share=1.0, lease_share=1.0)
    assert hint(client, chain(0, 8), HintKind.EXPECT_REUSE, within=100 * S).within_ns == 125 * S
    for n in range(6):
        client.store(ONE, chain(("a", n), 8))
    assert left(client, 0) == 8
    held = [client.lease(ONE, chain(("a", n), 8)).lease for n in (3, 4, 5)]
    assert all(held)
    client.store(ONE, chain("b", 8))  # nothing else is there
    assert left(client, 0) == 0
    made.advance(200 * S)


def test_what_does_not_come_in_time_is_expected_no_more() -> None:
    made, client = full(pin_share=0.5)
    hint(client, chain(0, 8), HintKind.EXPECT_REUSE, within=10 * S)
    made.advance(16 * S)
    client.store(ONE, chain("a", 8))
    assert left(client, 0) == 0


def test_priorities_go_both_ways_and_back() -> None:
    _, client = full(pin_share=0.5)
    assert hint(client, chain(0, 8), HintKind.PRIORITY, level=2).taken == 8
    assert hint(client, chain(3, 8), HintKind.PRIORITY, level=0).taken == 8
    client.store(ONE, chain("a", 8))
    assert [left(client, n) for n in range(4)] == [8, 8, 8, 0]
    assert hint(client, chain(0, 8), HintKind.PRIORITY, level=1).taken == 8
    client.store(ONE, chain("b", 8))
    assert left(client, 0) == 0


@pytest.mark.parametrize(("kind", "level"), [(0, 0), (9, 0), (4, 3), (4, 255)])
def test_an_unknown_hint_is_refused(kind: int, level: int) -> None:
    _, client = full()
    got = hint(client, chain(0, 8), kind, level=level)
    assert isinstance(got, ac.Fail) and got.code is ErrorCode.BAD_KEY


def test_an_operator_sees_pins_and_goes_over_them() -> None:
    made, client = full(pin_share=0.5)
    admin = made.open("boss", admin=True)
    hint(client, chain(0, 8), HintKind.PIN, within=60 * S)
    hint(client, chain(1, 8), HintKind.EXPECT_REUSE, within=60 * S)
    rows = {row["hash"]: row for row in admin.list("chunks", Selector(everything=True))}
    assert rows[chain(0, 1)[0].hex()]["pinned_s"] == pytest.approx(60, abs=1)
    assert rows[chain(1, 1)[0].hex()]["spared_s"] == pytest.approx(75, abs=1)
    assert "pinned_s" not in rows[chain(2, 1)[0].hex()]
    assert admin.evict(Selector(keys=tuple(chain(0, 8)))).evicted == 8
    assert left(client, 0) == 0
    made.settle()
    assert made.stat()["counters"]["kept_bytes"] == 8 * 8 * KIB  # of those that are expected


def test_a_row_that_is_used_again_is_not_pinned() -> None:
    made, client = full(pin_share=0.5)
    hint(client, chain(0, 8), HintKind.PIN, within=600 * S)
    made.open("boss", admin=True).evict(Selector(keys=tuple(chain(0, 8))))
    made.settle()
    client.store(ONE, chain("a", 8))
    assert made.core._store.keeping.by_row == {}


def test_hints_reach_the_tiers_below() -> None:
    """There, too, a pinned chunk is no victim, and a session that is over goes first."""
    made, client = full(
        pin_share=1.0, pin_total_share=1.0, tiers=(TierConfig("nvme", 48 * 8 * KIB),)
    )
    hint(client, chain(0, 8), HintKind.PIN, within=600 * S)
    for n in range(20):
        client.store(ONE, chain(("a", n), 8))
        made.advance(S)
    assert left(client, 0) == 8
    below = made.core._store.ladder.lowers[0]
    assert below.chunks > 0 and made.counter("policy_errors") == 0


def test_many_hints_leave_nothing_behind() -> None:
    made, client = full(pin_share=0.5)
    keeping, timers = made.core._store.keeping, made.core._store.timers
    for n in range(2000):
        hint(client, chain(n % 4, 8), HintKind.PIN, within=(1 + n % 50) * S)
        assert sum(map(len, timers._buckets.values())) <= 32
        if n % 100 == 0:
            made.advance(S)
    made.advance(60 * S)
    assert keeping.by_row == {} and keeping.nbytes == 0 and keeping._bytes == {}
    assert not any(timers._buckets.values())


@pytest.mark.parametrize("kind", list(HintKind))
def test_a_hint_about_many_keys_is_carried_out_in_slices(kind: HintKind) -> None:
    """Somebody else is served in between; the answer counts all of them."""
    made = World(1024 * 8 * KIB, 512 * KIB, write_share=1.0, pin_share=1.0, pin_total_share=1.0)
    client = made.open()
    client.register(ONE)
    hashes = chain("long", 1000)
    for begin in range(0, 1000, 100):
        parent = hashes[begin - 1] if begin else bytes(32)
        client.store(ONE, hashes[begin : begin + 100], parent=parent, index0=begin)
    packed = b"".join([*hashes, *chain("nobody", 50)])
    event = ev.Hint(client.number, 777, ONE.digest, 1, packed, kind, 0, 60 * S)
    made.handle(event)
    slices = 1
    while 777 not in made.replies:
        made.handle(ev.Tick())
        slices += 1
    answer = made.replies.pop(777)
    assert isinstance(answer, ac.Reply) and isinstance(answer.result, ac.HintResult)
    assert answer.result[:3] == (1000, 50, 0)
    assert slices >= 4
    made.settle()
    if kind in (HintKind.SESSION_END, HintKind.PRIORITY):
        assert len(made.core._store.keeping.by_row) == 0
        order = list(made.core._store.policy.victims(0, made.now))
        assert order == sorted(order, key=lambda row: -made.core._store.chunks.index[row])
    else:
        assert len(made.core._store.keeping.by_row) == 1000
