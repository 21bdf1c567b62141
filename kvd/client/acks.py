"""Request ids of one link, and which answers have come.

The law of this module: ids rise by one. `upto` is acknowledged with each request: everything up to
it was answered, so the daemon need not keep those replies. One answer that is lost for good does
not hold the others up for ever.
"""

from __future__ import annotations

__all__ = ["Acks"]

# Answers that never came are acknowledged all the same when this many later ones have come.
_GIVE_UP = 192


class Acks:
    """`first`: an id that has been used and answered."""

    def __init__(self, first: int) -> None:
        self.next = first + 1
        self.upto = first
        self._answered: set[int] = set()  # answered, with an unanswered one before them

    def answered(self, request: int) -> int:
        """Acknowledge this answer from the next request on. Returns the id whose answer holds up
        too many later ones, 0 if none does: if nobody waits for it, it is to be taken for
        answered."""
        if request != self.upto + 1:
            if request > self.upto:
                self._answered.add(request)
                if len(self._answered) > _GIVE_UP:
                    return self.upto + 1
            return 0
        answered = self._answered
        while True:
            self.upto = request
            request += 1
            if request not in answered:
                return 0
            answered.remove(request)
