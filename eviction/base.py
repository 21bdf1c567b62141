"""The contract of an eviction policy.

The law of this module: a policy only advises. It never calls back into the store, owns no lock
and no clock, and sees neither keys nor bytes: only small integer ids that the core gives to
chunks, and times that the core passes in. The core re-checks every victim (a leaf, unleased, not
being written, not below a tenant's minimum); a stale candidate is a no-op. What a policy must get
right is the order: a chunk may only be named before a chunk of the same chain that is nearer to
the root if nothing below it is left, so `touch` gets whole chains, unless the policy says that it
needs none (`whole_chains`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kvd.native import mypyc_attr

LATELY_NS: Final = 100_000_000  # see `Policy.whole_chains`
Ghostly = tuple[NDArray[np.uint64], NDArray[np.float64]]  # digests, and a row of numbers for each


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy(ABC):
    """Order of eviction among the chunks of one tier. One instance, one thread.

    `queue` is a small integer chosen by the core (one for each size class and tenant): victims
    are asked for a queue, so that room is made where it is needed.
    """

    name: ClassVar[str] = "?"

    @abstractmethod
    def insert(
        self, chunk: int, *, parent: int, queue: int, size: int, ghost: int, now: int
    ) -> None:
        """A chunk became resident. `parent` is its parent's id or -1; `size` its bytes in this
        tier; `ghost` a 64-bit digest of its key, for policies that remember evicted keys; `now`
        ns. Pre: `chunk` is not in the policy. Post: it is not the first victim of a queue that
        holds a chunk with no later use."""

    def load(
        self,
        order: NDArray[np.int64],
        born: NDArray[np.int64],
        *,
        parents: NDArray[np.int64],
        queue: int,
        size: int,
        ghosts: NDArray[np.uint64],
        memory: NDArray[np.float64] | None = None,
    ) -> None:
        """Many chunks of one queue became resident at once, after a restart. `order`: coldest
        first, each before its ancestors; `born`: when each was last used, ns; `parents` and
        `ghosts` as for `insert`; `memory`: what an earlier life's `memory` told of each, a row of
        NaN where it told nothing. Pre: none of them is in the policy. Without a faster way, they
        are inserted one by one in the order of their birth, ancestors first among equals."""
        for n in np.lexsort((-np.arange(len(order)), born)).tolist():
            self.insert(
                int(order[n]),
                parent=int(parents[n]),
                queue=queue,
                size=size,
                ghost=int(ghosts[n]),
                now=int(born[n]),
            )

    @abstractmethod
    def touch(self, chain: Sequence[int], now: int) -> None:
        """These chunks, in order from root to leaf, were used together: a whole chain, or the end
        of one, see `whole_chains`. Ids that are not in the policy are passed over. Post: no chunk
        precedes its own descendants."""

    def whole_chains(self) -> bool:
        """Whether each use must be told from the root on: so it is, unless a policy says
        otherwise. Else of a chain that grows batch by batch only the end is told, where all before
        it was told less than `LATELY_NS` ago: of a long prompt each chunk once, not once a batch.
        That is for who keeps descendants first without being told, and to whom two uses so close
        are one. It does not change in a policy's life."""
        return True

    @abstractmethod
    def victims(self, queue: int, now: int) -> Iterator[int]:
        """Candidates of a queue, best victim first, every resident chunk at most once. Nothing is
        removed; the caller stops when it has enough and calls `forget` for what it took. The
        iterator is dead after any other call that changes the policy."""

    def leaves(self, queue: int, now: int) -> Iterator[int]:
        """As `victims`, for a caller whose candidates may all have to stay: what was named does not
        count as gone, so of a chain none is named but its end. Without a better way, all are."""
        return self.victims(queue, now)

    def first(self, queue: int, now: int) -> int:
        """The first of `victims`, or -1: what is asked for as a rule."""
        return next(iter(self.victims(queue, now)), -1)

    def defer(self, chunks: Sequence[int], now: int) -> None:
        """These candidates, in the order in which `victims` named them, may not go now: they are
        leased, or being written. Post: those that have nothing below them are named behind all
        others of their queue, until they are used, or their turn comes again as others are
        evicted; so that a search meets each of them once, and evictions cost no more for many of
        them. No use is counted. Without a better way, they count as used, each by itself: `touch`
        is told of a leaf alone."""
        for chunk in reversed(chunks):
            self.touch([chunk], now)

    def cool(self, chunks: Sequence[int], now: int) -> None:  # noqa: B027 - nothing is allowed
        """These chunks, in order from leaf to root, are said not to be used again: a hint. Post:
        those that have nothing below them are named before all others of their queue, until they
        are used or something is stored below them. Nothing else is changed, for hints can be wrong.
        A policy may do nothing."""

    @abstractmethod
    def coldness(self, queue: int, now: int) -> float | None:
        """A number that can be compared between queues: the smaller, the less the first victim
        of this queue is worth keeping. 0 where that was cooled; infinite when nothing is left but
        what was deferred. None when the queue is empty."""

    @abstractmethod
    def forget(self, chunk: int, *, evicted: bool) -> None:
        """The chunk is no longer resident. `evicted`: by this policy's advice, so a ghost may be
        kept; otherwise it was removed or invalidated. Unknown ids are a no-op."""

    @abstractmethod
    def value(self, chunk: int, now: int) -> float:
        """Worth of one resident chunk on the scale of `coldness` (for choosing a slab)."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident chunks."""

    # -- what a restart should not lose; ids change with it ---------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What was learned and belongs to no single chunk: values that msgpack knows, below a
        megabyte, to be had at once."""
        return {}

    def memory(self, chunks: NDArray[np.int64]) -> NDArray[np.float64]:
        """What is known of each of these chunks, finite numbers in rows of one width, which does
        not change. Pre: they are here. A few thousand are asked for at a time."""
        return np.empty((len(chunks), 0))

    def ghosts(self, begin: int, count: int) -> Ghostly | None:
        """What is remembered of evicted keys, some of it: at most `count`, from place `begin` on,
        oldest first. None from the last place on."""
        return None

    def restore(self, state: dict[str, Any], ghosts: Ghostly, now: int) -> None:
        """Take up what `snapshot` and `ghosts` told; `load` follows. Pre: the policy is empty.
        Any exception where it does not hold: the caller takes a new policy then."""
        if state:
            raise ValueError(f"policy {self.name!r} keeps nothing over a restart")
