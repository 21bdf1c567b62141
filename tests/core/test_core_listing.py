"""What an operator sees is what is there, and what they name is what goes."""

from __future__ import annotations

import pytest
from world import KIB, O, S, World, chain, key, spec

from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig
from kvd.core.events import Selector
from kvd.errors import ErrorCode

ONE = spec()
TREE = chain("root", 3)  # a trunk of three, and two branches of four


def branch(name: str) -> list[bytes]:
    return [key(name, n) for n in range(4)]


@pytest.fixture
def world() -> World:
    world = World(4096 * KIB, 128 * KIB)
    client = world.open()
    client.register(ONE)
    client.store(ONE, TREE)
    for name in "ab":
        client.store(ONE, branch(name), parent=TREE[-1], index0=3)
    client.store(ONE, chain("other", 5))
    return world


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        (Selector(tier="foo"), "tier 'foo' is unknown: known are dram, nvme"),
        (Selector(kind=3), "kind 3 is unknown: 1 (prefix) or 2 (content)"),
        (
            Selector(state="hot"),
            "state 'hot' is unknown: writing, unsealed, sealed, quarantined",
        ),
    ],
)
def test_a_condition_with_a_name_that_nothing_has_is_refused(selector: Selector, said: str) -> None:
    world = World(4096 * KIB, 128 * KIB, tiers=(TierConfig("nvme", 1024 * KIB),))
    admin = world.open(admin=True)
    for refused in (
        world.ask(ev.List(admin.number, 0, "specs", selector, 0, 9)),
        world.ask(ev.Evict(admin.number, 0, selector, False, 0, 9)),
    ):
        assert isinstance(refused, ac.Fail)
        assert (refused.code, refused.message) == (ErrorCode.BAD_KEY, said)
    refused = world.ask(ev.TierCommand(admin.number, 0, "foo", "drain"))
    assert refused.message == "tier 'foo' is unknown: known below DRAM are nvme"
    for known in (Selector(namespace="nope"), Selector(tier="nvme"), Selector(kind=2)):
        assert admin.list("chunks", known) == []


def test_rows_of_each_level(world: World) -> None:
    admin = world.open(admin=True)
    foreign = world.open("other")
    foreign.register(ONE)
    foreign.store(ONE, chain("f", 2))
    (default, other) = admin.list("namespaces")
    assert default == {
        "namespace": "default",
        "specs": 1,
        "chunks": 16,
        "bytes": 16 * 8 * KIB,
        "hits": 0,
        "leases": 0,
    }
    assert other["chunks"] == 2
    row = admin.list("specs", Selector(namespace="default"))[0]
    assert (row["model"], row["chunks"], row["shards"]) == ("m", 16, 1)
    assert row["spec"] == ONE.digest.hex()
    prefixes = admin.list("prefixes", Selector(namespace="default"))
    assert {(r["root"], r["chunks"], r["depth"]) for r in prefixes} == {
        (TREE[0].hex(), 11, 7),
        (key("other", 0).hex(), 5, 5),
    }
    chunks = admin.list("chunks", Selector(keys=(TREE[1],)))
    assert len(chunks) == 1
    row = chunks[0]
    assert (row["parent"], row["index"], row["tokens"]) == (TREE[0].hex(), 1, 16)
    assert (row["tier"], row["bytes"], row["shards"]) == ("dram", 8 * KIB, 1)
    assert set(admin.list("chunks")[0]) == {
        "namespace", "spec", "kind", "hash", "parent", "index", "tokens", "bytes", "shards",
        "tier", "state", "age_s", "idle_s", "hits", "leases",
    }  # fmt: skip


@pytest.mark.parametrize("level", ["namespaces", "specs", "prefixes", "chunks"])
@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_pages_add_up(world: World, level: str, limit: int) -> None:
    admin = world.open(admin=True)
    whole = admin.list(level)
    paged = admin.list(level, limit=limit)

    def order(row: dict[str, object]) -> str:
        return str(sorted(row.items()))

    assert sorted(paged, key=order) == sorted(whole, key=order)


def test_filters(world: World) -> None:
    admin = world.open(admin=True)
    world.advance(100 * S)
    lease = admin.lease(ONE, TREE).lease
    admin.release(lease)

    def found(**given: object) -> int:
        return len(admin.list("chunks", Selector(**given)))  # type: ignore[arg-type]

    assert found(idle_ns=50 * S) == 13
    assert found(key_prefix=TREE[0][:4]) == 1
    assert found(subtree=TREE[2]) == 9
    assert found(subtree=TREE[2], idle_ns=50 * S) == 8
    assert found(state="sealed") == 16
    assert found(state="writing") == 0
    assert found(tier="dram") == 16
    assert found(spec=b"?" * 32) == 0
    assert found(kind=2) == 0
    assert found(namespace="default", keys=(TREE[0], TREE[0], key("?"))) == 1


def test_looking_changes_nothing(world: World) -> None:
    admin = world.open(admin=True)
    order = list(world.core._store.policy.victims(0, world.now))
    before = world.stat()["counters"]
    for level in ("namespaces", "specs", "prefixes", "chunks"):
        admin.list(level)
    admin.evict(Selector(everything=True), dry_run=True)
    admin.lookup(ONE, TREE)
    assert list(world.core._store.policy.victims(0, world.now)) == order
    after = world.stat()["counters"]
    asked = {"lookups", "chunks_asked", "chunks_hit", "sessions_opened"}
    assert {k: v for k, v in after.items() if k not in asked} == {
        k: v for k, v in before.items() if k not in asked
    }
    assert all(row["hits"] == 0 and row["leases"] == 0 for row in admin.list("chunks"))


def test_a_dry_run_names_what_would_go(world: World) -> None:
    admin = world.open(admin=True)
    selector = Selector(subtree=key("a", 1))
    dry = admin.evict(selector, dry_run=True, limit=2)
    assert {row["hash"] for row in dry.named} == {k.hex() for k in branch("a")[1:]}
    assert (dry.matched, dry.evicted, dry.bytes) == (3, 3, 3 * 8 * KIB)
    assert len(admin.list("chunks")) == 16
    done = admin.evict(selector, limit=2)
    assert done[:5] == dry[:5]
    assert admin.lookup(ONE, [*TREE, *branch("a")]).leading == 4


def test_a_subtree_goes_leaves_first(world: World) -> None:
    """However it is cut short, what is left is usable as a whole."""
    admin = world.open(admin=True)
    cursor: int | None = 0
    while cursor is not None:
        event = ev.Evict(admin.number, 0, Selector(subtree=TREE[0]), False, cursor, 1)
        cursor = world.ask(event).cursor
        rows = {row["hash"]: row["parent"] for row in admin.list("chunks")}
        roots = {TREE[0].hex(), key("other", 0).hex()}
        assert all(parent in rows for h, parent in rows.items() if h not in roots)
    assert len(admin.list("chunks")) == 5


def test_leased_chunks_are_reported_and_never_taken(world: World) -> None:
    admin = world.open(admin=True)
    lease = admin.lease(ONE, [*TREE, *branch("a")[:2]]).lease
    got = admin.evict(Selector(subtree=TREE[0]))
    assert (got.matched, got.evicted, got.leased) == (11, 6, 5)
    assert list(admin.load(lease).outcomes) == [O.OK] * 5
    admin.release(lease)
    assert admin.evict(Selector(subtree=TREE[0])).evicted == 5
    world.settle()
    assert admin.list("prefixes")[0]["root"] == key("other", 0).hex()


def test_an_eviction_goes_on_while_others_change_the_tree(world: World) -> None:
    admin, other = world.open(admin=True), world.open(admin=True)
    first = world.ask(ev.Evict(admin.number, 0, Selector(subtree=TREE[0]), False, 0, 2))
    for name in "ab":  # the very chunk that it would go on with is gone
        other.evict(Selector(keys=tuple(branch(name))))
    cursor = first.cursor
    while cursor is not None:
        event = ev.Evict(admin.number, 0, Selector(subtree=TREE[0]), False, cursor, 2)
        cursor = world.ask(event).cursor
    assert {row["hash"] for row in admin.list("chunks")} == {k.hex() for k in chain("other", 5)}


def test_a_selector_that_says_nothing_selects_nothing(world: World) -> None:
    admin = world.open(admin=True)
    assert admin.evict(Selector()).matched == 0
    assert len(admin.list("chunks")) == 16
    assert admin.evict(Selector(everything=True)).evicted == 16
    world.settle()
    assert world.core._store.chunks.used >= 16 and len(world.core._store.index) == 0


@pytest.mark.parametrize(
    "event",
    [
        ev.List(2, 0, "shelves", Selector(), 0, 10),
        ev.List(2, 0, "chunks", Selector(state="sad"), 0, 10),
        ev.List(2, 0, "prefixes", Selector(), 1 << 62, 10),
        ev.Evict(2, 0, Selector(keys=(b"short",)), False, 0, 10),
        ev.Evict(2, 0, Selector(subtree=b"short"), False, 0, 10),
        ev.Evict(2, 0, Selector(subtree=bytes(32)), False, 1 << 62, 10),
    ],
)
def test_what_can_not_be_meant_is_refused(world: World, event: ev.List | ev.Evict) -> None:
    world.open(admin=True)
    got = world.ask(event)
    assert isinstance(got, ac.Fail) and got.code == ErrorCode.BAD_KEY


def test_wide_looks_go_in_slices() -> None:
    """No page visits much, however large the cache and whatever it looks for."""
    world = World(32768 * KIB, 1024 * KIB, write_share=1.0)
    client = world.open(admin=True)
    tiny = spec("t", 4 * KIB)
    client.register(tiny)
    for n in range(3):
        client.store(tiny, chain(n, 2000))
    pages = 0
    cursor: int | None = 0
    while cursor is not None:
        event = ev.List(client.number, 0, "chunks", Selector(state="writing"), cursor, 100)
        got = world.ask(event)
        cursor, pages = got.cursor, pages + 1
        assert got.rows == []
    assert pages >= 6000 / 1024
    prefixes = client.list("prefixes")
    assert sorted(row["chunks"] for row in prefixes) == [2000] * 3
    evicted = client.evict(Selector(subtree=key(1, 0)))
    assert evicted.evicted == 2000
    assert {row["root"] for row in client.list("prefixes")} == {
        key(0, 0).hex(),
        key(2, 0).hex(),
    }
