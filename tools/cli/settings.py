"""`kvd-cli config`: what the running daemon resolved, and where each value comes from."""

from __future__ import annotations

import json
from typing import Any

import click

from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.guard import Failed
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import format_bytes

# Last words of settings that are bytes: the daemon sends its numbers without their kind.
_SIZES = ("limit", "reserve", "scrub", "size", "slab_size")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@connection
def config(
    link: Link,
    output: Output,
    names: tuple[str, ...],
) -> None:
    """Show the daemon's settings as they are in force, each with its origin.

    NAME is a setting, or the beginning of several (arena, limits.lease). Secrets are not in it:
    the daemon is configured with paths of files only.

    \b
    Examples:
      kvd-cli config
      kvd-cli config arena
      kvd-cli config --json | jq '.settings[] | select(.origin != "default")'
    """
    told = link.stat().get("config")
    if not told:
        raise Failed("this daemon does not tell its settings; `kvd --check` shows a configuration")
    rows = [row for row in _rows(told) if not names or row["name"].startswith(names)]
    if not rows:
        raise Failed(f"no setting starts with {' or '.join(names)}")
    if output.as_json:
        output.json(settings=rows)
        return
    table = output.table("", "setting", "value", "origin")
    for row in rows:
        set_here = row["origin"] != "default"
        table.add_row(
            cell(row["name"], "bold" if set_here else ""),
            cell(_text(row["name"], row["value"])),
            cell(row["origin"], "" if set_here else "dim"),
        )
    output.show(table)


def _text(name: str, value: Any) -> str:
    """A value as a person reads it: sizes with their unit."""
    if value is None or value == []:
        return "-"
    if name.rpartition(".")[2] in _SIZES and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _rows(told: Any) -> list[dict[str, Any]]:
    """Settings as rows of name, value, origin, by name."""
    if isinstance(told, dict):
        told = [
            {"name": name, **entry} if isinstance(entry, dict) else {"name": name, "value": entry}
            for name, entry in told.items()
        ]
    rows = [
        {
            "name": str(row["name"]),
            "value": row.get("value"),
            "origin": str(row.get("origin", "unknown")),
        }
        for row in told
    ]
    return sorted(rows, key=lambda row: row["name"])
