"""Sessions that are over while somebody may still write into their slots.

The law of this module: a session's condemned slots are given back only when no process can hold
its mapping (its flock is free) and no worker of ours copies for it. Until then it is asked again,
often at first and once a second later, at no cost to the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LockWatch"]

FIRST_S = 0.02
LONGEST_S = 1.0


@dataclass(slots=True)
class _Watched:
    wait_s: float
    due_s: float
    copies: int  # of ours, still running


class LockWatch:
    """`is_free(public_id)` asks the arena; `freed(public_id)` is told once for each."""

    def __init__(self, is_free: Callable[[bytes], bool], freed: Callable[[bytes], None]) -> None:
        self._is_free = is_free
        self._freed = freed
        self._watched: dict[bytes, _Watched] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, public_id: bytes, now_s: float, *, copies: int = 0) -> None:
        self._watched[public_id] = _Watched(FIRST_S, now_s + FIRST_S, copies)

    def copy_done(self, public_id: bytes) -> None:
        """One of our copies for that session has ended."""
        watched = self._watched.get(public_id)
        if watched is not None:
            watched.copies -= 1
            watched.due_s = 0.0

    def wait_s(self, now_s: float) -> float | None:
        """How long until somebody is to be asked; None: there is nobody."""
        due = [watched.due_s for watched in self._watched.values() if watched.copies <= 0]
        return max(0.0, min(due) - now_s) if due else None

    def poll(self, now_s: float) -> None:
        """Ask for those that are due."""
        for public_id, watched in list(self._watched.items()):
            if watched.due_s > now_s or watched.copies > 0:
                continue
            if self._is_free(public_id):
                del self._watched[public_id]
                self._freed(public_id)
            else:
                watched.wait_s = min(LONGEST_S, watched.wait_s * 1.5)
                watched.due_s = now_s + watched.wait_s
