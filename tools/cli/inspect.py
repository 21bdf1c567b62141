"""`kvd-cli inspect`: namespaces → specs → prefixes → chunks.

The law of this module: looking changes nothing. A page is what the daemon held while it answered;
between two pages chunks may come and go, and a cursor stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import click
from rich.text import Text
from rich.tree import Tree

from kvd.tools.cli.console import Output, cell
from kvd.tools.cli.guard import Failed
from kvd.tools.cli.link import Conditions, Link, Page, Row
from kvd.tools.cli.options import (
    Asked,
    Duration,
    HexKey,
    conditions_from,
    connection,
    filters,
    fits,
    prefix_bytes,
    whole_key,
)
from kvd.tools.cli.units import (
    clean,
    format_bytes,
    format_count,
    format_duration,
    short_key,
)

LEVELS = ("namespaces", "specs", "prefixes", "chunks")
_DEFAULT_LIMIT = 50
_TREE_PREFIXES = 5
_MANY = 1000  # rows of a table that are no longer drawn one by one


class Column(NamedTuple):
    """A column of a table: its head ('>' first: to the right), and a row's text in it."""

    head: str
    text: Callable[[Row], str]
    style: str = ""


def _plain(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key, "-"))


def _number(key: str) -> Callable[[Row], str]:
    return lambda row: format_count(row[key]) if row.get(key) is not None else "-"


def _size(row: Row) -> str:
    return format_bytes(row["bytes"])


def _span(key: str) -> Callable[[Row], str]:
    return lambda row: format_duration(row.get(key))


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "namespaces": (
        Column("namespace", _plain("namespace"), "bold"),
        Column(">specs", _number("specs")),
        Column(">chunks", _number("chunks")),
        Column(">size", _size),
        Column(">hits", _number("hits")),
        Column(">leases", _number("leases")),
    ),
    "specs": (
        Column("namespace", _plain("namespace")),
        Column("spec", _plain("spec"), "cyan"),
        Column("model", _plain("model"), "bold"),
        Column("revision", _plain("revision")),
        Column("dtype", _plain("dtype")),
        Column("engine", _plain("engine")),
        Column("codec", _plain("codec")),
        Column(">tokens/chunk", _number("chunk_tokens")),
        Column(">shards", _number("shards")),
        Column(">chunks", _number("chunks")),
        Column(">size", _size),
    ),
    "prefixes": (
        Column("namespace", _plain("namespace")),
        Column("spec", _plain("spec"), "cyan"),
        Column("kind", lambda row: _kind(row)),
        Column("root", _plain("root"), "cyan"),
        Column(">chunks", _number("chunks")),
        Column(">depth", _number("depth")),
        Column(">size", _size),
        Column(">hits", _number("hits")),
        Column(">idle", _span("idle_s")),
    ),
    "chunks": (
        Column("namespace", _plain("namespace")),
        Column("spec", _plain("spec"), "cyan"),
        Column("kind", lambda row: _kind(row)),
        Column("key", _plain("hash"), "cyan"),
        Column("parent", lambda row: _parent(row), "dim"),
        Column(">index", _number("index")),
        Column(">tokens", _number("tokens")),
        Column(">size", _size),
        Column(">shards", _number("shards")),
        Column("tier", lambda row: "+".join(row.get("tiers") or [str(row.get("tier", "-"))])),
        Column("state", _plain("state")),
        Column(">age", _span("age_s")),
        Column(">idle", _span("idle_s")),
        Column(">hits", _number("hits")),
        Column(">leases", _number("leases")),
    ),
}
_KEYS = frozenset({"spec", "key", "root", "parent"})
# said once above the table when they are the same in all rows
_COMMON: dict[str, tuple[str, ...]] = {
    "namespaces": (),
    "specs": ("namespace",),
    "prefixes": ("namespace", "spec", "kind"),
    "chunks": ("namespace", "spec", "kind", ">tokens", ">shards", "tier", "state"),
}


def _kind(row: Row) -> str:
    kind = row.get("kind")
    return {1: "prefix", 2: "content"}.get(kind, str(kind)) if isinstance(kind, int) else str(kind)


def _parent(row: Row) -> str:
    parent = str(row.get("parent") or "")
    return parent if parent.strip("0") else "-"


@click.command()
@click.argument("level", required=False, type=click.Choice(LEVELS))
@filters
@click.option(
    "--key", "--key-prefix", "key", type=HexKey(), metavar="HEX", help="Keys that start so."
)
@click.option(
    "--prefix",
    "--subtree",
    "prefix",
    type=HexKey(),
    metavar="KEY",
    help="This chunk and all that continue it.",
)
@click.option(
    "--idle", type=Duration(), metavar="DURATION", help="Not used for at least this long."
)
@click.option(
    "--age", type=Duration(), metavar="DURATION", help="Stored at least this long ago (chunks)."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="Rows at most; 0 for all.",
)
@click.option(
    "--cursor",
    type=click.IntRange(0, (1 << 64) - 1),
    default=0,
    metavar="N",
    help="Go on where an earlier page ended.",
)
@click.option("--full", is_flag=True, help="Keys in full, not abbreviated.")
@connection
def inspect(
    link: Link,
    output: Output,
    level: str | None,
    namespace: str | None,
    spec: str | None,
    model: str | None,
    kind: str | None,
    tier: str | None,
    state: str | None,
    key: str | None,
    prefix: str | None,
    idle: float | None,
    age: float | None,
    limit: int,
    cursor: int,
    full: bool,
) -> None:
    """Show what the daemon holds: namespaces, specs, prefixes or chunks.

    Without LEVEL: a tree of all of them down to the prefixes, or the chunks that the filters name.
    Without the admin role you see your own namespace.

    \b
    Examples:
      kvd-cli inspect                              the tree
      kvd-cli inspect specs -n default
      kvd-cli inspect prefixes --model my-model --limit 10
      kvd-cli inspect chunks --key 3fa9            one chunk by an abbreviated key
      kvd-cli inspect chunks --prefix 3fa9c2       a chain from there on
      kvd-cli inspect chunks --state sealed --idle 1h --json
      kvd-cli inspect chunks --cursor 4711         the next page
    """
    asked = Asked(namespace, spec, model, kind, tier, state)
    narrowed = asked._replace(namespace=None).any or any(
        value is not None for value in (key, prefix, idle, age)
    )
    if level is None and not narrowed and cursor == 0:
        _tree(link, output, asked, full)
        return
    level = level or "chunks"
    if level != "chunks" and (key is not None or age is not None):
        raise click.UsageError("--key and --age are of chunks: say `inspect chunks`")
    conditions = _one(conditions_from(link, asked))
    if idle is not None:
        conditions["idle_ns"] = int(idle * 1e9)
    if key is not None:
        conditions["key_prefix"] = prefix_bytes(key)
    if prefix is not None:
        conditions["subtree"] = whole_key(link, prefix, conditions)
    page = _page(link, level, conditions, limit, cursor, key, age)
    if output.as_json:
        output.json(level=level, rows=page.rows, cursor=page.cursor)
        return
    if page.rows:
        _show(output, level, page.rows, full)
    else:
        output.say(_nothing(link, filtered=narrowed or namespace is not None or cursor > 0))
    if page.cursor is not None:
        output.note(f"more: --cursor {page.cursor}", style="dim")


def _one(all_conditions: list[Conditions]) -> Conditions:
    """One page can't go over several selectors: its cursor belongs to one."""
    if len(all_conditions) > 1:
        specs = ", ".join(short_key(one["spec"].hex()) for one in all_conditions)
        raise Failed(f"that model has {len(all_conditions)} specs: name one by --spec ({specs})")
    return dict(all_conditions[0])


def _page(
    link: Link,
    level: str,
    conditions: Conditions,
    limit: int,
    cursor: int,
    key: str | None,
    age: float | None,
) -> Page:
    """A page after the filters that the daemon doesn't know: an odd hex digit, and age."""
    rows: list[Row] = []
    at: int | None = cursor
    while at is not None and (not limit or len(rows) < limit):
        page = link.page(level, conditions, limit - len(rows) if limit else 0, at)
        found = fits(page.rows, key) if level == "chunks" else page.rows
        rows.extend(row for row in found if age is None or (row.get("age_s") or 0) >= age)
        at = page.cursor
    return Page(rows, at)


def _nothing(link: Link, *, filtered: bool) -> str:
    """Why there is nothing to show: it may be there, and hidden by the filters or the role."""
    info = link.info()
    what = "nothing there that fits" if filtered else "nothing there yet"
    if info.admin:
        return what if filtered else "the daemon holds nothing yet"
    return f"{what}, of what you may see: namespace {clean(info.namespace)}, without admin role"


def _show(output: Output, level: str, rows: list[Row], full: bool) -> None:
    columns = [column for column in _COLUMNS[level] if _worth(column, rows)]
    common = [column for column in columns if column.head in _COMMON[level]]
    common = [column for column in common if len({column.text(row) for row in rows}) == 1]
    if common:
        said = (f"{one.head.removeprefix('>')} {_shown(one, rows[0], full)}" for one in common)
        output.say(clean(", ".join(said)), style="dim")
    columns = [column for column in columns if column not in common]
    heads = [column.head for column in columns]
    if len(rows) > _MANY:
        output.long_table(
            heads, ([_shown(column, row, full) for column in columns] for row in rows)
        )
        return
    table = output.table("", *heads)
    for row in rows:
        table.add_row(*(cell(_shown(column, row, full), column.style) for column in columns))
    output.show(table)


def _shown(column: Column, row: Row, full: bool) -> str:
    text = column.text(row)
    return text if full or column.head not in _KEYS else short_key(text)


def _worth(column: Column, rows: list[Row]) -> bool:
    """Columns that say nothing are left out of a table (never of JSON)."""
    return any(column.text(row) not in ("-", "") for row in rows)


def _tree(link: Link, output: Output, asked: Asked, full: bool) -> None:
    """Namespaces, their specs, and the first prefixes of each."""
    where: Conditions = {} if asked.namespace is None else {"namespace": asked.namespace}
    spaces = []
    for row in link.rows("namespaces", where):
        specs = []
        for spec in link.rows("specs", {"namespace": row["namespace"]}):
            below = {"namespace": row["namespace"], "spec": bytes.fromhex(spec["spec"])}
            first = list(islice(link.rows("prefixes", below), _TREE_PREFIXES + 1))
            specs.append(
                {
                    **spec,
                    "children": first[:_TREE_PREFIXES],
                    "more": len(first) > _TREE_PREFIXES,
                }
            )
        spaces.append({**row, "children": specs})
    if output.as_json:
        output.json(level="tree", namespaces=spaces)
        return
    if not spaces or not any(space["children"] for space in spaces):
        output.say(_nothing(link, filtered=asked.namespace is not None))
        return
    for space in spaces:
        output.show(_branch(space, full))


def _branch(space: dict[str, Any], full: bool) -> Tree:
    tree = Tree(_line(space["namespace"], _sums(space), "bold"), guide_style="dim")
    for spec in space["children"]:
        shape = f"{spec['dtype']}, {spec['chunk_tokens']} tokens a chunk"
        if spec.get("shards", 1) != 1:
            shape += f", {spec['shards']} shards"
        head = Text.assemble(
            (clean(spec["model"]), "bold"),
            (f"  {_cut(spec['spec'], full)}", "cyan"),
            (f"  {clean(shape)}  ", "dim"),
            _sums(spec),
        )
        branch = tree.add(head)
        for prefix in spec["children"]:
            branch.add(
                Text.assemble(
                    (_cut(prefix["root"], full), "cyan"),
                    f"  {format_count(prefix['chunks'])} chunks, depth "
                    f"{format_count(prefix['depth'])}, {format_bytes(prefix['bytes'])}, "
                    f"{format_count(prefix['hits'])} hits, "
                    f"idle {format_duration(prefix['idle_s'])}",
                )
            )
        if spec["more"]:
            branch.add(
                Text(f"more: kvd-cli inspect prefixes --spec {short_key(spec['spec'])}", "dim")
            )
    return tree


def _cut(key: object, full: bool) -> str:
    return clean(key) if full else short_key(clean(key))


def _line(name: object, rest: str, style: str) -> Text:
    return Text.assemble((clean(name), style), f"  {rest}")


def _sums(row: Row) -> str:
    text = f"{format_count(row['chunks'])} chunks, {format_bytes(row['bytes'])}"
    if row.get("hits") is not None:
        text += f", {format_count(row['hits'])} hits"
    if row.get("leases"):
        text += f", {format_count(row['leases'])} leased"
    return text
