"""A small world around the core for tests: shared memory, workers and clients, all simulated.

`World.memory` is what the record table would hold, made from nothing but the core's actions, and
`World.payload` says what each slot's bytes are. Workers' answers wait until a test gives them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.chunk import (
    IDENTITY_DTYPE,
    NO_PARENT,
    RECORD_DTYPE,
    ChunkHeader,
    HeaderFlag,
    Kind,
    KVSpec,
    Outcome,
    ShardSpec,
    SlotRef,
    State,
    unpack_refs,
)
from kvd.core import Core, CoreConfig
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.core.recollection import Recollection
from kvd.errors import ErrorCode
from kvd.eviction import make_policy

S = 1_000_000_000
KIB = 1024
O = Outcome  # noqa: E741 - tests read better


def spec(name: str = "m", *nbytes: int, chunk_tokens: int = 16) -> KVSpec:
    """A spec with one shard of each size."""
    sizes = nbytes or (8 * KIB,)
    shards = tuple(ShardSpec(0, tp, 0, 0, 0, 1, 0, 1, n) for tp, n in enumerate(sizes))
    return KVSpec(
        name, "", "w", "e", "bf16", "", "c", chunk_tokens, 1, len(sizes), 1, (), (), shards
    )


def key(*path: object) -> bytes:
    """A hash for a path of names; any 32 bytes would do."""
    return hashlib.sha256(repr(path).encode()).digest()


def chain(name: object, count: int, start: int = 0) -> list[bytes]:
    """Hashes of one prompt's chunks."""
    return [key(name, n) for n in range(start, start + count)]


def fingerprint(hash_: bytes) -> bytes:
    return hashlib.blake2b(hash_, digest_size=16).digest()


def refs_of(packed: bytes) -> list[SlotRef]:
    return [SlotRef(*map(int, row)) for row in unpack_refs(packed).tolist()]


class Shelf:
    """A tier below, in plain memory: what lies there survives a restart of the core."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.there: dict[tuple[Any, ...], tuple[int, int, ChunkHeader, bytes]] = {}
        self.forgotten: set[tuple[Any, ...]] = set()  # deleted, but the deletion failed
        self.next = 1

    @property
    def used(self) -> int:
        return sum(header.length for _, _, header, _ in self.there.values())

    def room(self, length: int) -> int:
        return (self.limit - self.used) // length

    def records(self) -> tuple[Any, Any, Any]:
        """What `Tier.recover` tells: records, places."""
        self.forgotten.clear()
        held = list(self.there.values())
        raw = b"".join(header.pack()[: IDENTITY_DTYPE.itemsize] for _, _, header, _ in held)
        at = np.array([x[0] for x in held], np.uint64)
        return np.frombuffer(raw, IDENTITY_DTYPE), at, at + np.uint64(1000)

    def write(self, job: ac.TierWrite, payload: bytes) -> ev.TierWritten:
        header = job.header
        assert header.flags & HeaderFlag.SEALED, "written before it was sealed"
        assert header.state is State.READY
        name = _chunk(job)
        assert name not in self.there or name in self.forgotten, "written although it was there"
        if hashlib.sha256(payload).digest()[:16] != header.digest:
            return ev.TierWritten(job.job, ev.TierAnswer.CORRUPT)
        if name in self.forgotten:  # the younger counts
            self.forgotten.discard(name)
            self.there.pop(name, None)
        if not self.room(job.length):
            return ev.TierWritten(job.job, ev.TierAnswer.NO_SPACE, room=0)
        at, self.next = self.next, self.next + 1
        self.there[name] = (at, at + 1000, header, payload)
        return ev.TierWritten(job.job, ev.TierAnswer.OK, at, at + 1000, room=self.room(job.length))

    def read(self, job: ac.TierRead | ac.TierScrub) -> tuple[ev.TierReadDone, bytes]:
        found = self.there.get(_name(job))
        if found is None or found[:2] != (job.at, job.generation):
            return ev.TierReadDone(job.job, ev.TierAnswer.MISS), b""
        _, _, header, payload = found
        if hashlib.sha256(payload).digest()[:16] != header.digest:
            del self.there[_name(job)]
            return ev.TierReadDone(job.job, ev.TierAnswer.CORRUPT), b""
        return ev.TierReadDone(job.job, ev.TierAnswer.OK, header), payload

    def delete(self, job: ac.TierDelete) -> ev.TierDeleted:
        found = self.there.get(_name(job))
        if found is None or found[:2] != (job.at, job.generation):
            return ev.TierDeleted(job.job, ev.TierAnswer.MISS)
        del self.there[_name(job)]
        return ev.TierDeleted(job.job, ev.TierAnswer.OK)


def _name(job: ac.TierRead | ac.TierScrub | ac.TierDelete) -> tuple[Any, ...]:
    return job.kind, job.namespace, job.spec, job.chunk, job.shard


def _chunk(job: Any) -> tuple[Any, ...]:
    """The key that a job of a tier is about."""
    if not isinstance(job, ac.TierWrite):
        return _name(job)
    h = job.header
    return h.kind, h.namespace_digest, h.spec, h.chunk, h.shard


class Answered(NamedTuple):
    """Stands among actions where a tier's answer came in."""

    job: Any
    event: Any
    payload: bytes = b""  # of a read: what then stood in its slot


_TIER_JOBS = (ac.TierWrite, ac.TierRead, ac.TierScrub, ac.TierDelete)
_READS = (ac.TierRead, ac.TierScrub)
_LOST = (ev.TierAnswer.FAILED, ev.TierAnswer.TIMEOUT, ev.TierAnswer.OFF)


class World:
    """One arena, one core at a time. Times in ns; the clock moves only by `advance`."""

    def __init__(
        self,
        size: int = 1024 * KIB,
        slab_size: int = 64 * KIB,
        policy: str = "lru",
        auto: bool = True,
        **settings: Any,
    ) -> None:
        self.settings = {"instance": "test", "size": size, "slab_size": slab_size, **settings}
        self.shelves = [Shelf(tier.limit) for tier in settings.get("tiers", ())]
        self.fails: Callable[[Any], int] = lambda job: 0  # how a job fails
        self.where: dict[int, int] = {}  # job -> record; slabs may change class later
        self.kept: dict[int, bytes] = {}  # job -> a payload on its way to another tier
        self.in_hand: dict[int, Any] = {}  # jobs of tiers that did not come back yet
        self.policy = policy
        self.auto = auto  # workers answer at once
        self.now = 1_000 * S
        self.epoch = 0
        self.memory: dict[int, ChunkHeader] = {}
        self.slot_sizes = [0] * (size // slab_size)
        self.payload: dict[int, bytes] = {}  # record -> what its bytes are
        self.horizon = 0
        self.jobs: list[Any] = []
        self.log: list[ac.Action] = []
        self.replies: dict[int, ac.Reply | ac.Fail] = {}
        self._request = 0
        self._sessions = 0
        self.locks: set[bytes] = set()
        self.recalled: list[str] = []
        self._start()
        self.tiers_are_up()

    # -- the daemon's life ----------------------------------------------------------------------

    def _start(self) -> None:
        self.epoch += 1_000_000
        config = CoreConfig(epoch=self.epoch, **self.settings)
        self.config = config
        self.core = Core(config, lambda: make_policy(self.policy))
        self.core.grow(config.size)

    def restart(
        self,
        torn: Sequence[int] = (),
        *,
        up: bool = True,
        known: Mapping[str, Recollection] | None = None,
    ) -> list[ac.Action]:
        """SIGKILL and a new life. `torn`: records that don't hold any more; `up`: the tiers below
        are told to be there, too; `known`: what policies of the earlier life knew."""
        namespaces, specs = self.core.namespaces, self.core.specs
        self.jobs.clear()
        self.in_hand.clear()
        self.kept.clear()
        self._start()
        if known is not None:
            self.recalled = self.core.recall(known, self.now)
        for record in torn:
            del self.memory[record]
        kept = sorted(self.memory)
        records = np.zeros(len(kept), RECORD_DTYPE)
        for n, record in enumerate(kept):
            records[n] = np.frombuffer(self.memory[record].pack(), RECORD_DTYPE)[0]
        actions = self.core.adopt(
            self.slot_sizes,
            records,
            np.array(kept, np.uint32),
            namespaces,
            specs,
            sorted(self.locks),
            self.horizon,
            self.now,
            list(torn),
        )
        self._carry(actions)
        for n, shelf in enumerate(self.shelves):
            if shelf.there:
                told = self.core.recover(n, *shelf.records(), self.now)
                self._carry(told)
                actions += told
        if self.shelves:
            self.core.recovered()
        return actions + self.tiers_are_up() if up else actions

    def tiers_are_up(self) -> list[ac.Action]:
        """The tiers below are there: what the core does about it is carried out."""
        actions: list[ac.Action] = []
        for n in range(len(self.shelves)):
            told = self.core.handle(ev.TierState(n, True, True), self.now)
            self._carry(told)
            actions += told
        return actions

    # -- events ---------------------------------------------------------------------------------

    def handle(self, event: Any) -> list[ac.Action]:
        """One event; its actions are carried out."""
        actions = self.core.handle(event, self.now)
        self._carry(actions)
        if self.auto:
            actions = actions + self.work()
        return actions

    def forerun(self, event: ev.Lookup) -> list[ac.Action]:
        """What is begun before a lookup; the lookup follows."""
        actions = self.core.forerun(event, self.now)
        self.now += 1  # as the server's clock does
        self._carry(actions)
        return actions

    def advance(self, ns: int) -> list[ac.Action]:
        """Time passes, with a Tick whenever one is due."""
        actions: list[ac.Action] = []
        end = self.now + ns
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            actions += self.handle(ev.Tick())
            actions += self.settle()
        self.now = end
        return actions + self.settle()

    def settle(self) -> list[ac.Action]:
        """Ticks until nothing is under way."""
        actions: list[ac.Action] = []
        for _ in range(10_000):
            if not self.core.busy:
                return actions
            actions += self.handle(ev.Tick())
        raise AssertionError("the core stays busy")

    def request(self, event: Any) -> tuple[Any, list[ac.Action]]:
        """Send a request (its `request` field is set) and go on until it is answered."""
        self._request += 1
        number = self._request
        actions = self.handle(event._replace(request=number))
        for _ in range(10_000):
            copies = self._copies()
            if number in self.replies or not (self.core.busy or copies):
                break
            actions += self.do(copies[0]) if copies else self.handle(ev.Tick())
        reply = self.replies.pop(number, None)
        return (reply.result if isinstance(reply, ac.Reply) else reply), actions

    def ask(self, event: Any) -> Any:
        """The result of a request, or the Fail; Ticks follow the reply, as in the server."""
        result, _ = self.request(event)
        self.settle()
        return result

    def _copies(self) -> list[Any]:
        """Jobs that somebody may wait for: copies, and with tiers whatever makes room."""
        wanted = (ac.Copy, ac.Seal, *_TIER_JOBS) if self.shelves else (ac.Copy,)
        return [job for job in self.jobs if isinstance(job, wanted)]

    # -- workers --------------------------------------------------------------------------------

    def work(self) -> list[ac.Action]:
        """All workers finish what they have."""
        actions: list[ac.Action] = []
        while self.jobs:
            actions += self.do(self.jobs[0])
        return actions

    def do(self, job: Any, *, fail: int = 0) -> list[ac.Action]:
        """One worker finishes one job. `fail`: not 0, and which way."""
        self.jobs.remove(job)
        fail = fail or self.fails(job)
        event: Any
        if isinstance(job, _TIER_JOBS):
            event = self._tier_job(job, fail)
            read = isinstance(job, ac.TierRead)
            answered = Answered(
                job, event, self.payload.get(self.where[job.job], b"") if read else b""
            )
            actions = self.core.handle(event, self.now)
            self._carry(actions)
            self.kept.pop(job.job, None)  # nobody wanted it
            return [answered, *actions]  # type: ignore[list-item]
        if isinstance(job, ac.Seal):
            digest = b"" if fail else self.digest(job.record)
            event = ev.Sealed(job.record, job.generation, digest)
        elif isinstance(job, ac.Verify):
            ok = not fail and self.digest(job.record) == job.digest
            event = ev.Verified(job.record, job.generation, ok)
        else:
            source, target = self.record_at(job.source), self.record_at(job.target)
            if not fail and source in self.payload:
                self.payload[target] = self.payload[source]
            event = ev.Copied(job.copy, not fail)
        actions = self.core.handle(event, self.now)
        self._carry(actions)
        return actions

    def _tier_job(self, job: Any, fail: int) -> Any:
        """What a tier answers; `fail`: not carried out, or carried out and not told."""
        del self.in_hand[job.job]
        shelf = self.shelves[job.tier]
        lost = _LOST[fail % len(_LOST)]
        if isinstance(job, ac.TierWrite):
            if fail:
                self.kept.pop(job.job, None)
                return ev.TierWritten(job.job, lost)
            kept = self.kept.pop(job.job) if job.kept else None
            return shelf.write(job, self.payload[self.where[job.job]] if kept is None else kept)
        if isinstance(job, ac.TierDelete):
            if fail and fail % 2:
                shelf.delete(job)
            elif fail:
                shelf.forgotten.add(_name(job))
            return ev.TierDeleted(job.job, lost) if fail else shelf.delete(job)
        if fail:
            return ev.TierReadDone(job.job, lost)
        event, payload = shelf.read(job)
        if isinstance(job, ac.TierScrub) and job.keep and event.answer is ev.TierAnswer.OK:
            self.kept[job.job] = payload
        if isinstance(job, ac.TierRead):
            self.payload[self.where[job.job]] = payload or b"half of it"
        return event

    def held_keys(self) -> set[tuple[bytes, int, bytes]]:
        """(spec, kind, hash) of chunks in some request's or tier's hands."""
        store = self.core._store
        found = set()
        for row in store.pinned:
            space = store.spaces.of(store.chunks.space[row])
            found.add((space.digest, int(space.kind), store.chunks.key_of(row)))
        return found

    def digest(self, record: int) -> bytes:
        return hashlib.sha256(self.payload.get(record, b"")).digest()[:16]

    def record_at(self, offset: int) -> int:
        slab, rest = divmod(offset, self.config.slab_size)
        return slab * self.config.records_per_slab + rest // self.slot_sizes[slab]

    # -- carrying out ---------------------------------------------------------------------------

    def _carry(self, actions: Sequence[ac.Action]) -> None:
        self.log += actions
        for action in actions:
            if isinstance(action, ac.AssignSlab):
                self.slot_sizes[action.slab] = action.slot_size
                per = self.config.records_per_slab
                for record in range(action.slab * per, (action.slab + 1) * per):
                    self.memory.pop(record, None)
            elif isinstance(action, ac.WriteRecord):
                action.header.pack()
                self.memory[action.record] = action.header
            elif isinstance(action, ac.PatchRecord):
                self._patch(action)
            elif isinstance(action, ac.LeaseHorizon):
                assert action.until != self.horizon
                self.horizon = action.until
            elif isinstance(action, ac.Seal | ac.Verify | ac.Copy):
                self.jobs.append(action)
            elif isinstance(action, _TIER_JOBS):
                assert action.job not in self.in_hand
                assert all(
                    other.tier != action.tier
                    or _chunk(other) != _chunk(action)
                    or (isinstance(other, _READS) and isinstance(action, _READS))
                    for other in self.in_hand.values()
                ), "two jobs at a time for one key"
                self.in_hand[action.job] = action
                if isinstance(action, ac.TierWrite) and action.kept:
                    self.kept[action.job] = self.kept.pop(action.kept)
                elif isinstance(action, ac.TierWrite | ac.TierRead):
                    self.where[action.job] = self.record_at(action.offset)
                self.jobs.append(action)
            elif isinstance(action, ac.Reply | ac.Fail):
                assert action.request not in self.replies, "a request was answered twice"
                self.replies[action.request] = action  # type: ignore[index]

    def _patch(self, action: ac.PatchRecord) -> None:
        header = self.memory.get(action.record)
        assert header is not None, "a record that was never written is patched"
        changes = {
            name: getattr(action, name)
            for name in ("state", "generation", "flags", "digest")
            if getattr(action, name) is not None
        }
        self.memory[action.record] = header._replace(**changes)

    # -- clients --------------------------------------------------------------------------------

    def open(
        self,
        namespace: str = "default",
        group: bytes = b"",
        admin: bool = False,
        maps_memory: bool = True,
        name: str = "client",
    ) -> Client:
        self._sessions += 1
        public = self._sessions.to_bytes(16, "big")
        event = ev.OpenSession(
            self._sessions, public, namespace, group or public, admin, name, maps_memory
        )
        self.handle(event)
        if maps_memory:
            self.locks.add(public)
        return Client(self, event)

    def stat(self) -> dict[str, Any]:
        return self.core.stat()

    @property
    def tier(self) -> dict[str, Any]:
        tier: dict[str, Any] = self.stat()["tiers"][0]
        return tier

    def counter(self, name: str, label: str | None = None) -> int:
        value = self.stat()["counters"][name]
        return int(value if label is None else value[label])

    def in_state(self, state: State) -> list[int]:
        """Records that stand in the table in a state."""
        return sorted(r for r, h in self.memory.items() if h.state == state)


class Client:
    """A session, and how it talks."""

    def __init__(self, world: World, event: ev.OpenSession) -> None:
        self.world = world
        self.number = event.session
        self.public_id = event.public_id
        self.namespace = event.namespace

    def register(self, wanted: KVSpec) -> KVSpec:
        result = self.world.ask(ev.RegisterSpec(self.number, 0, wanted))
        assert result.digest == wanted.digest
        return wanted

    def reserve_event(
        self,
        wanted: KVSpec,
        hashes: Sequence[bytes],
        *,
        parent: bytes = NO_PARENT,
        index0: int = 0,
        shards: Sequence[int] | None = None,
        prints: Sequence[bytes] | None = None,
        kind: Kind = Kind.PREFIX,
        ttl: int = 30 * S,
        flags: int = 0,
    ) -> ev.Reserve:
        return ev.Reserve(
            self.number,
            0,
            wanted.digest,
            kind,
            tuple(range(len(wanted.shards))) if shards is None else tuple(shards),
            b"".join(hashes),
            parent,
            index0,
            b"".join(prints or [fingerprint(h) for h in hashes]),
            None,
            None,
            flags,
            ttl,
        )

    def reserve(self, wanted: KVSpec, hashes: Sequence[bytes], **more: Any) -> Any:
        return self.world.ask(self.reserve_event(wanted, hashes, **more))

    def fill(self, packed: bytes) -> None:
        """Copy into granted slots: what is written is what the record says it is."""
        for ref in refs_of(packed):
            header = self.world.memory[ref.record]
            assert header.generation == ref.generation and header.state == State.WRITING
            self.world.payload[ref.record] = content(header)

    def commit(
        self, write: int, items: Sequence[int] | None = None, digests: bytes | None = None
    ) -> Any:
        packed = None if items is None else np.array(items, "<u4").tobytes()
        return self.world.ask(ev.Commit(self.number, 0, write, packed, digests))

    def abort(self, write: int, items: Sequence[int] | None = None) -> Any:
        packed = None if items is None else np.array(items, "<u4").tobytes()
        return self.world.ask(ev.Abort(self.number, 0, write, packed))

    def store(self, wanted: KVSpec, hashes: Sequence[bytes], **more: Any) -> list[Outcome]:
        """Reserve, copy, commit: one outcome a result, OK where the commit said so."""
        reserved = self.reserve(wanted, hashes, **more)
        outcomes = [Outcome(o) for o in reserved.outcomes]
        if reserved.write:
            self.fill(reserved.refs)
            done = iter(self.commit(reserved.write).outcomes)
            outcomes = [Outcome(next(done)) if o is O.GRANTED else o for o in outcomes]
        return outcomes

    def lookup_event(
        self,
        wanted: KVSpec,
        hashes: Sequence[bytes],
        flags: int = 0,
        *,
        shards: Sequence[int] | None = None,
        prints: Sequence[bytes] | None = None,
        kind: Kind = Kind.PREFIX,
        lease: int = 30 * S,
        parent: bytes = NO_PARENT,
        index0: int = 0,
    ) -> ev.Lookup:
        return ev.Lookup(
            self.number,
            0,
            wanted.digest,
            kind,
            tuple(range(len(wanted.shards))) if shards is None else tuple(shards),
            b"".join(hashes),
            b"".join([fingerprint(h) for h in hashes] if prints is None else prints),
            flags,
            lease,
            parent,
            index0,
            30 * S,
        )

    def lookup(self, wanted: KVSpec, hashes: Sequence[bytes], flags: int = 0, **more: Any) -> Any:
        return self.world.ask(self.lookup_event(wanted, hashes, flags, **more))

    def lease(self, wanted: KVSpec, hashes: Sequence[bytes], **more: Any) -> Any:
        return self.lookup(wanted, hashes, LookupFlag.LEASE, **more)

    def load(
        self, lease: int, items: Sequence[int] | None = None, shards: tuple[int, ...] | None = None
    ) -> Any:
        packed = None if items is None else np.array(items, "<u4").tobytes()
        return self.world.ask(ev.Load(self.number, 0, lease, packed, shards))

    def release(self, lease: int) -> Any:
        return self.world.ask(ev.Release(self.number, 0, lease))

    def renew(self, lease: int, ns: int) -> Any:
        return self.world.ask(ev.Renew(self.number, 0, lease, ns))

    def evict(
        self, selector: ev.Selector, dry_run: bool = False, limit: int = 1000
    ) -> ac.EvictResult:
        """All slices, added up."""
        total = ac.EvictResult(0, 0, 0, 0, 0, [], None)
        cursor: int | None = 0
        while cursor is not None:
            got = self.world.ask(ev.Evict(self.number, 0, selector, dry_run, cursor, limit))
            if isinstance(got, ac.Fail):
                raise AssertionError(got)
            total = ac.EvictResult(*(a + b for a, b in zip(total[:6], got[:6], strict=True)), None)
            cursor = got.cursor
        return total

    def list(self, level: str, selector: ev.Selector = ev.Selector(), limit: int = 1000) -> Any:  # noqa: B008
        """All rows."""
        rows: list[dict[str, Any]] = []
        cursor: int | None = 0
        while cursor is not None:
            got = self.world.ask(ev.List(self.number, 0, level, selector, cursor, limit))
            if isinstance(got, ac.Fail):
                return got
            rows += got.rows
            cursor = got.cursor
        return rows

    def close(self, stopped: bool = False) -> list[ac.Action]:
        """The session ends; `stopped`: its process is surely gone."""
        if stopped:
            self.world.locks.discard(self.public_id)
        actions = self.world.handle(ev.CloseSession(self.number, stopped))
        return actions + self.world.settle()

    def free_lock(self) -> list[ac.Action]:
        """No process holds the mapping any more."""
        self.world.locks.discard(self.public_id)
        actions = self.world.handle(ev.LockFreed(self.public_id))
        return actions + self.world.settle()


def content(header: ChunkHeader) -> bytes:
    """The bytes that belong under a record's key."""
    return b"|".join(
        (
            header.namespace_digest,
            header.spec,
            bytes([header.kind]),
            header.chunk,
            bytes([header.shard]),
        )
    )


def sealed(header: ChunkHeader) -> bool:
    return bool(header.flags & HeaderFlag.SEALED)


__all__ = ["ErrorCode", "LookupFlag", "O", "World", "chain", "fingerprint", "key", "spec"]
