"""A store of many chunks that hides the round trips.

The law of this module: one batch is always asked for ahead of the one that is copied; every commit
is acknowledged before the call returns.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvd.chunk import Outcome, payload_digest
from kvd.client.call import Call
from kvd.client.copies import copy_into, copy_into_with_digest
from kvd.client.reservation import Reservation
from kvd.client.stream import Batch, Copier, Keys, Stream
from kvd.errors import KvdError, ProtocolError
from kvd.wire import messages as m

if TYPE_CHECKING:
    from kvd.client.base import ClientBase

_COMMITS = 2  # in flight while the next batch is copied
_NO_ROOM = (Outcome.OVER_QUOTA, Outcome.NO_SPACE)


class Filled(NamedTuple):
    """A batch that was copied. `first`: its first result; `digests`: if the client seals."""

    first: int
    reservation: Reservation
    digests: list[bytes] | None


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
                if not self.client.arrived(now.call):
                    self._commit()
                held = self.client.reservation_of(now.call)
                following = self._note(now, held)
                goes_on = following == now.end and following < self.keys.keys
                self._commit(hold=goes_on)
                if goes_on:
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
            self.client.flush()
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
        if reservation.whole:
            return batch.end
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

    def _commit(self, *, hold: bool = False) -> None:
        """Send the commit of what was filled last, if that was not done yet; `hold`: with the next
        question."""
        filled, self._filled = self._filled, None
        if filled is not None:
            left_s = self.client.left_s(self._deadline_ns)
            try:
                call = filled.reservation.submit_commit(
                    None, filled.digests, timeout_s=left_s, hold=hold
                )
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
