"""What is remembered of chunks that were evicted.

The law of this module: bounded, first in first out, and a digest is here or resident, never both:
`take` removes. At most `MOST` (some 70 MB), however large the cache. 64-bit digests can collide;
the price is a wrong score, never a wrong byte.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from kvd.eviction.base import Ghostly

MOST = 1 << 19


class Ghosts:
    """A ring of (digest, `width` numbers). The ring only grows: its bound follows the largest
    number of resident chunks."""

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._place: dict[int, int] = {}
        self._digest = array("Q")
        self._values = array("d")
        self._hand = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, digest: int) -> bool:
        return digest in self._place

    def put(self, digest: int, values: tuple[float, ...], limit: int) -> tuple[float, ...] | None:
        """Remember; at most `limit` digests. What had to go for it, the oldest, is returned."""
        limit = min(limit, MOST)
        if limit <= 0:
            return values
        self._place.pop(digest, None)
        hand, width = self._hand, self._width
        if hand >= len(self._digest):
            if hand < limit:
                self._digest.append(digest)
                self._values.extend(values)
                self._place[digest] = hand
                self._hand = hand + 1
                return None
            hand = 0
        old, lost = self._digest[hand], None
        if self._place.get(old) == hand:
            del self._place[old]
            lost = self._numbers(hand)
        self._digest[hand] = digest
        at, numbers = hand * width, self._values
        for value in values:
            numbers[at] = value
            at += 1
        self._place[digest] = hand
        self._hand = hand + 1
        return lost

    def take(self, digest: int) -> tuple[float, ...] | None:
        """What was remembered, and forget it."""
        place = self._place.pop(digest, None)
        if place is None:
            return None
        return self._numbers(place)

    def _numbers(self, place: int) -> tuple[float, ...]:
        return tuple(self._values[place * self._width : (place + 1) * self._width])

    def values(self) -> NDArray[np.float64]:
        """All numbers of the ring, [digests, width]; a few may be of digests taken since."""
        return np.frombuffer(self._values).reshape(len(self._digest), self._width)

    def part(self, begin: int, count: int) -> Ghostly | None:
        """Digests and numbers of some, oldest first, from place `begin` on; None from the last on.
        Those that were taken meanwhile are left out."""
        size = len(self._digest)
        if begin >= size:
            return None
        places = (np.arange(begin, min(begin + count, size)) + self._hand) % size
        digests = np.frombuffer(self._digest, np.uint64)[places]
        pairs = zip(digests.tolist(), places.tolist(), strict=True)
        live = np.array([self._place.get(digest) == place for digest, place in pairs], bool)
        return digests[live], self.values()[places[live]]

    @property
    def places(self) -> int:
        """Where parts end."""
        return len(self._digest)

    def restore(self, digests: NDArray[np.uint64], values: NDArray[np.float64]) -> None:
        """Take up what parts told, in their order. Pre: empty. ValueError if it does not hold."""
        if not len(digests):
            return
        if values.shape != (len(digests), self._width) or not np.isfinite(values).all():
            raise ValueError("ghosts of another width, or without a number")
        digests, values = digests[-MOST:], values[-MOST:]
        self._digest = array("Q", digests.astype("<u8").tobytes())
        self._values = array("d", values.astype("<f8").tobytes())
        self._place = {d: i for i, d in enumerate(digests.tolist())}
        self._hand = len(digests)
