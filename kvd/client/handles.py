"""What a client holds: reservations, leases and transfers, as context managers.

The law of this module: a handle belongs to the session that gave it and is given back exactly once,
at the end of its context at the latest. Bytes that were read under a lease count only after
`check()`; leaving a lease's context does that check, and raises LeaseLost rather than let bytes be
used that may have been replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvd.chunk import Outcome, payload_digest
from kvd.client.call import Call
from kvd.client.channel import Channel
from kvd.client.durations import TIMEOUT_MAX_S, deadline_ns, span_ns
from kvd.client.keys import outcomes as named
from kvd.client.keys import pack_digests, pack_items
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
    UnknownHandle,
)
from kvd.wire import messages as m

_WAIT_NS = 30_000_000_000  # one long poll at most
_GRANTED = int(Outcome.GRANTED)
_OK = int(Outcome.OK)


class Handle:
    """What all three have in common: the session, and how to ask it."""

    def __init__(self, channel: Channel, link: Link | None, timeout_s: float) -> None:
        self._channel = channel
        self._session = link
        self._timeout_s = timeout_s

    @property
    def _link(self) -> Link:
        """The session that gave this handle."""
        if self._session is None:
            raise UnknownHandle("nothing was asked for, and nothing was given")
        return self._session

    def _submit(self, message: m.Request, timeout_s: float | None = None) -> Call:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._channel.submit(
            message, deadline_ns=deadline_ns(timeout_s), serial=self._link.serial
        )

    def _forget(self, message: m.Request) -> None:
        """Send without waiting; if there is no session any more, it has ended there as well."""
        try:
            self._channel.forget(message, self._link.serial)
        except (ClientClosed, Forked):
            return


class Reservation(Handle):
    """Slots to fill. Results are chunk-major: index = key * len(shards) + position in `shards`.

    Leaving the context without commit aborts, and so does an exception; what was committed stays.
    """

    def __init__(
        self, channel: Channel, link: Link | None, reply: m.ReserveReply, timeout_s: float
    ) -> None:
        super().__init__(channel, link, timeout_s)
        self.write = reply.write
        self.outcomes = named(reply.outcomes)
        self.deadline_ns = reply.deadline - (link.offset_ns if link is not None else 0)
        granted = np.flatnonzero(np.frombuffer(reply.outcomes, dtype=np.uint8) == _GRANTED)
        self._granted: NDArray[np.intp] = granted
        maps, epoch = (link.maps, link.epoch) if link is not None else ({}, 0)
        self._slots = Slots(maps, epoch, len(reply.outcomes))
        if reply.refs:
            self._slots.fill(granted, reply.refs)
        self._left: set[int] = set(granted.tolist())
        # Until this write is over, this process may be copying: the session's lock says so.
        self._lock = link.lock if link is not None and self._left else None

    @classmethod
    def empty(cls, channel: Channel, timeout_s: float) -> Self:
        """Of no keys: nobody was asked."""
        return cls(channel, None, m.ReserveReply(0, b"", b"", 0), timeout_s)

    @property
    def granted(self) -> list[int]:
        """Results that are to be filled."""
        found: list[int] = self._granted.tolist()
        return found

    def view(self, index: int) -> memoryview:
        """The slot of a granted result, writable, exactly the payload's bytes. KeyError if it was
        not granted."""
        return self._slots.view(index)

    def array(
        self, index: int, dtype: DTypeLike = np.uint8, shape: Sequence[int] | None = None
    ) -> NDArray[Any]:
        """The slot as a writable array of `dtype` (flat without `shape`)."""
        return self._slots.array(index, dtype, shape)

    def tensor(self, index: int, dtype: Any, shape: Sequence[int] | None = None) -> Any:
        """The slot as a torch tensor on the CPU (flat without `shape`)."""
        return self._slots.tensor(index, dtype, shape)

    def submit_commit(
        self,
        items: Sequence[int] | None = None,
        digests: Sequence[bytes] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Call:
        """Send a commit without waiting. `digests`: 16 bytes for each of `items` (of all granted
        without `items`): the chunks are sealed at once. Pass the call to `committed`."""
        chosen = sorted(self._left) if items is None else list(items)
        for index in chosen:
            if index not in self._left:
                raise KeyError(f"result {index} is not granted, or was committed or aborted")
        if digests is not None and len(digests) != len(chosen):
            raise ValueError(f"{len(chosen)} digests are due, {len(digests)} came")
        packed = None if len(chosen) == len(self.granted) else pack_items(chosen)
        return self._submit(
            m.Commit(self.write, packed, None if digests is None else pack_digests(digests)),
            timeout_s,
        )

    def committed(self, call: Call) -> list[Outcome]:
        """The outcome of every result, after the answer to `call` (waits for it)."""
        message, reply = call.message, call.result()
        if not isinstance(message, m.Commit) or not isinstance(reply, m.OutcomesReply):
            raise ProtocolError("not the answer to a commit")
        chosen = self.granted
        if message.items is not None:
            chosen = np.frombuffer(message.items, dtype="<u4").tolist()
        if len(reply.outcomes) != len(chosen):
            raise ProtocolError(f"{len(reply.outcomes)} outcomes for {len(chosen)} items")
        result = list(self.outcomes)
        for index, outcome in zip(chosen, named(reply.outcomes), strict=True):
            result[index] = outcome
        self.outcomes = tuple(result)
        self._left.difference_update(chosen)
        if not self._left:
            self._lock = None
        return result

    def commit(
        self,
        digests: Sequence[bytes] | None = None,
        *,
        items: Sequence[int] | None = None,
        seal: bool = False,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Make what was filled readable, and wait for the acknowledgement.

        Returns one outcome a result: OK is stored and readable now; for what was not granted, what
        reserve said. `items`: only these. `seal`: compute the digests here. Unavailable when no
        answer came: it may or may not be stored.
        """
        if not self._left and items is None:
            return list(self.outcomes)
        if seal and digests is None:
            chosen = sorted(self._left) if items is None else items
            digests = [payload_digest(self.view(index)) for index in chosen]
        return self.committed(self.submit_commit(items, digests, timeout_s=timeout_s))

    def abort(self, *, wait: bool = False) -> None:
        """Give back what was not committed; the caller copies no more into it. Idempotent."""
        if not self._left:
            return
        left = sorted(self._left)
        packed = None if len(left) == len(self._granted) else pack_items(left)
        message = m.Abort(self.write, packed)
        self._left.clear()
        self._lock = None
        if wait:
            self._submit(message).result()
        else:
            self._forget(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


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
        ready = np.flatnonzero(np.frombuffer(reply.outcomes, dtype=np.uint8) == _OK)
        if reply.refs:
            self._slots.fill(ready, reply.refs)
        self._fresh: list[int] = ready.tolist()
        # How many results are known, in the daemon's order of completion: what `wait` goes on from.
        self._known = len(reply.outcomes) - reply.outcomes.count(0)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """As far as they are known; FAILED where not."""
        return named(bytes(self._raw))

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
        items = np.frombuffer(reply.items, dtype="<u4")
        if items.size and int(items.max()) >= len(self._raw):
            raise ProtocolError("a wait names a result that was not asked for")
        ready = items[np.frombuffer(reply.outcomes, dtype=np.uint8) == _OK]
        if reply.refs:
            self._slots.fill(ready, reply.refs)
        self._fresh += [i for i in dict.fromkeys(ready.tolist()) if self._raw[i] != _OK]
        for index, outcome in zip(items.tolist(), reply.outcomes, strict=True):
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
        items = None if index is None else np.array([index])
        if not self.lease.valid or not self._slots.fresh(items):
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
        read. Answers at once; iterate the transfer."""
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

    def release(self, *, wait: bool = False) -> None:
        """Let go. With `wait`, LeaseLost if the daemon says that the lease had ended before: the
        confirmation for machines with weak memory ordering. Idempotent."""
        if self._released:
            return
        self._released = True
        message = m.Release(self.id)
        if not wait:
            self._forget(message)
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


class Lookup(Handle):
    """The answer to a lookup. As a context manager it gives back all that came with it."""

    def __init__(
        self, channel: Channel, link: Link | None, reply: m.LookupReply, timeout_s: float
    ) -> None:
        super().__init__(channel, link, timeout_s)
        self.raw = reply.outcomes  # one byte a key
        self.leading = reply.leading  # keys of the leading run
        # where hits lie, one byte a key: 0 DRAM, n the n-th tier below it (as `stat` lists them)
        self.tiers = reply.tiers or bytes(len(reply.outcomes))
        self.lease: Lease | None = None
        self.transfer: Transfer | None = None
        self.reservation: Reservation | None = None  # for the keys from `leading` on
        if reply.lease and link is not None:
            self.lease = Lease(channel, link, reply.lease, reply.expiry, timeout_s)
            if reply.load is not None:
                self.transfer = self.lease.adopt(reply.load)
        if reply.reserved is not None:
            self.reservation = Reservation(channel, link, reply.reserved, timeout_s)

    @classmethod
    def empty(cls, channel: Channel, timeout_s: float) -> Self:
        """Of no keys: nobody was asked."""
        return cls(channel, None, m.LookupReply(b"", 0, 0, 0, None, None), timeout_s)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One a key: OK, MISS, PARTIAL, MISMATCH, SKIPPED, OVER_QUOTA ..."""
        return named(self.raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.reservation is not None:
            self.reservation.abort()
        if self.lease is not None:
            self.lease.__exit__(kind, error, trace)
