"""The declared table of what the server counts beside the core.

The law of this module: as in kvd.telemetry.table. These are apart because the core counts all of
its own, and none of these.
"""

from __future__ import annotations

from kvd.telemetry.metric import Metric, MetricKind

__all__ = ["SERVER_METRICS"]

_C = MetricKind.COUNTER

_ALL = (
    Metric("requests", _C, "requests", "Requests taken on, each once."),
    Metric("replies", _C, "replies", "Replies made, each once; a retry's copy is in replayed."),
    Metric("replayed", _C, "requests", "Retries of requests that had been taken on before."),
    Metric(
        "requests_recorded",
        _C,
        "requests",
        "Requests for trace.record, by what became of them. dropped: they came faster than they "
        "could be written; failed: the disk refused; partial: the rest of a prompt, left out.",
        "result",
        ("written", "dropped", "failed", "partial"),
    ),
    Metric(
        "policy_writes_failed", _C, "files", "What policies know could not be kept for a restart."
    ),
    Metric(
        "requests_expired", _C, "requests", "Requests past their deadline when read; no effect."
    ),
    Metric(
        "requests_delayed",
        _C,
        "requests",
        "Requests beyond what their tenant may ask for in a second or have in flight, or of a "
        "session that has too much to read: answered busy, no effect.",
    ),
    Metric(
        "malformed",
        _C,
        "messages",
        "Messages that do not follow the protocol, by the error that answered them.",
        "error",
        ("protocol", "limit", "version"),
    ),
    Metric(
        "refused",
        _C,
        "messages",
        "Messages of strangers, of closed sessions and of other epochs, by error.",
        "error",
        ("unknown_session", "stale_epoch", "auth", "draining", "wrong_instance", "other"),
    ),
    Metric(
        "attach_refused",
        _C,
        "clients",
        "Attaches that were refused, by error.",
        "error",
        ("protocol", "limit", "version", "auth", "draining", "wrong_instance", "other"),
    ),
    Metric(
        "sends_failed",
        _C,
        "replies",
        "Replies that could not be sent: the peer does not read, or is gone.",
        "reason",
        ("full", "unreachable"),
    ),
    Metric(
        "sessions_ended",
        _C,
        "sessions",
        "Sessions that ended, by what ended them.",
        "reason",
        ("bye", "process", "connection", "full", "unreachable", "lock", "removed", "shutdown"),
    ),
    Metric("registry_failures", _C, "writes", "Specs that a restart may not know any more."),
    Metric(
        "faults",
        _C,
        "faults",
        "Exceptions nobody expected, by where they were caught; the daemon went on.",
        "where",
        ("core", "action", "request", "loop"),
    ),
    Metric(
        "exports",
        _C,
        "exports",
        "Exports of metrics, by result. failed: not taken; the next one has it all again. skipped: "
        "it was due, and the one before was still under way.",
        "result",
        ("ok", "failed", "skipped"),
    ),
    Metric(
        "spans",
        _C,
        "spans",
        "Spans of sampled requests, by result. dropped: they came faster than they went.",
        "result",
        ("ok", "failed", "dropped"),
    ),
    Metric(
        "scrapes",
        _C,
        "requests",
        "Reads of /metrics, by result. failed: the loop did not answer in time; refused: too many "
        "connections at a time.",
        "result",
        ("ok", "failed", "refused"),
    ),
    Metric(
        "transfers",
        _C,
        "jobs",
        "Jobs of the worker threads, by result; stuck: reported by the watchdog.",
        "result",
        ("done", "failed", "stuck"),
    ),
)

SERVER_METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
