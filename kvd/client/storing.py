"""The storing half of a client.

The law of this module: OK is said of nothing that the daemon did not acknowledge, and what was not
stored has its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvd.chunk import Kind, Outcome
from kvd.client.base import ClientBase, SpecHandle, SpecLike
from kvd.client.copies import as_bytes, copy_into
from kvd.client.inline import InlineStore, put_message
from kvd.client.keys import Hashes, Numbers, outcomes, pack_fingerprints, pack_numbers, whole
from kvd.client.reservation import Reservation
from kvd.client.store import Store
from kvd.client.stream import Copier, Keys
from kvd.errors import SpecError
from kvd.wire import messages as m


class Storing(ClientBase):
    """reserve, store_chunks, put."""

    def reserve(
        self,
        spec: SpecLike,
        hashes: Hashes,
        fingerprints: Hashes | None = None,
        *,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        parent: bytes | None = None,
        index0: int = 0,
        tokens: Numbers | None = None,
        pos0: Numbers | None = None,
        flags: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Reservation:
        """Slots to fill, a leading run; results are chunk-major over `shards`.

        `parent`: hash of the chunk before the first one (None: a root). `tokens`, `pos0`: for
        chunks that are not full or not at (index0 + i) * chunk_tokens. `ttl_s`: until unfinished
        slots are taken back (None: as long as the daemon says). ConfigError if this client maps
        no memory.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, parent, index0, timeout_s)
        message = m.Reserve(
            keys.spec,
            keys.kind,
            keys.shards,
            keys.hashes,
            keys.parent,
            keys.index0,
            keys.fingerprints or pack_fingerprints(None, keys.keys),
            pack_numbers(tokens, "<u4", keys.keys, "tokens"),
            pack_numbers(pos0, "<u8", keys.keys, "pos0"),
            whole(flags, "flags"),
            self._ttl_ns(ttl_s, timeout_s),
        )
        if not keys.keys:
            return Reservation.empty(self._channel, self.timeout_s)
        self.info(timeout_s).check_memory("reserve")
        return self.reservation_of(self.submit_at(message, self.deadline_ns(timeout_s)))

    def store_chunks(
        self,
        spec: SpecLike,
        hashes: Hashes,
        fingerprints: Hashes | None,
        fill: Copier,
        *,
        batch: int = 16,
        shards: Sequence[int] = (0,),
        kind: Kind = Kind.PREFIX,
        parent: bytes | None = None,
        index0: int = 0,
        tokens: Numbers | None = None,
        pos0: Numbers | None = None,
        flags: int = 0,
        ttl_s: float | None = None,
        seal: bool = False,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Store many chunks, reserving one batch of `batch` keys ahead of the one being copied.

        `fill(result, view)` writes a slot, or `fill` is one buffer a result. Returns one outcome a
        result: OK was acknowledged as stored; EXISTS was there. `seal`: compute the digests here.
        `timeout_s` is for the whole call. Without shared memory this is a put a key.
        """
        keys = self._keys(spec, hashes, fingerprints, shards, kind, parent, index0, timeout_s)
        keys = keys._replace(
            fingerprints=keys.fingerprints or pack_fingerprints(None, keys.keys),
            tokens=pack_numbers(tokens, "<u4", keys.keys, "tokens"),
            pos0=pack_numbers(pos0, "<u8", keys.keys, "pos0"),
        )
        if not keys.keys:
            return []
        deadline_ns = self.deadline_ns(timeout_s)
        ttl_ns = self._ttl_ns(ttl_s, timeout_s)
        flags = whole(flags, "flags")
        if self.info(timeout_s).maps_memory:
            stream = Store(
                self,
                keys,
                fill,
                whole(batch, "batch"),
                flags=flags,
                ttl_ns=ttl_ns,
                seal=bool(seal),
            )
            return stream.run(deadline_ns)
        sizes = self._sizes(spec, keys)
        inline = InlineStore(self, keys, fill, sizes=sizes, flags=flags, ttl_ns=ttl_ns)
        return inline.run(deadline_ns)

    def put(
        self,
        spec: SpecLike,
        key: bytes,
        fingerprint: bytes | None,
        data: Any,
        *,
        shard: int = 0,
        kind: Kind = Kind.PREFIX,
        parent: bytes | None = None,
        index: int = 0,
        tokens: int | None = None,
        pos0: int | None = None,
        flags: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Store one shard of one chunk in one call: OK, EXISTS, BUSY, NO_SPACE, ...

        Through shared memory where it is mapped, else inline. ValueError if `data` (any
        contiguous buffer) has not the chunk's size.
        """
        deadline_ns = self.deadline_ns(timeout_s)
        raw = as_bytes(data)
        numbers = {
            "tokens": None if tokens is None else [tokens],
            "pos0": None if pos0 is None else [pos0],
        }
        if self.info(timeout_s).maps_memory:
            with self.reserve(
                spec,
                [key],
                None if fingerprint is None else [fingerprint],
                shards=(shard,),
                kind=kind,
                parent=parent,
                index0=index,
                flags=flags,
                ttl_s=ttl_s,
                timeout_s=self.left_s(deadline_ns),
                **numbers,
            ) as reservation:
                if not reservation.granted:
                    return reservation.outcomes[0]
                copy_into(reservation.view(0), raw)
                return reservation.commit(timeout_s=self.left_s(deadline_ns))[0]
        keys = self._keys(
            spec,
            [key],
            None if fingerprint is None else [fingerprint],
            (shard,),
            kind,
            parent,
            index,
            timeout_s,
        )._replace(
            tokens=pack_numbers(numbers["tokens"], "<u4", 1, "tokens"),
            pos0=pack_numbers(numbers["pos0"], "<u8", 1, "pos0"),
        )
        if keys.fingerprints is None:
            keys = keys._replace(fingerprints=pack_fingerprints(None, 1))
        ttl_ns = self._ttl_ns(ttl_s, timeout_s)
        message = put_message(keys, 0, 1, whole(flags, "flags"), ttl_ns)
        call = self.submit_at(message, deadline_ns, [raw.data])
        return outcomes(self._reply(call, m.OutcomesReply).outcomes)[0]

    @staticmethod
    def _sizes(spec: SpecLike, keys: Keys) -> list[int]:
        """Payload bytes of each shard. SpecError if only a spec's digest is at hand."""
        layout = spec.spec if isinstance(spec, SpecHandle) else spec
        if isinstance(layout, bytes):
            raise SpecError("without shared memory a KVSpec or SpecHandle is due, not a digest")
        return [layout.shards[shard].nbytes for shard in keys.shards]
