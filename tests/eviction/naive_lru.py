"""LRU, leaf-first, the naive way: one list a queue. The oracle of the exact order."""

from __future__ import annotations

from collections.abc import Sequence


class NaiveLru:
    """`order[queue]`: chunks, coldest first."""

    def __init__(self) -> None:
        self.order: dict[int, list[int]] = {}

    def insert(self, chunk: int, queue: int) -> None:
        self.order.setdefault(queue, []).append(chunk)

    def touch(self, chain: Sequence[int]) -> None:
        for chunk in reversed(chain):
            for names in self.order.values():
                if chunk in names:
                    names.remove(chunk)
                    names.append(chunk)

    def forget(self, chunk: int) -> None:
        for names in self.order.values():
            if chunk in names:
                names.remove(chunk)

    def victims(self, queue: int) -> list[int]:
        return list(self.order.get(queue, []))
