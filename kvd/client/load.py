"""A load of many chunks that hides the round trips.

The law of this module: one batch is always asked for ahead of the one that is copied; nothing that
was delivered is called OK before its lease, epoch and generation were checked after its last byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.chunk import Outcome, payload_digest
from kvd.client.copies import copy_out, copy_out_with_digest
from kvd.client.keys import where
from kvd.client.lease import Transfer
from kvd.client.lookup import Lookup
from kvd.client.stream import Batch, Copier, Keys, Stream
from kvd.errors import ArenaError, LeaseLost, ProtocolError
from kvd.wire import LookupFlag
from kvd.wire import messages as m

if TYPE_CHECKING:
    from kvd.client.base import ClientBase

_OK = int(Outcome.OK)


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
                if not self.client.arrived(now.call):
                    self._release()
                found = self.client.lookup_of(now.call)
                following = self._note(now, found)
                goes_on = following == now.end and following < self.keys.keys
                self._release(hold=goes_on)
                if goes_on:
                    ahead = self._ask(following, alone=False)
                self._taken, found = found, None
                if not self._take(now, self._taken):
                    self.rest(following, Outcome.DEADLINE)
                    break
                if ahead is None:
                    self._release()
                    ahead = self._ask(following, alone=True)
        except BaseException:
            self.client.flush()
            raise
        finally:
            self._release()
            if found is not None and found.lease is not None:
                found.lease.release()
            if ahead is not None:
                ahead.call.cancel()
        return self.outcomes

    def _release(self, *, hold: bool = False) -> None:
        """Let go of the batch that was copied last, if that was not done yet; `hold`: with the
        next question."""
        taken, self._taken = self._taken, None
        if taken is not None and taken.lease is not None:
            taken.lease.release(hold=hold)

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
        if len(found.raw) != batch.end - batch.begin:
            raise ProtocolError(f"{len(found.raw)} outcomes for {batch.end - batch.begin} keys")
        if found.raw.count(_OK) == found.leading == len(found.raw):
            return batch.end
        said = found.outcomes
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
        hits = where(found.raw, _OK)
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
        for index, outcome in enumerate(() if transfer.whole else transfer.outcomes):
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
