"""The arena's memory beyond its first part, taken while the daemon serves.

The law of this module: it is taken step by step, in pauses between what clients wait for, and what
is there is used at once. Memory that can't be had is no reason to stop: what is reserved serves,
and so does what lies in small pages.
"""

from __future__ import annotations

import logging
from typing import Any

from kvd.arena import ArenaOwner
from kvd.core import Core
from kvd.server.transfers import Job, Transfers
from kvd.sizes import format_size

__all__ = ["Memory"]

log = logging.getLogger(__name__)

_PREFAULT_STEP = 64 << 20


class Memory:
    """Reserves the rest of an arena, and faults all of it in. Pre: the core may be called."""

    def __init__(self, arena: ArenaOwner, core: Core, transfers: Transfers) -> None:
        self._arena = arena
        self._core = core
        self._transfers = transfers
        self._huge_bytes: int | None = None  # in huge pages, once that was counted

    def shown(self) -> dict[str, Any]:
        """For a stat: fields of the first tier."""
        if self._huge_bytes is None:
            return {}
        return {"huge_bytes": self._huge_bytes, "huge_problem": self._arena.why_small}

    def origin(self) -> dict[str, str]:
        """For a stat: where the arena came from."""
        arena = self._arena
        if arena.adopted:
            return {"origin": "adopted", "replaced": ""}
        return {"origin": "replaced" if arena.replaced else "new", "replaced": arena.replaced}

    def start(self) -> None:
        if self._arena.reserved >= self._arena.size:
            self._prefault(0)
        else:
            self._reserve_more()

    def _reserve_more(self) -> None:
        self._transfers.submit(
            Job("reserve memory", self._arena.reserve_step, self._reserved, background=True)
        )

    def _reserved(self, done: bool | None) -> None:
        arena = self._arena
        self._core.grow(arena.reserved)
        if done is not False:
            self._prefault(0)
        if done is None:
            log.error(
                "only %s of the arena's %s could be reserved; serving with that",
                format_size(arena.reserved),
                format_size(arena.size),
            )
        elif done:
            log.info("the arena's %s are reserved", format_size(arena.size))
        else:
            self._reserve_more()

    def _prefault(self, offset: int) -> None:
        """Fault the arena into our own mapping, step by step, once it is reserved: the worker
        that hashes a payload would otherwise pay a fault for each of its pages."""
        length = min(_PREFAULT_STEP, self._arena.reserved - offset)
        if length <= 0:
            count = Job("count pages", self._arena.huge_bytes, self._counted, background=True)
            self._transfers.submit(count)
            return
        self._transfers.submit(
            Job(
                "prefault memory",
                lambda: self._arena.prefault(offset, length),
                lambda _: self._prefault(offset + length),
                background=True,
            )
        )

    def _counted(self, found: int | None) -> None:
        self._huge_bytes = found
        if found is not None and self._arena.huge_problem:
            log.warning(
                "only %s of the arena's %s lie in huge pages: %s",
                format_size(found),
                format_size(self._arena.size),
                self._arena.huge_problem,
            )
