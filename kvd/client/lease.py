"""Leases, and the transfers that bring their chunks to where they can be read.

The law of this module: bytes that were read under a lease count only after `check()`; leaving a
lease's context does that check, and raises LeaseLost rather than let bytes be used that may have
been replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvd.chunk import Outcome
from kvd.client.channel import Channel
from kvd.client.durations import TIMEOUT_MAX_S, deadline_ns, span_ns
from kvd.client.handle import Handle
from kvd.client.keys import outcomes as named
from kvd.client.keys import pack_items, unpack_items, where
from kvd.client.link import Link
from kvd.client.memory import Slots
from kvd.client.settings import LEASE_MARGIN_NS, SharedLease
from kvd.errors import (
    ClientClosed,
    Forked,
    KvdError,
    LeaseLost,
    ProtocolError,
    StaleEpoch,
    Unavailable,
)
from kvd.wire import messages as m

_WAIT_NS = 30_000_000_000  # one long poll at most
_OK = int(Outcome.OK)


class Transfer(Handle):
    """Chunks of a lease that are, or will be, where this process can read them.

    Iterating yields result numbers as they become ready (OK), and ends when all are known.
    Index = position in the load * number of shards + position in the shards.
    """

    def __init__(
        self, channel: Channel, lease: Lease, link: Link, reply: m.LoadReply, timeout_s: float
    ) -> None:
        super().__init__(channel, link, timeout_s)
        self.lease = lease
        self.id = reply.transfer
        self.done = reply.done
        self._raw = bytearray(reply.outcomes)
        self._slots = Slots(link.maps, link.epoch, len(reply.outcomes))
        self._fresh = where(reply.outcomes, _OK)
        if reply.refs:
            self._slots.fill(self._fresh, reply.refs)
        # How many results are known, in the daemon's order of completion: what `wait` goes on from.
        self._known = len(reply.outcomes) - reply.outcomes.count(0)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """As far as they are known; FAILED where not."""
        return named(bytes(self._raw))

    @property
    def whole(self) -> bool:
        """Whether every result is OK."""
        return self._raw.count(_OK) == len(self._raw)

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Results that became ready and were not handed out before; waits until there is one, all
        are known, or `timeout_s` (the client's default) has passed."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        until_ns = deadline_ns(timeout_s)
        while not self._fresh and not self.done:
            left_ns = until_ns - time.monotonic_ns()
            if left_ns <= 0:
                break
            self._ask(left_ns)
        ready, self._fresh = self._fresh, []
        return ready

    def _ask(self, left_ns: int) -> None:
        message = m.Wait(self.id, self._known, min(left_ns, _WAIT_NS))
        reply = self._submit(message, min(left_ns / 1e9 + 1.0, TIMEOUT_MAX_S)).result()
        if not isinstance(reply, m.WaitReply):
            raise ProtocolError("not the answer to a wait")
        items = unpack_items(reply.items)
        if items and max(items) >= len(self._raw):
            raise ProtocolError("a wait names a result that was not asked for")
        ready = [items[at] for at in where(reply.outcomes, _OK)]
        if reply.refs:
            self._slots.fill(ready, reply.refs)
        self._fresh += [i for i in dict.fromkeys(ready) if self._raw[i] != _OK]
        for index, outcome in zip(items, reply.outcomes, strict=True):
            self._raw[index] = outcome
        self._known = reply.known
        self.done = reply.done

    def __iter__(self) -> Iterator[int]:
        yield from self.until(deadline_ns(self._timeout_s))
        if not self.done:
            raise Unavailable(f"the transfer was not finished within {self._timeout_s} s")

    def until(self, until_ns: int) -> Iterator[int]:
        """Results as they become ready, no longer than until then (ns, CLOCK_MONOTONIC): `done`
        tells whether that was all."""
        while True:
            ready = self.wait(max(0.0, (until_ns - time.monotonic_ns()) / 1e9))
            yield from ready
            if (self.done and not self._fresh) or (not ready and time.monotonic_ns() >= until_ns):
                return

    def view(self, index: int) -> memoryview:
        """The payload of a ready result, read-only. KeyError if it is not ready."""
        return self._slots.view(index).toreadonly()

    def array(
        self, index: int, dtype: DTypeLike = np.uint8, shape: Sequence[int] | None = None
    ) -> NDArray[Any]:
        """The payload as a read-only array (flat without `shape`)."""
        found = self._slots.array(index, dtype, shape)
        found.flags.writeable = False
        return found

    def tensor(self, index: int, dtype: Any, shape: Sequence[int] | None = None) -> Any:
        """The payload as a torch tensor on the CPU. Torch has no read-only tensors: who writes
        into it spoils the cache for everybody."""
        return self._slots.tensor(index, dtype, shape)

    def digest(self, index: int) -> bytes | None:
        """The payload's digest as the record has it; None while the chunk is not sealed."""
        return self._slots.digest(index)

    def check(self, index: int | None = None) -> None:
        """After the last byte was used: LeaseLost if this result (all, if None) may have been
        replaced meanwhile. What was read must then be thrown away."""
        if not self.lease.valid or not self._slots.fresh(index):
            raise LeaseLost(
                f"lease {self.lease.id} ended before the bytes were used: throw them away and "
                f"look up again; ask for a longer lease, or renew it"
            )

    def cancel(self) -> None:
        """Stop what is not finished; the lease stays."""
        if not self.done and self.id:
            self.done = True
            self._forget(m.Cancel(self.id))


class Lease(Handle):
    """Chunks that can't be evicted until `expiry_ns` (CLOCK_MONOTONIC of this process).

    A lease that was joined belongs to another session of the group: leaving its context checks it,
    but does not release it.
    """

    def __init__(
        self, channel: Channel, link: Link, lease: int, expiry: int, timeout_s: float
    ) -> None:
        super().__init__(channel, link, timeout_s)
        self.id = lease
        self.expiry_ns = expiry - link.offset_ns
        self._released = False
        self._joined = False
        self._transfers: list[Transfer] = []

    @classmethod
    def join(cls, channel: Channel, link: Link, shared: SharedLease, timeout_s: float) -> Self:
        """A lease that another session of the group took. StaleEpoch if the daemon restarted."""
        if shared.epoch != link.epoch:
            raise StaleEpoch(
                f"lease {shared.id} is of epoch {shared.epoch}, the daemon's is {link.epoch}"
            )
        lease = cls(channel, link, shared.id, shared.expiry_ns, timeout_s)
        lease._joined = True
        return lease

    def share(self) -> SharedLease:
        """What another session of the group needs to join."""
        link = self._link
        return SharedLease(self.id, self.expiry_ns + link.offset_ns, link.epoch)

    @property
    def valid(self) -> bool:
        """Not released, and not yet near its expiry."""
        return not self._released and time.monotonic_ns() < self.expiry_ns - LEASE_MARGIN_NS

    def load(
        self,
        items: Sequence[int] | None = None,
        *,
        shards: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Start to bring chunks (positions within the lease; all, if None) to where they can be
        read. Answers at once; iterate the transfer. ConfigError if this client maps no memory."""
        if self._link.info is not None:
            self._link.info.check_memory("load")
        message = m.Load(
            self.id,
            None if items is None else pack_items(items),
            None if shards is None else tuple(shards),
        )
        reply = self._submit(message, timeout_s).result()
        if not isinstance(reply, m.LoadReply):
            raise ProtocolError("not the answer to a load")
        return self.adopt(reply, timeout_s)

    def adopt(self, reply: m.LoadReply, timeout_s: float | None = None) -> Transfer:
        """The transfer that an answer describes, kept with this lease for its checks."""
        transfer = Transfer(
            self._channel,
            self,
            self._link,
            reply,
            self._timeout_s if timeout_s is None else timeout_s,
        )
        self._transfers.append(transfer)
        return transfer

    def renew(self, seconds: float, *, timeout_s: float | None = None) -> int:
        """Hold on for `seconds` from now on; the new expiry. UnknownHandle if it ended already."""
        reply = self._submit(m.Renew(self.id, span_ns(seconds, "seconds")), timeout_s).result()
        if not isinstance(reply, m.LeaseReply):
            raise ProtocolError("not the answer to a renew")
        self.expiry_ns = reply.expiry - self._link.offset_ns
        return self.expiry_ns

    def check(self) -> None:
        """LeaseLost if what was loaded under this lease may have been replaced."""
        for transfer in self._transfers:
            transfer.check()
        if not self.valid:
            raise LeaseLost(f"lease {self.id} has ended: look up again, or ask for a longer one")

    def release(self, *, wait: bool = False, hold: bool = False) -> None:
        """Let go. With `wait`, LeaseLost if the daemon says that the lease had ended before: the
        confirmation for machines with weak memory ordering. `hold`: it may go out with what is
        asked next. Idempotent."""
        if self._released:
            return
        self._released = True
        self._transfers = []  # they refer to this lease: no circle stays behind
        message = m.Release(self.id)
        if not wait:
            self._forget(message, hold=hold)
            return
        try:
            self._submit(message).result()
        except (ClientClosed, Forked, Unavailable):
            raise
        except KvdError as error:
            raise LeaseLost(f"lease {self.id} had ended before its release: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self._released:
                self.check()
        finally:
            if not self._joined:
                self.release()
