"""Counts that several threads add to."""

from __future__ import annotations

import threading

from kvd.tiers.tally import Tally


class WhileAnotherAdds(int):
    """One more; as it is added, another thread counts one, too."""

    def __new__(cls, tally: Tally, name: str) -> WhileAnotherAdds:
        self = super().__new__(cls, 1)
        self.thread = threading.Thread(target=tally.add, args=(name,))
        return self

    def __radd__(self, before: int) -> int:
        self.thread.start()
        self.thread.join(0.2)
        return before + int(self)


def test_what_another_thread_counts_meanwhile_is_not_lost() -> None:
    tally = Tally()
    tally.add("reads", 5)
    one = WhileAnotherAdds(tally, "reads")
    tally.add("reads", one)
    one.thread.join()
    assert tally.counts() == {"reads": 7}


def test_a_count_is_told_once_something_was_added_and_what_is_told_stays_as_it_was() -> None:
    tally = Tally()
    assert tally.counts() == {}
    tally.add("bad", 0)
    tally.set("foreign", 3)
    tally.set("foreign", 2)
    told = tally.counts()
    tally.add("bad")
    assert told == {"bad": 0, "foreign": 2}
    assert tally.counts() == {"bad": 1, "foreign": 2}
