"""The account of what an installation has on a medium that others write to, too."""

from __future__ import annotations

import pytest

from kvd.tiers import mine as mine_module
from kvd.tiers.backend import Refused
from kvd.tiers.base import Answer
from kvd.tiers.mine import Mine

EVER = 1 << 62  # as late as may be: whatever is unsure is settled


def test_what_is_looked_for_can_not_be_written_and_is_told_once() -> None:
    mine: Mine[str] = Mine(1000)
    assert mine.begin("a", 400)
    mine.unsure("a", 400)
    assert mine.look_for(0) is None and mine.unsettled(0) == 0
    assert mine.unsettled(EVER) == 1
    assert mine.look_for(EVER) == ("a", 400) and mine.look_for(EVER) is None
    with pytest.raises(Refused, match="taken back"):
        mine.begin("a", 400)
    mine.looked("a", gone=False)
    assert mine.usage().used_bytes == 400 and mine.begin("b", 600)
    with mine.listing():
        assert mine.look_for(EVER) == ("a", 400)
        assert not mine.listed("a", 400, 0.0, ours=True)
        mine.looked("a", gone=True)
        assert not mine.listed("a", 400, 0.0, ours=True), "of a page that was read before"
    assert mine.usage().used_bytes == 600


def test_what_can_not_be_settled_waits_behind_the_others() -> None:
    mine: Mine[str] = Mine(1000)
    for name in ("a", "b", "c"):
        mine.begin(name, 10)
        mine.unsure(name, 10)
    told = []
    for _ in range(6):
        found = mine.look_for(EVER)
        assert found is not None
        told.append(found[0])
        mine.looked(found[0], gone=False)
    assert told == ["a", "b", "c"] * 2


@pytest.mark.parametrize("ended", ["written", "failed", "unsure"])
def test_what_a_recovery_finds_while_it_is_written_counts_once(ended: str) -> None:
    mine: Mine[str] = Mine(1000)
    with mine.listing():
        assert mine.begin("a", 400) and mine.listed("a", 400, 0.0, ours=True)
        if ended == "unsure":
            mine.unsure("a", 400)
        elif ended == "failed":
            mine.failed("a", 400)
        else:
            mine.end("a", 400, ours=True)
    assert mine.usage().used_bytes == 400 and mine.look_for(EVER) is None
    mine.forget(["a"])
    assert mine.usage().used_bytes == 0


@pytest.mark.parametrize("ended", ["ours", "theirs", "failed", "unsure", "no room"])
@pytest.mark.parametrize("found", [False, True])
def test_a_doubt_ends_when_it_is_known_what_lies_there_and_not_before(
    ended: str, found: bool
) -> None:
    """A second write that surely came to nothing says nothing of the first."""
    mine: Mine[str] = Mine(1000)
    mine.begin("a", 400)
    mine.unsure("a", 400)
    if ended == "no room":
        assert mine.begin("b", 600)
        with pytest.raises(Refused) as full:
            mine.begin("a", 401)
        assert full.value.answer is Answer.NO_SPACE
        mine.failed("b", 600)
    else:
        assert mine.begin("a", 500) and mine.usage().used_bytes == 500
        if found:
            assert mine.listed("a", 400, 0.0, ours=True)
        if ended == "failed":
            mine.failed("a", 500)
        elif ended == "unsure":
            mine.unsure("a", 500)
        else:
            mine.end("a", 500, ours=ended == "ours")
    usage, left = mine.usage(), mine.look_for(EVER)
    if ended == "no room" or (ended == "failed" and not found):
        assert left == ("a", 400) and usage.used_bytes == 400
    elif ended == "unsure" and not found:
        assert left == ("a", 500) and usage.used_bytes == 500
    else:
        assert left is None
        assert usage.used_bytes == (400 if found else 500 if ended == "ours" else 0)


def test_what_is_deleted_while_it_is_in_doubt_stays_in_doubt() -> None:
    """The write may be carried out after the deletion."""
    mine: Mine[bytes] = Mine(1000)
    mine.begin(b"a", 400)
    mine.unsure(b"a", 400)
    mine.forget([b"a"])
    assert mine.usage().used_bytes == 400 and mine.look_for(EVER) == (b"a", 400)


def test_what_is_renewed_is_young_again() -> None:
    mine: Mine[str] = Mine(1000, aged=True)
    mine.listed("a", 400, 5.0, ours=True)
    mine.listed("b", 100, 6.0, ours=True)
    assert not mine.begin("a", 300)
    mine.renewed("a", 300)
    assert mine.usage().used_bytes == 400
    assert mine.older(1000.0, 9) == ["b"]


def test_what_is_being_expired_can_not_be_written_until_that_is_over() -> None:
    """Else the deletion would hit what was written anew."""
    mine: Mine[str] = Mine(1000, aged=True)
    mine.listed("a", 400, 5.0, ours=True)
    mine.listed("b", 400, 6.0, ours=True)
    assert mine.older(10.0, 9) == ["a", "b"] and mine.older(10.0, 9) == []
    for name in ("a", "b"):
        with pytest.raises(Refused, match="being deleted"):
            mine.begin(name, 400)
    mine.forget(["a"])
    mine.deleted(["a", "b"])
    assert mine.begin("a", 400) and not mine.begin("b", 400)
    assert mine.older(10.0, 9) == ["b"], "it is told again"


def test_what_is_being_deleted_is_told_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ages may be put in order anew meanwhile, and name it again."""
    monkeypatch.setattr(mine_module, "_STALE", 1)
    mine: Mine[int] = Mine(10_000, aged=True)
    for name in range(40):
        mine.begin(name, 10)
        mine.end(name, 10, ours=True)
    first = mine.older(float(EVER), 3)
    assert first == [0, 1, 2]
    mine.forget(range(10, 40))
    assert mine.older(float(EVER), 100) == list(range(3, 10))
    mine.deleted(first)  # and they lie there still
    assert sorted(mine.older(float(EVER), 100)) == first
