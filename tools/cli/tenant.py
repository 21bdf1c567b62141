"""`kvd-cli tenant`: who is let in, and what each may have.

The law of this module: what is shown is what the daemon enforces; a token is shown once, or written
to a file that only its owner can read. Nothing is checked here that the daemon checks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.guard import Failed
from kvd.tools.cli.link import Link, Row
from kvd.tools.cli.options import connection
from kvd.tools.cli.units import clean, format_bytes, format_count

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def tenant() -> None:
    """Tenants: namespaces with members, and shares of each tier.

    \b
    Examples:
      kvd-cli tenant add team-a --uid 1001 --min dram=25% --max nvme=200GiB
      kvd-cli tenant add ci --token-out ci.token      members hold a token
      kvd-cli tenant list
      kvd-cli tenant show team-a --json
      kvd-cli tenant set team-a --weight dram=2 --unset nvme.max
      kvd-cli tenant rotate ci --keep                 the old token holds, too, for now
      kvd-cli tenant remove ci --evict
    """


def settings(command: F) -> F:
    """What a tenant is made of."""
    for option in (
        click.option("--inflight", metavar="SIZE", help="Bytes of unfinished writes at a time."),
        click.option("--requests-s", type=float, metavar="N", help="Requests a second."),
        click.option(
            "--public-writer/--no-public-writer",
            default=None,
            help="Its members may write in the namespace `public`.",
        ),
        click.option(
            "--public/--no-public",
            default=None,
            help="Its lookups go on in the namespace `public`, unasked.",
        ),
        click.option("--max", "most", multiple=True, metavar="TIER=AMOUNT", help="At most."),
        click.option("--weight", multiple=True, metavar="TIER=N", help="Of what is left (1)."),
        click.option(
            "--min",
            "least",
            multiple=True,
            metavar="TIER=AMOUNT",
            help="Guaranteed: 25% of the tier, or 8GiB.",
        ),
        click.option("--curve-key", multiple=True, metavar="KEY", help="Public key of a client."),
        click.option("--gid", type=int, multiple=True, metavar="GID", help="Members, by group."),
        click.option("--uid", type=int, multiple=True, metavar="UID", help="Members, by user."),
    ):
        command = option(command)
    return command


def _given(
    uid: tuple[int, ...],
    gid: tuple[int, ...],
    curve_key: tuple[str, ...],
    least: tuple[str, ...],
    weight: tuple[str, ...],
    most: tuple[str, ...],
    public: bool | None,
    public_writer: bool | None,
    requests_s: float | None,
    inflight: str | None,
) -> dict[str, Any]:
    """A table as in kvd.toml, of what was named."""
    given: dict[str, Any] = {}
    for key, many in (("uids", uid), ("gids", gid), ("curve_keys", curve_key)):
        if many:
            given[key] = list(many)
    for key, value in (
        ("public", public),
        ("public_writer", public_writer),
        ("requests_s", requests_s),
        ("inflight", inflight),
    ):
        if value is not None:
            given[key] = value
    for key, words in (("min", least), ("weight", weight), ("max", most)):
        for word in words:
            tier, equals, amount = word.partition("=")
            if not equals or not tier or not amount:
                raise click.BadParameter(f"{word!r}: write TIER=AMOUNT", param_hint=f"--{key}")
            given.setdefault(tier, {})[key] = _number(amount) if key == "weight" else amount
    return given


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", text):
        raise click.BadParameter(f"{text!r} is not a number", param_hint="--weight")
    return float(text)


@tenant.command()
@click.argument("name")
@settings
@click.option("--token/--no-token", default=None, help="Make a token (if nobody else is named).")
@click.option("--token-out", metavar="PATH", help="Write it there (0600), not to the output.")
@connection
def add(
    link: Link, output: Output, name: str, token: bool | None, token_out: str | None, **more: Any
) -> None:
    """Let a new tenant in. Needs the admin role.

    \b
    Examples:
      kvd-cli tenant add team-a --uid 1001 --uid 1002
      kvd-cli tenant add ci --token-out ci.token --max dram=10%
    """
    given = _given(**more)
    members = any(key in given for key in ("uids", "gids", "curve_keys"))
    given["token"] = bool(token_out) or (not members if token is None else token)
    reply = link.client.tenant("add", name, given)
    _done(output, "add", reply.rows[0], reply.token, token_out)


@tenant.command(name="set")
@click.argument("name")
@settings
@click.option("--unset", multiple=True, metavar="KEY", help="Take back: uids, nvme, nvme.max, …")
@connection
def set_(link: Link, output: Output, name: str, unset: tuple[str, ...], **more: Any) -> None:
    """Change a tenant; what is not named stays. Holds at once. Needs the admin role.

    \b
    Examples:
      kvd-cli tenant set team-a --min dram=40% --max dram=60%
      kvd-cli tenant set team-a --unset dram.max --requests-s 200
    """
    given = _given(**more)
    for word in unset:
        key, dot, inner = word.partition(".")
        if dot:
            given.setdefault(key, {})[inner] = None
        else:
            given[key] = None
    if not given:
        raise click.UsageError("nothing to change is named")
    reply = link.client.tenant("set", name, given)
    _done(output, "set", reply.rows[0], None, None)


@tenant.command()
@click.argument("name")
@click.option("--keep", is_flag=True, help="The token of now holds, too, until the next rotation.")
@click.option("--token-out", metavar="PATH", help="Write it there (0600), not to the output.")
@connection
def rotate(link: Link, output: Output, name: str, keep: bool, token_out: str | None) -> None:
    """A new token; sessions that are open stay. Needs the admin role.

    \b
    Examples:
      kvd-cli tenant rotate ci --keep --token-out ci.token
    """
    reply = link.client.tenant("rotate", name, {"keep": keep})
    _done(output, "rotate", reply.rows[0], reply.token, token_out)


@tenant.command()
@click.argument("name")
@click.option("--evict", is_flag=True, help="Also evict all chunks of its namespace.")
@connection
def remove(link: Link, output: Output, name: str, evict: bool) -> None:
    """End a tenant's sessions and let nobody in as it. Needs the admin role.

    Its chunks stay until others need the room: it has no minimum any more. With --evict they go
    now, but for those that somebody holds.

    \b
    Examples:
      kvd-cli tenant remove ci
      kvd-cli tenant remove ci --evict
    """
    reply = link.client.tenant("remove", name)
    evicted = leased = 0
    if evict:
        for part in link.evict({"namespace": name}, dry_run=False):
            evicted += part.evicted
            leased += part.leased
    if output.as_json:
        output.json(tenant=reply.rows[0], evicted=evicted, leased=leased)
    else:
        said = f"; {format_count(evicted)} chunks evicted" if evict else ""
        output.say(f"{clean(name)}: removed{said}")
    if leased:
        raise Failed(f"{leased} chunks are held and stay: evict again later")


@tenant.command(name="list")
@connection
def list_(link: Link, output: Output) -> None:
    """All tenants, and what they have of each tier. Without the admin role: your own.

    \b
    Examples:
      kvd-cli tenant list
      kvd-cli tenant list --json | jq '.tenants[] | {name, tiers}'
    """
    rows = list(link.client.tenants())
    if output.as_json:
        output.json(tenants=rows)
        return
    table = output.table(
        "tenants", "tenant", "origin", "tier", ">used", ">min", ">share", ">max", ">chunks",
        ">suffered", ">inflicted", ">below min",
    )  # fmt: skip
    for row in rows:
        for tier, told in row.get("tiers", {"": {}}).items():
            table.add_row(cell(row["name"]), cell(row["origin"]), cell(tier), *_tier(row, tier))
            del told
    output.show(table)


def _tier(row: Row, tier: str) -> list[str]:
    """What the columns of one tier say."""
    told = row.get("tiers", {}).get(tier, {})
    where = "dram" if tier == "dram" else "below"

    def size(key: str) -> str:
        value = told.get(key)
        return "-" if value is None else format_bytes(value)

    def count(name: str) -> str:
        return format_count(row.get("counters", {}).get(name, {}).get(where, 0))

    return [
        size("used_bytes"),
        size("minimum_bytes"),
        size("share_bytes"),
        size("maximum_bytes"),
        format_count(told.get("chunks", 0)),
        count("evictions_suffered"),
        count("evictions_inflicted"),
        count("evictions_below_minimum"),
    ]


@tenant.command()
@click.argument("name", required=False, default="")
@connection
def show(link: Link, output: Output, name: str) -> None:
    """One tenant: members, shares, hits and misses. Without a name: your own.

    \b
    Examples:
      kvd-cli tenant show
      kvd-cli tenant show team-a --json
    """
    row = link.client.tenant("show", name).rows[0]
    if output.as_json:
        output.json(tenant=row)
        return
    output.say(f"{clean(row['name'])} ({clean(row['origin'])}), {row['sessions']} sessions")
    for key, value in row["settings"].items():
        output.say(f"  {clean(key)}: {clean(str(value))}")
    if row["tokens"]:
        output.say(f"  tokens: {row['tokens']}")
    table = output.table(
        "", "tier", ">used", ">min", ">share", ">max", ">chunks",
        ">suffered", ">inflicted", ">below min",
    )  # fmt: skip
    for tier in row.get("tiers", {}):
        table.add_row(cell(tier), *_tier(row, tier))
    output.show(table)
    counters = row.get("counters", {})
    asked, hit = counters.get("chunks_asked", 0), counters.get("chunks_hit", 0)
    share = f" ({100 * hit / asked:.1f} %)" if asked else ""
    output.say(f"asked {format_count(asked)}, hit {format_count(hit)}{share}")
    for why, count in counters.get("chunks_missed", {}).items():
        if count:
            output.say(f"  missed, {clean(why)}: {format_count(count)}")


def _done(output: Output, command: str, row: Row, token: str | None, token_out: str | None) -> None:
    """Say what was done, and hand over a token."""
    if token is not None and token_out is not None:
        _write(token_out, token)
        token = None
    if output.as_json:
        output.json(tenant=row, **({"token": token} if token is not None else {}))
        return
    output.note(f"{clean(row['name'])}: {command} done", style="dim")
    if token is not None:
        output.note("its token, which is not shown again:", style="dim")
        output.say(token)


def _write(path: str, token: str) -> None:
    """A file that nobody else can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(token + "\n")
    except OSError as error:
        raise Failed(
            f"--token-out: can't write {path}: {error.strerror}; the token was made: rotate it"
        ) from None
