"""`kvd-cli status`: one screen from which an operator understands the daemon.

The law of this module: every number is the daemon's own. What is not known to this version is
shown under its own name rather than left out; what is zero and means "all is well" is left out of
the table, never of JSON.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import clean, format_bytes, format_count, format_duration

MOST_SLABS = 16  # a slab is at most this part of an arena
Counter = int | float | Mapping[str, int | float]


@click.command()
@connection
def status(
    link: Link,
    output: Output,
) -> None:
    """Show how the daemon is: tiers, hits, sessions, leases, evictions, errors, the loop.

    \b
    Examples:
      kvd-cli status
      kvd-cli status --socket /run/kvd/kvd.sock
      kvd-cli status --json | jq '.tiers[] | {name, used_bytes, limit_bytes}'
      watch kvd-cli status
    """
    info = link.info()
    stat = link.stat()
    for name in ("version", "instance", "namespace"):
        stat.setdefault(name, getattr(info, name))
    stat.pop("config", None)  # `kvd-cli config` shows it
    if output.as_json:
        output.json(socket=link.socket, admin=info.admin, **stat)
        return
    for part in render(output, stat, link.socket, info.admin):
        output.show(part)


def render(
    output: Output, stat: Mapping[str, Any], socket: str, admin: bool
) -> list[RenderableType]:
    """The parts of the screen, from the answer to a stat."""
    book = Book(stat)
    parts: list[RenderableType] = [
        _head(stat, socket, admin),
        _tiers(output, stat),
        *_below(output, stat),
        _facts(output, book),
    ]
    if (unknown := book.unread()) is not None:
        parts.append(unknown)
    return parts


class Book:
    """The counters and gauges of a stat, and which of them have been shown."""

    def __init__(self, stat: Mapping[str, Any]) -> None:
        self.stat = stat
        self._counters: dict[str, Counter] = {**stat.get("gauges", {}), **stat.get("counters", {})}
        self._read: set[str] = set()

    def get(self, name: str) -> Counter:
        self._read.add(name)
        return self._counters.get(name, 0)

    def total(self, *names: str) -> float:
        """The sum of these counters over all their labels."""
        return sum(total(self.get(name)) for name in names)

    def count(self, *names: str) -> str:
        return format_count(self.total(*names))

    def size(self, name: str) -> str:
        return format_bytes(self.total(name))

    def reasons(self, name: str, *besides: str) -> str:
        """Labels that occurred, without those named."""
        counter = self.get(name)
        if isinstance(counter, Mapping):
            counter = {label: n for label, n in counter.items() if label not in besides}
        return reasons(counter)

    def unread(self) -> Text | None:
        """What a newer daemon counts and this version has no line for."""
        rest = sorted(set(self._counters) - self._read)
        said = [
            f"{clean(name)} {format_count(total(self._counters[name]))}"
            for name in rest
            if total(self._counters[name])
        ]
        return Text("also counted: " + ", ".join(said), style="dim") if said else None


def total(counter: Counter) -> float:
    """A counter, or the sum over its reasons."""
    return sum(counter.values()) if isinstance(counter, Mapping) else counter


def reasons(counter: Counter) -> str:
    """'12 no_space, 3 leased': the reasons that occurred, the most frequent first."""
    if not isinstance(counter, Mapping):
        return ""
    named = sorted(((count, name) for name, count in counter.items() if count), reverse=True)
    return ", ".join(f"{format_count(count)} {clean(name)}" for count, name in named)


def _head(stat: Mapping[str, Any], socket: str, admin: bool) -> Text:
    role = " (admin)" if admin else ""
    return Text.assemble(
        ("kvd ", "bold"),
        (clean(stat.get("version", "?")), "bold"),
        f"  instance {clean(stat.get('instance', '?'))}",
        f"  up {format_duration(stat.get('uptime_s'))}",
        f"  pid {stat['pid']}" if "pid" in stat else "",
        ("  draining", "bold yellow") if stat.get("draining") else "",
        (f"  epoch {stat.get('epoch', '?')}", "dim"),
        f"\nnamespace {clean(stat.get('namespace', '?'))}{role}",
        (f"  socket {clean(socket)}", "dim"),
    )


def _tiers(output: Output, stat: Mapping[str, Any]) -> Table:
    table = output.table("", "tier", "state", "used", "", ">chunks", ">leased", ">condemned")
    for tier in stat.get("tiers", []):
        limit = tier.get("limit_bytes", 0)
        used = tier.get("used_bytes", 0)  # slots that are taken, whatever by
        reserved = tier.get("reserved_bytes", limit)
        growing = reserved < limit - limit // MOST_SLABS  # less than a slab may be left over
        state = f"growing ({format_bytes(reserved)})" if growing else tier.get("state", "?")
        condemned = tier.get("condemned_bytes", 0)
        table.add_row(
            cell(tier.get("name", "?"), "bold"),
            cell(state, "green" if state == "ok" else "yellow"),
            output.bar(used, limit, 16),
            cell(f"{format_bytes(used)} of {format_bytes(limit)}"),
            cell(format_count(tier.get("chunks", 0))),
            cell(format_count(tier.get("leased_chunks", 0))),
            cell(format_bytes(condemned), "yellow" if condemned else ""),
        )
    return table


def _below(output: Output, stat: Mapping[str, Any]) -> list[Table]:
    """What only tiers below memory have."""
    tiers = [tier for tier in stat.get("tiers", []) if "engine" in tier]
    if not tiers:
        return []
    table = output.table("tier", "engine", "written", ">write", ">read", ">pending", "last error")
    for tier in tiers:
        overdue = tier.get("overdue", 0)
        pending = format_count(tier.get("pending", 0))
        table.add_row(
            cell(tier.get("name", "?"), "bold"),
            cell(tier.get("engine", "?")),
            cell(tier.get("policy", "?")),
            cell(_rate(tier, "write_gbps")),
            cell(_rate(tier, "read_gbps")),
            cell(f"{pending} ({overdue} hang)" if overdue else pending, "red" if overdue else ""),
            cell(
                clean(tier.get("last_error") or "none"), "yellow" if tier.get("last_error") else ""
            ),
        )
    return [table]


def _rate(tier: Mapping[str, Any], name: str) -> str:
    rate = tier.get(name) or 0
    return f"{rate:.2f} GB/s" if rate else "-"


def _ladder(book: Book) -> Text | None:
    """What moved between the tiers."""
    if len(book.stat.get("tiers", [])) < 2:
        for name in _LADDER:
            book.get(name)
        return None
    return _join(
        _said("down", book.reasons("demotions")),
        _said("up", book.reasons("shards_promoted")),
        _said("kept", book.count("chunks_kept") if book.total("chunks_kept") else ""),
        _said("prefetched", book.reasons("chunks_prefetched")),
        _said("for these", book.size("prefetch_bytes") if book.total("prefetch_bytes") else ""),
        _said("writes", book.reasons("shards_written", "ok")),
        _said("reads", book.reasons("shards_fetched", "ok")),
        _said("deletes", book.reasons("shards_deleted", "ok", "miss")),
        _said("further down", book.reasons("descents")),
        _said("evicted below", book.reasons("chunks_evicted_below")),
        _said("scrubbed", book.reasons("shards_scrubbed")),
        _said("moving", book.count("moving") if book.total("moving") else ""),
        _said("queued", book.count("fetches_queued") if book.total("fetches_queued") else ""),
        _said(
            "first hits hold", book.size("transient_bytes") if book.total("transient_bytes") else ""
        ),
        _said("recovered", book.count("records_recovered")),
        _said("waiting for their spec", book.count("records_waiting"))
        if book.total("records_waiting")
        else "",
    )


_LADDER = (
    "demotions",
    "shards_promoted",
    "chunks_kept",
    "chunks_prefetched",
    "prefetch_bytes",
    "shards_written",
    "shards_fetched",
    "shards_deleted",
    "descents",
    "chunks_evicted_below",
    "shards_scrubbed",
    "moving",
    "fetches_queued",
    "transient_bytes",
    "records_recovered",
    "records_waiting",
)


def _facts(output: Output, book: Book) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in (
        ("lookups", _lookups(book)),
        ("hits", _hits(output, book)),
        ("misses", Text(book.reasons("chunks_missed") or "none")),
        ("loads", _loads(book)),
        ("stores", _stores(book)),
        ("evictions", _evictions(book)),
        ("tenants", _tenants(book)),
        ("policy", _policy(book)),
        ("hints", _hints(book)),
        ("ladder", _ladder(book)),
        ("directory", _directory(book.stat.get("directory"))),
        ("metrics", _metrics(book)),
        ("leases", _leases(book)),
        ("writes", _writes(book)),
        ("sessions", _sessions(book)),
        ("integrity", _integrity(book)),
        ("restart", _restart(book)),
        ("slabs", _slabs(book)),
        ("requests", _requests(book)),
        ("recorded", Text(book.reasons("requests_recorded"))),
        ("workers", _workers(book)),
        ("errors", _errors(book)),
        ("loop", _loop(book.stat.get("loop", {}))),
    ):
        if value:
            grid.add_row(Text(name), value)
    return grid


def _join(*parts: str) -> Text:
    return Text("; ".join(part for part in parts if part))


def _said(label: str, text: str) -> str:
    """'label: text', or nothing for no text."""
    return f"{label}: {text}" if text else ""


def _lookups(book: Book) -> Text:
    return Text(f"{book.count('lookups')} requests for {book.count('chunks_asked')} chunks")


def _hits(output: Output, book: Book) -> Text:
    asked, hit = book.total("chunks_asked"), book.total("chunks_hit")
    if not asked:
        return Text("nothing asked yet", style="dim")
    bar = output.bar(hit, asked)
    bar.stylize("green")
    return Text.assemble(bar, f" {100 * hit / asked:.1f} %, {format_count(hit)} chunks")


def _tenants(book: Book) -> Text | None:
    """What tenants take from each other; `kvd-cli tenant list` says which."""
    tenants = book.stat.get("tenants", {})
    said = _join(
        f"{format_count(len(tenants))} told apart" if len(tenants) > 1 else "",
        _said("evictions for others", book.reasons("evictions_suffered")),
        _said("below a minimum", book.reasons("evictions_below_minimum")),
        _said("hits in public", _nonzero(book.total("chunks_hit_public"))),
        _said("asked to wait", _nonzero(book.total("requests_delayed"))),
    )
    book.get("evictions_inflicted")  # the same ones, from the other side
    return said if said.plain else None


def _loads(book: Book) -> Text:
    return _join(
        f"{book.count('chunks_delivered')} chunks, {book.size('bytes_loaded')}",
        _said("failed", _nonzero(book.total("chunks_failed"))),
        _said("shards", book.reasons("shards_loaded", "ok")),
    )


def _stores(book: Book) -> Text:
    return _join(
        f"{book.count('chunks_stored')} chunks, {book.size('bytes_stored')}",
        _said("not granted", book.reasons("shards_reserved", "granted")),
        _said("not committed", book.reasons("shards_committed", "ok")),
        _said("given back", _nonzero(book.total("shards_aborted"))),
    )


def _evictions(book: Book) -> Text:
    return _join(
        f"{book.count('chunks_evicted')} chunks, {book.size('bytes_evicted')}",
        book.reasons("chunks_evicted"),
    )


def _policy(book: Book) -> Text | None:
    """Who decides which chunks go, and whether that is who should."""
    shown = [
        (t.get("name", "?"), t["eviction"]) for t in book.stat.get("tiers", []) if "eviction" in t
    ]
    if not shown:
        return None
    text = Text(clean(shown[0][1].get("policy", "?")))
    for tier, policy in shown:
        if policy.get("error"):
            instead = {"none": "rows go as they come"}.get(policy.get("turn"), "LRU decides")
            text.append(
                f"; failed in {clean(tier)}, {instead} until the next start: "
                f"{clean(policy['error'])}",
                style="red",
            )
    return text


def _hints(book: Book) -> Text | None:
    taken, over = book.reasons("chunks_hinted"), book.total("hints_over_cap")
    kept = book.size("kept_bytes") if book.total("kept_bytes") else ""
    if not (taken or over or kept):
        return None
    return _join(
        f"{taken or 'none'} (chunks)", _said("keep", kept), _said("over the cap", _nonzero(over))
    )


def _leases(book: Book) -> Text:
    return _join(
        f"{book.count('active_leases')} on {book.count('leased_chunks')} chunks",
        f"{book.count('leases_given')} given",
        _said("ended", book.reasons("leases_ended")),
    )


def _writes(book: Book) -> Text:
    condemned = book.total("condemned_bytes")
    held = book.total("held_bytes")
    text = _join(
        f"{book.count('active_writes')} unfinished, {book.size('writing_bytes')}",
        f"condemned {format_bytes(condemned)}" if condemned else "none condemned now",
        f"held for earlier readers {format_bytes(held)}" if held else "",
        _said("condemned so far", book.reasons("slots_condemned")),
        _said("reclaimed", book.reasons("slots_reclaimed")),
    )
    text.stylize("yellow" if condemned else "")
    return text


def _sessions(book: Book) -> Text:
    told = book.stat.get("sessions", 0)
    now = len(told) if isinstance(told, list | dict) else int(told)
    closed = book.total("sessions_closed")
    ended = book.reasons("sessions_ended")  # counted by the server, which knows why
    return _join(
        f"{format_count(now)} open",
        f"{book.count('sessions_opened')} opened so far",
        _said(f"{format_count(closed)} ended", ended)
        or (f"{format_count(closed)} ended" if closed else ""),
    )


def _integrity(book: Book) -> Text:
    return _join(
        f"{book.count('shards_sealed')} shards sealed",
        _said("verified after a restart", book.reasons("shards_verified")),
        _said("failed seals", _nonzero(book.total("seals_failed"))),
    )


def _restart(book: Book) -> Text | None:
    adopted, rejected = book.reasons("records_adopted"), book.reasons("records_rejected")
    if not adopted and not rejected:
        return None
    return _join(_said("adopted", adopted), _said("not taken over", rejected))


def _slabs(book: Book) -> Text:
    free = sum(tier.get("slabs_free", 0) for tier in book.stat.get("tiers", []))
    return _join(
        f"{format_count(free)} free",
        f"{book.count('slabs_assigned')} given to a size class so far",
        _said("changed class", book.reasons("slab_changes")),
        _said("slots moved", book.reasons("slots_moved")),
        _said("no memory for", _nonzero(book.total("slabs_refused"))),
    )


def _requests(book: Book) -> Text:
    return _join(
        f"{book.count('requests')} carried out",
        f"{book.count('replies')} answered",
        _said("answered once more", _nonzero(book.total("replayed"))),
    )


def _workers(book: Book) -> Text:
    """Threads that seal, verify and move payloads."""
    done = book.get("transfers")
    count = done.get("done", 0) if isinstance(done, Mapping) else done
    text = _join(
        f"{format_count(count)} transfers done",
        book.reasons("transfers", "done"),
        _said("recency still to be noted", _nonzero(book.total("pending_touches"))),
    )
    text.stylize("yellow" if book.reasons("transfers", "done") else "")
    return text


def _errors(book: Book) -> Text:
    text = _join(
        *(
            _said(label, book.reasons(name) or _nonzero(book.total(name)))
            for label, name in (
                ("refused", "requests_refused"),
                ("refused at the door", "refused"),
                ("malformed", "malformed"),
                ("expired before they were read", "requests_expired"),
                ("attaches refused", "attach_refused"),
                ("not sent", "sends_failed"),
                ("specs not kept for a restart", "registry_failures"),
                ("same hash, other identity", "key_mismatches"),
                ("policy", "policy_errors"),
                ("policies not kept for a restart", "policy_writes_failed"),
                ("faults of the daemon", "faults"),
            )
        )
    )
    if not text:
        return Text("none", style="green")
    text.stylize("red" if book.total("faults", "policy_errors") else "yellow")
    return text


def _directory(directory: Mapping[str, Any] | None) -> Text | None:
    """How the directory is that daemons of one bucket share, and what it was asked and told."""
    if not directory:
        return None
    counts = {name: n for name, n in directory.items() if isinstance(n, int) and n}
    state = clean(directory.get("state", "?"))
    error = directory.get("last_error")
    return Text.assemble(
        (state, "green" if state == "ok" else "yellow"),
        "".join(f"; {clean(name)} {format_count(n)}" for name, n in counts.items()),
        (f"; {clean(error)}" if error and state != "ok" else "", "yellow"),
    )


def _metrics(book: Book) -> Text | None:
    """Whether they are exported, and how that goes."""
    counts, scraped = book.reasons("exports"), book.reasons("scrapes")
    spans = book.reasons("spans")
    told = book.stat.get("telemetry")
    if not isinstance(told, Mapping):
        return None
    state, since = told.get("state"), told.get("failing_since_unix_ns", 0)
    address = told.get("prometheus", "")
    reads = _join(f"at http://{clean(address)}/metrics" if address else "", _said("read", scraped))
    if state == "off":
        return reads if reads.plain else Text("not exported", style="dim")
    text = _join(
        f"exported to {clean(told.get('endpoint', '?'))}: {clean(state)}"
        + (f" for {format_duration(max(0.0, time.time() - since / 1e9))}" if since else ""),
        clean(told.get("last_error", "")) if since else "",
        _said("exports", counts),
        _said("spans", spans),
        reads.plain,
    )
    text.stylize("yellow" if since else "")
    return text


def _loop(loop: Mapping[str, Any]) -> Text | None:
    """The loop's own figures, whatever they are; names that end in a unit are shown with it."""
    if not loop:
        return None
    return _join(*(_with_unit(name, value) for name, value in loop.items()))


def _with_unit(name: str, value: Any) -> str:
    text, said = clean(value), clean(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = format_count(value)
        for ending, scale in (("_ns", 1e-9), ("_us", 1e-6), ("_ms", 1e-3), ("_s", 1.0)):
            if name.endswith(ending):
                text, said = format_duration(value * scale), said.removesuffix(ending)
                break
        if name.endswith("_bytes"):
            text, said = format_bytes(value), said.removesuffix("_bytes")
    return f"{said.replace('_', ' ')} {text}"


def _nonzero(count: float) -> str:
    return format_count(count) if count else ""
