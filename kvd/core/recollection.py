"""What policies know, taken along from one life of the daemon to the next.

The law of this module: by digests of keys, for rows and ids are others after a restart; in small
parts, so that telling it stops nobody; bounded. What does not hold is a cold policy, and no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvd.core.advice import Advice
    from kvd.core.store import Store

_PART: Final = 2048  # rows looked at for one part
_GHOSTS: Final = 2048
MOST_CHUNKS: Final = 1 << 20  # of a tier

Part = dict[str, Any]  # plain values, as msgpack knows them


class Recollection:
    """What an earlier life knew in one tier. Arrays by position, in the order of `digests`."""

    def __init__(
        self,
        policy: str,
        state: dict[str, Any],
        digests: NDArray[np.uint64],
        last: NDArray[np.int64],
        memory: NDArray[np.float64],
        ghosts: NDArray[np.uint64],
        ghost_values: NDArray[np.float64],
    ) -> None:
        order = np.argsort(digests, kind="stable")
        self.policy = policy
        self.state = state
        self.digests = digests[order]
        self.last = last[order]  # use, Unix ns
        self.memory = memory[order]
        self.ghosts = ghosts
        self.ghost_values = ghost_values

    def find(self, digests: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions, and which of them are meant."""
        if not len(self.digests):
            return np.zeros(len(digests), np.int64), np.zeros(len(digests), bool)
        at = np.searchsorted(self.digests, digests).clip(0, len(self.digests) - 1)
        return at, self.digests[at] == digests

    def of(self, digests: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Memory of these; NaN of those that are not known."""
        at, known = self.find(digests)
        if not len(self.digests):
            return np.full((len(digests), self.memory.shape[1]), np.nan)
        return np.where(known[:, None], self.memory[at], np.nan)


def parts(store: Store) -> Iterator[Part]:
    """All that is to be taken along; a part may be empty. State may change between two parts: each
    is true by itself. A policy that has lost its turn tells nothing."""
    chunks = store.chunks
    advices = [(store.policy, chunks.np_ready)]
    advices += [(lower.policy, lower.np_count) for lower in store.ladder.lowers]
    for advice, there in advices:
        policy = advice.policy
        if policy is None or advice.error:
            continue
        try:
            yield _head(advice)
            begin = told = 0
            while begin < chunks.used and told < MOST_CHUNKS and not advice.error:
                some = slice(begin, min(begin + _PART, chunks.used))
                rows = np.flatnonzero((there[some] > 0) & (chunks.np_space[some] != 0)) + begin
                begin, told = some.stop, told + len(rows)
                if len(rows):
                    last = chunks.np_last[rows] + store.config.unix_offset_ns
                    yield {
                        "digests": store.ghosts(rows).astype("<u8").tobytes(),
                        "last": last.astype("<i8").tobytes(),
                        "memory": policy.memory(rows).astype("<f8").tobytes(),
                    }
                else:
                    yield {}
            begin = 0
            while not advice.error and (ghosts := policy.ghosts(begin, _GHOSTS)) is not None:
                begin += _GHOSTS
                yield {
                    "ghosts": ghosts[0].astype("<u8").tobytes(),
                    "values": ghosts[1].astype("<f8").tobytes(),
                }
        except GeneratorExit:  # whoever asked needs no more
            raise
        except BaseException as error:  # noqa: BLE001 - of the policy; the tiers that follow go on
            advice.fail("snapshot", error)


def _head(advice: Advice) -> Part:
    policy = advice.policy
    assert policy is not None
    return {
        "tier": advice.tier,
        "policy": policy.name,
        "state": policy.snapshot(),
        "width": int(policy.memory(np.empty(0, np.int64)).shape[1]),
    }


def collect(told: Iterable[Part]) -> dict[str, Recollection]:
    """Recollections by tier. Any exception where the parts do not hold."""
    heads: list[tuple[Part, list[Part]]] = []
    for part in told:
        if "tier" in part:
            heads.append((part, []))
        else:
            heads[-1][1].append(part)
    return {str(head["tier"]): _collected(head, rest) for head, rest in heads}


def _collected(head: Part, rest: list[Part]) -> Recollection:
    def joined(name: str, dtype: str) -> NDArray[Any]:
        return np.frombuffer(b"".join(part[name] for part in rest if name in part), dtype)

    width = int(head["width"])
    digests, last = joined("digests", "<u8"), joined("last", "<i8")
    ghosts, values = joined("ghosts", "<u8"), joined("values", "<f8")
    if len(last) != len(digests) or not 0 <= width <= 64:
        raise ValueError("columns of different lengths")
    return Recollection(
        str(head["policy"]),
        dict(head["state"]),
        digests,
        last,
        joined("memory", "<f8").reshape(len(digests), width),
        ghosts,
        values.reshape(len(ghosts), -1 if len(values) else 0),
    )
