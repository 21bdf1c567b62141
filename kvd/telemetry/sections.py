"""The declared table of what `stat` shows beside its counters: of tiers, of tenants, of the loop.

The law of this module: as in kvd.telemetry.table. A row names the value where `stat` has it, so
that what is exported and what `kvd-cli` shows is one number; a value that is not known is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvd.telemetry.metric import MetricKind

__all__ = ["SECTIONS", "Section", "Shown"]

_C = MetricKind.COUNTER
_G = MetricKind.GAUGE


class Shown(NamedTuple):
    """One metric. `key`: where the value stands in a row of its section."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    key: str


class Row(NamedTuple):
    labels: tuple[str, ...]  # values of the section's labels
    values: Mapping[str, Any]


class Section(NamedTuple):
    """Metrics with the same labels."""

    name: str
    labels: tuple[str, ...]
    metrics: tuple[Shown, ...]

    def rows(self, stat: Mapping[str, Any]) -> Iterator[Row]:
        """Of an administrator's stat."""
        if self.name == "daemon":
            yield Row((), {**stat.get("loop", {}), **_plain(stat)})
        elif self.name == "directory":
            for event, value in stat.get("directory", {}).items():
                if isinstance(value, int):
                    yield Row((event,), {"count": value})
        elif self.name == "tiers":
            for tier in stat["tiers"]:
                yield Row((tier["name"],), {**tier, "healthy": int(tier["state"] == "ok")})
        elif self.name in ("reasons", "notes"):
            for tier in stat["tiers"]:
                for name, value in tier.get(self.name, {}).items():
                    yield Row((tier["name"], name), {"count": value})
        elif self.name == "answers":
            for tier in stat["tiers"]:
                for operation, answers in tier.get("answers", {}).items():
                    for answer, value in answers.items():
                        yield Row((tier["name"], operation, answer), {"count": value})
        else:
            for tenant, row in stat["tenants"].items():
                for tier, values in row["tiers"].items():
                    yield Row((tenant, tier), values)


def _plain(stat: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {**stat, "draining": int(stat.get("draining", False))}
    if "started_unix_ns" in stat:
        plain["started"] = stat["started_unix_ns"] / 1e9
    if "longest_turn_ms" in stat.get("loop", {}):
        plain["longest_turn"] = stat["loop"]["longest_turn_ms"] / 1000
    return plain


SECTIONS = (
    Section(
        "daemon",
        (),
        (
            Shown("start_time", _G, "s", "When the daemon started, since 1970.", "started"),
            Shown("uptime", _G, "s", "Since the daemon's start.", "uptime_s"),
            Shown("sessions", _G, "sessions", "Sessions that are open.", "sessions"),
            Shown("draining", _G, "", "1 while the daemon is shutting down.", "draining"),
            Shown("loop_turns", _C, "turns", "Turns of the loop.", "turns"),
            Shown(
                "loop_faults", _C, "faults", "All that is in faults, and the loop's own.", "faults"
            ),
            Shown(
                "loop_longest_turn", _G, "s", "The longest turn since the start.", "longest_turn"
            ),
            Shown(
                "requests_in_flight",
                _G,
                "requests",
                "Requests that wait for their answer.",
                "requests_in_flight",
            ),
            Shown(
                "transfers_pending", _G, "jobs", "Jobs that wait for a worker.", "transfers_pending"
            ),
            Shown("workers_stuck", _G, "threads", "Workers in a job that hangs.", "workers_stuck"),
            Shown(
                "locks_watched",
                _G,
                "sessions",
                "Sessions that ended while their memory may still be written to.",
                "locks_watched",
            ),
        ),
    ),
    Section(
        "tiers",
        ("tier",),
        (
            Shown("tier_limit", _G, "bytes", "What the tier may take at most.", "limit_bytes"),
            Shown("tier_used", _G, "bytes", "What of it is taken.", "used_bytes"),
            Shown("tier_huge_pages", _G, "bytes", "Memory in huge pages.", "huge_bytes"),
            Shown("tier_chunks", _G, "chunks", "Chunks in the tier.", "chunks"),
            Shown("tier_healthy", _G, "", "1 if its state is ok, else 0.", "healthy"),
            Shown("tier_pending", _G, "jobs", "Jobs handed over and not completed.", "pending"),
            Shown("tier_overdue", _G, "jobs", "Of these, beyond their deadline.", "overdue"),
            Shown("tier_written", _C, "bytes", "Payload written to the medium.", "bytes_written"),
            Shown("tier_read", _C, "bytes", "Payload read from the medium.", "bytes_read"),
        ),
    ),
    Section(
        "answers",
        ("tier", "operation", "answer"),
        (Shown("tier_answers", _C, "jobs", "Jobs of a tier below, by answer.", "count"),),
    ),
    Section(
        "reasons",
        ("tier", "reason"),
        (Shown("tier_failures", _C, "failures", "What went wrong in a tier below.", "count"),),
    ),
    Section(
        "notes",
        ("tier", "note"),
        (
            Shown(
                "tier_notes",
                _G,
                "",
                "What only this medium tells: retries, fallbacks, foreign files (docs/tiers.md).",
                "count",
            ),
        ),
    ),
    Section(
        "directory",
        ("event",),
        (
            Shown(
                "directory_events",
                _C,
                "events",
                "What the shared directory was asked and told, and how it went.",
                "count",
            ),
        ),
    ),
    Section(
        "tenants",
        ("tenant", "tier"),
        (
            Shown("tenant_used", _G, "bytes", "Slots that the tenant has there.", "used_bytes"),
            Shown("tenant_chunks", _G, "chunks", "Chunks that it has there.", "chunks"),
            Shown("tenant_minimum", _G, "bytes", "What nobody can take from it.", "minimum_bytes"),
            Shown("tenant_share", _G, "bytes", "What it has when all want more.", "share_bytes"),
            Shown(
                "tenant_maximum",
                _G,
                "bytes",
                "What it may have at most, if that is bounded.",
                "maximum_bytes",
            ),
        ),
    ),
)
