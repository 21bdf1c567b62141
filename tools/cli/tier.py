"""`kvd-cli tier`: what an operator can ask of a tier below memory.

The law of this module: what was begun goes on in the daemon; this tool says what it was told.
"""

from __future__ import annotations

import sys

import click

from kvd.tools.cli.console import Output
from kvd.tools.cli.guard import FAILED
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import clean, format_count

_WORDS = {
    "probe": "",
    "drain": "chunks that memory holds are being written there",
    "scrub": "chunks are being read to see whether they hold; `kvd-cli status` counts them",
}


@click.command()
@click.argument("command", type=click.Choice(tuple(_WORDS)))
@click.argument("name")
@connection
def tier(link: Link, output: Output, command: str, name: str) -> None:
    """Ask something of a tier below memory. Needs the admin role.

    \b
    probe   see whether it works now; one that is paused after errors goes on at once if it does
    drain   write there what memory holds and it does not, hottest first (before a reboot)
    scrub   read all of it in the background, to see whether it holds

    \b
    Examples:
      kvd-cli tier probe nvme
      kvd-cli tier drain nvme && systemctl reboot
      kvd-cli tier scrub s3
    """
    reply = link.client.tier(name, command)
    if output.as_json:
        output.json(
            tier=name, command=command, ok=reply.ok, detail=reply.detail, chunks=reply.chunks
        )
    else:
        state = "ok" if reply.ok else "failed"
        said = clean(reply.detail) if reply.detail else ""
        if reply.ok and _WORDS[command]:
            said = f"{format_count(reply.chunks)} {_WORDS[command]}"
        output.say(f"{clean(name)}: {command} {state}" + (f": {said}" if said else ""))
    if not reply.ok:
        sys.exit(FAILED)
