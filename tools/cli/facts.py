"""The lines of `kvd-cli status`: a name and what is to be said of it, from a stat's counters.

The law of this module: a line says what an operator asks first, and then only what is not zero; a
line that has nothing to say is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kvd.tools.cli.book import Book
from kvd.tools.cli.console import Output
from kvd.tools.cli.units import clean, format_bytes, format_count, format_duration

__all__ = ["facts"]


def facts(output: Output, book: Book) -> Table:
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
    arena = book.stat.get("arena", {})
    replaced = arena.get("replaced", "") if isinstance(arena, Mapping) else ""
    if not (adopted or rejected or replaced):
        return None
    return _join(
        _said("adopted", adopted),
        _said("not taken over", rejected),
        f"nothing adopted: the arena that was there {clean(replaced)}" if replaced else "",
    )


def _slabs(book: Book) -> Text:
    free = sum(tier.get("slabs_free", 0) for tier in book.stat.get("tiers", []))
    return _join(
        f"{format_count(free)} free",
        f"{book.count('slabs_assigned')} given to a size class so far",
        _said("changed class", book.reasons("slab_changes")),
        _said("slots moved", book.reasons("slots_moved")),
        _said("no memory for", _nonzero(book.total("slabs_refused"))),
        *_huge(book),
    )


def _huge(book: Book) -> list[str]:
    """How much of the memory lies in huge pages, and why not all."""
    said = []
    for tier in book.stat.get("tiers", []):
        if "huge_bytes" in tier:
            size, limit = tier["huge_bytes"], tier.get("limit_bytes", 0)
            problem = f" ({clean(tier['huge_problem'])})" if tier.get("huge_problem") else ""
            of = "" if size == limit else f" of {format_bytes(limit)}"
            said.append(f"{format_bytes(size)}{of} in huge pages{problem}")
    return said


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
