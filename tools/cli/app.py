"""The command line of kvd-cli: the group, its help, and the small commands."""

from __future__ import annotations

from typing import Any

import click

import kvd
from kvd.errors import KvdError, Unavailable
from kvd.tools.cli.advise import advise
from kvd.tools.cli.console import Output
from kvd.tools.cli.evict import evict
from kvd.tools.cli.inspect import inspect
from kvd.tools.cli.link import Link
from kvd.tools.cli.options import connection, places
from kvd.tools.cli.settings import config
from kvd.tools.cli.status import status
from kvd.tools.cli.tenant import tenant
from kvd.tools.cli.tier import tier
from kvd.tools.cli.units import clean, format_duration
from kvd.tools.simulate.command import simulate
from kvd.wire.versions import MAJOR, MINOR

_EPILOG = """\b
Examples:
  kvd-cli status                           how the daemon is
  kvd-cli inspect                          what it holds
  kvd-cli inspect chunks --idle 10m        chunks that nobody used for ten minutes
  kvd-cli evict --namespace dev --dry-run  what an eviction would take
  kvd-cli advise                           what more memory would bring
  kvd-cli status --json | jq .tiers

\b
Exit codes: 0 done, 1 failed (or only in part), 2 usage, 3 daemon away.
"""


@click.group(
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@places
@click.version_option(kvd.__version__, prog_name="kvd-cli", message="%(prog)s %(version)s")
@click.pass_context
def cli(
    ctx: click.Context,
    socket: str | None,
    timeout: float | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Look into a kvd daemon, and take things out of it.

    The daemon is found by --socket, else by KVD_SOCKET, else at the default place. Looking changes
    nothing: it touches no recency and takes no lease.
    """
    ctx.obj = {
        "socket": socket,
        "timeout": timeout,
        "token_file": token_file,
        "as_json": as_json,
    }


@click.command()
@click.option("--count", "-c", type=click.IntRange(min=1), default=1, help="Round trips to make.")
@connection
def ping(
    link: Link,
    output: Output,
    count: int,
) -> None:
    """Ask the daemon's loop for an answer, and time it.

    \b
    Examples:
      kvd-cli ping
      kvd-cli ping --timeout 200ms || systemctl restart kvd
    """
    info = link.info()
    times = sorted(link.ping() for _ in range(count))
    middle = times[len(times) // 2]
    if output.as_json:
        output.json(
            instance=info.instance,
            socket=link.socket,
            count=count,
            rtt_ms={
                "min": times[0] * 1e3,
                "median": middle * 1e3,
                "max": times[-1] * 1e3,
            },
        )
        return
    spread = f" (of {count}: max {format_duration(times[-1])})" if count > 1 else ""
    output.say(f"{clean(info.instance)} answered in {format_duration(middle)}{spread}")


@click.command()
@connection
def version(
    link: Link,
    output: Output,
) -> None:
    """Versions of this tool, of the protocol and of the daemon, if one is there.

    \b
    Examples:
      kvd-cli version
      kvd-cli version --json
    """
    daemon: dict[str, Any] | None = None
    away = ""
    try:
        info = link.info()
        daemon = {"version": info.version, "instance": info.instance}
    except Unavailable as error:
        away = "away"
        if not output.as_json:
            output.note(clean(error), style="dim")
    except KvdError as error:
        away = clean(error)
    if output.as_json:
        output.json(
            version=kvd.__version__, protocol=f"{MAJOR}.{MINOR}", daemon=daemon, socket=link.socket
        )
        return
    output.say(f"kvd-cli   {kvd.__version__}")
    output.say(f"protocol  {MAJOR}.{MINOR}")
    if daemon is None:
        output.say(f"daemon    {away}")
    else:
        output.say(f"daemon    {clean(daemon['version'])} (instance {clean(daemon['instance'])})")


for _command in (status, inspect, evict, tenant, tier, advise, simulate, config, ping, version):
    cli.add_command(_command)
