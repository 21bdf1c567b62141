"""Options that commands share, and what an operator's words turn into.

The law of this module: a word that could mean two things is refused with both named, never
guessed. An abbreviated key or spec must fit exactly one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from kvd.tools.cli.console import Output
from kvd.tools.cli.guard import Failed
from kvd.tools.cli.link import Conditions, Link, Row
from kvd.tools.cli.units import LONGEST_S, clean, parse_duration, parse_hex, short_key
from kvd.wire.limits import TOKEN_BYTES

STATES = ("writing", "unsealed", "sealed", "quarantined")
KINDS = {"prefix": 1, "content": 2}
_MIN_ABBREVIATION = 4
_TIMEOUT_S = 5.0
_TIMEOUT_MOST_S = 30 * 86_400.0  # of a client's calls
F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.ParamType):
    """90s, 10m, 1h30m, 2d; a plain number is seconds."""

    name = "duration"

    def __init__(self, most_s: float = LONGEST_S) -> None:
        self._most_s = most_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float | int):
            return float(value)
        try:
            return parse_duration(value, self._most_s)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class HexKey(click.ParamType):
    """A key, whole (64 hex digits) or abbreviated."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_hex(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Asked(NamedTuple):
    """The filters of one command line, as typed."""

    namespace: str | None
    spec: str | None
    model: str | None
    kind: str | None
    tier: str | None
    state: str | None

    @property
    def any(self) -> bool:
        return any(value is not None for value in self)


def connection(command: Callable[..., None]) -> Callable[..., None]:
    """--socket, --token-file, --timeout and --json. The command gets a link and an output."""

    @wraps(command)
    def run(
        ctx: click.Context,
        /,
        socket: str | None,
        timeout: float | None,
        token_file: str | None,
        as_json: bool,
        **rest: Any,
    ) -> None:
        before: dict[str, Any] = ctx.obj or {}  # the same options before the command's name
        name = ctx.command_path.partition(" ")[2] or ctx.info_name or ""
        output = Output(name, as_json=as_json or bool(before.get("as_json")))
        token_file = token_file or before.get("token_file")
        if timeout is None:
            timeout = before.get("timeout")
        with Link(
            socket or before.get("socket"),
            _TIMEOUT_S if timeout is None else timeout,
            None if token_file is None else _token(token_file),
        ) as link:
            command(link, output, **rest)

    return places(click.pass_context(run))


def places(command: F) -> F:
    """The options that every command and the group itself have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object (docs/cli.md)."),
        click.option(
            "--timeout",
            type=Duration(_TIMEOUT_MOST_S),
            metavar="DURATION",
            help=f"Give up after this long ({_TIMEOUT_S:g}s).",
        ),
        click.option(
            "--token-file",
            metavar="PATH",
            envvar="KVD_TOKEN_FILE",
            help="Be of the namespace to which this file's token belongs.",
        ),
        click.option(
            "--socket",
            metavar="PATH",
            help="The daemon's socket (else KVD_SOCKET, else the default place).",
        ),
    ):
        command = option(command)
    return command


def _token(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:  # not all of it: it may be a device without an end
            token = file.read(TOKEN_BYTES + 2).strip()
    except OSError as error:
        raise Failed(f"--token-file: can't read {path}: {error.strerror or error}") from None
    if not token:
        raise Failed(f"--token-file: {path} is empty")
    if len(token) > TOKEN_BYTES:
        raise Failed(f"--token-file: {path} has more than {TOKEN_BYTES} bytes: no token")
    return token


def filters(command: F) -> F:
    """Which chunks: all given conditions hold."""
    for option in (
        click.option("--state", type=click.Choice(STATES), help="Only chunks in this state."),
        click.option("--tier", metavar="NAME", help="Only chunks in this tier (dram, nvme, …)."),
        click.option(
            "--kind", type=click.Choice(list(KINDS)), help="Chained or content-keyed chunks."
        ),
        click.option("--model", metavar="NAME", help="Only specs of this model."),
        click.option("--spec", metavar="DIGEST", help="Only this spec; may be abbreviated."),
        click.option(
            "--namespace", "-n", metavar="NAME", help="Only this namespace (others: admin)."
        ),
    ):
        command = option(command)
    return command


def conditions_from(link: Link, asked: Asked) -> list[Conditions]:
    """Selector conditions for the filters: one, or one for each spec of a model."""
    base: Conditions = {}
    if asked.namespace is not None:
        base["namespace"] = asked.namespace
    if asked.kind is not None:
        base["kind"] = KINDS[asked.kind]
    for name in ("tier", "state"):
        if (value := getattr(asked, name)) is not None:
            base[name] = value
    if asked.spec is None and asked.model is None:
        return [base]
    digests = _specs(link, asked)
    return [{**base, "spec": bytes.fromhex(digest)} for digest in digests]


def _specs(link: Link, asked: Asked) -> list[str]:
    """Digests of the specs that --spec and --model name."""
    where: Conditions = {} if asked.namespace is None else {"namespace": asked.namespace}
    known: dict[str, str] = {}
    for row in link.rows("specs", where):
        known.setdefault(str(row["spec"]), str(row.get("model", "")))
    found = sorted(known)
    if asked.model is not None:
        found = [digest for digest in found if known[digest] == asked.model]
        if not found:
            names = ", ".join(sorted({clean(name) for name in known.values()})) or "none"
            raise Failed(f"no spec of model {clean(asked.model)!r} is known; models: {names}")
    if asked.spec is not None:
        try:
            wanted = parse_hex(asked.spec)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--spec") from None
        found = [digest for digest in found if digest.startswith(wanted)]
        if not found:
            raise Failed(f"no spec starts with {wanted}: see `kvd-cli inspect specs`")
        if len(found) > 1:
            raise Failed(f"{wanted} fits {len(found)} specs: {_some(found)}")
    return found


def prefix_bytes(key: str) -> bytes:
    """The whole bytes of an abbreviated key; a last odd digit is compared by `fits`."""
    return bytes.fromhex(key[: len(key) // 2 * 2])


def fits(rows: Iterable[Row], key: str | None) -> list[Row]:
    """Rows whose hash starts with `key`."""
    return [row for row in rows if key is None or str(row["hash"]).startswith(key)]


def whole_key(link: Link, key: str, conditions: Conditions) -> bytes:
    """The one chunk hash that `key` abbreviates. It may be there under several specs."""
    if len(key) == 64:
        return bytes.fromhex(key)
    if len(key) < _MIN_ABBREVIATION:
        raise click.UsageError(
            f"{key!r} is too short for a key: give at least {_MIN_ABBREVIATION} digits"
        )
    found: set[str] = set()
    for row in link.rows("chunks", {**conditions, "key_prefix": prefix_bytes(key)}):
        found.update(str(match["hash"]) for match in fits([row], key))
    if not found:
        raise Failed(f"no chunk's key starts with {key}")
    if len(found) > 1:
        raise Failed(f"{key} fits {len(found)} keys: {_some(sorted(found))}; give more digits")
    return bytes.fromhex(found.pop())


def _some(keys: list[str]) -> str:
    shown = ", ".join(short_key(key) for key in keys[:5])
    return shown + (", ..." if len(keys) > 5 else "")
