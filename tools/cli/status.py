"""`kvd-cli status`: one screen from which an operator understands the daemon.

The law of this module: every number is the daemon's own. What is not known to this version is
shown under its own name rather than left out; what is zero and means "all is well" is left out of
the table, never of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvd.tools.cli.book import Book
from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.facts import facts
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import clean, format_bytes, format_count, format_duration


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
        facts(output, book),
    ]
    if (unknown := book.unread()) is not None:
        parts.append(unknown)
    return parts


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
        growing = reserved < limit
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
