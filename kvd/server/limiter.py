"""How many requests a tenant may make in a second.

The law of this module: a bucket for each tenant that has a bound, filled steadily, never fuller
than one second's worth. A request that finds none left has no effect and is told when to come back;
what gives something back, or finishes what was begun, is never held up.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.errors import Busy
from kvd.wire import Op

__all__ = ["LIMITED", "Limiter"]

NS = 1_000_000_000
LIMITED = frozenset(
    int(op) for op in (Op.LOOKUP, Op.RESERVE, Op.LOAD, Op.PUT, Op.GET, Op.LIST, Op.EVICT, Op.STAT)
)


class Limiter:
    """`rate(namespace)`: requests a second, 0 for no bound. Times in ns, monotonic."""

    def __init__(self, rate: Callable[[str], float]) -> None:
        self._rate = rate
        self._due: dict[str, float] = {}  # when the tenant's next request is due, in ns

    def take(self, namespace: str, now: int) -> None:
        """One request is to be carried out. Busy, with when to ask again, if it may not be."""
        rate = self._rate(namespace)
        if not rate:
            return
        step = NS / rate
        due = max(self._due.get(namespace, 0.0), now - NS + step)  # a second's worth is saved up
        if due > now:
            raise Busy(
                f"requests: the tenant may make {rate:g} a second; ask again in "
                f"{(due - now) / 1e6:.1f} ms",
                (due - now) / NS,
            )
        self._due[namespace] = due + step
