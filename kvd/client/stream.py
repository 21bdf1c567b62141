"""Stores and loads of many chunks that hide the round trips.

The law of this module: one batch is always asked for ahead of the one that is copied; every commit
is acknowledged before the call returns; nothing that a load delivered is called OK before its
lease, epoch and generation were checked after its last byte. An outcome is FAILED until then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvd.chunk import NO_PARENT, Kind, Outcome, payload_digest
from kvd.client.call import Call
from kvd.client.copies import (
    copy_into,
    copy_into_with_digest,
    copy_out,
    copy_out_with_digest,
)
from kvd.client.lease import Transfer
from kvd.client.lookup import Lookup
from kvd.client.reservation import Reservation
from kvd.errors import ArenaError, KvdError, LeaseLost, ProtocolError
from kvd.wire import LookupFlag
from kvd.wire import messages as m

if TYPE_CHECKING:
    from kvd.client.base import ClientBase

# What goes out right behind something else costs next to nothing: libzmq's I/O thread is awake
# then, and waking it is most of what sending costs. So a batch's last word (commit, release) is
# sent together with the question for the batch after the next, as soon as the next one's answer is
# in.

Copier = Callable[[int, memoryview], object] | Sequence[Any]
_COMMITS = 2  # in flight while the next batch is copied
_NO_ROOM = (Outcome.OVER_QUOTA, Outcome.NO_SPACE)


class Keys(NamedTuple):
    """What stands in every request of a stream, packed."""

    spec: bytes
    kind: int
    shards: tuple[int, ...]
    hashes: bytes
    fingerprints: bytes | None
    parent: bytes
    index0: int
    tokens: bytes | None
    pos0: bytes | None

    @property
    def keys(self) -> int:
        """How many."""
        return len(self.hashes) // 32

    def parent_of(self, begin: int) -> bytes:
        """The hash before key `begin` in its chain."""
        if self.kind == Kind.CONTENT:
            return NO_PARENT
        return self.hashes[32 * (begin - 1) : 32 * begin] if begin else self.parent

    def part(self, field: str, each: int, begin: int, end: int) -> bytes | None:
        value: bytes | None = getattr(self, field)
        return None if value is None else value[each * begin : each * end]


class Batch(NamedTuple):
    """Keys [begin, end), asked for. `alone`: nothing of this stream was held meanwhile."""

    begin: int
    end: int
    call: Call
    alone: bool


class Filled(NamedTuple):
    """A batch that was copied. `first`: its first result; `digests`: if the client seals."""

    first: int
    reservation: Reservation
    digests: list[bytes] | None


class Stream:
    """What a store and a load have in common."""

    def __init__(self, client: ClientBase, keys: Keys, copier: Copier, batch: int) -> None:
        self.client = client
        self.keys = keys
        self.width = len(keys.shards)
        self.batch = max(1, batch)
        self.outcomes = [Outcome.FAILED] * (keys.keys * self.width)
        self.copier = copier if callable(copier) else None
        self.buffers: Sequence[Any] = () if callable(copier) else copier
        if self.copier is None and len(self.buffers) != len(self.outcomes):
            raise ValueError(f"{len(self.outcomes)} buffers are due, {len(self.buffers)} came")

    def arrived(self, call: Call) -> bool:
        """Whether a call has come to its end; nothing is waited for."""
        try:
            call.result(0)
        except TimeoutError:
            return False
        except KvdError:  # whoever takes the result meets it again
            return True
        return True

    def rest(self, begin: int, outcome: Outcome) -> None:
        """Keys from `begin` on were not tried, because of this."""
        first = begin * self.width
        self.outcomes[first:] = [outcome] * (len(self.outcomes) - first)


class Store(Stream):
    """One streamed store."""

    def __init__(
        self,
        client: ClientBase,
        keys: Keys,
        fill: Copier,
        batch: int,
        *,
        flags: int,
        ttl_ns: int,
        seal: bool,
    ) -> None:
        super().__init__(client, keys, fill, batch)
        self._flags = flags
        self._ttl_ns = ttl_ns
        self._seal = seal
        self._commits: deque[tuple[int, Reservation, Call]] = deque()
        self._filled: Filled | None = None  # its commit is not sent yet

    def run(self, deadline_ns: int) -> list[Outcome]:
        """All of it: one outcome a result."""
        self._deadline_ns = deadline_ns
        ahead: Batch | None = self._ask(0, alone=True)
        held: Reservation | None = None
        try:
            while ahead is not None:
                now, ahead = ahead, None
                if not self.arrived(now.call):
                    self._commit()
                held = self.client.reservation_of(now.call)
                following = self._note(now, held)
                self._commit()
                if following == now.end:
                    ahead = self._ask(following, alone=False)
                self._fill(now.begin * self.width, held)
                held = None
                if ahead is None and following < self.keys.keys:
                    self._commit()
                    self._collect(0)  # our own unfinished writes were in the way
                    ahead = self._ask(following, alone=True)
                self._collect(_COMMITS)
            self._commit()
            self._collect(0)
        except BaseException:
            with contextlib.suppress(KvdError):  # what was filled is stored, as far as that goes
                self._commit()
            for reservation in [held, *(entry[1] for entry in self._commits)]:
                if reservation is not None:
                    reservation.abort()
            if ahead is not None:
                ahead.call.cancel()
            raise
        return self.outcomes

    def _ask(self, begin: int, *, alone: bool) -> Batch | None:
        keys = self.keys
        if begin >= keys.keys:
            return None
        end = min(begin + self.batch, keys.keys)
        message = m.Reserve(
            keys.spec,
            keys.kind,
            keys.shards,
            keys.hashes[32 * begin : 32 * end],
            keys.parent_of(begin),
            keys.index0 + begin,
            keys.part("fingerprints", 16, begin, end) or b"",
            keys.part("tokens", 4, begin, end),
            keys.part("pos0", 8, begin, end),
            self._flags,
            self._ttl_ns,
        )
        return Batch(begin, end, self.client.submit_at(message, self._deadline_ns), alone)

    def _note(self, batch: Batch, reservation: Reservation) -> int:
        """Take over what was said of each result; the key to go on from."""
        said = reservation.outcomes
        if len(said) != (batch.end - batch.begin) * self.width:
            raise ProtocolError(f"{len(said)} outcomes for {batch.end - batch.begin} keys")
        first = batch.begin * self.width
        self.outcomes[first : first + len(said)] = [
            Outcome.FAILED if outcome is Outcome.GRANTED else outcome for outcome in said
        ]
        stop = next((i for i, outcome in enumerate(said) if outcome in _NO_ROOM), None)
        if stop is None:
            return batch.end
        key = batch.begin + stop // self.width
        if not batch.alone or (said[stop] is Outcome.OVER_QUOTA and reservation.granted):
            # What this stream holds itself was in the way. A key of which only some shards were
            # granted is asked for again: those answer EXISTS then.
            return key
        self.rest(batch.end, said[stop])
        return self.keys.keys

    def _fill(self, first: int, reservation: Reservation) -> None:
        granted = reservation.granted
        if not granted:
            return
        digests: list[bytes] | None = [] if self._seal else None
        for index in granted:
            view = reservation.view(index)
            if self.copier is not None:
                self.copier(first + index, view)
                if digests is not None:
                    digests.append(payload_digest(view))
            elif digests is not None:
                digests.append(copy_into_with_digest(view, self.buffers[first + index]))
            else:
                copy_into(view, self.buffers[first + index])
        self._filled = Filled(first, reservation, digests)

    def _commit(self) -> None:
        """Send the commit of what was filled last, if that was not done yet."""
        filled, self._filled = self._filled, None
        if filled is not None:
            left_s = self.client.left_s(self._deadline_ns)
            try:
                call = filled.reservation.submit_commit(None, filled.digests, timeout_s=left_s)
            except BaseException:
                filled.reservation.abort()
                raise
            self._commits.append((filled.first, filled.reservation, call))

    def _collect(self, keep: int) -> None:
        """Wait for acknowledgements until at most `keep` are outstanding."""
        while len(self._commits) > keep:
            first, reservation, call = self._commits[0]
            granted = reservation.granted
            said = reservation.committed(call)
            self._commits.popleft()
            for index in granted:
                self.outcomes[first + index] = said[index]


class Load(Stream):
    """One streamed load."""

    def __init__(
        self,
        client: ClientBase,
        keys: Keys,
        take: Copier,
        batch: int,
        *,
        every: bool,
        lease_ns: int,
        verify: bool,
    ) -> None:
        super().__init__(client, keys, take, batch)
        self._every = every
        self._lease_ns = lease_ns
        self._verify = verify
        self._taken: Lookup | None = None  # its lease is still held

    def run(self, deadline_ns: int) -> list[Outcome]:
        """All of it: one outcome a result."""
        self._deadline_ns = deadline_ns
        ahead: Batch | None = self._ask(0, alone=True)
        found: Lookup | None = None
        try:
            while ahead is not None:
                now, ahead = ahead, None
                if not self.arrived(now.call):
                    self._release()
                found = self.client.lookup_of(now.call)
                following = self._note(now, found)
                self._release()
                if following == now.end:
                    ahead = self._ask(following, alone=False)
                self._taken, found = found, None
                if not self._take(now, self._taken):
                    self.rest(following, Outcome.DEADLINE)
                    break
                if ahead is None:
                    self._release()
                    ahead = self._ask(following, alone=True)
        finally:
            self._release()
            if found is not None and found.lease is not None:
                found.lease.release()
            if ahead is not None:
                ahead.call.cancel()
        return self.outcomes

    def _release(self) -> None:
        """Let go of the batch that was copied last, if that was not done yet."""
        taken, self._taken = self._taken, None
        if taken is not None and taken.lease is not None:
            taken.lease.release()

    def _ask(self, begin: int, *, alone: bool) -> Batch | None:
        keys = self.keys
        if begin >= keys.keys:
            return None
        end = min(begin + self.batch, keys.keys)
        flags = LookupFlag.LEASE | LookupFlag.LOAD
        if self._every:
            flags |= LookupFlag.EVERY
        if self.client.public:
            flags |= LookupFlag.PUBLIC
        message = m.Lookup(
            keys.spec,
            keys.kind,
            keys.shards,
            keys.hashes[32 * begin : 32 * end],
            keys.part("fingerprints", 16, begin, end),
            int(flags),
            self._lease_ns,
            keys.parent_of(begin),
            keys.index0 + begin,
            0,
        )
        return Batch(begin, end, self.client.submit_at(message, self._deadline_ns), alone)

    def _note(self, batch: Batch, found: Lookup) -> int:
        said = found.outcomes
        if len(said) != batch.end - batch.begin:
            raise ProtocolError(f"{len(said)} outcomes for {batch.end - batch.begin} keys")
        for position, outcome in enumerate(said):
            if outcome is not Outcome.OK:
                first = (batch.begin + position) * self.width
                self.outcomes[first : first + self.width] = [outcome] * self.width
        full = next((i for i, outcome in enumerate(said) if outcome is Outcome.OVER_QUOTA), None)
        if full is not None:
            # Leases of this stream were in the way; it lets them go before it asks again.
            if not batch.alone or full:
                return batch.begin + full
            self.rest(batch.end, Outcome.OVER_QUOTA)
            return self.keys.keys
        if not self._every and found.leading < len(said):
            self.rest(batch.end, Outcome.SKIPPED)
            return self.keys.keys
        return batch.end

    def _take(self, batch: Batch, found: Lookup) -> bool:
        """Copy what was found. False if some of it had not come when the call's time was over."""
        transfer = found.transfer
        if transfer is None:
            return True
        hits = [i for i, outcome in enumerate(found.outcomes) if outcome is Outcome.OK]
        if not self._every:
            hits = hits[: found.leading]
        width = self.width
        places = [(batch.begin + i) * width + s for i in hits for s in range(width)]
        if len(places) != len(transfer.outcomes):
            raise ProtocolError(f"{len(transfer.outcomes)} results for {len(places)} leased")
        taken: list[int] = []
        for index in transfer.until(self._deadline_ns):
            place = places[index]
            view = transfer.view(index)
            arrived: bytes | None = None
            if self.copier is not None:
                self.copier(place, view)
                if self._verify:
                    arrived = payload_digest(view)
            elif self._verify:
                arrived = copy_out_with_digest(view, self.buffers[place])
            else:
                copy_out(view, self.buffers[place])
            if arrived is not None and not self._holds(transfer, index, arrived):
                self.outcomes[place] = Outcome.CORRUPT
                continue
            taken.append(index)
        for index, outcome in enumerate(transfer.outcomes):
            if outcome is not Outcome.OK:
                late = outcome is Outcome.FAILED and not transfer.done
                self.outcomes[places[index]] = Outcome.DEADLINE if late else outcome
        self._check(transfer, taken, places)
        return transfer.done

    def _holds(self, transfer: Transfer, index: int, arrived: bytes) -> bool:
        """Whether what arrived is what the record's digest says; a chunk that is not sealed yet
        has none and stands on its identity and generation alone."""
        try:
            digest = transfer.digest(index)
        except ArenaError:  # the record is being rewritten: the check will tell
            return True
        return digest is None or arrived == digest

    def _check(self, transfer: Transfer, taken: list[int], places: list[int]) -> None:
        """After the last byte: one check for the batch, one each only if that one fails."""
        try:
            transfer.check()
        except LeaseLost:
            for index in taken:
                try:
                    transfer.check(index)
                except LeaseLost:
                    self.outcomes[places[index]] = Outcome.STALE
                else:
                    self.outcomes[places[index]] = Outcome.OK
            return
        for index in taken:
            self.outcomes[places[index]] = Outcome.OK
