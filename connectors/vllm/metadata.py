"""What scheduler and workers of one engine tell each other.

The law of this module: plain values only. The scheduler alone decides; a worker gets block ids,
keys and a lease, and answers with what it finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["LoadJob", "RankShape", "StepPlan", "StoreJob", "WorkerReport"]

Blocks = tuple[tuple[int, ...], ...]  # one row a KV group; 0 is no block


class RankShape(NamedTuple):
    """What one worker holds of a chunk, told once after its KV caches were registered."""

    pp: int
    tp: int
    replicas: int  # so many tensor ranks in a row hold the same bytes
    layers: tuple[int, int]
    heads: int
    nbytes: int  # a chunk's
    codec: str
    dtype: str
    quantisation: str
    refused: str = ""  # why this engine can't be cached; "": it can


class LoadJob(NamedTuple):
    """Chunks `first` .. of a lease, for the blocks of a request that waits for them."""

    job: int
    request: str
    lease: tuple[int, int, int]  # a kvd.client.SharedLease
    first: int
    chunks: int
    blocks: Blocks  # chunks * blocks a chunk in each group; 0: keep what is there


class StoreJob(NamedTuple):
    """Chunks that are computed when this step's forward is through."""

    job: int
    hashes: bytes  # 32 a chunk
    fingerprints: bytes  # 16 a chunk
    parent: bytes  # hash of the chunk before, 32 zero bytes at a root
    index0: int
    blocks: Blocks

    @property
    def chunks(self) -> int:
        return len(self.hashes) // 32


@dataclass
class StepPlan:
    """One step's work. `written`: blocks that this step, or a load that begins in it, writes to
    and that a store may still be reading; `all_written`: it could not be told which."""

    spec: bytes = b""  # KVSpec.encode(), whenever there is work
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    written: frozenset[int] = frozenset()
    all_written: bool = False


@dataclass
class WorkerReport:
    """Stores that came to their end, with how many ranks said so; and whether a load lost its
    daemon (which the scheduler then leaves alone for a while)."""

    stored: dict[int, int] = field(default_factory=dict)
    lost_daemon: bool = False

    def merged(self, other: WorkerReport) -> WorkerReport:
        stored = dict(self.stored)
        for job, ranks in other.stored.items():
            stored[job] = stored.get(job, 0) + ranks
        return WorkerReport(stored, self.lost_daemon or other.lost_daemon)
