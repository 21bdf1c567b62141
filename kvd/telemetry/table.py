"""The declared table of every metric of the core: what it counts, to the letter.

The law of this module: one event is one count, in one counter, under one label. Chunks asked are
hit or missed; chunks loaded are delivered or failed; a shard is not a chunk. A label's values are
all named here, and in kvd.telemetry.below for what moves between tiers.
"""

from __future__ import annotations

from kvd.telemetry.below import BELOW
from kvd.telemetry.metric import Metric, MetricKind

_C = MetricKind.COUNTER
_G = MetricKind.GAUGE

_HERE = (
    # lookups
    Metric("lookups", _C, "requests", "Lookup requests carried out.", tenant=True),
    Metric("chunks_asked", _C, "chunks", "Keys in lookups: hit + missed.", tenant=True),
    Metric(
        "chunks_hit",
        _C,
        "chunks",
        "Keys answered OK in lookups: the leading run, or with EVERY all that were there.",
        tenant=True,
    ),
    Metric(
        "chunks_hit_public",
        _C,
        "chunks",
        "Of chunks_hit, those of the namespace `public`, asked for from another one.",
        tenant=True,
    ),
    Metric(
        "chunks_missed",
        _C,
        "chunks",
        "Keys not answered OK in lookups, by reason. skipped: behind the end of the leading run; "
        "away: in a tier that can't be read now.",
        "reason",
        (
            "absent",
            "writing",
            "partial",
            "orphan",
            "mismatch",
            "quarantined",
            "over_quota",
            "skipped",
            "away",
        ),
        tenant=True,
    ),
    # loads
    Metric(
        "chunks_delivered",
        _C,
        "chunks",
        "Leased chunks whose first load gave every shard asked for. Later loads under the same "
        "lease (other ranks) are not counted again.",
        tenant=True,
    ),
    Metric(
        "chunks_failed",
        _C,
        "chunks",
        "Leased chunks whose first load gave not every shard asked for.",
        tenant=True,
    ),
    Metric(
        "shards_loaded",
        _C,
        "shards",
        "Results of loads, by outcome.",
        "outcome",
        ("ok", "miss", "corrupt", "cancelled", "deadline", "no_space"),
        tenant=True,
    ),
    Metric("bytes_loaded", _C, "bytes", "Payload bytes of shards loaded ok.", tenant=True),
    # stores
    Metric(
        "shards_reserved",
        _C,
        "shards",
        "Results of reserves, by outcome.",
        "outcome",
        (
            "granted",
            "exists",
            "busy",
            "no_space",
            "too_large",
            "over_quota",
            "mismatch",
            "draining",
            "deadline",
        ),
        tenant=True,
    ),
    Metric(
        "shards_committed",
        _C,
        "shards",
        "Results of commits, by outcome. ok: stored and readable.",
        "outcome",
        ("ok", "evicted", "expired", "failed"),
        tenant=True,
    ),
    Metric("shards_aborted", _C, "shards", "Unfinished writes given back.", tenant=True),
    Metric("chunks_stored", _C, "chunks", "Chunks that became resident by a commit.", tenant=True),
    Metric("bytes_stored", _C, "bytes", "Payload bytes of shards committed ok.", tenant=True),
    # ends
    Metric(
        "chunks_evicted",
        _C,
        "chunks",
        "Resident chunks removed from DRAM, by reason. capacity: for room; slab: a slab changed "
        "class; command: evict; quarantine: replaced or removed after a bad digest; demoted: a "
        "tier below has it; undemoted: a tier below could not take it; transient: read from below "
        "for one lease.",
        "reason",
        (
            "capacity",
            "slab",
            "command",
            "quarantine",
            "demoted",
            "undemoted",
            "transient",
        ),
        tenant=True,
    ),
    Metric(
        "evictions_suffered",
        _C,
        "chunks",
        "Chunks that the tenant lost for want of another's room, in DRAM or in a tier below.",
        "where",
        ("dram", "below"),
        tenant=True,
    ),
    Metric(
        "evictions_inflicted",
        _C,
        "chunks",
        "Chunks that others lost for this tenant's room.",
        "where",
        ("dram", "below"),
        tenant=True,
    ),
    Metric(
        "evictions_below_minimum",
        _C,
        "chunks",
        "Of evictions_suffered, those while the tenant had no more than its minimum. Always 0.",
        "where",
        ("dram", "below"),
        tenant=True,
    ),
    Metric("bytes_evicted", _C, "bytes", "Payload bytes of chunks evicted.", tenant=True),
    Metric("leases_given", _C, "leases", "Leases given by lookups.", tenant=True),
    Metric(
        "leases_ended",
        _C,
        "leases",
        "Leases that ended, by reason.",
        "reason",
        ("released", "expired", "session"),
        tenant=True,
    ),
    Metric(
        "slots_condemned",
        _C,
        "slots",
        "Unfinished writes whose writer may still be copying, by reason.",
        "reason",
        ("expired", "session", "restart"),
    ),
    Metric(
        "slots_reclaimed",
        _C,
        "slots",
        "Condemned slots given back, by what proved that the writer stopped.",
        "reason",
        ("aborted", "committed", "session", "lock"),
    ),
    # integrity
    Metric("shards_sealed", _C, "shards", "Digests taken, by whom.", "by", ("daemon", "client")),
    Metric("seals_failed", _C, "shards", "Background seals that failed."),
    Metric(
        "shards_verified",
        _C,
        "shards",
        "Adopted payloads compared with their digest before their first load.",
        "outcome",
        ("ok", "corrupt"),
    ),
    Metric(
        "key_mismatches",
        _C,
        "chunks",
        "Known hash with another identity.",
        "by",
        ("lookup", "reserve"),
        tenant=True,
    ),
    # slabs
    Metric("slabs_assigned", _C, "slabs", "Slabs given to a size class."),
    Metric(
        "slabs_refused",
        _C,
        "slabs",
        "Times that a slab could not be cut into smaller slots: no memory for their records.",
    ),
    Metric(
        "slab_changes",
        _C,
        "slabs",
        "Slabs emptied for another size class, by result.",
        "result",
        ("done", "given_up"),
    ),
    Metric(
        "slots_moved",
        _C,
        "slots",
        "Hot slots copied out of a slab, by result.",
        "result",
        ("done", "given_up"),
    ),
    Metric("policy_errors", _C, "errors", "Exceptions of the eviction policy; eviction went on."),
    # hints
    Metric(
        "chunks_hinted",
        _C,
        "chunks",
        "Chunks that hints were taken for, by hint.",
        "hint",
        ("session_end", "expect_reuse", "pin", "priority"),
        tenant=True,
    ),
    Metric(
        "hints_over_cap",
        _C,
        "chunks",
        "Chunks that were not pinned or spared: the tenant's cap is reached, or that of all.",
        tenant=True,
    ),
    # restart
    Metric(
        "records_adopted",
        _C,
        "records",
        "Records of an earlier life taken over, by state.",
        "state",
        ("sealed", "unsealed"),
    ),
    Metric(
        "records_rejected",
        _C,
        "records",
        "Records of an earlier life not taken over, by reason.",
        "reason",
        (
            "unknown_spec",
            "unknown_namespace",
            "geometry",
            "duplicate",
            "chain",
            "unfinished",
            "quarantined",
        ),
    ),
    Metric("records_recovered", _C, "records", "Records in tiers below taken up."),
)

_SESSIONS = (
    Metric("sessions_opened", _C, "sessions", "Sessions opened."),
    Metric("sessions_closed", _C, "sessions", "Sessions closed."),
    Metric(
        "requests_refused",
        _C,
        "requests",
        "Requests answered with an error, by code.",
        "code",
        (
            "unknown_session",
            "limit",
            "spec",
            "bad_key",
            "unknown_handle",
            "auth",
            "protocol",
            "busy",
        ),
    ),
)

_GAUGES = (
    Metric("leased_chunks", _G, "chunks", "Chunks under at least one lease."),
    Metric("active_leases", _G, "leases", "Leases."),
    Metric("active_writes", _G, "writes", "Reserves with unfinished slots."),
    Metric("writing_bytes", _G, "bytes", "Slots of unfinished writes."),
    Metric("condemned_bytes", _G, "bytes", "Condemned slots."),
    Metric(
        "held_bytes",
        _G,
        "bytes",
        "Freed slots of an earlier life, kept until no reader of it can be left.",
    ),
    Metric("pending_touches", _G, "chunks", "Recency not applied yet."),
    Metric(
        "transient_bytes", _G, "bytes", "Slots of first hits from below, until their lease ends."
    ),
    Metric("kept_bytes", _G, "bytes", "Slots that hints have pinned or spared."),
    Metric("moving", _G, "chunks", "Chunks on their way down."),
    Metric(
        "records_waiting",
        _G,
        "records",
        "Records in tiers below whose spec or namespace nobody has named yet.",
    ),
    Metric("prefetch_bytes", _G, "bytes", "Slots set aside for what is read up ahead."),
    Metric("fetches_queued", _G, "shards", "Shards that wait to be read from below."),
)

METRICS: dict[str, Metric] = {m.name: m for m in (*_HERE, *BELOW, *_SESSIONS, *_GAUGES)}


def metric(name: str) -> Metric:
    """KeyError for a name that is not declared."""
    return METRICS[name]
