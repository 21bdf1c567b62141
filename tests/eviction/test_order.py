"""Keys by their last use: against a list."""

from __future__ import annotations

import random

import pytest

from kvd.eviction.order import Order, Spot


@pytest.mark.parametrize("most", [1, 2, 5, 16, 33])
def test_bytes_since_a_use_are_those_of_a_list(most: int) -> None:
    """Over many turns of the places, with keys that stay long and keys that go at once."""
    rng = random.Random(most)
    order = Order(most)
    stand: list[Spot] = []  # coldest first
    for _ in range(40 * most + 400):
        if len(stand) == most or (stand and rng.random() < 0.4):
            spot = stand.pop(rng.choice([0, -1, rng.randrange(len(stand))]))
            order.take(spot)
            if rng.random() < 0.5:
                order.push(spot, rng.randrange(1, 1 << 40))
                stand.append(spot)
        else:
            stand.append(Spot())
            order.push(stand[-1], rng.randrange(1, 1 << 40))
        assert order.bytes == sum(spot.size for spot in stand)
        if stand:
            assert order.coldest() is stand[0]
        for n, spot in enumerate(stand):
            assert order.since(spot) == sum(later.size for later in stand[n + 1 :])
