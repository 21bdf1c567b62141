"""What a request must be before anything is done.

The law of this module: it changes nothing but the list of spaces. What does not hold is a typed
error that names the thing, the limit and the way out.
"""

from __future__ import annotations

import numpy as np

from kvd.chunk import NO_PARENT, Kind
from kvd.core import events as ev
from kvd.core.reserves import Request
from kvd.core.sessions import Session
from kvd.core.spaces import Space
from kvd.core.store import Store
from kvd.errors import BadKey, LimitExceeded, SpecError, UnknownSession


class Checks:
    """Raises; returns what was checked in the form that is needed next."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def session(self, number: int) -> Session:
        session = self._store.sessions.get(number)
        if session is None:
            raise UnknownSession(f"session {number} is not open: attach again")
        return session

    def space(self, session: Session, spec: bytes, kind: int) -> Space:
        if kind not in (Kind.PREFIX, Kind.CONTENT):
            raise BadKey(f"kind {kind} is unknown: 1 (prefix) or 2 (content)")
        if (session.namespace, spec) not in self._store.spaces.known:
            raise SpecError(f"spec {spec.hex()[:16]} is not registered: register_spec first")
        space = self._store.spaces.make(session.namespace, spec, kind)
        self._store.grow_queues()
        return space

    def shards(self, space: Space, shards: tuple[int, ...], keys: int) -> tuple[int, ...]:
        if not shards:
            raise BadKey("no shard is named: name at least one")
        if len(set(shards)) != len(shards):
            raise BadKey("a shard is named twice")
        for shard in shards:
            if not 0 <= shard < space.shards:
                raise SpecError(f"shard {shard} is not in the spec's table of {space.shards}")
        if keys * len(shards) > self._store.config.max_results:
            raise LimitExceeded(
                f"{keys} keys of {len(shards)} shards are {keys * len(shards)} results, at most "
                f"{self._store.config.max_results} a request: send fewer keys"
            )
        return tuple(shards)

    def keys(self, hashes: bytes) -> int:
        if len(hashes) % ev.HASH_BYTES:
            raise BadKey(f"hashes: {len(hashes)} bytes are no whole number of 32")
        count = len(hashes) // ev.HASH_BYTES
        most = self._store.config.max_keys
        if not 1 <= count <= most:
            raise LimitExceeded(f"{count} keys in a request, from 1 to {most} allowed: split it")
        return count

    def column(self, name: str, data: bytes, size: int, count: int) -> None:
        if len(data) != size * count:
            raise BadKey(f"{name}: {len(data)} bytes for {count} keys, must be {size * count}")

    def request(
        self,
        space: Space,
        shards: tuple[int, ...],
        hashes: bytes,
        parent: bytes,
        index0: int,
        fingerprints: bytes,
        tokens: bytes | None,
        pos0: bytes | None,
        flags: int,
        ttl: int,
    ) -> Request:
        count = self.keys(hashes)
        shards = self.shards(space, shards, count)
        self.column("fingerprints", fingerprints, ev.FINGERPRINT_BYTES, count)
        self.column("parent", parent, ev.HASH_BYTES, 1)
        if not 0 <= index0 <= (1 << 31) - count:
            raise BadKey(f"index0 {index0} is out of range")
        if not 0 <= flags < 1 << 32:
            raise BadKey(f"flags {flags:#x} do not fit 32 bits")
        if parent != NO_PARENT and not space.chained:
            raise BadKey("a content chunk has no parent: send 32 zero bytes")
        if parent != NO_PARENT and not index0:
            raise BadKey("index0 is 0, but a parent is named: a root has none")
        many = None
        if tokens is not None:
            self.column("tokens", tokens, 4, count)
            many = np.frombuffer(tokens, "<u4").tolist()
            most = space.spec.chunk_tokens
            if any(not 1 <= n <= most for n in many):
                raise BadKey(f"tokens of a chunk must be from 1 to the spec's {most}")
        where = None
        if pos0 is not None:
            self.column("pos0", pos0, 8, count)
            where = np.frombuffer(pos0, "<u8").tolist()
        ttl = min(ttl or self._store.config.ttl_default_ns, self._store.config.ttl_max_ns)
        return Request(
            space, shards, hashes, parent, index0, fingerprints, many, where, flags, max(ttl, 1)
        )

    def items(self, items: bytes, limit: int) -> list[int]:
        """Packed u32 numbers below `limit`. BadKey otherwise."""
        if len(items) % 4:
            raise BadKey(f"items: {len(items)} bytes are no whole number of u32")
        numbers: list[int] = np.frombuffer(items, "<u4").tolist()
        if numbers and max(numbers) >= limit:
            raise BadKey(f"item {max(numbers)} is out of range: there are {limit}")
        return numbers
