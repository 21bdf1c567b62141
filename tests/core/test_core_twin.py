"""The core against its naive twin, over random events."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from twin import Twin
from world import KIB, Client, O, S, World, fingerprint, key, refs_of, spec

from kvd.chunk import NO_PARENT, Kind, Outcome
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.config import TierConfig, WritePolicy
from kvd.core.events import LookupFlag
from kvd.eviction import POLICIES

SPECS = [
    spec("one", 28 * KIB),
    spec("two", 10 * KIB, 18 * KIB),
    spec("big", 60 * KIB),
    spec("three", 10 * KIB, 18 * KIB, 9 * KIB),  # two shards of a class that need not share a slab
]
DEPTH = 6
PATHS = [(name, branch) for name in "ab" for branch in (0, 1)]  # branches part at depth 3


def hash_at(path: tuple[str, int], depth: int) -> bytes:
    name, branch = path
    return key(name, branch if depth >= 3 else 0, depth)


def hashes(path: tuple[str, int], start: int, end: int) -> list[bytes]:
    return [hash_at(path, depth) for depth in range(start, end)]


paths = st.sampled_from(PATHS)
rarely = st.sampled_from([False] * 7 + [True])
often = st.sampled_from([True] * 3 + [False])
which = st.integers(0, len(SPECS) - 1)
numbers = st.integers(0, 1 << 30)


class CoreMachine(RuleBasedStateMachine):
    """Clients, workers, time and kills in any order; after each step all is compared."""

    tiers: tuple[TierConfig, ...] = ()

    @initialize(policy=st.sampled_from(["lru", "lru", *sorted(POLICIES)]), manual=st.booleans())
    def start(self, policy: str, manual: bool) -> None:
        self.world = World(
            512 * KIB,
            64 * KIB,
            policy,
            auto=not manual,
            write_share=0.5,
            ahead_share=1 / 8,
            tiers=self.tiers,
        )
        self.twin = Twin(self.world, SPECS)
        self.twin.told_up = set(range(len(self.tiers)))
        self.clients: dict[int, Client] = {}
        self.gone: list[Client] = []  # closed, lock still held
        self.transfers: dict[int, tuple[int, ev.Load, list[Outcome]]] = {}
        for kind in (Kind.PREFIX,):
            for s in SPECS:
                for path in PATHS:
                    for depth in range(DEPTH):
                        for name in Twin.namespaces:
                            above = hash_at(path, depth - 1) if depth else NO_PARENT
                            self.twin.parents[name, s.digest, kind, hash_at(path, depth)] = above
        self.twin.begin()
        self.open("default", True, False)

    # -- helpers --------------------------------------------------------------------------------

    def request(self, event: Any) -> tuple[Any, list[ac.Action]]:
        self.twin.begin()
        self.due()
        result, actions = self.world.request(event)
        return result, actions

    def due(self) -> None:
        """What falls due now is the twin's business before the event is."""
        self.twin.followed(self.world.advance(0))
        self.twin._tidy()

    def settle(self) -> None:
        self.twin.followed(self.world.settle())

    def quiet(self) -> None:
        """Nothing is left that another event would set off."""
        self.twin.followed(self.world.handle(ev.Tick()))
        self.settle()

    def client(self, n: int) -> Client:
        return list(self.clients.values())[n % len(self.clients)]

    # -- sessions -------------------------------------------------------------------------------

    @rule(foreign=rarely, grouped=often, inline=rarely)
    @precondition(lambda self: len(self.clients) < 4)
    def come(self, foreign: bool, grouped: bool, inline: bool) -> None:
        self.open("other" if foreign else "default", grouped, inline)

    def open(self, namespace: str, grouped: bool, inline: bool) -> None:
        self.twin.begin()
        self.quiet()
        group = b"engine" if grouped else b""
        client = self.world.open(namespace, group, admin=not self.clients, maps_memory=not inline)
        self.clients[client.number] = client
        self.twin.opened(
            ev.OpenSession(
                client.number,
                client.public_id,
                namespace,
                group or client.public_id,
                not inline,
                "",
                not inline,
            )
        )
        self.twin.sessions[client.number].admin = len(self.clients) == 1
        for s in SPECS:
            self.world.ask(ev.RegisterSpec(client.number, 0, s))

    @rule(n=numbers, stopped=st.booleans())
    @precondition(lambda self: len(self.clients) > 2)
    def close(self, n: int, stopped: bool) -> None:
        client = list(self.clients.values())[1 + n % (len(self.clients) - 1)]
        self.twin.begin()
        self.due()
        actions = client.close(stopped)
        del self.clients[client.number]
        if not stopped and client.public_id in self.world.locks:
            self.gone.append(client)
        self.twin.closed(client.number, stopped, actions)

    @rule(n=numbers)
    @precondition(lambda self: self.gone)
    def free_lock(self, n: int) -> None:
        client = self.gone.pop(n % len(self.gone))
        self.twin.begin()
        self.due()
        self.twin.lock_freed(client.public_id, client.free_lock())

    # -- stores ---------------------------------------------------------------------------------

    @rule(
        n=numbers,
        s=which,
        path=paths,
        start=st.sampled_from([0, 0, 0, 1, 3, 5]),
        length=st.integers(1, DEPTH),
        one=rarely,
        content=rarely,
        wrong=rarely,
        ttl=st.sampled_from([S, 30 * S]),
        finish=often,
    )
    def reserve(
        self,
        n: int,
        s: int,
        path: tuple[str, int],
        start: int,
        length: int,
        one: bool,
        content: bool,
        wrong: bool,
        ttl: int,
        finish: bool,
    ) -> None:
        client, wanted = self.client(n), SPECS[s]
        some = hashes(path, start, min(DEPTH, start + length))
        prints = [fingerprint(h) for h in some]
        if wrong:
            prints[-1] = b"another tokens!!"
        event = client.reserve_event(
            wanted,
            some,
            parent=hash_at(path, start - 1) if start and not content else NO_PARENT,
            index0=start,
            shards=(n % len(SPECS[s].shards),) if one else None,
            prints=prints,
            kind=Kind.CONTENT if content else Kind.PREFIX,
            ttl=ttl,
        )
        result, actions = self.request(event)
        self.twin.reserved(event, result, actions)
        if result.write:
            client.fill(result.refs)
            if finish:
                self.settle()
                done = ev.Commit(client.number, 0, result.write, None, None)
                answer, actions = self.request(done)
                self.twin.committed(done, answer, actions)
        self.settle()

    @rule(n=numbers, some=st.booleans(), digests=st.booleans())
    @precondition(lambda self: self.twin.writes)
    def commit(self, n: int, some: bool, digests: bool) -> None:
        number, write = list(self.twin.writes.items())[n % len(self.twin.writes)]
        granted = [i for i, item in enumerate(write.items) if item is not None]
        items = granted[: 1 + n % len(granted)] if some else granted
        packed = b"".join(i.to_bytes(4, "little") for i in items)
        told = None
        if digests:
            told = b"".join(
                self.world.digest(item.record) for i in items if (item := write.items[i])
            )
        event = ev.Commit(write.session, 0, number, packed, told)
        result, actions = self.request(event)
        if number not in self.twin.writes:
            assert isinstance(result, ac.Fail)
            return
        self.twin.committed(event, result, actions)
        self.settle()

    @rule(n=numbers, some=st.booleans())
    @precondition(lambda self: self.twin.writes)
    def abort(self, n: int, some: bool) -> None:
        number, write = list(self.twin.writes.items())[n % len(self.twin.writes)]
        granted = [i for i, item in enumerate(write.items) if item is not None]
        packed = granted[n % len(granted)].to_bytes(4, "little") if some else None
        event = ev.Abort(write.session, 0, number, packed)
        result, actions = self.request(event)
        if number not in self.twin.writes:
            assert isinstance(result, ac.Fail)
            return
        self.twin.aborted(event, result, actions)
        self.settle()

    @rule(n=numbers)
    @precondition(lambda self: self.twin.writes and len(self.clients) > 1)
    def another_sessions_write_is_refused(self, n: int) -> None:
        number, write = list(self.twin.writes.items())[n % len(self.twin.writes)]
        other = next(c for c in self.clients.values() if c.number != write.session)
        for event in (
            ev.Commit(other.number, 0, number, None, None),
            ev.Abort(other.number, 0, number, None),
        ):
            result, actions = self.request(event)
            assert isinstance(result, ac.Fail)
            self.twin.followed(actions)

    # -- loads ----------------------------------------------------------------------------------

    @rule(
        n=numbers,
        s=which,
        path=paths,
        start=st.sampled_from([0, 0, 0, 0, 1, 3]),
        one=rarely,
        content=rarely,
        every=rarely,
        lease=often,
        prints=st.sampled_from(["right"] * 6 + ["none", "wrong"]),
        length=st.sampled_from([0, 2 * S, 10_000 * S]),
    )
    def lookup(
        self,
        n: int,
        s: int,
        path: tuple[str, int],
        start: int,
        one: bool,
        content: bool,
        every: bool,
        lease: bool,
        prints: str,
        length: int,
    ) -> None:
        flags = LookupFlag.EVERY if every else LookupFlag.NONE
        if lease:
            flags |= LookupFlag.LEASE
        event = self.client(n).lookup_event(
            SPECS[s],
            hashes(path, start, DEPTH),
            flags,
            shards=(n % len(SPECS[s].shards),) if one else None,
            prints=[b"?" * 16] * (DEPTH - start) if prints == "wrong" else None,
            kind=Kind.CONTENT if content else Kind.PREFIX,
            lease=length,
        )
        if prints == "none":
            event = event._replace(fingerprints=None)
        result, actions = self.request(event)
        self.twin.looked_up(event, result)
        self.twin.followed(actions)
        self.settle()

    @rule(n=numbers, m=numbers, load=often, early=st.booleans(), both=st.booleans())
    @precondition(lambda self: self.twin.chunks)
    def look_up_what_is_there(
        self, n: int, m: int, load: bool, early: bool = False, both: bool = False
    ) -> None:
        """`early`: its first read is begun before it; `both`: and it loads itself."""
        name, digest, kind, hash_ = list(self.twin.chunks)[n % len(self.twin.chunks)]
        mine = [c for c in self.clients.values() if c.namespace == name]
        if not mine:
            return
        path = next(p for p in PATHS if hash_ in hashes(p, 0, DEPTH))
        event = mine[m % len(mine)].lookup_event(
            next(s for s in SPECS if s.digest == digest),
            hashes(path, 0, DEPTH),
            LookupFlag.LEASE | (LookupFlag.EVERY if n % 3 == 0 else 0),
            kind=Kind(kind),
        )
        loading = event._replace(flags=event.flags | LookupFlag.LOAD)
        if early:
            self.twin.begin()
            self.due()
            self.twin.followed(self.world.forerun(loading))
        if both:
            self.load_at_once(loading)
            return
        result, actions = self.request(event)
        self.twin.looked_up(event, result)
        self.twin.followed(actions)
        self.settle()
        if load and result.lease:
            self.load(list(self.twin.leases).index(result.lease), m, False, True)

    def load_at_once(self, event: ev.Lookup) -> None:
        """A lookup that loads what it leases."""
        result, actions = self.request(event)
        verified = [a for a in actions if isinstance(a, ac.Verify)]
        self.twin.looked_up(event, result)
        if result.lease:
            load = ev.Load(event.session, 0, result.lease, None, None)
            self.twin.loaded(load, result.load)
        self.twin.followed(actions)
        if self.world.auto:
            for job in verified:
                self.twin.verified(job.record, self.world.digest(job.record) == job.digest)
        self.settle()

    @rule(n=numbers, m=numbers, some=st.booleans(), wait=st.booleans())
    @precondition(lambda self: self.twin.leases)
    def load(self, n: int, m: int, some: bool, wait: bool) -> None:
        number, lease = list(self.twin.leases.items())[n % len(self.twin.leases)]
        client = self.client(m)
        packed = (n % len(lease.keys)).to_bytes(4, "little") if some else None
        event = ev.Load(client.number, 0, number, packed, None)
        result, actions = self.request(event)
        if not self.twin.may_use(client.number, number):
            assert isinstance(result, ac.Fail)
            return
        verified = [a for a in actions if isinstance(a, ac.Verify)]
        self.twin.loaded(event, result)
        self.twin.followed(actions)
        if self.world.auto:
            for job in verified:
                self.twin.verified(job.record, self.world.digest(job.record) == job.digest)
        if result.transfer and wait:
            result, actions = self.request(
                ev.Wait(client.number, 0, result.transfer, 0, self.world.now)
            )
            assert isinstance(result, ac.WaitResult)
            assert len(refs_of(result.refs)) == sum(o == O.OK for o in result.outcomes)
            self.twin.followed(actions)

    @rule(n=numbers, m=numbers, length=st.sampled_from([S, 60 * S]))
    @precondition(lambda self: self.twin.leases)
    def renew(self, n: int, m: int, length: int) -> None:
        number = list(self.twin.leases)[n % len(self.twin.leases)]
        client = self.client(m)
        result, actions = self.request(ev.Renew(client.number, 0, number, length))
        self.twin.followed(actions)
        if self.twin.may_use(client.number, number):
            assert result.expiry == self.world.now + length
            self.twin.leases[number].expiry = result.expiry
        else:
            assert isinstance(result, ac.Fail)

    @rule(n=numbers, m=numbers)
    @precondition(lambda self: self.twin.leases)
    def release(self, n: int, m: int) -> None:
        number, lease = list(self.twin.leases.items())[n % len(self.twin.leases)]
        client = self.client(m)
        result, actions = self.request(ev.Release(client.number, 0, number))
        if self.twin.may_use(client.number, number):
            assert result == ac.LeaseResult(0, len(lease.keys))
            del self.twin.leases[number]
        else:
            assert isinstance(result, ac.Fail)
        self.twin.followed(actions)

    # -- evictions by command -------------------------------------------------------------------

    @rule(n=numbers, s=which, path=paths, depth=st.integers(0, DEPTH - 1), dry=rarely)
    def evict(self, n: int, s: int, path: tuple[str, int], depth: int, dry: bool) -> None:
        one = hash_at(path, depth)
        selector = [
            ev.Selector(keys=(one,)),
            ev.Selector(keys=(one, hash_at(path, 0)), spec=SPECS[s].digest),
            ev.Selector(keys=(one,), namespace="other"),
            ev.Selector(keys=(one, one)),
            ev.Selector(),
            ev.Selector(spec=SPECS[s].digest),
            ev.Selector(subtree=one),
        ][n % 7]
        if selector.subtree is not None and not self.twin.linked(one):
            return
        client = self.client(n // 7)
        event = ev.Evict(client.number, 0, selector, dry, 0, 1000)
        result, actions = self.request(event)
        session = self.twin.sessions[client.number]
        if selector.namespace not in (None, session.namespace) and not session.admin:
            assert isinstance(result, ac.Fail)
            return
        self.twin.evicted(event, result, actions)
        self.settle()

    # -- workers, time and death ----------------------------------------------------------------

    @rule(n=numbers, fail=st.integers(0, 5))
    @precondition(lambda self: self.world.jobs)
    def work(self, n: int, fail: int) -> None:
        job = self.world.jobs[n % len(self.world.jobs)]
        self.twin.begin()
        self.due()
        how = 1 + n % 6 if fail == 0 else 0
        right = not how
        if isinstance(job, ac.Verify):
            right = right and self.world.digest(job.record) == job.digest
        waited = isinstance(job, ac.Verify) and self.twin.waits_for(job)
        self.twin.followed(self.world.do(job, fail=how))
        if waited:
            self.twin.verified(job.record, right)
        self.settle()

    # -- tiers below ----------------------------------------------------------------------------

    @rule(tier=numbers, readable=often, writable=often)
    @precondition(lambda self: self.tiers)
    def tier_comes_or_goes(self, tier: int, readable: bool, writable: bool) -> None:
        tier %= len(self.tiers)
        self.twin.begin()
        self.due()
        actions = self.world.handle(ev.TierState(tier, readable, writable))
        (self.twin.told_up.add if readable else self.twin.told_up.discard)(tier)
        self.twin.followed(actions)
        self.settle()

    @rule(n=numbers, s=which, tier=st.sampled_from(["dram", "dram", "dram", "nvme"]))
    @precondition(lambda self: self.tiers)
    def leave_one_tier(self, n: int, s: int, tier: str) -> None:
        client = next(iter(self.clients.values()))
        selector = ev.Selector(spec=SPECS[s].digest, tier=tier)
        event = ev.Evict(client.number, 0, selector, False, 0, 1000)
        result, actions = self.request(event)
        self.twin.evicted(event, result, actions)
        self.settle()

    @rule(n=numbers, m=numbers)
    @precondition(lambda self: any(c.below and not c.shards for c in self.twin.chunks.values()))
    def load_from_below(self, n: int, m: int) -> None:
        """Its whole chain, as far as it goes."""
        below = [key for key, c in self.twin.chunks.items() if c.below and not c.shards]
        self.look_up_what_is_there(list(self.twin.chunks).index(below[n % len(below)]), m, True)

    @rule(n=numbers, s=which, path=paths)
    @precondition(lambda self: self.tiers)
    def store_and_push_down(self, n: int, s: int, path: tuple[str, int]) -> None:
        self.reserve(n, s, path, 0, DEPTH, False, False, False, 30 * S, True)
        for _ in range(40):
            jobs = [j for j in self.world.jobs if isinstance(j, ac.Seal | ac.TierWrite)]
            if not jobs:
                break
            self.work(self.world.jobs.index(jobs[0]), 5)
        self.leave_one_tier(n, s, "dram")

    @rule(tier=numbers, n=numbers, gone=st.booleans())
    @precondition(lambda self: any(shelf.there for shelf in self.world.shelves))
    def tier_loses_something(self, tier: int, n: int, gone: bool) -> None:
        some = [(s, name) for s in self.world.shelves for name in s.there]
        shelf, name = some[n % len(some)]
        if gone:
            del shelf.there[name]
        else:
            shelf.there[name] = (*shelf.there[name][:3], b"other bytes")

    @rule(percent=st.sampled_from([0, 0, 20, 100]), seed=numbers)
    @precondition(lambda self: self.tiers)
    def tiers_refuse(self, percent: int, seed: int) -> None:
        chance = random.Random(seed)

        def fails(job: Any) -> int:
            tier = not isinstance(job, ac.Seal | ac.Verify | ac.Copy)
            return chance.randrange(1, 7) if tier and chance.randrange(100) < percent else 0

        self.world.fails = fails

    @rule(n=numbers)
    @precondition(lambda self: any(not s.verified for s in self.adopted()))
    def bytes_go_bad(self, n: int) -> None:
        some = [s for s in self.adopted() if not s.verified]
        self.world.payload[some[n % len(some)].record] = b"bad"

    def adopted(self) -> list[Any]:
        return [s for c in self.twin.chunks.values() for s in c.shards.values() if s.adopted]

    @rule(ns=st.sampled_from([S // 2, 3 * S, 31 * S]))
    def time_passes(self, ns: int) -> None:
        end = self.world.now + ns
        while (due := self.world.core.next_deadline()) is not None and due <= end:
            actions = self.world.advance(max(0, due - self.world.now))
            self.twin.begin()
            self.twin.followed(actions)
            self.twin._tidy()
        self.twin.followed(self.world.advance(end - self.world.now))
        self.twin.begin()
        self.twin._tidy()

    @rule(n=numbers, survivors=st.booleans(), torn=rarely, now=rarely)
    def restart(self, n: int, survivors: bool, torn: bool, now: bool) -> None:
        if not now:
            return
        alive = [c for c in [*self.clients.values(), *self.gone] if c.public_id in self.world.locks]
        if not survivors:
            alive = []
        self.world.locks = {c.public_id for c in alive}
        lost = set()
        if torn and self.world.memory:
            lost = {sorted(self.world.memory)[n % len(self.world.memory)]}
        before = dict(self.world.memory)
        self.world.restart(sorted(lost), up=False)
        self.clients.clear()
        self.gone = alive
        self.twin.restarted(lost, set(self.world.locks), before)
        self.twin.begin()
        self.twin.followed(self.world.tiers_are_up())
        if self.world.auto:
            self.twin.followed(self.world.work())
        self.twin.begin()
        self.open("default", True, False)

    @invariant()
    def all_is_as_the_twin_says(self) -> None:
        if not hasattr(self, "twin"):
            return
        self.twin.begin()
        self.due()
        self.quiet()
        admin = next(iter(self.clients.values()))
        rows = admin.list("chunks")
        self.twin.check(rows, self.world.stat())


CoreMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    # A failing run is told as it was met: to shrink it takes minutes without a word, and to explain
    # it as many; `shorten.py` does the first in seconds.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreAgainstItsTwin = CoreMachine.TestCase


class LadderMachine(CoreMachine):
    """The same over tiers that lose things, refuse, hang, and answer in any order."""

    @initialize(
        policy=st.sampled_from(["lru", "lru", *sorted(POLICIES)]),
        manual=st.booleans(),
        through=st.booleans(),
        second=st.booleans(),
    )
    def start(self, policy: str, manual: bool, through: bool = False, second: bool = True) -> None:
        when = WritePolicy.THROUGH if through else WritePolicy.ON_DEMOTE
        then = WritePolicy.ON_SECOND_HIT if second else WritePolicy.ON_DEMOTE
        self.tiers = (
            TierConfig("nvme", 400 * KIB, when, read_ns=2 * S, write_ns=2 * S, reads=2, writes=3),
            TierConfig("s3", 2000 * KIB, then, first_alone=False),
        )
        super().start(policy, manual)


LadderMachine.TestCase.settings = settings(
    CoreMachine.TestCase.settings, max_examples=150, stateful_step_count=50
)
TestLadderAgainstItsTwin = LadderMachine.TestCase
