"""LRU, leaf-first, the naive way: one list a queue. The oracle of the exact order."""

from __future__ import annotations

from collections.abc import Sequence


class NaiveLru:
    """`order[queue]`: chunks, coldest first; `late`: deferred, with their queues."""

    def __init__(self) -> None:
        self.order: dict[int, list[int]] = {}
        self.late: dict[int, int] = {}

    def insert(self, chunk: int, queue: int) -> None:
        self.order.setdefault(queue, []).append(chunk)

    def touch(self, chain: Sequence[int]) -> None:
        for chunk in reversed(chain):
            if chunk in self.late:
                self.order.setdefault(self.late.pop(chunk), []).append(chunk)
            for names in self.order.values():
                if chunk in names:
                    names.remove(chunk)
                    names.append(chunk)

    def forget(self, chunk: int, evicted: bool) -> None:
        here = chunk in self.late or any(chunk in names for names in self.order.values())
        self._take(chunk)
        if here and evicted and self.late:
            first = next(iter(self.late))
            self.order.setdefault(self.late.pop(first), []).insert(0, first)

    def defer(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            queue = self._take(chunk)
            if queue is not None:
                self.late[chunk] = queue

    def cool(self, chunks: Sequence[int]) -> None:
        for chunk in reversed(chunks):
            queue = self._take(chunk)
            if queue is not None:
                self.order.setdefault(queue, []).insert(0, chunk)

    def _take(self, chunk: int) -> int | None:
        """Out of where it is; its queue."""
        for queue, names in self.order.items():
            if chunk in names:
                names.remove(chunk)
                return queue
        return self.late.pop(chunk, None)

    def victims(self, queue: int) -> list[int]:
        return self.order.get(queue, []) + [c for c, q in self.late.items() if q == queue]
