"""Stores of one engine: which chunks a step completes, and which are on their way.

The law of this module: only what is hashed is stored, whole chunks of blocks that are all there; a
store is on its way until each rank has said that it is done, and for no longer than it may be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvd.connectors.vllm.config import Options
from kvd.connectors.vllm.daemon import Daemon
from kvd.connectors.vllm.metadata import StoreJob, WorkerReport
from kvd.connectors.vllm.request import Entry
from kvd.connectors.vllm.stats import Counts

__all__ = ["Stores"]

_PUSH_GRACE_S = 2.0


class Stores:
    """`numbers`: of jobs, those of loads among them; `block_tokens`: of each KV group."""

    def __init__(
        self, options: Options, daemon: Daemon, counts: Counts, numbers: Iterator[int],
        chunk_tokens: int, block_tokens: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._options = options
        self._daemon = daemon
        self._counts = counts
        self._numbers = numbers
        self._chunk = chunk_tokens
        self._block_tokens = block_tokens
        self.ranks = 1
        self._under_way: dict[int, tuple[float, int]] = {}  # job -> (begun, ranks to come)

    def __bool__(self) -> bool:
        """Whether any are on their way."""
        return bool(self._under_way)

    @property
    def awaited(self) -> bool:
        """Whether some are on their way, and not for longer than they may be."""
        if not self._under_way:
            return False
        oldest = min(begun for begun, _ in self._under_way.values())
        return time.monotonic() - oldest < self._options.store_deadline_s + _PUSH_GRACE_S

    def plan(self, output: Any, entries: Mapping[str, Entry]) -> list[StoreJob]:
        """What is complete when this step's forward is through; on its way from now on."""
        jobs = []
        state = output.kv_connector_block_state
        for name, scheduled in output.num_scheduled_tokens.items():
            entry = entries.get(name)
            if entry is None or entry.keys is None or state is None:
                continue
            request = entry.request
            # Only what is hashed: neither drafts nor placeholders of tokens to come.
            done = min(
                (request.num_computed_tokens + scheduled) // self._chunk, entry.keys.available
            )
            if self._options.store_policy == "prompt":
                done = min(done, request.num_prompt_tokens // self._chunk)
            if done <= entry.stored:
                continue
            if not self._daemon.away:
                job = self._job(entry, entry.stored, done, state.get_block_ids(name))
                if job is not None:
                    jobs.append(job)
            else:
                self._counts.add("dropped_chunks", done - entry.stored)
            entry.stored = done
        begun = time.monotonic()
        for job in jobs:
            self._under_way[job.job] = (begun, self.ranks)
        return jobs

    def _job(
        self, entry: Entry, begin: int, end: int, table: Sequence[Sequence[int]] | None
    ) -> StoreJob | None:
        assert entry.keys is not None
        rows = []
        for size, ids in zip(self._block_tokens, table or (), strict=True):
            width = self._chunk // size
            row = tuple(ids[begin * width : end * width])
            if len(row) != (end - begin) * width or 0 in row:
                return None  # not all of its blocks are (still) there
            rows.append(row)
        keys = entry.keys
        return StoreJob(
            next(self._numbers),
            keys.hashes(begin, end),
            keys.fingerprints(begin, end),
            keys.parent(begin),
            begin,
            tuple(rows),
        )

    def told(self, report: WorkerReport) -> None:
        """Ranks have come to the end of some."""
        for job, ranks in report.stored.items():
            begun, left = self._under_way.pop(job, (0.0, 0))
            if left > ranks:
                self._under_way[job] = (begun, left - ranks)
