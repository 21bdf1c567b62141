"""What other capacities would have hit, learned from the requests that come by.

The law of this module: a lookup that leases, or a store, is noted as it comes, in a microsecond,
and looked at after the reply, many keys together, or when somebody asks for the curves; what would
grow too long is left out, and counted. One sample of all namespaces, and one for each of those used
of late, `TENANTS` at most. Capacities are in bytes of slots, as limits are.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.core.config import SECOND_NS, CoreConfig
from kvd.core.spaces import Space
from kvd.eviction.distances import SAMPLES, Distances

TENANTS: Final = 32
SLICE: Final = 64  # keys looked at in one slice: a lookup that comes meanwhile waits for it
HALF_LIFE_S: Final = 6 * 3600.0
_TENANT_SAMPLES: Final = 2048
_RATE: Final = 0.25  # of all keys, followed at first: many at once must not cost much then
_REACH: Final = 4  # distances are followed up to so many times all that the tiers hold
_WORTH: Final = 64  # keys that are looked at together, if no more come
_NOTED: Final = 1 << 16  # keys that may wait to be looked at
_POINTS, _TENANT_POINTS = 48, 24
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_MASK: Final = (1 << 64) - 1


class Note(NamedTuple):
    stored: bool
    space: Space
    hashes: bytes
    now: int


class Reuses:
    """Reuse distances of all requests, and of each tenant's."""

    def __init__(self, config: CoreConfig) -> None:
        self._seed = config.seed
        self._reach = _REACH * (config.size + sum(tier.limit for tier in config.tiers))
        self._notes: deque[Note] = deque()
        self._noted = 0
        self.left_out = 0  # keys that came too fast
        self._all: Distances | None = None
        self._tenants: dict[str, Distances] = {}
        self._used: dict[str, int] = {}  # ns, of each tenant's last use

    @property
    def waiting(self) -> bool:
        """Whether so many keys are waiting that it pays to look at them: a few at a time cost
        several times as much."""
        return self._noted >= _WORTH

    # -- as they come ---------------------------------------------------------------------------

    def note(self, space: Space, hashes: bytes, now: int, *, stored: bool = False) -> None:
        """Somebody asked for these keys, or stores them."""
        self._notes.append(Note(stored, space, hashes, now))
        self._noted += len(hashes) // 32
        while self._noted > _NOTED:
            lost = len(self._notes.popleft().hashes) // 32
            self._noted -= lost
            self.left_out += lost

    def crowded(self) -> bool:
        """So many are waiting that the next event has to look at some."""
        return len(self._notes) > 64 or self._noted > _NOTED // 4

    # -- after the reply ------------------------------------------------------------------------

    def apply(self, budget: int = SLICE) -> None:
        """Look at up to `budget` keys of one space, oldest first."""
        notes = self._notes
        if not notes:
            return
        first = notes.popleft()
        hashes, lengths = [first.hashes], [len(first.hashes) // 32]
        size = lengths[0]
        while notes and size < budget:
            then = notes[0]
            if then.space is not first.space or then.stored != first.stored:
                break
            size += len(then.hashes) // 32
            hashes.append(then.hashes)
            lengths.append(len(then.hashes) // 32)
            notes.popleft()
        if size > budget:  # a part of the last request, from its leaf; the rest is next
            over = min(size - budget, lengths[-1] - 1)
            last = hashes[-1]
            hashes[-1], lengths[-1] = last[32 * over :], lengths[-1] - over
            size -= over
            if over:
                notes.appendleft(first._replace(hashes=last[: 32 * over]))
        self._noted -= size
        self._tell(first, b"".join(hashes), lengths)

    def _tell(self, note: Note, hashes: bytes, lengths: list[int]) -> None:
        digests = self._digests(note.space, hashes)
        size = note.space.chunk_slot_bytes
        if self._all is None:
            self._all = Distances(SAMPLES, _RATE, self._reach, HALF_LIFE_S)
        for distances in (self._all, self._tenant(note.space.namespace, note.now)):
            if distances is not None:
                tell = distances.stored if note.stored else distances.asked
                tell(digests, size, note.now, lengths)

    def _digests(self, space: Space, hashes: bytes) -> NDArray[np.uint64]:
        """64 bits a key; the seed is secret, so that no client chooses what is followed."""
        words = np.frombuffer(hashes, "<u8").reshape(-1, 4)
        mixed = words[:, 0] ^ words[:, 1] ^ words[:, 2] ^ words[:, 3]
        salt = (self._seed ^ (space.number * 0xBF58476D1CE4E5B9)) & _MASK
        digests: NDArray[np.uint64] = (mixed ^ np.uint64(salt)) * _ODD
        return digests ^ (digests >> np.uint64(32))

    def _tenant(self, namespace: str, now: int) -> Distances | None:
        found = self._tenants.get(namespace)
        if found is None:
            if len(self._tenants) >= TENANTS:
                idle = min(self._used, key=lambda name: self._used[name])
                if now - self._used[idle] < HALF_LIFE_S * SECOND_NS:
                    return None  # all of them are in use
                del self._tenants[idle], self._used[idle]
            found = Distances(_TENANT_SAMPLES, _RATE, self._reach, HALF_LIFE_S)
            self._tenants[namespace] = found
        self._used[namespace] = now
        return found

    # -- shown ----------------------------------------------------------------------------------

    def stat(self, namespace: str | None) -> dict[str, Any]:
        """Curves of a tenant, or of all and each (None). `curve`: [bytes of an LRU, percent of the
        chunks asked for that it would have hit]."""
        if not self.waiting:
            while self._notes:
                self.apply()
        names = sorted(self._tenants) if namespace is None else [namespace]
        tenants = {
            name: _shown(self._tenants[name], _TENANT_POINTS)
            for name in names
            if name in self._tenants
        }
        if namespace is not None:
            return {"tenants": tenants}
        every = {} if self._all is None else _shown(self._all, _POINTS)
        return {"all": every, "tenants": tenants, "left_out": self.left_out}


def _shown(distances: Distances, points: int) -> dict[str, Any]:
    return {
        "uses": int(distances.uses),
        "sampled": distances.sampled,
        "followed": distances.followed,
        "rate": round(distances.rate, 6),
        "curve": [[p.nbytes, round(100.0 * p.hit, 2)] for p in distances.curve(points)],
    }
