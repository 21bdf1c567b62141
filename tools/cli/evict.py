"""`kvd-cli evict`: take chunks out, and say what really went.

The law of this module: the numbers are the daemon's own counts of what it removed, slice by
slice, so they are true even when a later slice fails. A leased chunk is never taken; it is
reported, and the exit code says that not all that was asked for is gone.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from kvd.errors import KvdError, Unavailable
from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.guard import AWAY, FAILED, Failed
from kvd.tools.cli.link import Conditions, Evicted, Link
from kvd.tools.cli.options import (
    Asked,
    Duration,
    HexKey,
    conditions_from,
    connection,
    filters,
    whole_key,
)
from kvd.tools.cli.units import clean, format_bytes, format_count, format_duration, short_key

_NAMED_SHOWN = 50
_KEYS_A_REQUEST = 1024


@click.command()
@click.argument("keys", nargs=-1, type=HexKey(), metavar="[KEY]...")
@click.option(
    "--key",
    "more_keys",
    multiple=True,
    type=HexKey(),
    metavar="KEY",
    help="This chunk, as KEY; may be abbreviated.",
)
@click.option(
    "--prefix",
    "--subtree",
    "prefix",
    type=HexKey(),
    metavar="KEY",
    help="This chunk and all that continue it.",
)
@click.option("--key-prefix", type=HexKey(), metavar="HEX", help="All keys that start so.")
@filters
@click.option(
    "--older-than",
    "--idle",
    "idle",
    type=Duration(),
    metavar="DURATION",
    help="Not stored or used for at least this long.",
)
@click.option("--all", "everything", is_flag=True, help="All chunks (of the filters, if given).")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask before a wide eviction.")
@connection
def evict(
    link: Link,
    output: Output,
    keys: tuple[str, ...],
    more_keys: tuple[str, ...],
    prefix: str | None,
    key_prefix: str | None,
    namespace: str | None,
    spec: str | None,
    model: str | None,
    kind: str | None,
    tier: str | None,
    state: str | None,
    idle: float | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove chunks: those for which all conditions hold.

    By key or by --prefix nothing is asked; anything wider shows what would go and asks, unless
    --yes. Chunks in use (under a lease, or being read or written by a tier) are skipped and
    reported, and the exit code is then 1. A chunk that somebody is storing right now is not kept:
    its writer is told so when it commits.

    \b
    Examples:
      kvd-cli evict 3fa9c2                       one chunk by an abbreviated key
      kvd-cli evict --prefix 3fa9c2              a chain from there on
      kvd-cli evict --namespace dev --dry-run    what would go
      kvd-cli evict --spec 77ab --older-than 1h
      kvd-cli evict --all --yes --json
    """
    asked = Asked(namespace, spec, model, kind, tier, state)
    names = (*keys, *more_keys)
    wide = not names and prefix is None
    if not (names or asked.any or everything or idle is not None) and key_prefix is prefix is None:
        raise click.UsageError("say what to evict: a KEY, --prefix, --namespace, ... or --all")
    if sum((bool(names), prefix is not None, key_prefix is not None)) > 1:
        raise click.UsageError("give keys, or --prefix, or --key-prefix: not several of them")
    selectors: list[Conditions] = []
    for conditions in conditions_from(link, asked):
        if idle is not None:
            conditions["idle_ns"] = int(idle * 1e9)
        if everything:
            conditions["everything"] = True
        selectors.extend(_pointed(link, conditions, names, prefix, key_prefix))
    if wide and not dry_run and not yes and not _ask(link, selectors):
        selectors = []  # nothing fitted; what fits since then was not asked about
    total, error = _carry_out(link, selectors, dry_run)
    missing = max(0, len(set(names)) - total.matched) if error is None else 0
    _report(output, total, error, dry_run, missing)
    if error is not None:
        raise click.exceptions.Exit(AWAY if isinstance(error, Unavailable) else FAILED)
    if missing or (total.leased and not dry_run):
        raise click.exceptions.Exit(FAILED)


def _pointed(
    link: Link,
    conditions: Conditions,
    names: tuple[str, ...],
    prefix: str | None,
    key_prefix: str | None,
) -> list[Conditions]:
    """The conditions with what was pointed at; keys in lots that fit a request."""
    if prefix is not None:
        return [{**conditions, "subtree": whole_key(link, prefix, conditions)}]
    if key_prefix is not None:
        # The daemon compares whole bytes: a last odd digit stands for sixteen of them.
        odd = len(key_prefix) % 2
        ends = "0123456789abcdef" if odd else [""]
        return [{**conditions, "key_prefix": bytes.fromhex(key_prefix + end)} for end in ends]
    if names:
        found = list(dict.fromkeys(whole_key(link, name, conditions) for name in names))
        return [
            {**conditions, "keys": tuple(found[at : at + _KEYS_A_REQUEST])}
            for at in range(0, len(found), _KEYS_A_REQUEST)
        ]
    return [conditions]


def _ask(link: Link, selectors: list[Conditions]) -> bool:
    """Show how much would go and ask; a no, or nobody there to ask, evicts nothing. False when
    there is nothing that could go, and so nothing to ask."""
    total, error = _carry_out(link, selectors, True)
    if error is not None:
        raise error
    if not total.matched:
        return False
    spaces = sorted({clean(row["namespace"]) for row in total.named})
    text = f"This evicts {_amount(total.evicted, total.bytes)}"
    text += f" of {', '.join(spaces[:5])}" + (", ..." if len(spaces) > 5 else "") if spaces else ""
    text += f" and leaves {format_count(total.leased)} in use" if total.leased else ""
    try:
        sure = click.confirm(f"{text}. Go on?", default=False, err=True)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        raise Failed("nothing evicted: nobody there to ask; --yes goes on unasked") from None
    if not sure:
        raise Failed("nothing evicted")
    return True


def _carry_out(
    link: Link, selectors: list[Conditions], dry_run: bool
) -> tuple[Evicted, KvdError | None]:
    total = Evicted()
    try:
        for conditions in selectors:
            for part in link.evict(conditions, dry_run=dry_run):
                total = total.plus(part)
    except KvdError as error:
        if total == Evicted():  # nothing to tell besides
            raise
        return total, error
    return total, None


def _report(
    output: Output, total: Evicted, error: KvdError | None, dry_run: bool, missing: int
) -> None:
    complete = error is None and not missing and (dry_run or not total.leased)
    if output.as_json:
        fields: dict[str, Any] = {
            "dry_run": dry_run,
            "matched": total.matched,
            "evicted": 0 if dry_run else total.evicted,
            "leased": total.leased,
            "writing": total.writing,
            "bytes": 0 if dry_run else total.bytes,
            "missing": missing,
            "complete": complete,
        }
        if dry_run:
            fields["would_evict"] = total.evicted
            fields["would_free_bytes"] = total.bytes
            fields["chunks"] = list(total.named)
        if error is not None:
            fields["error"] = {"code": error.code.name.lower(), "message": clean(error)}
        output.json(**fields)
    else:
        if dry_run:
            _name(output, total)
        verb = "would evict" if dry_run else "evicted"
        output.say(f"{verb} {_amount(total.evicted, total.bytes)}")
        if total.writing:
            them = "would be" if dry_run else "are"
            output.say(
                f"{format_count(total.writing)} being written: their commit {them} answered "
                "with `evicted`"
            )
        if total.leased:
            output.say(
                f"skipped {format_count(total.leased)} in use: under a lease, or being read or "
                "written by a tier",
                style="yellow",
            )
        if missing:
            output.note(f"kvd-cli: {format_count(missing)} of the keys: no such chunk")
    if error is not None and not output.as_json:
        output.note(f"kvd-cli: not all done: {clean(error)}", style="red")


def _name(output: Output, total: Evicted) -> None:
    if not total.named:
        return
    table = output.table("", "namespace", "spec", "key", ">size", ">idle", ">hits", ">leases")
    for row in total.named[:_NAMED_SHOWN]:
        table.add_row(
            cell(row["namespace"]),
            cell(short_key(row["spec"]), "cyan"),
            cell(short_key(row["hash"]), "cyan"),
            cell(format_bytes(row["bytes"])),
            cell(format_duration(row.get("idle_s"))),
            cell(format_count(row.get("hits") or 0)),
            cell(format_count(row.get("leases") or 0)),
        )
    output.show(table)
    if len(total.named) > _NAMED_SHOWN:
        output.say(f"... and {format_count(len(total.named) - _NAMED_SHOWN)} more (--json: all)")


def _amount(chunks: int, size: int) -> str:
    plural = "" if chunks == 1 else "s"
    return f"{format_count(chunks)} chunk{plural}, {format_bytes(size)}"
