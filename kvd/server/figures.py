"""What an administrator is shown, of one moment: the core's numbers and the server's own.

The law of this module: it reads nothing. All that is in it was copied by the loop; to work it out
is anybody's, in any thread.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from kvd.core.stats import Reading, shown

__all__ = ["Figures", "Own", "pause"]

PAUSE_S = 1e-4


class Own(NamedTuple):
    """What only the server knows."""

    tiers: list[dict[str, Any]]  # the core's rows with what the tiers say of themselves
    counters: dict[str, Any]
    sections: dict[str, Any]

    def added_to(self, stat: dict[str, Any]) -> dict[str, Any]:
        """The core's sections and these."""
        return {
            **stat,
            **self.sections,
            "tiers": self.tiers,
            "counters": {**stat["counters"], **self.counters},
        }


class Figures(NamedTuple):
    """A copy of all of it."""

    reading: Reading
    own: Own
    apart: int  # so many tenants have rows of their own

    def stat(self) -> dict[str, Any]:
        """What `kvd-cli status` would show, less what is worked out for it alone. For another
        thread than the loop's."""
        return self.own.added_to(shown(self.reading, pause, self.apart))


def pause() -> None:
    """Let other threads run: the loop has requests to answer. A sleep of nothing gives the
    interpreter back before another one has woken up."""
    time.sleep(PAUSE_S)
