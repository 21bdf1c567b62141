"""The memory of what was evicted: bounded, oldest out, given back once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from kvd.eviction import ghosts as ghosts_module
from kvd.eviction.ghosts import Ghosts


def test_the_oldest_goes_and_is_told() -> None:
    ghosts = Ghosts(1)
    assert [ghosts.put(d, (d / 2,), 3) for d in (1, 2, 3)] == [None, None, None]
    assert ghosts.put(4, (2.0,), 3) == (0.5,)
    assert 1 not in ghosts and len(ghosts) == 3
    assert ghosts.take(1) is None


def test_what_is_taken_is_gone() -> None:
    ghosts = Ghosts(2)
    ghosts.put(7, (1.0, 2.0), 5)
    assert ghosts.take(7) == (1.0, 2.0)
    assert ghosts.take(7) is None and len(ghosts) == 0


def test_no_room_remembers_nothing() -> None:
    ghosts = Ghosts(1)
    assert ghosts.put(7, (1.0,), 0) == (1.0,)
    assert 7 not in ghosts


def test_there_is_an_end_to_memory_however_large_the_cache(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ghosts_module, "MOST", 8)
    ghosts = Ghosts(1)
    for digest in range(100):
        ghosts.put(digest, (0.0,), 1_000_000)
    assert len(ghosts) == 8


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 12)),
        max_size=120,
    )
)
def test_as_a_list_of_slots_would_have_it(calls: list[tuple[bool, int]]) -> None:
    """The naive twin: slots that are written round and round; taking leaves a hole."""
    ghosts, slots, hand, limit = Ghosts(1), [], 0, 6
    for n, (put, digest) in enumerate(calls):
        held = [slot for slot in slots if slot is not None and slot[0] == digest]
        if put:
            slots = [None if slot in held else slot for slot in slots]
            lost = None
            if hand == len(slots) and hand < limit:
                slots.append((digest, float(n)))
            else:
                hand %= len(slots)
                lost = slots[hand]
                slots[hand] = (digest, float(n))
            hand += 1
            assert ghosts.put(digest, (float(n),), limit) == (None if lost is None else lost[1:])
        else:
            slots = [None if slot in held else slot for slot in slots]
            assert ghosts.take(digest) == (held[0][1:] if held else None)
        live = {slot[0] for slot in slots if slot is not None}
        assert {d for d in range(13) if d in ghosts} == live and len(ghosts) == len(live)
    copy = Ghosts(1)
    told = [part for n in range(0, ghosts.places, 3) if (part := ghosts.part(n, 3)) is not None]
    assert ghosts.part(ghosts.places, 3) is None
    copy.restore(
        np.concatenate([np.empty(0, np.uint64), *(digests for digests, _ in told)]),
        np.concatenate([np.empty((0, 1)), *(values for _, values in told)]),
    )
    for digest in range(13):
        assert copy.take(digest) == ghosts.take(digest)
