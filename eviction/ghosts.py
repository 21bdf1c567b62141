"""What is remembered of chunks that were evicted.

The law of this module: bounded, first in first out, and a digest is here or resident, never both:
`take` removes. At most `MOST` (some 70 MB), however large the cache. 64-bit digests can collide;
the price is a wrong score, never a wrong byte.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
            lost = tuple(self._values[hand * width : (hand + 1) * width])
        self._digest[hand] = digest
        self._values[hand * width : (hand + 1) * width] = array("d", values)
        self._place[digest] = hand
        self._hand = hand + 1
        return lost

    def take(self, digest: int) -> tuple[float, ...] | None:
        """What was remembered, and forget it."""
        place = self._place.pop(digest, None)
        if place is None:
            return None
        return tuple(self._values[place * self._width : (place + 1) * self._width])

    def values(self) -> NDArray[np.float64]:
        """All numbers of the ring, [digests, width]; a few may be of digests taken since."""
        return np.frombuffer(self._values).reshape(len(self._digest), self._width)

    def snapshot(self) -> list[Any]:
        """Oldest first: [digests, values], little-endian bytes."""
        size = len(self._digest)
        order = [*range(self._hand, size), *range(min(self._hand, size))]
        live = [p for p in order if self._place.get(self._digest[p]) == p]
        digests = np.frombuffer(self._digest, dtype=np.uint64)[live] if size else np.empty(0, "<u8")
        values = self.values()[live]
        return [digests.astype("<u8").tobytes(), values.astype("<f8").tobytes()]

    def restore(self, state: list[Any]) -> None:
        """Take up a snapshot. Pre: empty."""
        digests = np.frombuffer(state[0], dtype="<u8").tolist()
        values = np.frombuffer(state[1], dtype="<f8").tolist()
        if len(values) != len(digests) * self._width:
            raise ValueError("ghosts of another width")
        self._digest = array("Q", digests)
        self._values = array("d", values)
        self._place = {d: i for i, d in enumerate(digests)}
        self._hand = len(digests)
