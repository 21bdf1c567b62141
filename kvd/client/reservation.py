"""Slots to fill, until they are committed or given back.

The law of this module: what leaves its context without a commit is aborted; and while this process
may be copying into a slot, the session's lock says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvd.chunk import Outcome, payload_digest
from kvd.client.call import Call
from kvd.client.channel import Channel
from kvd.client.handle import Handle
from kvd.client.keys import outcomes as named
from kvd.client.keys import pack_digests, pack_items, unpack_items, where
from kvd.client.link import Link
from kvd.client.memory import Slots
from kvd.errors import ProtocolError
from kvd.wire import messages as m

_GRANTED = int(Outcome.GRANTED)


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
        self._granted = where(reply.outcomes, _GRANTED)
        maps, epoch = (link.maps, link.epoch) if link is not None else ({}, 0)
        self._slots = Slots(maps, epoch, len(reply.outcomes))
        if reply.refs:
            self._slots.fill(self._granted, reply.refs)
        self._left = set(self._granted)
        # Until this write is over, this process may be copying: the session's lock says so.
        self._lock = link.lock if link is not None and self._left else None

    @classmethod
    def empty(cls, channel: Channel, timeout_s: float) -> Self:
        """Of no keys: nobody was asked."""
        return cls(channel, None, m.ReserveReply(0, b"", b"", 0), timeout_s)

    @property
    def granted(self) -> list[int]:
        """Results that are to be filled."""
        return list(self._granted)

    @property
    def whole(self) -> bool:
        """Whether every result is granted."""
        return len(self._granted) == len(self.outcomes)

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
        hold: bool = False,
    ) -> Call:
        """Send a commit without waiting. `digests`: 16 bytes for each of `items` (of all granted
        without `items`): the chunks are sealed at once. Pass the call to `committed`. `hold`: it
        goes out with what is asked next."""
        chosen = sorted(self._left) if items is None else list(items)
        for index in chosen:
            if index not in self._left:
                raise KeyError(f"result {index} is not granted, or was committed or aborted")
        if digests is not None and len(digests) != len(chosen):
            raise ValueError(f"{len(chosen)} digests are due, {len(digests)} came")
        packed = None if len(chosen) == len(self._granted) else pack_items(chosen)
        return self._submit(
            m.Commit(self.write, packed, None if digests is None else pack_digests(digests)),
            timeout_s,
            hold=hold,
        )

    def committed(self, call: Call) -> list[Outcome]:
        """The outcome of every result, after the answer to `call` (waits for it)."""
        message, reply = call.message, call.result()
        if not isinstance(message, m.Commit) or not isinstance(reply, m.OutcomesReply):
            raise ProtocolError("not the answer to a commit")
        chosen = self.granted
        if message.items is not None:
            chosen = unpack_items(message.items)
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
