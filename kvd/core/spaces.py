"""Spaces: all chunks of one (namespace, spec, kind), and the specs that are known.

The law of this module: a key is looked up in the asker's own space only, so a foreign key is a
miss like any other. A namespace knows the specs that it registered or has chunks of: nobody learns
which models another one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvd.chunk import Kind, KVSpec, namespace_digest
from kvd.core.columns import NONE
from kvd.core.config import slot_size
from kvd.core.index import Index, Rows
from kvd.core.shares import Shares
from kvd.errors import LimitExceeded

MAX_SPACES: Final = (1 << 16) - 1  # a row has 16 bits for the number of its space


class Space:
    """What is common to its chunks, and its sums."""

    def __init__(
        self, number: int, namespace: str, tenant: int, spec: KVSpec, kind: int, index: Index
    ) -> None:
        self._index = index
        self.number = number
        self.tenant = tenant
        self.namespace = namespace
        self.spec = spec
        self.digest = spec.digest
        self.namespace_digest = namespace_digest(namespace)
        self.kind = kind
        # mixed into what stands for its keys in policies: another tenant's use of a key is no use
        words = int.from_bytes(self.namespace_digest[:8]) * 3 + int.from_bytes(spec.digest[:8])
        self.salt = (words * 5 + kind) & (1 << 64) - 1
        self.chained = kind == Kind.PREFIX
        self.chunk_tokens = spec.chunk_tokens
        self.shards = len(spec.shards)
        self.nbytes = tuple(s.nbytes for s in spec.shards)
        self.slot_sizes = tuple(slot_size(n) for n in self.nbytes)
        self.chunk_slot_bytes = sum(self.slot_sizes)
        self.classes = tuple(sorted(set(self.slot_sizes)))
        self.queues = (NONE, NONE)  # of the policy: for chunks of this life, for adopted ones
        self.chunks = 0  # with at least one shard that is ready or in quarantine
        self.bytes = 0  # payload bytes of those shards
        self.hits = 0
        self.alone = 0  # chunks that are in tiers below only
        self.below_bytes = 0  # payload bytes in these tiers

    def get(self, key: bytes) -> int:
        """Row of a key, or NONE."""
        return self._index.get(self.number, key)

    def get_many(self, hashes: bytes) -> Rows:
        """Rows (or NONE) of packed 32-byte keys."""
        return self._index.get_many(self.number, hashes)


class Spaces:
    """All spaces by number (from 1), and the registry of specs and namespaces."""

    def __init__(self, index: Index, shares: Shares) -> None:
        self._index = index
        self._shares = shares
        self.specs: dict[bytes, KVSpec] = {}
        self.known: set[tuple[str, bytes]] = set()  # namespace, spec that it may use
        self.namespaces: dict[str, None] = {}
        self.version = 0  # rises when a spec or namespace is new
        self._numbers: dict[tuple[str, bytes, int], int] = {}
        self._by_digest: dict[tuple[bytes, bytes, int], int] = {}  # the namespace's
        self.by_number: list[Space | None] = [None]
        self.salts = [0]
        self._queues: dict[tuple[str, tuple[int, ...], bool], int] = {}
        self.queue_classes: list[tuple[int, ...]] = []
        self.queue_adopted: list[bool] = []
        self.queue_tenants: list[int] = []
        self.class_queues: dict[int, list[int]] = {}  # slot size -> queues with such slots

    def register(self, spec: KVSpec, namespace: str | None = None) -> None:
        """Keep a spec, for a namespace to use."""
        if namespace is not None:
            self.known.add((namespace, spec.digest))
        if spec.digest not in self.specs:
            self.specs[spec.digest] = spec
            self.version += 1

    def forget_unused(self) -> None:
        """Drop the specs that no namespace knows: who needs one registers it."""
        used = {digest for _, digest in self.known}
        if len(used) < len(self.specs):
            self.specs = {digest: spec for digest, spec in self.specs.items() if digest in used}
            self.version += 1

    def name(self, namespace: str) -> None:
        if namespace not in self.namespaces:
            self.namespaces[namespace] = None
            self.version += 1

    def find(self, namespace: str, spec: bytes, kind: int) -> Space | None:
        number = self._numbers.get((namespace, spec, kind))
        return None if number is None else self.by_number[number]

    def find_digest(self, namespace_digest: bytes, spec: bytes, kind: int) -> Space | None:
        """The same by the digest of the namespace, as a record has it."""
        number = self._by_digest.get((namespace_digest, spec, kind))
        return None if number is None else self.by_number[number]

    def make(self, namespace: str, spec: bytes, kind: int) -> Space:
        """The space, new if need be. Pre: the spec is registered."""
        found = self.find(namespace, spec, kind)
        if found is not None:
            return found
        number = len(self.by_number)
        if number > MAX_SPACES:
            raise LimitExceeded(f"{MAX_SPACES} (namespace, spec, kind) are in use, no more fit")
        tenant = self._shares.number(namespace)
        space = Space(number, namespace, tenant, self.specs[spec], kind, self._index)
        space.queues = (
            self._queue(namespace, space.classes, False),
            self._queue(namespace, space.classes, True),
        )
        self._numbers[namespace, spec, kind] = number
        self._by_digest[space.namespace_digest, spec, kind] = number
        self.known.add((namespace, spec))
        self.by_number.append(space)
        self.salts.append(space.salt)
        self.name(namespace)
        return space

    def of(self, number: int) -> Space:
        space = self.by_number[number]
        assert space is not None
        return space

    def all(self) -> Sequence[Space]:
        return [space for space in self.by_number if space is not None]

    def _queue(self, namespace: str, classes: tuple[int, ...], adopted: bool) -> int:
        name = (namespace, classes, adopted)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = len(self.queue_classes)
            self.queue_classes.append(classes)
            self.queue_adopted.append(adopted)
            self.queue_tenants.append(self._shares.number(namespace))
            for size in classes:
                self.class_queues.setdefault(size, []).append(queue)
        return queue
