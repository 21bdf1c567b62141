"""The naive twin: what the core's observable state must be, in plain dicts and lists.

It is told each event and the actions that the core answered with. It predicts every outcome that
the contract fixes, follows the ones that it leaves open (which slot, which victim, whether there
was room), and checks that those were legal: a slot in one hand at a time, a victim that is a leaf,
unleased, not being written, and not possibly read since before a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from world import Answered, O, S, World, content, fingerprint, refs_of

from kvd.chunk import NO_PARENT, HeaderFlag, Kind, KVSpec, Outcome, State, namespace_digest
from kvd.core import actions as ac
from kvd.core import events as ev
from kvd.core.events import LookupFlag
from kvd.core.lower import GRACE_NS

Key = tuple[str, bytes, int, bytes]  # namespace, spec, kind, hash


@dataclass
class Shard:
    state: str  # writing, ready or bad
    record: int
    sealed: bool = False
    verified: bool = True
    adopted: bool = False


@dataclass
class Chunk:
    parent: bytes
    index: int
    fingerprint: bytes
    hits: int = 0
    shards: dict[int, Shard] = field(default_factory=dict)
    below: set[tuple[int, int]] = field(default_factory=set)  # (tier, shard)

    def count(self, state: str) -> int:
        return sum(shard.state == state for shard in self.shards.values())


@dataclass
class Item:
    key: Key
    shard: int
    record: int
    phase: str = "open"  # open, evicted, condemned, done


@dataclass
class Write:
    session: int
    deadline: int
    items: list[Item | None]


@dataclass
class Lease:
    session: int
    keys: list[Key]
    shards: tuple[int, ...]
    expiry: int
    space: tuple[str, bytes, int]


@dataclass
class Session:
    public_id: bytes
    namespace: str
    group: bytes
    admin: bool
    maps: bool


class Twin:
    """Everything the daemon knows, the slow way."""

    def __init__(self, world: World, specs: list[KVSpec]) -> None:
        self.world = world
        self.specs = {s.digest: s for s in specs}
        self.sessions: dict[int, Session] = {}
        self.chunks: dict[Key, Chunk] = {}
        self.writes: dict[int, Write] = {}
        self.leases: dict[int, Lease] = {}
        self.condemned: dict[int, bytes] = {}  # record -> public id of its writer
        self.hand: dict[int, str] = {}  # record -> what it is taken for
        self.held: set[int] = set()  # freed during the hold
        self.hold_until: int | None = None
        self.earlier: set[bytes] = set()
        self.generations: dict[int, int] = {}
        self.parents: dict[tuple[str, bytes, int, bytes], bytes] = {}
        self.busy_keys: set[Key] = set()  # of the request in progress
        self.reclassing = False
        self.told_up: set[int] = set()  # tiers that can be read, as told
        self.fetching: dict[int, int] = {}  # job of a read -> record
        self.jobs: dict[int, Any] = {}  # in a tier's hands, as far as the actions were followed

    # -- small questions ------------------------------------------------------------------------

    def size(self, spec: bytes, shard: int) -> int:
        return -(-self.specs[spec].shards[shard].nbytes // 4096) * 4096

    def leased(self, key: Key) -> int:
        return sum(1 for lease in self.leases.values() if key in lease.keys)

    def children(self, key: Key) -> list[Key]:
        return [
            other
            for other, chunk in self.chunks.items()
            if other[:3] == key[:3] and chunk.parent == key[3] and other != key
        ]

    def legal(self, key: Key) -> bool:
        """Whether the chunk may go for room now."""
        chunk = self.chunks[key]
        if self.leased(key) or chunk.count("writing") or self.in_hand(key):
            return False
        if any(self.chunks[child].shards for child in self.children(key)):
            here = {s for s, shard in chunk.shards.items() if shard.state == "ready"}
            if not here <= {s for _, s in chunk.below}:
                return False
        return not (self.hold and any(s.adopted for s in chunk.shards.values()))

    def in_hand(self, key: Key) -> bool:
        """Whether a tier is at work on the chunk."""
        for job in self.jobs.values():
            header = job.header if isinstance(job, ac.TierWrite) else None
            chunk = header.chunk if header is not None else job.chunk
            spec = header.spec if header is not None else job.spec
            space = header.namespace_digest if header is not None else job.namespace
            kind = header.kind if header is not None else job.kind
            if (spec, kind, chunk) == key[1:] and space == namespace_digest(key[0]):
                return True
        return False

    @property
    def up(self) -> set[int]:
        """Tiers that can be read: not told to be away, and no job of theirs is overdue."""
        return self.told_up - self._late(self.jobs)

    def _late(self, jobs: dict[int, Any]) -> set[int]:
        """Tiers with a job that is overdue."""
        now = self.world.now
        return {job.tier for job in jobs.values() if job.deadline + GRACE_NS <= now}

    def within_reach(self, key: Key, shard: int, up: set[int] | None = None) -> bool:
        """Whether a shard that is not in DRAM could be read from below."""
        chunk = self.chunks.get(key)
        if chunk is None or shard in chunk.shards:
            return False
        return any((tier, shard) in chunk.below for tier in (self.up if up is None else up))

    @property
    def hold(self) -> bool:
        return self.hold_until is not None

    def write_bytes(self, session: int) -> int:
        total = 0
        for write in self.writes.values():
            if write.session == session:
                for item in write.items:
                    if item is not None and item.phase != "done":
                        total += self.size(item.key[1], item.shard)
        return total

    def lease_bytes(self, session: int) -> int:
        mine = {k for lease in self.leases.values() if lease.session == session for k in lease.keys}
        return sum(self.whole(key[1]) for key in mine)

    def whole(self, spec: bytes) -> int:
        """Slot bytes of a chunk with all its shards."""
        return sum(self.size(spec, s) for s in range(len(self.specs[spec].shards)))

    # -- actions that nobody asked for by name --------------------------------------------------

    def take(self, action: ac.Action) -> None:
        """Follow one action that is no reply, and check that it is legal now."""
        if isinstance(action, ac.TierWrite | ac.TierRead | ac.TierScrub | ac.TierDelete):
            self.jobs[action.job] = action
        if isinstance(action, ac.PatchRecord):
            self._patched(action)
        elif isinstance(action, ac.WriteRecord):
            self._written(action)
        elif isinstance(action, Answered):
            self._answered(action.job, action.event)
            self.landed = action.payload
        elif isinstance(action, ac.TierRead):
            record = self.world.where[action.job]
            assert record not in self.hand, "a slot in use was given to a tier"
            self.hand[record] = "fetch"
            self.fetching[action.job] = record
        elif isinstance(action, ac.TierDelete):
            self._gone_below(action)
        elif isinstance(action, ac.TierWrite) and action.kept:
            chunk = self.chunks[self.key_of(action.header)]
            above = [t for t, s in chunk.below if s == action.header.shard and t < action.tier]
            assert above, "what goes further down lies in a tier above"
        elif isinstance(action, ac.TierWrite):
            key, shard = self._owner(self.world.where[action.job])
            assert shard.state == "ready" and shard.sealed
            assert (self.key_of(action.header), action.header.shard)[0] == key
        elif isinstance(action, ac.AssignSlab):
            per = self.world.config.records_per_slab
            inside = range(action.slab * per, (action.slab + 1) * per)
            assert not any(record in self.hand for record in inside), "a slab in use changed class"

    def _answered(self, job: Any, event: Any) -> None:
        """A tier's answer, before what the core made of it."""
        del self.jobs[job.job]
        if isinstance(event, ev.TierWritten):
            if event.answer is ev.TierAnswer.OK:
                key = self.key_of(job.header)
                self.chunks[key].below.add((job.tier, job.header.shard))
        elif isinstance(event, ev.TierReadDone):
            if isinstance(job, ac.TierRead):
                self.landing = self.fetching.pop(job.job)
                self.hand.pop(self.landing)  # the core says so if the shard has landed
            if event.answer in (ev.TierAnswer.MISS, ev.TierAnswer.CORRUPT):
                self._gone_below(job)

    def _gone_below(self, job: Any) -> None:
        for name in self.namespaces:
            if namespace_digest(name) == job.namespace:
                key = (name, job.spec, job.kind, job.chunk)
                chunk = self.chunks.get(key)
                if chunk is not None:
                    chunk.below.discard((job.tier, job.shard))
                    if not chunk.shards and not chunk.below:
                        del self.chunks[key]

    def _patched(self, action: ac.PatchRecord) -> None:
        record = action.record
        if action.generation is not None:
            assert action.generation > self.generations.get(record, 0)
            self.generations[record] = action.generation
        if action.state is State.FREE:
            self._freed(record)
        elif action.state is State.QUARANTINED:
            _, shard = self._owner(record)
            assert shard.state == "ready"
            shard.state = "bad"
        elif action.state is State.CONDEMNED:
            self._condemned(record)
        elif action.state is None:
            _, shard = self._owner(record)
            assert shard.state == "ready"
            shard.sealed = True

    def _owner(self, record: int) -> tuple[Key, Shard]:
        for key, chunk in self.chunks.items():
            for shard in chunk.shards.values():
                if shard.record == record:
                    return key, shard
        raise AssertionError(f"record {record} is no chunk's")

    def _freed(self, record: int) -> None:
        """A slot became free. If a chunk's: then the whole chunk goes, and must be allowed to."""
        kind = self.hand.pop(record)
        if kind == "moved":
            return
        if kind in ("open", "evicted", "condemned"):
            for write in self.writes.values():
                for item in write.items:
                    if item is not None and item.record == record and item.phase == kind:
                        if kind == "open":
                            self._forget_shard(item.key, item.shard)
                        item.phase = "done"
            self.condemned.pop(record, None)
            return
        assert kind == "ready"
        key, shard = self._owner(record)
        chunk = self.chunks[key]
        if chunk.count("bad") and shard.state == "bad" and key in self.busy_keys:
            pass  # a quarantined shard is replaced by the write that asks for it
        elif key not in self.going:
            assert key not in self.busy_keys, "a chunk that the request relies on was evicted"
            if not (chunk.count("bad") and not chunk.count("ready")):
                assert self.legal(key), f"an illegal victim: {chunk}"
            self.going.add(key)
        if self.hold and shard.adopted:
            self.hand[record] = "held"
            self.held.add(record)
        for number, other in list(chunk.shards.items()):
            if other.record == record:
                self._forget_shard(key, number)

    def _forget_shard(self, key: Key, shard: int) -> None:
        chunk = self.chunks.get(key)
        if chunk is not None:
            chunk.shards.pop(shard, None)
            if not chunk.shards and not chunk.below:
                del self.chunks[key]

    def _condemned(self, record: int) -> None:
        for write in self.writes.values():
            for item in write.items:
                if item is not None and item.record == record and item.phase in ("open", "evicted"):
                    if item.phase == "open":
                        self._forget_shard(item.key, item.shard)
                    item.phase = "condemned"
                    self.hand[record] = "condemned"
                    owner = self.public_ids[write.session]
                    self.condemned[record] = owner
                    return
        raise AssertionError("a slot was condemned that nobody was writing")

    def _written(self, action: ac.WriteRecord) -> None:
        """A slot that was copied to another place, with everything but its place unchanged."""
        header = action.header
        assert header.state is State.READY
        key = self.key_of(header)
        assert action.record not in self.hand, "a slot in use was given away"
        if header.shard not in self.chunks[key].shards:
            self._landed(key, action.record, header)
            return
        shard = self.chunks[key].shards[header.shard]
        assert not self.leased(key), "a leased slot was moved"
        self.hand[shard.record] = "moved"
        self.hand[action.record] = "ready"
        shard.record = action.record
        assert header.generation > self.generations.get(action.record, 0)
        self.generations[action.record] = header.generation

    def _landed(self, key: Key, record: int, header: Any) -> None:
        """A shard was read up, with everything that is known of it unchanged."""
        chunk = self.chunks[key]
        assert record == self.landing
        assert any(shard == header.shard for _, shard in chunk.below)
        assert header.flags & HeaderFlag.SEALED
        assert (header.parent, header.index, header.fingerprint) == (
            chunk.parent, chunk.index, chunk.fingerprint,
        )  # fmt: skip
        assert self.landed == content(header)
        assert header.generation > self.generations.get(record, 0)
        self.generations[record] = header.generation
        self.hand[record] = "ready"
        chunk.shards[header.shard] = Shard("ready", record, True)

    landing = -1
    landed = b""

    def key_of(self, header: Any) -> Key:
        for name in self.namespaces:
            if namespace_digest(name) == header.namespace_digest:
                return name, header.spec, header.kind, header.chunk
        raise AssertionError("a record of an unknown namespace")

    # -- events ---------------------------------------------------------------------------------

    namespaces: tuple[str, ...] = ("default", "other")
    going: set[Key]
    public_ids: dict[int, bytes]

    def begin(self) -> None:
        """Before an event: what is due falls due."""
        self.going = set()
        self.busy_keys = set()
        self.public_ids = {**getattr(self, "public_ids", {})}
        self.public_ids.update({n: s.public_id for n, s in self.sessions.items()})
        now = self.world.now
        for number, lease in list(self.leases.items()):
            if lease.expiry <= now:
                del self.leases[number]
        if self.hold_until is not None and self.hold_until <= now:
            self.end_hold()

    def end_hold(self) -> None:
        self.hold_until = None
        for record in self.held:
            del self.hand[record]
        self.held.clear()

    def followed(self, actions: list[ac.Action]) -> None:
        """Actions of an event that needs no prediction (time, workers)."""
        for action in actions:
            if not isinstance(action, ac.Reply | ac.Fail):
                self.take(action)

    def opened(self, event: ev.OpenSession) -> None:
        self.sessions[event.session] = Session(
            event.public_id, event.namespace, event.group, event.admin, event.maps_memory
        )

    def reserved(self, event: ev.Reserve, result: Any, actions: list[ac.Action]) -> None:
        """Follow a reserve key by key beside the actions that it caused."""
        session = self.sessions[event.session]
        space = (session.namespace, event.spec, event.kind)
        replied = next(n for n, a in enumerate(actions) if isinstance(a, ac.Reply))
        stream, after = list(actions[:replied]), actions[replied + 1 :]
        refs = refs_of(result.refs)
        items: list[Item | None] = []
        hashes = [event.hashes[i : i + 32] for i in range(0, len(event.hashes), 32)]
        ended: Outcome | None = None
        at = 0
        rollback: list[Item] = []
        write = Write(event.session, self.world.now + event.ttl, items)
        if result.write:
            self.writes[result.write] = write
        self.busy_keys.add((*space, event.parent))
        cap = self.world.config.write_cap
        used = self.write_bytes(event.session)
        # a tier may have come back while the request waited
        late, late_now = self._late(self.jobs), self._late(self.world.in_hand)
        surely, perhaps = self.told_up - late - late_now, self.told_up - (late & late_now)
        for n, hash_ in enumerate(hashes):
            key = (*space, hash_)
            parent = event.parent if n == 0 else hashes[n - 1]
            if event.kind == Kind.CONTENT:
                parent = NO_PARENT
            print_ = event.fingerprints[16 * n : 16 * n + 16]
            got = [Outcome(o) for o in result.outcomes[at : at + len(event.shards)]]
            at += len(event.shards)
            if ended is not None:
                assert got == [ended] * len(got), "a grant behind the end of the leading run"
                items += [None] * len(got)
                continue
            # what was done between two looks of the request may have changed this chunk
            pairs = list(zip(event.shards, got, strict=True))
            self._until(stream, key, pairs, print_, perhaps)
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.fingerprint != print_:
                assert got == [O.MISMATCH] * len(got)
                items += [None] * len(got)
                self.busy_keys.add(key)  # what follows hangs under it
                continue
            self.busy_keys.add(key)
            if any(o in (O.NO_SPACE, O.OVER_QUOTA) for o in got):
                ended = next(o for o in got if o in (O.NO_SPACE, O.OVER_QUOTA))
            for shard, outcome in pairs:
                self._until(stream, key, [(shard, outcome)], print_, perhaps)
                there = self.chunks[key].shards.get(shard) if key in self.chunks else None
                item: Item | None = None
                size = self.size(event.spec, shard)
                if there is not None and there.state == "ready":
                    assert outcome is O.EXISTS
                elif there is not None and there.state == "writing":
                    assert outcome is O.BUSY
                elif there is not None and self.leased(key):
                    assert outcome is O.BUSY
                elif self.within_reach(key, shard, surely):
                    assert outcome is O.EXISTS
                elif outcome is O.EXISTS:
                    assert self.within_reach(key, shard, perhaps)
                elif outcome is O.GRANTED:
                    assert used + size <= cap
                    used += size
                    item = self._granted(key, shard, parent, n + event.index0, print_, stream)
                    ref = refs.pop(0)
                    assert (ref.record, ref.length) == (
                        item.record,
                        self.specs[event.spec].shards[shard].nbytes,
                    )
                    assert ref.generation == self.generations[item.record]
                    assert self.world.record_at(ref.offset) == item.record
                elif outcome is O.OVER_QUOTA:
                    total = used + sum(self.size(event.spec, s) for s in event.shards)
                    assert total > cap
                else:
                    assert outcome is O.NO_SPACE, outcome
                items.append(item)
        del rollback
        for action in stream:
            if isinstance(action, ac.WriteRecord) and action.header.state is State.WRITING:
                # granted to a chunk that then could not have all its shards: given back at once
                self.hand[action.record] = "undone"
                self.generations[action.record] = action.header.generation
            elif isinstance(action, ac.PatchRecord) and self.hand.get(action.record) == "undone":
                assert action.state is State.FREE
                del self.hand[action.record]
                self.generations[action.record] = action.generation or 0
            else:
                self.take(action)
        assert not refs
        assert bool(result.write) == any(item is not None for item in items)
        if ended is O.NO_SPACE:
            self._no_room(space, event)
        self.busy_keys.clear()
        self.followed(after)

    def _until(
        self,
        stream: list[ac.Action],
        key: Key,
        wanted: list[tuple[int, Outcome]],
        print_: bytes,
        up: set[int],
    ) -> None:
        """Follow actions until these outcomes of a chunk could be, or the next slot is granted."""
        while stream and not all(self._could(key, s, o, print_, up) for s, o in wanted):
            action = stream[0]
            if isinstance(action, ac.WriteRecord) and action.header.state is State.WRITING:
                return
            self.take(stream.pop(0))

    def _could(self, key: Key, shard: int, outcome: Outcome, print_: bytes, up: set[int]) -> bool:
        """Whether a reserve that looks now could answer so of a shard."""
        chunk = self.chunks.get(key)
        if chunk is not None and chunk.fingerprint != print_:
            return outcome is O.MISMATCH
        there = chunk.shards.get(shard) if chunk is not None else None
        if outcome is O.EXISTS:
            ready = there is not None and there.state == "ready"
            return ready or self.within_reach(key, shard, up)
        if outcome is O.BUSY:
            return there is not None and there.state != "ready"
        return there is None or (there.state == "bad" and not self.leased(key))

    def _granted(
        self,
        key: Key,
        shard: int,
        parent: bytes,
        index: int,
        print_: bytes,
        stream: list[ac.Action],
    ) -> Item:
        while True:
            action = stream.pop(0)
            if isinstance(action, ac.WriteRecord) and action.header.state is State.WRITING:
                break
            self.take(action)
        header = action.header
        assert (self.key_of(header), header.shard) == (key, shard)
        assert (header.parent, header.index, header.fingerprint) == (parent, index, print_)
        assert action.record not in self.hand, "a slot in use was given away"
        assert header.generation > self.generations.get(action.record, 0)
        self.generations[action.record] = header.generation
        self.hand[action.record] = "open"
        chunk = self.chunks.setdefault(key, Chunk(parent, index, print_))
        chunk.shards[shard] = Shard("writing", action.record)
        return Item(key, shard, action.record)

    def _no_room(self, space: tuple[str, bytes, int], event: ev.Reserve) -> None:
        """NO_SPACE is only true if no chunk with such a slot could go."""
        if self.world.in_hand:
            return  # a slot may be in a tier's hands, or about to be
        sizes = {self.size(event.spec, s) for s in event.shards}
        for key, chunk in self.chunks.items():
            if key in self.busy_keys or not self.legal(key):
                continue
            if not any(s.state == "ready" for s in chunk.shards.values()):
                continue
            mine = {self.size(key[1], s) for s in chunk.shards}
            below = [k for k in self.chunks if self._descends(k, key)]
            assert below or len(sizes) > 1 or not sizes & mine, f"{key} could have gone"

    def _descends(self, key: Key, above: Key) -> bool:
        """By what was ever stored: holes keep families together."""
        if key[:3] != above[:3] or key == above:
            return False
        hash_: bytes | None = key[3]
        while hash_ is not None and hash_ != NO_PARENT:
            if hash_ == above[3]:
                return True
            hash_ = self.parents.get((*key[:3], hash_))
        return False

    def committed(self, event: ev.Commit, result: Any, actions: list[ac.Action]) -> None:
        write = self.writes[event.write]
        numbers = _numbers(event.items)
        if numbers is None:
            numbers = [n for n, item in enumerate(write.items) if item is not None]
        expected = []
        for n in numbers:
            item = write.items[n]
            if item is None or item.phase == "done":
                expected.append(O.FAILED)
            elif item.phase == "evicted":
                expected.append(O.EVICTED)
            elif item.phase == "condemned":
                expected.append(O.EXPIRED)
            else:
                expected.append(O.OK)
                item.phase = "done"
                shard = self.chunks[item.key].shards[item.shard]
                shard.state = "ready"
                shard.sealed = event.digests is not None
                self.hand[item.record] = "ready"
        assert [Outcome(o) for o in result.outcomes] == expected
        for action in actions:
            if isinstance(action, ac.PatchRecord) and action.state is State.READY:
                assert self.hand[action.record] == "ready"
            elif not isinstance(action, ac.Reply):
                self.take(action)
        for n in numbers:  # a commit says that the writer has stopped, also one that is too late
            item = write.items[n]
            assert item is None or item.phase == "done", "a slot is kept for a writer that stopped"
        self._tidy()

    def aborted(self, event: ev.Abort, result: Any, actions: list[ac.Action]) -> None:
        write = self.writes[event.write]
        numbers = _numbers(event.items)
        if numbers is None:
            numbers = [n for n, item in enumerate(write.items) if item is not None]
        seen: set[int] = set()
        expected = []
        for n in numbers:
            item = write.items[n]
            gone = item is None or item.phase == "done" or n in seen
            seen.add(n)
            expected.append(O.FAILED if gone else O.ABORTED)
        self.followed(actions)
        assert [Outcome(o) for o in result.outcomes] == expected
        for n in numbers:
            item = write.items[n]
            assert item is None or item.phase == "done"
        self._tidy()

    def _tidy(self) -> None:
        for number, write in list(self.writes.items()):
            if all(item is None or item.phase == "done" for item in write.items):
                del self.writes[number]

    def looked_up(self, event: ev.Lookup, result: Any) -> None:
        session = self.sessions[event.session]
        space = (session.namespace, event.spec, event.kind)
        hashes = [event.hashes[i : i + 32] for i in range(0, len(event.hashes), 32)]
        every = bool(event.flags & LookupFlag.EVERY)
        outcomes: list[Outcome] = []
        leading = 0
        running = True
        for n, hash_ in enumerate(hashes):
            key = (*space, hash_)
            asked = None
            if event.fingerprints is not None:
                asked = event.fingerprints[16 * n : 16 * n + 16]
            outcome = self._look(key, event.shards, asked)
            orphan = outcome is O.OK and event.kind == Kind.PREFIX and self._orphan(key)
            if running and outcome is O.OK and not orphan:
                leading += 1
                outcomes.append(outcome)
                continue
            if running and not every:
                outcomes.append(O.MISS if orphan else outcome)
            else:
                outcomes.append(outcome if every else O.SKIPPED)
            running = False
        hits = [n for n, o in enumerate(outcomes) if o is O.OK]
        if event.flags & LookupFlag.LEASE and hits:
            left = self.world.config.lease_cap - self.lease_bytes(event.session)
            mine = {
                k
                for lease in self.leases.values()
                if lease.session == event.session
                for k in lease.keys
            }
            room = 0
            for n in hits:
                left -= 0 if (*space, hashes[n]) in mine else self.whole(event.spec)
                if left < 0:
                    break
                room += 1
            if room < len(hits):
                cut = hits[room]
                for n in range(cut, len(outcomes)):
                    if every and outcomes[n] is O.OK:
                        outcomes[n] = O.OVER_QUOTA
                    elif not every:
                        outcomes[n] = O.OVER_QUOTA if n == cut else O.SKIPPED
                hits = hits[:room]
                leading = min(leading, cut)
        assert [Outcome(o) for o in result.outcomes] == outcomes
        assert result.leading == leading
        if not (event.flags & LookupFlag.LEASE and hits):
            assert result.lease == 0
            return
        assert result.lease
        keys = [(*space, hashes[n]) for n in hits]
        limit = self.world.config.lease_max_ns
        length = min(event.lease_ns or self.world.config.lease_default_ns, limit)
        assert result.expiry == self.world.now + length
        assert self.world.horizon >= result.expiry
        self.leases[result.lease] = Lease(event.session, keys, event.shards, result.expiry, space)
        for key in set(keys):
            self.chunks[key].hits += 1

    def _look(self, key: Key, shards: tuple[int, ...], asked: bytes | None) -> Outcome:
        chunk = self.chunks.get(key)
        if chunk is None:
            return O.MISS
        if asked is not None and asked != chunk.fingerprint:
            return O.MISMATCH
        states = [chunk.shards[s].state if s in chunk.shards else "absent" for s in shards]
        states = [
            "ready" if self.within_reach(key, s) else state
            for s, state in zip(shards, states, strict=True)
        ]
        if all(s == "ready" for s in states):
            return O.OK
        if "bad" in states:
            return O.MISS
        away = all(
            st == "ready" or (s not in chunk.shards and any(b == s for _, b in chunk.below))
            for s, st in zip(shards, states, strict=True)
        )
        return O.PARTIAL if "ready" in states and not away else O.MISS

    def _orphan(self, key: Key) -> bool:
        parent = self.chunks[key].parent
        if parent == NO_PARENT:
            return False
        above = self.chunks.get((*key[:3], parent))
        return above is None or not (above.count("ready") or above.below)

    def may_use(self, session: int, lease: int) -> bool:
        found = self.leases.get(lease)
        if found is None or session not in self.sessions:
            return False
        mine, its = self.sessions[session], self.sessions[found.session]
        return (mine.namespace, mine.group) == (its.namespace, its.group)

    def loaded(self, event: ev.Load, result: Any) -> None:
        lease = self.leases[event.lease]
        shards = event.shards or lease.shards
        numbers = _numbers(event.items)
        keys = lease.keys if numbers is None else [lease.keys[n] for n in numbers]
        refs = refs_of(result.refs)
        expected = []
        for key in keys:
            for s in shards:
                there = self.chunks.get(key)
                shard = there.shards.get(s) if there is not None else None
                if self.within_reach(key, s):
                    expected.append(O.FAILED)
                elif shard is None or shard.state == "writing":
                    expected.append(O.MISS)
                elif shard.state == "bad":
                    expected.append(O.CORRUPT)
                elif not shard.verified:
                    expected.append(O.FAILED)
                else:
                    expected.append(O.OK)
                    self.right_bytes(key, s, refs.pop(0))
        assert [Outcome(o) for o in result.outcomes] == expected
        assert not refs
        assert result.done == (O.FAILED not in expected) == (result.transfer == 0)

    def right_bytes(self, key: Key, shard: int, ref: Any) -> None:
        """A reference that was given out leads to the bytes of that very key."""
        assert self.chunks[key].shards[shard].record == ref.record
        header = self.world.memory[ref.record]
        assert header.state is State.READY and header.generation == ref.generation
        assert self.world.record_at(ref.offset) == ref.record
        assert ref.length == self.specs[key[1]].shards[shard].nbytes
        assert self.world.payload[ref.record] == content(header)
        assert (self.key_of(header), header.shard) == (key, shard)

    def verified(self, record: int, ok: bool) -> None:
        """A worker compared a payload, and the core's actions were followed: a bad one must be
        in quarantine by now."""
        for chunk in self.chunks.values():
            for shard in chunk.shards.values():
                if shard.record == record:
                    shard.verified = True
                    assert (shard.state == "bad") == (not ok)

    def waits_for(self, job: ac.Verify) -> bool:
        """Whether what is being verified is still there."""
        for chunk in self.chunks.values():
            for shard in chunk.shards.values():
                if shard.record == job.record and not shard.verified:
                    return self.generations[job.record] == job.generation
        return False

    def evicted(self, event: ev.Evict, result: ac.EvictResult, actions: list[ac.Action]) -> None:
        """One slice: what went was meant, not leased; what was being written was marked."""
        before = {key: self.leased(key) for key in self.chunks}
        held = self.world.held_keys()
        matching = {key for key in self.chunks if self._meant(key, event)}
        for key in matching:
            chunk = self.chunks[key]
            below_only = event.selector.tier not in (None, "dram")
            if below_only or event.dry_run:
                continue
            if chunk.count("writing") and self._marked(key, event, result):
                for write in self.writes.values():
                    for item in write.items:
                        if item is not None and item.key == key and item.phase == "open":
                            item.phase = "evicted"
                            self.hand[item.record] = "evicted"
                            self._forget_shard(key, item.shard)
        named = set()
        for action in actions:
            if isinstance(action, ac.PatchRecord) and action.state is State.FREE:
                key, _ = self._owner(action.record)
                assert key in matching and not before[key]
                named.add(key)
                self.going.add(key)
            elif isinstance(action, ac.TierDelete) and self._key_of_job(action) in matching:
                named.add(self._key_of_job(action))
            if not isinstance(action, ac.Reply | ac.Fail):
                self.take(action)
        gone = len(named)
        if event.dry_run:
            assert not gone
            assert len(result.named) <= len(matching)
        else:
            assert result.evicted == gone
        if result.cursor is None and event.cursor == 0:
            assert result.matched == len(matching)
            leased = {
                key
                for key in matching
                if before[key] and key not in self.going and self._was_resident(key)
            }
            assert leased <= set() or result.leased >= len(leased)
            assert result.leased <= len(leased | {key for key in matching if key[1:] in held})

    def _was_resident(self, key: Key) -> bool:
        chunk = self.chunks.get(key)
        return chunk is not None and bool(chunk.count("ready") or chunk.count("bad") or chunk.below)

    def _key_of_job(self, job: Any) -> Key:
        name = next(n for n in self.namespaces if namespace_digest(n) == job.namespace)
        return name, job.spec, job.kind, job.chunk

    def _marked(self, key: Key, event: ev.Evict, result: ac.EvictResult) -> bool:
        return result.cursor is None  # the machine takes slices that are large enough

    def _meant(self, key: Key, event: ev.Evict) -> bool:
        session, selector = self.sessions[event.session], event.selector
        if not session.admin and key[0] != session.namespace:
            return False
        if selector == ev.Selector():
            return False
        if selector.namespace is not None and key[0] != selector.namespace:
            return False
        chunk = self.chunks[key]
        if selector.tier == "dram" and not chunk.shards:
            return False
        if selector.tier == "nvme" and not any(tier == 0 for tier, _ in chunk.below):
            return False
        if selector.spec is not None and key[1] != selector.spec:
            return False
        if selector.keys and key[3] not in selector.keys:
            return False
        return selector.subtree is None or self._below(key, selector.subtree)

    def _below(self, key: Key, root: bytes) -> bool:
        hash_: bytes | None = key[3]
        while hash_ is not None and hash_ != NO_PARENT:
            if hash_ == root:
                return True
            hash_ = self.parents.get((*key[:3], hash_))
        return False

    def linked(self, root: bytes) -> bool:
        """Whether all that is below a chunk by what was ever stored is so by what is there: a
        family whose middle is gone may have fallen apart."""
        for key in self.chunks:
            if self._below(key, root):
                hash_ = key[3]
                while hash_ != root:
                    chunk = self.chunks.get((*key[:3], hash_))
                    if chunk is None:
                        return False
                    hash_ = chunk.parent
        return True

    def closed(self, number: int, stopped: bool, actions: list[ac.Action]) -> None:
        session = self.sessions.pop(number)
        for lease_number, lease in list(self.leases.items()):
            if lease.session == number:
                del self.leases[lease_number]
        self.followed(actions)
        for write_number, write in list(self.writes.items()):
            if write.session == number:
                for item in write.items:
                    if item is not None and item.phase != "done":
                        assert not stopped and session.maps, "a stopped writer's slot is kept"
                        assert item.phase == "condemned"
                del self.writes[write_number]

    def lock_freed(self, public_id: bytes, actions: list[ac.Action]) -> None:
        self.earlier.discard(public_id)
        self.followed(actions)
        assert public_id not in self.condemned.values()
        if not self.earlier:
            if self.hold:
                self.end_hold()
            assert bytes(16) not in self.condemned.values()
        self._tidy()

    def restarted(self, torn: set[int], locked: set[bytes], before: dict[int, Any]) -> None:
        """What an earlier life's table says, by the rules of adoption. `before`: the table at the
        moment of the kill."""
        self.sessions.clear()
        self.writes.clear()
        self.leases.clear()
        self.condemned.clear()
        self.hand.clear()
        self.held.clear()
        hits_gone: dict[Key, Chunk] = {}
        for record, header in sorted(before.items()):
            if record in torn:
                if locked:
                    self.condemned[record] = bytes(16)
                    self.hand[record] = "condemned"
                continue
            if header.state in (State.WRITING, State.CONDEMNED):
                if header.session in locked or (header.session == bytes(16) and locked):
                    self.condemned[record] = header.session
                    self.hand[record] = "condemned"
            elif header.state is State.READY:
                key = self.key_of(header)
                chunk = hits_gone.setdefault(
                    key, Chunk(header.parent, header.index, header.fingerprint)
                )
                sealed = bool(header.flags & HeaderFlag.SEALED)
                chunk.shards[header.shard] = Shard("ready", record, sealed, not sealed, True)
                self.hand[record] = "ready"
        self.chunks = hits_gone
        self._recovered()
        self.earlier = set(locked)
        self.hold_until = None
        if locked and self.world.horizon > self.world.now:
            self.hold_until = self.world.horizon
        self.generations = {r: h.generation for r, h in self.world.memory.items()}

    def _recovered(self) -> None:
        """What lies in tiers is there again, if it says of its chunk what DRAM's record says."""
        self.fetching.clear()
        self.jobs.clear()
        self.told_up = set(range(len(self.world.shelves)))
        for tier, shelf in enumerate(self.world.shelves):
            for _, _, header, _ in shelf.there.values():
                key = self.key_of(header)
                chunk = self.chunks.setdefault(
                    key, Chunk(header.parent, header.index, header.fingerprint)
                )
                chunk.below.add((tier, header.shard))

    # -- the whole state ------------------------------------------------------------------------

    def check(self, rows: list[dict[str, Any]], stat: dict[str, Any]) -> None:
        """All that an administrator can see is what it should be."""
        mine = {}
        for (name, spec, kind, hash_), chunk in self.chunks.items():
            ready = chunk.count("ready")
            if chunk.count("bad"):
                state = "quarantined"
            elif chunk.count("writing"):
                state = "writing"
            elif all(s.sealed for s in chunk.shards.values()):
                state = "sealed"
            else:
                state = "unsealed"
            held = [s for s, x in chunk.shards.items() if x.state != "writing"]
            held += [s for _, s in chunk.below]
            per_tier = [sum(t == tier for t, _ in chunk.below) for tier in (0, 1)]
            ready = max([ready, *per_tier])
            mine[name, spec.hex(), Kind(kind).name.lower(), hash_.hex()] = (
                chunk.parent.hex(),
                chunk.index,
                sum(self.specs[spec].shards[s].nbytes for s in held),
                ready,
                state,
                chunk.hits,
                sum(1 for lease in self.leases.values() if (name, spec, kind, hash_) in lease.keys),
            )
        theirs = {
            (r["namespace"], r["spec"], r["kind"], r["hash"]): (
                r["parent"],
                r["index"],
                r["bytes"],
                r["shards"],
                r["state"],
                r["hits"],
                r["leases"],
            )
            for r in rows
        }
        assert theirs == mine
        tier = stat["tiers"][0]
        sizes = self.world.slot_sizes
        per = self.world.config.records_per_slab
        size = {record: sizes[record // per] for record in self.hand}
        copies = [job for job in self.world.jobs if isinstance(job, ac.Copy)]
        targets = [self.world.record_at(job.target) for job in copies]
        assert not set(targets) & set(self.hand), "a copy goes to a slot in use"
        copying = sum(sizes[record // per] for record in targets)
        assert tier["used_bytes"] == sum(size.values()) + copying <= tier["limit_bytes"]
        by_kind: dict[str, int] = {}
        for record, kind in self.hand.items():
            by_kind[kind] = by_kind.get(kind, 0) + size[record]
        assert tier["writing_bytes"] == by_kind.get("open", 0) + by_kind.get("evicted", 0)
        assert tier["condemned_bytes"] == by_kind.get("condemned", 0)
        assert tier["held_bytes"] == by_kind.get("held", 0)
        resident = [c for c in self.chunks.values() if c.count("ready") or c.count("bad")]
        assert tier["chunks"] == len(resident)
        leased = {key for lease in self.leases.values() for key in lease.keys}
        assert tier["leased_chunks"] == len(leased)
        assert stat["counters"]["active_leases"] == len(self.leases)
        assert stat["sessions"] == len(self.sessions)
        latest = max((lease.expiry for lease in self.leases.values()), default=0)
        if self.hold_until is not None:
            latest = max(latest, self.hold_until)
        soon = self.world.now + self.world.config.lease_default_ns
        assert latest <= self.world.horizon
        assert self.world.horizon <= max(latest, soon) + 2 * self.world.config.horizon_step_ns
        self._table()

    def _table(self) -> None:
        """Shared memory says the same."""
        for record, header in self.world.memory.items():
            kind = self.hand.get(record)
            if header.state is State.READY:
                assert kind == "ready"
            elif header.state is State.WRITING:
                assert kind in ("open", "evicted")
            elif header.state is State.CONDEMNED:
                assert kind == "condemned"
            elif header.state is State.FREE:
                assert kind in (None, "held", "condemned", "fetch")


def _numbers(items: bytes | None) -> list[int] | None:
    if items is None:
        return None
    return [int.from_bytes(items[i : i + 4], "little") for i in range(0, len(items), 4)]


__all__ = ["S", "Twin", "fingerprint"]
