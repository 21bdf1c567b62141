"""The index is a dictionary from (space, key) to row, whatever happens to it."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from world import key

from kvd.core.columns import NONE, Chunks
from kvd.core.index import Index
from kvd.core.timers import Timers


class Book:
    """An index, and the dictionary that it must be."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.chunks = Chunks(rows)
        self.index = Index(self.chunks, seed)
        self.twin: dict[tuple[int, bytes], int] = {}

    def put(self, space: int, name: bytes) -> None:
        row = self.chunks.take()
        self.chunks.key[32 * row : 32 * row + 32] = name
        self.chunks.space[row] = space
        self.index.put(row)
        self.twin[space, name] = row

    def remove(self, space: int, name: bytes) -> None:
        row = self.twin.pop((space, name))
        self.index.remove(row)
        self.chunks.give(row)

    def check(self, names: list[bytes], spaces: range) -> None:
        for space in spaces:
            wanted = [self.twin.get((space, name), NONE) for name in names]
            assert [self.index.get(space, name) for name in names] == wanted
            assert self.index.get_many(space, b"".join(names)).tolist() == wanted
        assert len(self.index) == len(self.twin)


# the last ones where signed words and carries would show
NAMES = [*(key(n) for n in range(9)), b"\xff" * 32, b"\x80" + bytes(31), bytes(31) + b"\x80"]
steps = st.lists(st.tuples(st.booleans(), st.integers(1, 2), st.sampled_from(NAMES)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 5))
def test_it_is_the_dictionary(some: list[tuple[bool, int, bytes]], seed: int) -> None:
    book = Book(100, seed)
    for put, space, name in some:
        if put and (space, name) not in book.twin:
            book.put(space, name)
        elif not put and (space, name) in book.twin:
            book.remove(space, name)
        book.check(NAMES, range(1, 3))


def test_it_grows_and_shrinks_under_traffic() -> None:
    """Through several doublings, with removals while it moves from one table to the next."""
    rng = random.Random(11)
    book = Book(20_000, seed=7)
    names: list[bytes] = []
    for n in range(12_000):
        name = key("grow", n)
        book.put(1, name)
        names.append(name)
        if rng.random() < 0.3:
            gone = names.pop(rng.randrange(len(names)))
            book.remove(1, gone)
            assert book.index.get(1, gone) == NONE
        if n % 500 == 0:
            some = rng.sample(names, min(len(names), 300))
            book.check([*some, *NAMES], range(1, 2))
    book.check(names, range(1, 2))
    for name in names:
        book.remove(1, name)
    assert len(book.index) == 0
    assert book.index.get_many(1, b"".join(names)).tolist() == [NONE] * len(names)


@pytest.mark.inside
def test_one_change_moves_a_few_entries_only() -> None:
    """A table of a million entries must not be rebuilt in one event."""
    book = Book(20_000)
    moved: list[int] = []
    real = book.index._put
    count = 0

    def counted(row: int, *hash_: int) -> None:
        nonlocal count
        count += 1
        real(row, *hash_)

    book.index._put = counted  # type: ignore[method-assign]
    for n in range(12_000):
        count = 0
        book.put(1, key(n))
        moved.append(count)
    assert max(moved) <= 65
    assert sum(moved) < 4 * len(moved)


def test_keys_that_share_a_part_are_told_apart() -> None:
    """K21 (of the index): all 32 bytes count."""
    book = Book(200)
    names = [bytes(32)]
    for at in range(32):
        name = bytearray(32)
        name[at] = 1
        names.append(bytes(name))
    for name in names:
        book.put(1, name)
    book.check(names, range(1, 3))


@pytest.mark.parametrize("before", [50, 1_025, 1_060, 2_049])
def test_many_rows_enter_at_once(before: int) -> None:
    """Also while the table moves to a larger one: what adoption enters one by one comes first."""
    book = Book(9_000)
    for n in range(before):
        book.put(1, key("before", n))
    first = book.chunks.take_rows(5_000)
    names = [key("bulk", n) for n in range(5_000)]
    packed = np.frombuffer(b"".join(names), np.uint64).reshape(-1, 4)
    book.chunks.np_key[first : first + 5_000] = packed
    book.chunks.np_space[first : first + 5_000] = 1
    book.index.load(first, 5_000)
    book.twin.update({(1, name): first + n for n, name in enumerate(names)})
    there = [key("before", n) for n in range(before)]
    book.check([*names, *there, key("absent")], range(1, 3))
    for name in names[::3]:
        book.remove(1, name)
    book.check(names, range(1, 2))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "move", "remove", "pop"]), st.integers(0, 200)),
        max_size=80,
    )
)
def test_timers_fall_due_in_time_and_no_earlier(some: list[tuple[str, int]]) -> None:
    timers, twin = Timers(), {}
    now = 0
    for number, (what, value) in enumerate(some):
        if what == "add":
            due = now + value * 3_000_000
            timers.add(due, "lease", number)
            twin[number] = due
        elif what == "move" and twin:  # as a renewed lease: the new one first
            moved = list(twin)[value % len(twin)]
            before, twin[moved] = twin[moved], now + value * 1_000_000
            timers.add(twin[moved], "lease", moved)
            if before != twin[moved]:
                timers.remove(before, "lease", moved)
        elif what == "remove" and twin:
            number = list(twin)[value % len(twin)]
            timers.remove(twin.pop(number), "lease", number)
        elif what == "pop":
            now += value * 1_000_000
            popped = set()
            while (entry := timers.pop(now)) is not None:
                popped.add(entry.number)
            assert popped == {n for n, due in twin.items() if due <= now}
            twin = {n: due for n, due in twin.items() if due > now}
        assert timers.next() == (min(twin.values()) if twin else None)
