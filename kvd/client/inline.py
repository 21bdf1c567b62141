"""Bytes through the socket, for clients that can't map memory.

The law of this module: the same outcomes as through shared memory, at the price of the daemon
copying; a few requests are in flight, each as large as the limits told at hello allow.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvd.chunk import Outcome
from kvd.client.call import Call
from kvd.client.copies import as_bytes, copy_out
from kvd.client.keys import outcomes
from kvd.client.stream import Copier, Keys, Stream
from kvd.errors import ProtocolError
from kvd.wire import GetFlag
from kvd.wire import messages as m

if TYPE_CHECKING:
    from kvd.client.base import ClientBase

_IN_FLIGHT = 4


def put_message(keys: Keys, begin: int, end: int, flags: int, ttl_ns: int) -> m.Put:
    """The put of keys [begin, end); a payload frame a result goes with it."""
    return m.Put(
        keys.spec,
        keys.kind,
        keys.shards,
        keys.hashes[32 * begin : 32 * end],
        keys.parent_of(begin),
        keys.index0 + begin,
        keys.part("fingerprints", 16, begin, end) or b"",
        keys.part("tokens", 4, begin, end),
        keys.part("pos0", 8, begin, end),
        flags,
        ttl_ns,
    )


def get_message(keys: Keys, begin: int, end: int, *, every: bool, public: bool = False) -> m.Get:
    """The get of keys [begin, end)."""
    return m.Get(
        keys.spec,
        keys.kind,
        keys.shards,
        keys.hashes[32 * begin : 32 * end],
        keys.part("fingerprints", 16, begin, end),
        (int(GetFlag.EVERY) if every else 0) | (int(GetFlag.PUBLIC) if public else 0),
    )


class InlineStore(Stream):
    """A streamed store of one key a put (a put is copied as a whole, so it should be small)."""

    def __init__(
        self,
        client: ClientBase,
        keys: Keys,
        fill: Copier,
        *,
        sizes: list[int],
        flags: int,
        ttl_ns: int,
    ) -> None:
        super().__init__(client, keys, fill, 1)
        self._sizes = sizes  # payload bytes of each shard, for `fill`
        self._flags = flags
        self._ttl_ns = ttl_ns
        self._flying: deque[tuple[int, Call]] = deque()

    def run(self, deadline_ns: int) -> list[Outcome]:
        """All of it: one outcome a result."""
        for key in range(self.keys.keys):
            first = key * self.width
            payload = [self._bytes(first + s, self._sizes[s]) for s in range(self.width)]
            message = put_message(self.keys, key, key + 1, self._flags, self._ttl_ns)
            call = self.client.submit_at(message, deadline_ns, payload)
            self._flying.append((first, call))
            self._collect(_IN_FLIGHT)
        self._collect(0)
        return self.outcomes

    def _bytes(self, index: int, size: int) -> memoryview:
        if self.copier is None:
            return as_bytes(self.buffers[index]).data
        made = memoryview(bytearray(size))
        self.copier(index, made)
        return made

    def _collect(self, keep: int) -> None:
        while len(self._flying) > keep:
            first, call = self._flying.popleft()
            reply = call.result()
            if not isinstance(reply, m.OutcomesReply) or len(reply.outcomes) != self.width:
                raise ProtocolError("not an answer to this put")
            self.outcomes[first : first + self.width] = outcomes(reply.outcomes)


class InlineLoad(Stream):
    """A streamed load of one key a get, a few ahead."""

    def __init__(self, client: ClientBase, keys: Keys, take: Copier, *, every: bool) -> None:
        super().__init__(client, keys, take, 1)
        self._every = every

    def run(self, deadline_ns: int) -> list[Outcome]:
        """All of it: one outcome a result."""
        flying: deque[tuple[int, Call]] = deque()
        asked = 0
        while asked < self.keys.keys or flying:
            while asked < self.keys.keys and len(flying) < _IN_FLIGHT:
                public = self.client.public
                message = get_message(self.keys, asked, asked + 1, every=True, public=public)
                flying.append((asked, self.client.submit_at(message, deadline_ns)))
                asked += 1
            key, call = flying.popleft()
            if self._take(key, call) or self._every:
                continue
            self.rest(key + 1, Outcome.SKIPPED)
            for _, unneeded in flying:
                unneeded.cancel()
            break
        return self.outcomes

    def _take(self, key: int, call: Call) -> bool:
        """Hand out what came; whether all shards did."""
        reply = call.result()
        if not isinstance(reply, m.OutcomesReply) or len(reply.outcomes) != self.width:
            raise ProtocolError("not an answer to this get")
        frames = iter(call.frames)
        first = key * self.width
        said = outcomes(reply.outcomes)
        if said.count(Outcome.OK) != len(call.frames):
            raise ProtocolError(f"{len(call.frames)} payload frames for {said.count(Outcome.OK)}")
        for index, outcome in enumerate(said):
            if outcome is Outcome.OK:
                view = memoryview(next(frames))
                if self.copier is not None:
                    self.copier(first + index, view)
                else:
                    copy_out(view, self.buffers[first + index])
            self.outcomes[first + index] = outcome
        return all(outcome is Outcome.OK for outcome in said)
