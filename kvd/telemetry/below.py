"""The declared table of what the core counts of the tiers below DRAM: what goes down, and comes up.

The law of this module: as in kvd.telemetry.table.
"""

from __future__ import annotations

from kvd.telemetry.metric import Metric, MetricKind

__all__ = ["BELOW"]

_C = MetricKind.COUNTER

BELOW = (
    Metric(
        "demotions",
        _C,
        "chunks",
        "Chunks on their way down, by how it ended. written, present (it was there already); or "
        "dropped without: off (no tier takes writes), unwanted (by the tier's write policy), "
        "no_time (a store could not wait), over_quota (its tenant has its maximum there), and what "
        "the tier answered.",
        "result",
        (
            "written",
            "present",
            "off",
            "unwanted",
            "no_time",
            "over_quota",
            "no_space",
            "too_large",
            "corrupt",
            "timeout",
            "failed",
        ),
        tenant=True,
    ),
    Metric(
        "shards_promoted",
        _C,
        "shards",
        "Shards read up into DRAM: for one lease, to stay, or ahead, before anybody asked.",
        "how",
        ("transient", "stays", "ahead"),
        tenant=True,
    ),
    Metric(
        "chunks_prefetched",
        _C,
        "chunks",
        "Keys in prefetches, by what became of the hint: here (in DRAM already), coming, no_space, "
        "missed, or skipped behind the first that is not to be had.",
        "answer",
        ("here", "coming", "no_space", "missed", "skipped"),
        tenant=True,
    ),
    Metric(
        "chunks_kept",
        _C,
        "chunks",
        "Chunks read up for one lease that stayed after a second hit.",
        tenant=True,
    ),
    Metric(
        "chunks_evicted_below",
        _C,
        "chunks",
        "Chunks removed from a tier below, by reason.",
        "reason",
        ("capacity", "quota", "demoted", "command", "quarantine"),
        tenant=True,
    ),
    Metric(
        "descents",
        _C,
        "chunks",
        "Last copies that had to leave a tier below that has another one below it, by what became "
        "of them: written there, or deleted: off (no further tier takes writes, or the payload "
        "can't be read), unwanted (by its write policy), busy (enough are on their way), "
        "over_quota (its tenant has its maximum there), and what a tier answered.",
        "result",
        (
            "written",
            "off",
            "unwanted",
            "busy",
            "over_quota",
            "miss",
            "no_space",
            "too_large",
            "corrupt",
            "timeout",
            "failed",
        ),
        tenant=True,
    ),
    Metric(
        "shards_written",
        _C,
        "shards",
        "Writes to tiers below, by answer. late: not back in time, counted again when they are.",
        "answer",
        (
            "ok",
            "exists",
            "no_space",
            "too_large",
            "corrupt",
            "timeout",
            "failed",
            "off",
            "late",
        ),
    ),
    Metric(
        "shards_fetched",
        _C,
        "shards",
        "Reads from tiers below, by answer. foreign: the record is another chunk's; cancelled: "
        "nobody waited any more; late: not back in time, counted again when they are.",
        "answer",
        (
            "ok",
            "miss",
            "corrupt",
            "timeout",
            "failed",
            "off",
            "foreign",
            "cancelled",
            "late",
        ),
    ),
    Metric(
        "shards_scrubbed",
        _C,
        "shards",
        "Payloads below read to see whether they hold, by answer.",
        "answer",
        ("ok", "miss", "corrupt", "timeout", "failed", "off", "foreign"),
    ),
    Metric(
        "shards_deleted",
        _C,
        "shards",
        "Deletions in tiers below, by answer.",
        "answer",
        ("ok", "miss", "timeout", "failed", "off"),
    ),
)
