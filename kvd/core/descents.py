"""From a full tier to the next one: what would be deleted there is written further down first.

The law of this module: only a last copy goes down, one payload at a time is read and then written,
through memory of the server's own, so that DRAM gives no slot for it. It is a favour, not a right:
no store waits for it. Where it can't be done (the next tier is away, full, busy or does not want
the chunk, the payload does not hold), the chunk is deleted all the same, and counted with why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvd.chunk import ChunkHeader
from kvd.core.actions import TierScrub, TierWrite
from kvd.core.events import TierAnswer
from kvd.core.fetches import Fetches
from kvd.core.lower import READY, Lower, TierJob
from kvd.core.store import Store

_AT_A_TIME: Final = 4  # payloads of one tier on their way down: what the server holds in memory


class Descent:
    """One chunk on its way from a tier to the next. `place`: who waits for its room; `nbytes`:
    what it will take there of its tenant's maximum."""

    __slots__ = ("cells", "failed", "key", "nbytes", "place", "row", "source", "target", "tenant")

    def __init__(
        self,
        row: int,
        key: bytes,
        source: Lower,
        target: Lower,
        place: tuple[int, int],
        cells: list[int],
        tenant: int,
        nbytes: int,
    ) -> None:
        self.row = row
        self.key = key
        self.source = source
        self.target = target
        self.place = place
        self.cells = cells  # still to go, the next one last
        self.tenant = tenant
        self.nbytes = nbytes
        self.failed = ""  # why some shard did not get there


class Descents:
    """`ended(descent)`: the chunk is below, or will not get there; nobody holds it any more."""

    def __init__(self, store: Store, fetches: Fetches) -> None:
        self._store = store
        self._fetches = fetches
        self.running = [0] * len(store.ladder.lowers)  # by source
        self.ended: Callable[[Descent], None] = lambda descent: None
        self.full: Callable[[Lower, int, tuple[int, ...]], None] = lambda lower, size, empty: None

    def possible(self, source: Lower, row: int) -> bool:
        """Whether `begin` would. Pre: the chunk is in nobody's hands."""
        ladder = self._store.ladder
        return bool(
            source.readable
            and self.running[source.number] < _AT_A_TIME
            and any(
                low.writable and ladder.wants(low, row)
                for low in ladder.lowers[source.number + 1 :]
            )
            and not ladder.elsewhere(source, row)
        )

    def begin(self, source: Lower, row: int, place: tuple[int, int]) -> bool:
        """Take a chunk down whose last copy lies in `source`. False, and why is counted, if that
        can't be: then nothing has begun. Pre: it is in nobody's hands."""
        store, ladder = self._store, self._store.ladder
        if source.number + 1 == len(ladder.lowers) or ladder.elsewhere(source, row):
            return False
        targets = [low for low in ladder.lowers[source.number + 1 :] if low.writable]
        wanting = [low for low in targets if ladder.wants(low, row)]
        if not wanting or not source.readable:
            self.count(row, "unwanted" if targets and source.readable else "off")
            return False
        target = wanting[0]
        space = store.spaces.of(store.chunks.space[row])
        first = store.chunks.cell[row]
        every = range(first + space.shards - 1, first - 1, -1)
        cells = [c for c in every if source.state[c] == READY and target.state[c] != READY]
        nbytes = sum(space.slot_sizes[cell - first] for cell in cells)
        if store.shares.isolate and target.use.full(
            space.tenant, target.use.coming[space.tenant] + nbytes
        ):
            self.count(row, "over_quota")
            return False
        if self.running[source.number] >= _AT_A_TIME:
            self.count(row, "busy")
            return False
        key = store.chunks.key_of(row)
        descent = Descent(row, key, source, target, place, cells, space.tenant, nbytes)
        target.use.coming[space.tenant] += nbytes
        self.running[source.number] += 1
        ladder.hold(row)
        self._next(descent)
        return True

    def count(self, row: int, how: str) -> None:
        store = self._store
        space = store.spaces.of(store.chunks.space[row])
        store.counters.tenant(space.namespace)["descents", how] += 1

    def _next(self, descent: Descent) -> None:
        """Read the next shard, or end."""
        store, source = self._store, descent.source
        while descent.cells and source.state[descent.cells[-1]] != READY:
            descent.cells.pop()  # it was lost meanwhile
            descent.failed = descent.failed or "miss"
        if descent.failed or not descent.cells:
            self.running[source.number] -= 1
            descent.target.use.coming[descent.tenant] -= descent.nbytes
            self.count(descent.row, descent.failed or "written")
            store.ladder.release(descent.row)
            self.ended(descent)
            return
        cell = descent.cells.pop()
        name = self._fetches.name(cell)
        within = source.config.read_ns
        number = store.ladder.begin("descent", source, cell, within, descent)
        store.out.append(
            TierScrub(
                number, source.number, *name, source.at[cell], source.generation[cell],
                self._nbytes(cell), store.now + within, keep=True,
            )
        )  # fmt: skip

    def _nbytes(self, cell: int) -> int:
        store = self._store
        row = store.cells.chunk[cell]
        space = store.spaces.of(store.chunks.space[row])
        return space.nbytes[cell - store.chunks.cell[row]]

    def read(
        self, number: int, job: TierJob, answer: TierAnswer, header: ChunkHeader | None
    ) -> None:
        """A payload was read, and stands in the server's memory under the job's number."""
        store, cell = self._store, job.cell
        descent = job.owner
        assert isinstance(descent, Descent)
        target = descent.target
        if answer is TierAnswer.OK and not (
            header is not None and self._fetches.fits(cell, header)
        ):
            answer = TierAnswer.CORRUPT
            self._fetches.delete(descent.source, cell)
        elif answer in (TierAnswer.MISS, TierAnswer.CORRUPT):
            store.ladder.forget(descent.source, cell)
        if answer is TierAnswer.OK and target.writable:
            assert header is not None
            within = target.config.write_ns
            writing = store.ladder.begin("write", target, cell, within, descent)
            nbytes = self._nbytes(cell)
            store.out.append(
                TierWrite(
                    writing, target.number, header, 0, nbytes, store.now + within, kept=number
                )
            )
        else:
            descent.failed = "off" if answer is TierAnswer.OK else answer.value
        store.ladder.release(job.row)
        if descent.failed:
            self._next(descent)

    def written(
        self, job: TierJob, answer: TierAnswer, at: int, generation: int, room: int,
        empty: tuple[int, ...],
    ) -> None:  # fmt: skip
        """A payload came down, or did not."""
        store, target, cell = self._store, job.lower, job.cell
        descent = job.owner
        assert isinstance(descent, Descent)
        store.counters.own["shards_written", answer.value] += 1
        size = -(-self._nbytes(cell) // 4096) * 4096
        if answer in (TierAnswer.OK, TierAnswer.EXISTS):
            store.ladder.put(target, cell, at, generation)
            if 0 <= room < max(2, target.writing):
                self.full(target, size, ())
        else:
            descent.failed = answer.value
            if answer is TierAnswer.NO_SPACE:
                self.full(target, size, empty)
        store.ladder.release(job.row)
        self._next(descent)
